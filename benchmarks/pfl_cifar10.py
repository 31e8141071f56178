"""The CIFAR-10 workload of the pfl-research benchmarks (arXiv 2404.06430), from end to end.

1000 clients with 50 images each, 50 of them per round, one epoch in batches of 10, SGD with step size 0.1, unweighted
mean, 1500 rounds, central evaluation every 10 rounds: 375,000 client-steps and 150 evaluations. Without the data set's
files (`--data` or ATOLL_DATA) the images are random: speed does not depend on them, accuracy then says nothing.

    python benchmarks/pfl_cifar10.py --device cuda --precision bf16
"""

import argparse
import contextlib
import logging
import time
from pathlib import Path

import torch

from atoll import LocalEngine, Task, Training, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.data.datasets import Dataset, load
from atoll.data.partition import Iid
from atoll.kernel.errors import DataError
from atoll.kernel.randomness import default_generator


def data(root: Path | None) -> Dataset:
    try:
        return load("cifar10", root, merge=False)
    except DataError:
        print("CIFAR-10 was not found: random images are used")
        with default_generator(0):
            x, y = torch.randn(60_000, 3, 32, 32), torch.randint(0, 10, (60_000,))
        return Dataset("random", x[:50_000], y[:50_000], 10, (x[50_000:], y[50_000:]), "random")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    task = Task.build(
        data(options.data),
        Iid(),
        clients=options.clients,
        model="simple-cnn",
        shares=(1.0, 0.0, 0.0),
        training=Training(lr=0.1, batch_size=10),
    )
    engine = LocalEngine(device=options.device, precision=options.precision, compile=options.device != "cpu")
    settings = {"cohort": 50, "eval_every": 10, "evaluation": "central", "engine": engine}
    algorithm = FedAvg(weighting="uniform")
    began = time.perf_counter()
    # The engine weighs compilation against the rounds ahead, so the warm-up is the same run, stopped after one round.
    with contextlib.suppress(StopIteration):
        federate(task, algorithm, rounds=options.rounds, on_round=_stop, **settings)
    plans = ", ".join(map(str, engine.plans.values()))
    print(f"calibration and compilation: {time.perf_counter() - began:.1f} s; plan: {plans}")
    began = time.perf_counter()
    report = federate(task, algorithm, rounds=options.rounds, **settings)
    seconds = time.perf_counter() - began
    print(f"{options.rounds} rounds in {seconds:.1f} s, {1e3 * seconds / options.rounds:.2f} ms a round")
    print(f"central accuracy: {report.evaluations[-1]['evaluation']['central']['score']:.4f}")


def _stop(_: object) -> None:
    raise StopIteration


if __name__ == "__main__":
    main()
