"""FedFSA's setting: 100 clients, 10 per round, its CNN, 10 local epochs, then a round on the heads.

python benchmarks/fedfsa_table.py --device cuda --precision bf16 --jobs 3
python benchmarks/fedfsa_table.py --list
"""

from __future__ import annotations

import statistics
from typing import Any

from published import Cell, main, mean_text, origins, table

TASKS = {  # title, data set, partition, rounds, augmentation, radii (usual and larger)
    "fashion-dir0.5": ("Fashion-MNIST, Dirichlet 0.5", "fashion-mnist", "prior:0.5", 100, "none", (0.1, 0.2)),
    "cifar10-dir0.5": ("CIFAR-10, Dirichlet 0.5", "cifar10", "prior:0.5", 200, "crop-flip", (0.1, 0.2)),
    "cifar10-pat5": ("CIFAR-10, 5 classes", "cifar10", "shards:5", 200, "crop-flip", (0.1, 0.2)),
    "cifar100-dir0.3": ("CIFAR-100, Dirichlet 0.3", "cifar100", "prior:0.3", 200, "crop-flip", (0.05, 0.9)),
    "cifar100-t500": (
        "CIFAR-100, Dirichlet 0.3, all 500 rounds",
        "cifar100",
        "prior:0.3",
        500,
        "crop-flip",
        (0.05, 0.9),
    ),
}
SEEDS = [0, 1, 2]
PUBLISHED = {  # FedFSA's poster, means over three seeds
    "fashion-dir0.5": {
        "fedavg-ft": "91.59 ± .47", "fedcr": "92.43 ± .41", "fedala": "91.83 ± .39", "fedsam": "91.89 ± .39",
        "mofedsam": "92.94 ± .27", "fedspeed": "92.88 ± .20", "fedfsa": "92.88 ± .35",
    },
    "cifar10-dir0.5": {
        "fedavg-ft": "81.41 ± .77", "fedcr": "83.49 ± .32", "fedala": "81.76 ± .53", "fedsam": "83.84 ± .44",
        "mofedsam": "88.16 ± .25", "fedspeed": "87.99 ± .25", "fedfsa": "88.37 ± .27",
    },
    "cifar10-pat5": {
        "fedavg-ft": "81.79 ± .61", "fedcr": "84.00 ± .14", "fedala": "81.62 ± 1.08", "fedsam": "84.16 ± .20",
        "mofedsam": "88.33 ± .14", "fedspeed": "88.24 ± .37", "fedfsa": "88.64 ± .09",
    },
    "cifar100-dir0.3": {
        "fedavg-ft": "41.09 ± .14", "fedcr": "42.74 ± .39", "fedala": "39.75 ± 1.07", "fedsam": "44.66 ± .40",
        "mofedsam": "51.02 ± 2.21", "fedspeed": "52.61 ± .55", "fedfsa": "60.87 ± .61",
    },
}  # fmt: skip
PUBLISHED["cifar100-t500"] = PUBLISHED["cifar100-dir0.3"]

PARTS = ["momentum alone", "fedsam", "mofedsam", "flexible radius alone", "fedfsa"]


def methods(usual: float, larger: float) -> dict[str, str]:
    """Every method by its name in the table. The last two take FedFSA apart."""
    head, sensitive = "head_epochs=10", "sensitivity=minmax"
    return {
        "fedavg-ft": "fedavg-ft:epochs=10,tune=head,tune_epochs=10",
        "fedsam": f"fedfsa:epochs=10,rho={usual},alpha=1,top_c=0,{head}",
        "mofedsam": f"fedfsa:epochs=10,rho={usual},alpha=0.1,top_c=0,{head}",
        "fedspeed": "fedspeed+tune:epochs=10",
        "fedala": "fedala+tune:epochs=10",
        "fedcr": "fedcr:epochs=10",
        "fedcr, less noise": "fedcr:epochs=10,offset=3",
        "fedfsa": f"fedfsa:epochs=10,rho={usual},rho_larger={larger},alpha=0.1,top_c=2,{sensitive},{head}",
        "momentum alone": f"fedfsa:epochs=10,rho=0,rho_larger=0,alpha=0.1,top_c=0,{head}",
        "flexible radius alone": f"fedfsa:epochs=10,rho={usual},rho_larger={larger},alpha=1,top_c=2,{sensitive},{head}",
    }


def cells() -> list[Cell]:
    """Seeds outermost, so that a first column is complete early."""
    return [
        Cell(
            task, method, seed,
            {"dataset": dataset, "partition": dealt, "clients": 100, "model": "fedfsa-cnn", "split": "65/5/30",
             "augment": augment},
            {"lr": 0.1, "batch_size": 48, "clip": 10.0, "lr_decay": 0.998 if method.startswith("fedspeed") else 1.0},
            {"rounds": rounds, "cohort": 10, "eval_every": rounds},
        )
        for seed in SEEDS
        for task, (_, dataset, dealt, rounds, augment, radii) in TASKS.items()
        for method in methods(*radii).values()
    ]  # fmt: skip


def page(done: list[dict[str, Any]]) -> str:
    """The page docs/results/fedfsa.md."""
    sections = []
    for task, (title, _, _, _, _, radii) in TASKS.items():
        rows = []
        for called, method in methods(*radii).items():
            found = _scores(done, task, method)
            if found:
                ours = mean_text([*found.values()])
                rows.append([called, f"`{method}`", PUBLISHED[task].get(called, "–"), ours, str(len(found))])
        heads = ["method", "written", "published", "ours", "seeds"]
        body = table(heads, rows) if rows else "Not run yet."
        sections.append(f"## {title}\n\n{body}\n")
    return f"""# FedFSA's table, run again

Written by `python benchmarks/fedfsa_table.py` from [fedfsa.json](fedfsa.json); run it again to add the missing cells.
Cells so far: {len(done)} of {len(cells())}, on {origins(done) or "nothing"}.

**Protocol.** 100 clients with equally many samples, 10 of them in a round, 10 local epochs, SGD with lr 0.1, batch 48,
gradients clipped at 10, uniform means, {TASKS["cifar10-dir0.5"][3]} rounds (there 500; Fashion-MNIST
{TASKS["fashion-dir0.5"][3]}, there 250), four rows of CIFAR-100 also for all 500; then all clients train their heads
for 10 epochs. FedFSA's CNN.
FedSpeed's lr falls by 0.2 % a round, as in the original. CIFAR images are cropped and flipped. Train and test samples
are merged; each client keeps 65 % for training, 5 % for validation, 30 % for test (there 70/30). Accuracy in %, mean
over clients, after the last round: nothing is chosen on test. Published: FedFSA's poster. Our CIFAR-100 is a JPEG copy:
expect slightly lower figures there.

{chr(10).join(sections)}
## What each part of FedFSA brings

The paper gives no such table. Momentum is `alpha=0.1` instead of 1. FedSAM is sharpness-awareness alone, with the usual
radius on all layers; MoFedSAM is both. A flexible radius is larger on the two most sensitive layers; FedFSA is a
flexible radius with momentum. Sensitivity is that of the released code, `minmax`; the paper's, `raw`, was not run here.
Points above FedAvg-FT, means over the seeds that both have.

{_ablation(done)}
{COMMENT}"""


def _ablation(done: list[dict[str, Any]]) -> str:
    """FedFSA taken apart, against FedAvg-FT."""
    rows = []
    for task, (title, _, _, _, _, radii) in TASKS.items():
        found = {called: _scores(done, task, method) for called, method in methods(*radii).items()}
        plain, row = found["fedavg-ft"], [title]
        for called in PARTS:
            gains = [found[called][seed] - plain[seed] for seed in plain.keys() & found[called].keys()]
            row.append(f"{statistics.mean(gains):+.1f}" if gains else "–")
        rows.append(row)
    return table(["task", *PARTS], rows)


def _scores(done: list[dict[str, Any]], task: str, method: str) -> dict[int, float]:
    """Of a method on a task, by seed."""
    return {
        one["seed"]: one["curve"][-1]["test_macro"] for one in done if (one["task"], one["method"]) == (task, method)
    }


COMMENT = """
With one seed; after two fifths of the published rounds unless stated otherwise. How much a cell varies when it is run
again was not measured here. The published ± are 0.1 to 1.1 points, and 2.2 for MoFedSAM on CIFAR-100; if ours are like
these, a difference of two single cells is uncertain by up to ±3 points, and by ±4.5 with MoFedSAM on CIFAR-100.

- *Momentum* alone gains -0.8 to +1.3 points, *sharpness-awareness* alone (FedSAM) +0.2 to +3.1. Both together
  (MoFedSAM) gain +0.8 to +10.3, more than the sum of the two on all four tasks (by 1.4, 1.9, 2.3 and 5.9), of which
  only CIFAR-100 is beyond that uncertainty.
- *The flexible radius* makes no visible difference on CIFAR-10 and Fashion-MNIST, neither alone (-0.5 to -0.1 against
  FedSAM) nor with momentum (-0.2 to -0.1 against MoFedSAM); the published differences are -0.1 to 0.3. **On
  CIFAR-100**, where the larger radius is 18 times the usual one, it is 14.7 points above FedAvg-FT alone after 200
  rounds, and 14.2 after 500; FedFSA is 8.7 and 17.3 above.
- On CIFAR-100 FedFSA is 6 points below the flexible radius alone after 200 rounds, and 1.6 below MoFedSAM; after all
  500 it is 3.1 above the one and 7.7 above the other (published: 9.9 above MoFedSAM): it keeps improving (50.9, then
  57.5), while the others fall (56.9, then 54.4; MoFedSAM 52.5, then 49.8; FedAvg-FT 42.2, then 40.2). In these runs
  momentum pays off late; one seed does not show whether it does in others.

**Against the published values.** On CIFAR-100 after all 500 rounds FedAvg-FT and MoFedSAM are 0.9 and 1.2 points below
theirs and FedFSA is 3.4 below; the JPEG copy, and 65 % of samples for training where there are 70, may be the reason.
After 200 rounds: on Fashion-MNIST (100) all methods except FedCR are within 0.7 points of theirs, and with 5 classes
per client MoFedSAM, FedSpeed and FedFSA within 0.6, while FedAvg-FT, FedSAM and FedALA are 2 to 4 points *above*
theirs. With Dirichlet on CIFAR, FedAvg-FT and FedSAM match theirs, and with 100 classes so do MoFedSAM and FedSpeed;
FedALA is 1 to 3 points below, as are MoFedSAM, FedSpeed and FedFSA with 10 classes.

**FedCR** is below in all four (by 2.9, 8.3, 1.5 and 15.9 points). Known differences: its released code uses lr 0.05,
and an encoder that ends in a linear layer of its own, where ours ends at the input of the head, after a ReLU. Part of
the gap may be the noise, which at first is larger than such features (sigma = log 2): with sigma = 0.05 at first
(`offset=3`) it gains 1.6, 6.3, 2.9 and 2.2 points, and is above its published value with 5 classes, 1 to 2 below on
Fashion-MNIST and on CIFAR-10 with Dirichlet, and still 13.6 below on CIFAR-100. There the divergence seems to be
costly: after 8 rounds (seed 0, two CPU cores) FedAvg-FT reaches 24.7, private heads alone
(`beta=0,offset=1000,draws=1`) 24.0, with the noise of `offset=3` 24.2, and with the divergence as well 19.0, although
its weight is the smallest of those published. We cannot explain why the authors' result is higher. After 15 rounds on
Fashion-MNIST (same cores), FedAvg-FT reaches 90.3, FedCR 89.2, with lr 0.05 88.1, without its divergence (`beta=0`)
89.0, with a layer of its own 89.5, with `offset=3` 90.4, and with both 90.5: with one seed, differences of a point or
two decide nothing.
"""


if __name__ == "__main__":
    main("fedfsa", cells(), {"fedfsa": page})
