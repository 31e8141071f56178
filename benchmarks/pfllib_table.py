"""PFLlib's protocol: 20 clients, all of them in every round, its CNN, batch 10, lr 0.005; published beside ours.

    python benchmarks/pfllib_table.py --device cuda --precision bf16 --jobs 8     # all that is missing, then the page
    python benchmarks/pfllib_table.py --only 'fashion-prac-fedavg-seed0'          # one cell
    python benchmarks/pfllib_table.py --list
"""

from __future__ import annotations

from typing import Any

import numpy as np
from published import Cell, main

ROUNDS = 500
TASKS = {"fashion-prac": ("fashion-mnist", "pfllib:0.1"), "cifar10-prac": ("cifar10", "pfllib:0.1"),
         "fashion-pat": ("fashion-mnist", "pathological:2"), "cifar10-pat": ("cifar10", "pathological:2")}  # fmt: skip
METHODS = ["local", "fedavg", "fedavg-ft", "ditto:lam=0.1", "ditto:lam=1.0", "fedper"]
SEEDS = [0, 1, 2]
PUBLISHED = {  # PFLlib's page (Fashion-MNIST) and the FedALA poster (CIFAR-10): best round on test, mean of 3 trials
    "fashion-prac": {"fedavg": 85.85, "ditto": 97.47, "fedper": 97.44},
    "cifar10-prac": {"fedavg": 59.16, "fedavg-ft": 90.34, "ditto": 90.59},
    "fashion-pat": {"fedavg": 80.41, "ditto": 99.44, "fedper": 99.47},
    "cifar10-pat": {"fedavg": 55.09, "fedavg-ft": 92.13, "ditto": 92.39},
}


def cells() -> list[Cell]:
    """The first seed has PFLlib's own partition (its seed 1); the others draw theirs."""
    return [
        Cell(
            task, method, seed,
            {"dataset": dataset, "partition": f"{partition}:{seed + 1}", "clients": 20, "model": "cnn", "split": "70/5/25"},
            {"lr": 0.005, "batch_size": 10},
            {"rounds": ROUNDS, "eval_every": 10},
        )
        for seed in SEEDS
        for task, (dataset, partition) in TASKS.items()
        for method in METHODS
    ]  # fmt: skip


def page(done: list[dict[str, Any]]) -> str:
    """The page docs/results/pfllib.md."""
    return ""


if __name__ == "__main__":
    main("pfllib", cells(), page)
