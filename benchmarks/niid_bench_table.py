"""NIID-Bench's protocol: 10 clients, 50 rounds of 10 epochs, one model for all, the official test set.

python benchmarks/niid_bench_table.py --device cuda --precision tf32 --jobs 6
python benchmarks/niid_bench_table.py --list
"""

from __future__ import annotations

from typing import Any

from published import Cell, main, mean_text, origins, table

PARTITIONS = {"iid": "iid", "dir0.5": "niid-bench:0.5", "labels2": "labels:2"}
DATASETS = {  # with the augmentation of training images
    "mnist": ("mnist", "none"),
    "fashion": ("fashion-mnist", "none"),
    "cifar10": ("cifar10", "none"),
    "cifar10-augmented": ("cifar10", "crop-flip"),
}
METHODS = ["fedavg:epochs=10", "fedprox:mu=0.01,epochs=10"]
SEEDS = [0, 1, 2]
PUBLISHED = {  # Flower's niid_bench baseline (best over rounds); in brackets NIID-Bench's own README
    "mnist-iid": ("99.09", "99.16"), "mnist-dir0.5": ("98.89", "99.02"), "mnist-labels2": ("96.86", "96.85"),
    "fashion-iid": ("89.23", "89.42"), "fashion-dir0.5": ("88.09", "88.15"), "fashion-labels2": ("78.10", "78.05"),
    "cifar10-iid": ("71.32", "71.26"), "cifar10-dir0.5": ("62.47 (68.2)", "65.63 (67.9)"),
    "cifar10-labels2": ("51.17 (49.8)", "50.44 (50.7)"),
}  # fmt: skip
PUBLISHED |= {
    name.replace("cifar10", "cifar10-augmented"): value for name, value in PUBLISHED.items() if "cifar" in name
}


def cells() -> list[Cell]:
    """Seeds outermost, so that a first column is complete early."""
    return [
        Cell(
            f"{short}-{words}", method, seed,
            {"dataset": dataset, "partition": dealt, "clients": 10, "model": "lenet", "split": "100/0/0",
             "central": "official", "augment": augment},
            {"lr": 0.01, "batch_size": 64, "momentum": 0.9},
            {"rounds": 50, "eval_every": 1, "evaluation": "central"},
        )
        for seed in SEEDS
        for short, (dataset, augment) in DATASETS.items()
        for words, dealt in PARTITIONS.items()
        for method in METHODS
    ]  # fmt: skip


def page(done: list[dict[str, Any]]) -> str:
    """The page docs/results/niid-bench.md."""
    rows = []
    for task, published in PUBLISHED.items():
        for method, value in zip(METHODS, published, strict=True):
            found = [one for one in done if one["task"] == task and one["method"] == method]
            last = mean_text([one["curve"][-1]["central"] for one in found])
            best = mean_text([max(point["central"] for point in one["curve"]) for one in found])
            rows.append([task, method.partition(":")[0], value, last, best, str(len(found))])
    heads = ["task", "method", "published", "last round", "oracle", "seeds"]
    return f"""# NIID-Bench's table, run again

Written by `python benchmarks/niid_bench_table.py` from [niid-bench.json](niid-bench.json), which holds every
curve; run it again to add the missing cells. Cells so far: {len(done)} of {len(cells())}, on
{origins(done) or "nothing"}.

**Protocol.** 10 clients, all of them in every round, 50 rounds of 10 local epochs, SGD with momentum 0.9, lr
0.01, batch 64, the small CNN of NIID-Bench (`lenet`), no augmentation unless stated. Clients train on
all of their samples; the shared model is scored on the official test set, in %, after every round. `dir0.5`:
NIID-Bench's Dirichlet with its cap; `labels2`: two classes per client. Published: the table of Flower's
niid_bench baseline, which is an oracle (best round on test); in brackets NIID-Bench's own README, CIFAR-10.
FedProx with μ = 0.01 (they tuned it).

{table(heads, rows)}

{COMMENT}"""


COMMENT = """\
**MNIST and Fashion-MNIST** agree with the published values to within about a point, except MNIST with two classes per
client, where FedProx ends 3 points below: with two classes the curves jump by several points from round to round, and
one seed says little.

**CIFAR-10** lies 8 to 13 points below without augmentation. NIID-Bench's training transform pads and crops at random
and flips images; with that (`cifar10-augmented`: `--augment crop-flip`) the IID cells reach 72.4 for the published
71.3, Dirichlet(0.5) lies between the two published values for the same cell, and two labels reach 50.3 for FedAvg and
47.1 for FedProx (published 51.2 and 50.4, one seed). So augmentation belongs to that protocol: without it the network
has memorised its samples after about 15 rounds."""


if __name__ == "__main__":
    main("niid-bench", cells(), {"niid-bench": page})
