"""NIID-Bench's protocol: 10 clients, 50 rounds of 10 epochs, one model for all, the official test set.

    python benchmarks/niid_bench_table.py --device cuda --jobs 8
    python benchmarks/niid_bench_table.py --list
"""

from __future__ import annotations

from typing import Any

from published import Cell, main

PARTITIONS = {"iid": "iid", "dir0.5": "niid-bench:0.5", "labels2": "labels:2"}
DATASETS = {"mnist": "mnist", "fashion": "fashion-mnist", "cifar10": "cifar10"}
METHODS = ["fedavg:epochs=10", "fedprox:mu=0.01,epochs=10"]
SEEDS = [0, 1, 2]


def cells() -> list[Cell]:
    """Seeds outermost, so that a first column is complete early."""
    return [
        Cell(
            f"{short}-{words}", method, seed,
            {"dataset": dataset, "partition": partition, "clients": 10, "model": "lenet", "split": "100/0/0",
             "central": "official"},
            {"lr": 0.01, "batch_size": 64, "momentum": 0.9},
            {"rounds": 50, "eval_every": 1, "evaluation": "central"},
        )
        for seed in SEEDS
        for short, dataset in DATASETS.items()
        for words, partition in PARTITIONS.items()
        for method in METHODS
    ]  # fmt: skip


def page(done: list[dict[str, Any]]) -> str:
    """The page docs/results/niid-bench.md."""
    return ""


if __name__ == "__main__":
    main("niid-bench", cells(), page)
