"""What protection costs in time: each line is measured beside what it is compared with, in one run, by turns.

    python benchmarks/protect_speed.py                 # all lines, on this machine
    python benchmarks/protect_speed.py --only dpsgd    # those whose name has this in it
    python benchmarks/protect_speed.py --turns 9

One function measures one kind of line and says the most that its ratio may be. A ratio is that of medians over turns,
so a machine that is busy with other things changes both of its sides alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from published import choose

from atoll import LocalEngine, create
from atoll.data.task import Task
from atoll.kernel.algorithm import Arrival, Update
from atoll.kernel.job import Done, Job, Local
from atoll.kernel.params import Stack
from atoll.kernel.randomness import generator
from atoll.protect.channel import Channel
from atoll.protect.compression import parse_compression
from atoll.protect.rules import parse_rule
from atoll.protect.secure import KINDS, parse_secure
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.testing.bench.steps import Workload, make_task


class Line(NamedTuple):
    """One ratio: what was measured, against what, and the most that it may be."""

    name: str
    seconds: float
    beside: float
    most: float

    def __str__(self) -> str:
        ratio = self.seconds / self.beside
        told = "holds" if ratio <= self.most else "does not hold"
        return (
            f"{self.name}: {1e3 * self.seconds:.2f} ms against {1e3 * self.beside:.2f} ms, ratio {ratio:.2f} "
            f"(at most {self.most:g}: {told})"
        )


def take_turns(turns: int, *works: Callable[[], object]) -> list[float]:
    """Run each work once to warm up, then all of them by turns; return the median seconds of each."""
    for work in works:
        work()
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(turns):
        for work, found in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
    return [statistics.median(found) for found in times]


def make_round(method: str, task: Task, engine: LocalEngine) -> Callable[[], None]:
    """Make the local work of one round of a method, all clients together."""
    population = Population(engine.place(task), RamMemory(task.clients), seed=0)
    algorithm = create(method)
    job = Job(Local(), algorithm, algorithm.start(population.facts), np.arange(task.clients), 0, calls=100_000)

    def round() -> None:
        done = [outcome for outcome in engine.run(job, population) if isinstance(outcome, Done)]
        assert sum(len(one.clients) for one in done) == task.clients, "a client was lost"

    return round


def measure_dpsgd(turns: int, compiles: bool | None) -> Iterator[Line]:
    """Gradients of samples, cut and with noise, against plain steps: both in the engine, as it chooses to run them."""
    for workload in (
        Workload("mlp", (1, 28, 28), 50, 10, target=0, steps=10),
        Workload("cnn", (1, 28, 28), 20, 10, target=0, steps=4),
        Workload("cnn", (3, 32, 32), 20, 10, target=0, steps=4),
    ):
        task = make_task(workload)
        engines = [LocalEngine(device="cpu", compile=compiles, remember=False) for _ in range(2)]
        works = [make_round(name, task, one) for name, one in zip(("fedavg+dpsgd", "fedavg"), engines, strict=True)]
        private, plain = take_turns(turns, *works)
        steps = workload.clients * workload.steps
        yield Line(f"dpsgd step, {workload.name}", private / steps, plain / steps, most=3.0)


RULES = (
    "median", "trimmed:20", "meamed:20", "krum:20", "multi-krum:20", "geometric", "centered-clip", "norm-bound",
    "bucket:2+median", "nnm:20+trimmed:20",
)  # fmt: skip


def measure_rules(turns: int, compiles: bool | None) -> Iterator[Line]:
    """Rules on 100 replies of PFLlib's CNN, against one local epoch of these clients, of 100 samples each."""
    workload = Workload("cnn", (1, 28, 28), 100, 10, target=0, steps=10)
    task = make_task(workload)
    epoch = make_round("fedavg", task, LocalEngine(device="cpu", compile=compiles, remember=False))
    replies = draw_replies(task)

    def make_combination(words: str) -> Callable[[], object]:
        rule = parse_rule(words)
        assert rule is not None
        return lambda: rule.combine([replies], None)

    *each, local = take_turns(turns, *map(make_combination, RULES), epoch)
    for words, seconds in zip(RULES, each, strict=True):
        yield Line(f"rule {words}, {workload.name}", seconds, local, most=1.0)


def draw_replies(task: Task) -> Arrival:
    """Draw a reply of every client: normal numbers in the shape of the model."""
    draw = generator(0, "replies")
    leaves = {
        name: torch.from_numpy(draw.standard_normal((task.clients, *leaf.shape), dtype=np.float32))
        for name, leaf in task.network.initial.items()
    }
    fields = {"delta": Stack(leaves, task.network.initial.layout)}
    return Arrival(np.arange(task.clients), fields, torch.ones(task.clients))


MESSAGES = ("qsgd:8", "qsgd:4", "sign", "topk:0.01", "sums", "masks", "masks:neighbours=20")


def measure_messages(turns: int, compiles: bool | None) -> Iterator[Line]:
    """Packing, encoding and masking the messages of 100 clients, against one local epoch of these clients.

    They have 600 samples each, as Fashion-MNIST gives them. All clients are in this process, also when they mask.
    """
    for model in ("mlp", "cnn"):
        workload = Workload(model, (1, 28, 28), 100, 10, target=0, steps=60)
        task = make_task(workload)
        epoch = make_round("fedavg", task, LocalEngine(device="cpu", compile=compiles, remember=False))
        replies = draw_replies(task)
        *each, local = take_turns(turns, *(make_transfer(words, replies) for words in MESSAGES), epoch)
        for words, seconds in zip(MESSAGES, each, strict=True):
            yield Line(f"{words}, {workload.name}", seconds, local, most=0.1)


def make_transfer(words: str, replies: Arrival) -> Callable[[], None]:
    """Make what happens to the messages of a round between clients, who send one by one, and the server's rule."""
    algorithm, clients = create("fedavg"), len(replies.clients)
    secure = parse_secure(words) if words.partition(":")[0] in KINDS else None
    stages = (parse_compression(words),) if secure is None else secure.stages(clients)
    adder = None if secure is None else secure.adder()

    def transfer() -> None:
        channel = Channel([stage for stage in stages if stage is not None])
        read = []
        for row, client in enumerate(replies.clients):
            send = {name: value.rows(slice(row, row + 1)) for name, value in replies.fields.items()}
            update = Update(send=send, weight=replies.weight[row : row + 1])
            read.append(channel.up(algorithm, np.array([client]), update, 0))
        if adder is not None:
            adder.add_up(read, round=0, asked=replies.clients)

    return transfer


LINES: tuple[Callable[[int, bool | None], Iterator[Line]], ...] = (measure_dpsgd, measure_rules, measure_messages)


def main() -> None:
    """Measure and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs=1, help="measure functions whose name matches this regular expression")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true", help="without the compiler, which takes a while at first")
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {asked.turns} turns")
    measures = {measure.__name__: measure for measure in LINES}
    for name in choose(parser, measures, asked.only):
        for line in measures[name](asked.turns, False if asked.no_compile else None):
            print(line, flush=True)


if __name__ == "__main__":
    main()
