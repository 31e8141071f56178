"""What personalization buys under client-level privacy: four methods at several epsilons, on 10,000 made-up clients.

    python benchmarks/privacy_table.py                 # runs what is missing in docs/results/privacy.json
    python benchmarks/privacy_table.py --page          # writes docs/results/privacy.md from it

`--task million` with 10,000 clients: few samples each, who call the same point by other names. Privacy about clients
needs many of them, since the noise on a mean shrinks with the cohort. Every cell is kept as soon as it is there.
"""

import argparse
import itertools
import json
import platform
import subprocess
from pathlib import Path
from statistics import mean, stdev

import torch

from atoll import LocalEngine, Recipe, federate

METHODS = ("fedavg", "fedavg-ft", "ditto", "fedper")
EPSILONS = ("none", "8", "4", "2")
SEEDS = (0, 1)
ROUNDS, CLIENTS, SHARE, CLIP, DELTA = 30, 10_000, 0.03, 0.25, 1e-5
CELLS = Path(__file__).parents[1] / "docs" / "results" / "privacy.json"


def main() -> None:
    """Run the cells that are missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true")
    if parser.parse_args().page:
        CELLS.with_suffix(".md").write_text(write_page(json.loads(CELLS.read_text())))
        return
    torch.set_num_threads(1)
    cells = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    wanted = [*itertools.product(SEEDS, METHODS, EPSILONS), *((seed, "local", "none") for seed in SEEDS)]
    for seed, method, epsilon in wanted:
        key = f"{method} {epsilon} {seed}"
        if key in cells:
            continue
        task = Recipe("million", clients=CLIENTS, model="mlp:16", seed=seed).build()
        words = "none" if epsilon == "none" else f"client:epsilon={epsilon},delta={DELTA},clip={CLIP}"
        report = federate(
            task, method, rounds=ROUNDS, cohort=f"poisson:{SHARE}", eval_every=ROUNDS, seed=seed, dp=words,
            engine=LocalEngine(device="cpu", strategy="chunk:64 eager one_core"),
        )  # fmt: skip
        scores = report.figures()
        cells[key] = {"mean": scores.macro, "bottom10": scores.bottom10, "promise": " ".join(report.privacy)}
        cells["about"] = {"torch": torch.__version__, "machine": f"{platform.machine()}, one core", "commit": commit()}
        CELLS.write_text(json.dumps(cells, indent=0))
        print(key, cells[key], flush=True)


def commit() -> str:
    """Return the commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def write_page(cells: dict[str, dict[str, float]]) -> str:
    """Return the page of results."""
    about = cells["about"]
    parts = [
        "# Privacy about clients: what it costs, and what personalization buys\n",
        "Written by `python benchmarks/privacy_table.py --page` from [privacy.json](privacy.json), which the same",
        f"command without `--page` measures; commit {about['commit']}, torch {about['torch']}, {about['machine']}.\n",
        f"`--task million --clients {CLIENTS} --model mlp:16 --cohort poisson:{SHARE} --rounds {ROUNDS}`, default",
        f"step size, `--dp client:epsilon=E,delta={DELTA},clip={CLIP}`, seeds {', '.join(map(str, SEEDS))};",
        "accuracy in % of what clients deploy on their own test samples, mean over a sample of 1,000 clients,",
        "± standard deviation over seeds. Promises are about adding or removing one client, by privacy loss",
        "distributions. See",
        "[Privacy](../guides/privacy.md).\n",
        f"| method | {' | '.join('no noise' if one == 'none' else f'ε = {one}' for one in EPSILONS)} |",
        f"|---|{'--:|' * len(EPSILONS)}",
    ]
    for method in METHODS:
        row = [_show([cells[f"{method} {epsilon} {seed}"]["mean"] for seed in SEEDS]) for epsilon in EPSILONS]
        parts.append(f"| {method} | {' | '.join(row)} |")
    parts.append(f"| local | {_show([cells[f'local none {seed}']['mean'] for seed in SEEDS])} | | | |\n")
    return "\n".join(parts) + "\n" + Path(__file__).with_name("privacy_words.md").read_text()


def _show(values: list[float]) -> str:
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}"


if __name__ == "__main__":
    main()
