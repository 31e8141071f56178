"""Attacks by rules: what honest clients are left with, of FedAvg's shared model and of Ditto's personal ones.

    python benchmarks/robust_table.py                  # runs what is missing in docs/results/robust.json
    python benchmarks/robust_table.py --page           # writes docs/results/robust.md from it

Digits, 20 clients by Dirichlet 0.3, 20 % attackers, 30 rounds, three seeds; a cell is the mean over honest clients and
seeds. Every cell is kept as soon as it is there, so the command can be stopped and called again.
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

ATTACKS = (
    "none", "sign-flip:0.2", "alie:share=0.2,factor=1.5", "ipm:share=0.2,factor=2", "label-flip:0.2", "mimic:0.2",
    "backdoor:0.2",
)  # fmt: skip
RULES = ("mean", "median", "trimmed", "krum", "geometric", "centered-clip", "nnm+trimmed")
METHODS = ("fedavg", "ditto", "local")
SEEDS = (0, 1, 2)
ROUNDS, CLIENTS = 30, 20
WORDS = """## In words

- **With 20 % attackers on skewed clients, the plain mean is hard to beat here.** Against sign flips and inner
  products of this size, the median, the trimmed mean and nearest-neighbour mixing end 19 to 36 points below it:
  honest replies differ more from each other than forged ones differ from their mean, so these rules cut off
  honest minorities and keep the forgeries. Centred clipping loses least of all rules, the geometric median
  next.
- **Rules cost something without any attacker**: nothing to speak of for centred clipping and nearest-neighbour
  mixing (within two standard deviations), 3 points for the trimmed mean, 7 to 8 for the median, and 44 for
  Krum, which takes one client's reply for everybody's.
- **No rule stops the backdoor**: it works on 67 to 98 % of triggered samples for FedAvg. The attackers'
  honest-looking replies pass; Krum and the median hinder it most, and cost 45 and 8 points of accuracy.
- **Ditto's claim of robustness does not show at its default lam = 1**: its personal models are below FedAvg's
  shared one in every row of the mean, as they are without an attack, and lose 6 points to sign flips where
  FedAvg loses 4. What personal models do buy is against the backdoor, which works on 75 % of triggered samples
  instead of 95 %. Clients that train alone feel nothing, and are above Ditto under four of the six attacks.
- Differences below about 5 points are within the noise of three seeds. One task, one skew and one share of
  attackers decide nothing in general: run your own with `--attack` and `--aggregate`.
"""
CELLS = Path(__file__).parents[1] / "docs" / "results" / "robust.json"


def main() -> None:
    """Run the cells that are missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true")
    if parser.parse_args().page:
        CELLS.with_suffix(".md").write_text(write_page(json.loads(CELLS.read_text())))
        return
    torch.set_num_threads(1)
    cells = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    for seed, method, attack, rule in itertools.product(SEEDS, METHODS, ATTACKS, RULES):
        key = f"{method} {attack} {rule} {seed}"
        if key in cells or (method == "local" and rule != "mean"):  # nothing is aggregated there
            continue
        task = Recipe("digits", partition="dirichlet:0.3", clients=CLIENTS, seed=seed).build()
        engine = LocalEngine(device="cpu", strategy="whole traced one_core")
        report = federate(task, method, rounds=ROUNDS, seed=seed, attack=attack, aggregate=rule, engine=engine)
        found = report.select_evaluation()
        cells[key] = {
            "mean": found.personal["test"].macro,
            "worst": found.personal["test"].worst,
            "success": found.attack,
        }
        cells["about"] = {"torch": torch.__version__, "machine": f"{platform.machine()}, one core", "commit": commit()}
        CELLS.write_text(json.dumps(cells, indent=0))
        print(key, {name: value and round(value, 3) for name, value in cells[key].items()}, flush=True)


def commit() -> str:
    """Return the commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def write_page(cells: dict[str, dict[str, float]]) -> str:
    """Return the page of results."""
    about = cells["about"]
    parts = [
        "# Attacks and rules\n",
        "Written by `benchmarks/robust_table.py` from [robust.json](robust.json), which",
        f"`python benchmarks/robust_table.py` measures; commit {about['commit']}, torch {about['torch']},",
        f"{about['machine']}.\n",
        f"Digits, {CLIENTS} clients by Dirichlet 0.3, 20 % of them attack, {ROUNDS} rounds, default hyperparameters,",
        f"seeds {', '.join(map(str, SEEDS))}. Accuracy in % of what honest clients deploy on their test samples,",
        "mean over clients and ± standard deviation over seeds. Rules count with `auto` hostile replies, 4 of 20. See",
        "[Hostile clients](../guides/robust.md).\n",
    ]
    for method in METHODS[:2]:
        parts += [f"## {method}\n", f"| attack | {' | '.join(RULES)} |", f"|---|{'--:|' * len(RULES)}"]
        for attack in ATTACKS:
            row = [_show([cells[f"{method} {attack} {rule} {seed}"]["mean"] for seed in SEEDS]) for rule in RULES]
            parts.append(f"| {attack} | {' | '.join(row)} |")
        parts.append("")
        success = [
            f"{rule} {100 * mean(cells[f'{method} backdoor:0.2 {rule} {seed}']['success'] for seed in SEEDS):.0f}"
            for rule in RULES
        ]
        parts.append(f"The backdoor works on so many % of triggered samples of other classes: {', '.join(success)}.\n")
    alone = [_show([cells[f"local {attack} mean {seed}"]["mean"] for seed in SEEDS]) for attack in ("none", ATTACKS[1])]
    parts.append(f"Training alone: {alone[0]} (honest clients of an attacked federation: {alone[1]}).\n")
    return "\n".join([*parts, WORDS])


def _show(values: list[float]) -> str:
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}"


if __name__ == "__main__":
    main()
