"""How fast steps are, against the plain loop a researcher writes; both are measured in one run, by turns.

The baseline trains one client after another with `torch.optim.SGD`, all tensors on the device, no DataLoader. Atoll
runs a round of FedAvg through its engine, everything included. Figures are microseconds per client-step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from atoll import models
from atoll.algorithms.fedavg import FedAvg
from atoll.data.batches import Split
from atoll.data.task import Task, Training
from atoll.kernel.job import Done, Job, Local
from atoll.kernel.network import Network, Precision
from atoll.kernel.randomness import default_generator, generator
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.testing.bench.table import Row


@dataclass(frozen=True)
class Workload:
    """K clients with `steps` batches of B samples each; or as many on average, where they are skewed."""

    model: str
    shape: tuple[int, ...]
    clients: int
    batch: int
    target: float  # the least speed-up
    most: float | None = None  # microseconds
    steps: int = 50
    seeds: int = 1  # runs of the same clients, which differ in their draws
    precision: Precision = "fp32"
    skewed: bool = False  # ten classes dealt by Dirichlet(0.1): the largest client has many times the median's samples
    compile: bool | None = None  # None where it pays; False where compiling takes too long to wait for

    @property
    def name(self) -> str:
        """For the table and for `--only`."""
        shape = "x".join(map(str, self.shape))
        extras = ["skewed"] * self.skewed + [f"{self.seeds}-seeds"] * (self.seeds > 1)
        return "-".join([self.model, shape, f"{self.clients}x{self.batch}", *extras])

    def measure(self, device: str, repeats: int) -> Row:
        """Measure the plain loop and Atoll by turns."""
        return measure(self, torch.device(device), repeats)


CPU = (
    Workload("mlp", (1, 8, 8), 50, 10, target=5.0),
    Workload("mlp", (1, 28, 28), 50, 10, target=5.0),
    Workload("mlp", (1, 28, 28), 50, 10, target=4.0, skewed=True),
    Workload("cnn", (1, 28, 28), 20, 10, target=1.2),
    Workload("cnn", (3, 32, 32), 20, 10, target=1.2),
    Workload("cnn", (1, 28, 28), 10, 50, target=1.0, steps=16),
    Workload("cnn", (3, 32, 32), 10, 50, target=1.0, steps=16),
)
CUDA = (
    Workload("cnn", (3, 32, 32), 20, 10, target=40.0, precision="bf16"),
    Workload("cnn", (3, 32, 32), 100, 10, target=60.0, most=16.0, precision="bf16"),
    Workload("cnn", (1, 28, 28), 100, 10, target=60.0, precision="bf16"),
    Workload("cnn", (1, 28, 28), 100, 10, target=60.0, most=24.0, precision="bf16", skewed=True),
    Workload("cnn", (1, 28, 28), 100, 10, target=60.0, most=15.0, precision="bf16", skewed=True, seeds=5),
    Workload("cnn", (3, 32, 32), 100, 50, target=25.0, most=50.0, precision="bf16"),
    Workload("resnet18-gn", (3, 32, 32), 20, 32, target=4.0, most=1500.0, steps=10, precision="bf16"),
    Workload("mlp", (1, 28, 28), 50, 10, target=5.0),
)


def make_task(workload: Workload) -> Task:
    """Make a task of random samples."""
    rng = generator(0, "bench", workload.name)
    total = workload.clients * workload.batch * workload.steps
    count = min(total, 20_000)  # clients may share samples: only speed is measured
    x = torch.from_numpy(rng.standard_normal((count, *workload.shape), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 10, count))
    shares = np.full(workload.clients, 1 / workload.clients)
    if workload.skewed:
        shares = rng.dirichlet(np.full(workload.clients, 0.1), size=10).mean(0)
    sizes = np.maximum(np.round(shares * total / workload.batch), 1).astype(np.int64) * workload.batch
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    order = torch.arange(int(offsets[-1])) % count
    nothing = Split(torch.zeros(0, dtype=torch.int64), np.zeros(workload.clients + 1, dtype=np.int64))
    with default_generator(0):
        module = models.build(workload.model, workload.shape, 10)
    return Task(
        name=workload.name,
        x=x,
        y=y,
        splits={"train": Split(order, offsets), "val": nothing, "test": nothing},
        network=Network(module, signature=(workload.model, workload.shape)),
        classes=10,
        training=Training(lr=0.01, batch_size=workload.batch),
    )


def make_plain_round(task: Task, workload: Workload, device: torch.device) -> Callable[[], int]:
    """Make a round of the plain loop, which returns how many client-steps it took."""
    task = task.to(device, torch.float32)
    with default_generator(0):
        model: nn.Module = models.build(workload.model, workload.shape, 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    split = task.splits["train"]
    clients = workload.clients if device.type == "cpu" else min(workload.clients, 5)
    order = [split.order[split.offsets[k] : split.offsets[k + 1]].reshape(-1, workload.batch) for k in range(clients)]

    def round() -> int:
        for client in range(clients):
            model.load_state_dict(start)
            for batch in order[client]:
                optimizer.zero_grad()
                F.cross_entropy(model(task.x[batch]), task.y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return sum(map(len, order))

    return round


def make_atoll_round(task: Task, engine: LocalEngine, seed: int = 0) -> Callable[[], int]:
    """Make a round of FedAvg through the engine, which returns how many client-steps it took."""
    population = Population(engine.place(task), RamMemory(task.clients), seed=seed)
    algorithm = FedAvg()
    w = algorithm.start(population.facts)
    everybody = np.arange(task.clients)
    job = Job(Local(), algorithm, w, everybody, 0, calls=100_000)

    def round() -> int:
        trained = [outcome.clients for outcome in engine.run(job, population) if isinstance(outcome, Done)]
        samples = task.splits["train"].sizes(np.concatenate(trained))
        return int(-(-samples // task.training.batch_size).sum())

    return round


def time_together(task: Task, engine: LocalEngine, seeds: int, rounds: int) -> tuple[float, float]:
    """Time rounds of several seeds side by side; return the first round's seconds, and those per client-step after."""

    def run(seed: int) -> tuple[int, list[float]]:
        round, clock, steps = make_atoll_round(task, engine, seed), list[float](), list[int]()
        for _ in range(rounds + 2):
            _wait(engine.device)
            clock.append(time.perf_counter())
            steps.append(round())
        _wait(engine.device)
        return sum(steps[2:]), [*clock, time.perf_counter()]

    found = engine.run_together([task], [functools.partial(run, seed) for seed in range(seeds)])
    for one in found:
        if isinstance(one, BaseException):
            raise one
    done = [one for one in found if not isinstance(one, BaseException)]
    began, second, third, ended = (
        pick(clock[place] for _, clock in done) for pick, place in ((min, 0), (max, 1), (min, 2), (max, -1))
    )
    return second - began, (ended - third) / sum(steps for steps, _ in done)


def time_step(round: Callable[[], int], device: torch.device) -> float:
    """Time a round; return its seconds per client-step."""
    _wait(device)
    began = time.perf_counter()
    steps = round()
    _wait(device)
    return (time.perf_counter() - began) / steps


def measure(workload: Workload, device: torch.device, repeats: int) -> Row:
    """Measure microseconds per client-step of the baseline and of Atoll, medians, and Atoll's first round."""
    task = make_task(workload)
    engine = LocalEngine(device=str(device), precision=workload.precision, compile=workload.compile, remember=False)
    theirs, ours = make_plain_round(task, workload, device), make_atoll_round(task, engine)
    theirs()
    if workload.seeds > 1:
        first, together = time_together(task, engine, workload.seeds, repeats)
        times = [(time_step(theirs, device), together) for _ in range(repeats)]
        return _make_row(workload, engine, first, times)
    began = time.perf_counter()
    ours()  # measures plans and makes programs
    _wait(device)
    first = time.perf_counter() - began
    ours()
    times = [(time_step(theirs, device), time_step(ours, device)) for _ in range(repeats)]
    return _make_row(workload, engine, first, times)


def _make_row(workload: Workload, engine: LocalEngine, first: float, times: list[tuple[float, float]]) -> Row:
    """Make a row of the table of seconds per client-step, the baseline's and Atoll's."""
    plain, atoll = (1e6 * statistics.median(values) for values in zip(*times, strict=True))
    return Row(
        workload=workload.name, unit="us per client-step", beside="plain loop", theirs=plain, atoll=atoll, first=first,
        least=workload.target, most=workload.most, plan=str(next(iter(engine.plans.values()))),
    )  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
