"""How fast training is, against the plain loop a researcher writes; both are measured in one run, by turns.

The baseline trains one client after another with `torch.optim.SGD`, all tensors on the device, no DataLoader. Atoll
runs a round of FedAvg through its engine, everything included. Figures are microseconds per client-step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from atoll import models
from atoll.algorithms.fedavg import FedAvg
from atoll.data.batches import Split
from atoll.data.task import Task, Training
from atoll.kernel.errors import unknown
from atoll.kernel.job import Done, Job, Local
from atoll.kernel.network import Network, Precision
from atoll.kernel.randomness import default_generator, generator
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population


@dataclass(frozen=True)
class Workload:
    """K clients with `steps` batches of B samples each; or as many on average, where they are skewed."""

    model: str
    shape: tuple[int, ...]
    clients: int
    batch: int
    target: float  # the least speed-up
    steps: int = 50
    precision: Precision = "fp32"
    skewed: bool = False  # ten classes dealt by Dirichlet(0.1): the largest client has many times the median's samples
    compile: bool | None = None  # None where it pays; False where compiling takes too long to wait for

    @property
    def name(self) -> str:
        """For the table and for `--only`."""
        shape = "x".join(map(str, self.shape))
        return f"{self.model}-{shape}-{self.clients}x{self.batch}{'-skewed' if self.skewed else ''}"


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
    Workload("cnn", (3, 32, 32), 100, 10, target=60.0, precision="bf16"),
    Workload("cnn", (1, 28, 28), 100, 10, target=60.0, precision="bf16"),
    Workload("cnn", (1, 28, 28), 100, 10, target=60.0, precision="bf16", skewed=True),
    Workload("cnn", (3, 32, 32), 100, 50, target=25.0, precision="bf16"),
    Workload("resnet18-gn", (3, 32, 32), 20, 32, target=4.0, steps=10, precision="bf16", compile=False),
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


def make_atoll_round(task: Task, engine: LocalEngine) -> Callable[[], int]:
    """Make a round of FedAvg through the engine, which returns how many client-steps it took."""
    population = Population(engine.place(task), RamMemory(task.clients), seed=0)
    algorithm = FedAvg()
    w = algorithm.start(population.facts)
    everybody = np.arange(task.clients)

    def round() -> int:
        job = Job(Local(), algorithm, w, everybody, 0, calls=100_000)
        trained = [outcome.clients for outcome in engine.run(job, population) if isinstance(outcome, Done)]
        samples = task.splits["train"].sizes(np.concatenate(trained))
        return int(-(-samples // task.training.batch_size).sum())

    return round


def time_step(round: Callable[[], int], device: torch.device) -> float:
    """Time a round; return its seconds per client-step."""
    _wait(device)
    began = time.perf_counter()
    steps = round()
    _wait(device)
    return (time.perf_counter() - began) / steps


def measure(workload: Workload, device: torch.device, repeats: int) -> tuple[float, float, str]:
    """Measure seconds per client-step of the baseline and of Atoll (medians); return them and Atoll's plan."""
    task = make_task(workload)
    engine = LocalEngine(device=str(device), precision=workload.precision, compile=workload.compile, remember=False)
    theirs, ours = make_plain_round(task, workload, device), make_atoll_round(task, engine)
    theirs()
    ours()  # calibrates and compiles
    ours()
    times = [(time_step(theirs, device), time_step(ours, device)) for _ in range(repeats)]
    plan = next(iter(engine.plans.values()))
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times), str(plan)


def run(device: str = "auto", quick: bool = False, only: list[str] | None = None) -> int:
    """Print the speed table; return 1 if a target was missed."""
    where = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    workloads = {workload.name: workload for workload in (CUDA if where.type == "cuda" else CPU)}
    for name in only or ():
        if name not in workloads:
            raise unknown("workload", name, workloads)
    console = Console()
    kind = torch.cuda.get_device_name() if where.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    table = Table(title=f"Microseconds per client-step on {kind}, torch {torch.__version__}")
    for column in ("workload", "plain loop", "atoll", "speed-up", "target", "plan"):
        table.add_column(column, justify="left" if column in ("workload", "plan") else "right")
    missed = 0
    for name in only or workloads:
        workload = workloads[name]
        if quick:
            workload = replace(workload, steps=max(2, workload.steps // 4))
        with Console(stderr=True).status(f"measuring {name} (calibrates and compiles first)"):
            theirs, ours, plan = measure(workload, where, repeats=3 if quick else 5)
        ratio = theirs / ours
        missed += ratio < workload.target
        mark = "" if ratio >= workload.target else " missed"
        row = (name, f"{theirs * 1e6:.0f}", f"{ours * 1e6:.1f}", f"{ratio:.2f}x{mark}", f"{workload.target:g}x", plan)
        table.add_row(*row)
        console.print(" ".join(row))
    console.print(table)
    return 1 if missed else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
