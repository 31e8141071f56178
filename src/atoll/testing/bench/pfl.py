"""The CIFAR-10 workload of the pfl-research benchmarks (arXiv 2404.06430), from end to end.

1000 clients with 50 images each, 50 of them per round, one epoch in batches of 10, SGD with step size 0.1, unweighted
mean, 1500 rounds, central evaluation every 10 rounds: 375,000 client-steps and 150 evaluations. Without the data set's
files (ATOLL_DATA) the images are random: speed does not depend on them, accuracy then says nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.algorithms.fedavg import FedAvg
from atoll.data.datasets import Dataset, load
from atoll.data.partition import Iid
from atoll.data.task import Task, Training
from atoll.federation.loop import federate
from atoll.kernel.errors import DataError
from atoll.kernel.network import Precision
from atoll.kernel.randomness import default_generator
from atoll.runtime.engines.local import LocalEngine
from atoll.testing.bench.table import Row


@dataclass(frozen=True)
class PflCifar10:
    """The workload; all its rounds are timed after a first one, which measures plans and makes programs."""

    rounds: int = 1500
    clients: int = 1000
    precision: Precision = "bf16"
    most: float | None = 14.0  # seconds
    data: Path | None = None

    name = "pfl-cifar10"

    def measure(self, device: str, repeats: int = 1) -> Row:
        """Measure the seconds of all rounds; the fastest of the repeats counts."""
        dataset = find_images(self.data)
        task = Task.build(
            dataset, Iid(), clients=self.clients, model="simple-cnn", shares=(1.0, 0.0, 0.0),
            training=Training(lr=0.1, batch_size=10),
        )  # fmt: skip
        engine = LocalEngine(device=device, precision=self.precision, compile=device != "cpu")
        settings: dict[str, Any] = {"cohort": 50, "eval_every": 10, "evaluation": "central", "engine": engine}
        algorithm = FedAvg(weighting="uniform")
        began = time.perf_counter()
        # The engine weighs compilation against the rounds ahead, so the warm-up is the same run, stopped after a round.
        with suppress(StopIteration):
            federate(task, algorithm, rounds=self.rounds, on_round=_stop, **settings)
        first, took = time.perf_counter() - began, list[float]()
        for _ in range(repeats):
            began = time.perf_counter()
            report = federate(task, algorithm, rounds=self.rounds, **settings)
            took.append(time.perf_counter() - began)
        last = report.history[-1].evaluation  # of the server's test set alone
        assert last is not None
        assert last.central is not None
        score = last.central["score"]
        note = f"{self.rounds} rounds; accuracy {score:.4f} on {dataset.name}"
        plan = next(str(plan) for (phase, *_), plan in engine.plans.items() if phase == "local")
        return Row(workload=self.name, unit="s", atoll=min(took), first=first, most=self.most, plan=plan, note=note)


def find_images(root: Path | None) -> Dataset:
    """Return CIFAR-10, or as many random images where its files are not found."""
    try:
        return load("cifar10", root, merge=False)
    except DataError:
        with default_generator(0):
            x, y = torch.randn(60_000, 3, 32, 32), torch.randint(0, 10, (60_000,))
        return Dataset("random images", x[:50_000], y[:50_000], 10, (x[50_000:], y[50_000:]), "random")


def _stop(_: object) -> None:
    raise StopIteration
