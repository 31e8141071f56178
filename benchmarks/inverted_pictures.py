"""Pictures that are rebuilt from what clients send: a FedAvg update, the same under privacy, and a one-shot upload.

    python benchmarks/inverted_pictures.py        # writes docs/guides/audit-pictures.png, and prints its table

Digits, 6 clients by Dirichlet 0.3, seed 0, one round. Each row of the picture is a run: four messages of one sample,
then one of four, each true sample beside what was rebuilt of it.
"""

import io
import subprocess
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

from atoll import Recipe, audit, federate
from atoll.experiments.audit.inversion import Picture
from atoll.experiments.audit.page import draw_pair

RUNS = {
    "`fedavg`": ("fedavg", {}),
    "`fedavg:epochs=5`, five local steps": ("fedavg:epochs=5", {}),
    "`fedavg` with `--dp client:noise=1,clip=1`": ("fedavg", {"dp": "client:noise=1,clip=1"}),
    "`oneshot-proto`": ("oneshot-proto", {}),
}
PAGE = Path(__file__).parents[1] / "docs" / "guides" / "audit-pictures.png"
GAP = 12  # pixels between pairs


def main() -> None:
    """Rebuild pictures, draw them, and print how good they are."""
    torch.set_num_threads(1)
    task = Recipe("digits", partition="dirichlet:0.3", clients=6, seed=0).build()
    print(
        "| digits, 6 clients, Dirichlet 0.3, seed 0 | 1 sample: PSNR, SSIM | 4 samples: PSNR, SSIM | the mean sample |"
    )
    print("|---|---|---|---|")
    drawn = []
    for name, (method, settings) in RUNS.items():
        report = federate(task, method, rounds=1, evaluation="none", progress=False, **settings)
        found = audit(report, attacks=["inversion"]).pictures
        for attack in dict.fromkeys(one.attack for one in found):
            print(describe(name, [one for one in found if one.attack == attack]))
        drawn.append(draw_row([one for one in found if one.attack != "first layer"]))
    width, height = max(one.width for one in drawn), sum(one.height + GAP for one in drawn) - GAP
    whole, top = Image.new("L", (width, height), 255), 0
    for one in drawn:
        whole.paste(one, (0, top))
        top += one.height + GAP
    whole.save(PAGE, optimize=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"\n{PAGE.name}: {whole.width} x {whole.height}, commit {commit.stdout.strip()}")


def describe(name: str, pictures: list[Picture]) -> str:
    """Return a row of the table: medians by how many samples a message is made of."""
    cells = [f"{name}, {pictures[0].attack}"]
    for samples in (1, 4):
        mine = [one for one in pictures if one.samples == samples]
        quality = f"{median(one.psnr for one in mine):.1f} dB, {median(one.ssim for one in mine):.2f}" if mine else ""
        cells.append(quality)
    return f"| {' | '.join([*cells, f'{median(one.baseline for one in pictures):.1f} dB'])} |"


def draw_row(pictures: list[Picture]) -> Image.Image:
    """Return the pairs of a row side by side, small."""
    pairs = [
        np.asarray(Image.open(io.BytesIO(draw_pair(one))).resize((85, 40), Image.Resampling.NEAREST))
        for one in pictures
    ]
    gap = np.full((pairs[0].shape[0], GAP), 255, dtype=np.uint8)
    parts = [part for pair in pairs for part in (pair, gap)][:-1]
    return Image.fromarray(np.concatenate(parts, axis=1))


if __name__ == "__main__":
    main()
