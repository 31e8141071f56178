"""Other people's code beside ours, on the same clients and from the same initial values, round by round in one run."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.algorithms.fedavg import FedAvg
from atoll.data.recipe import Recipe
from atoll.data.task import Task, Training
from atoll.federation import federate
from atoll.kernel.errors import RunError
from atoll.records.rounds import Round
from atoll.runtime.engines.local import LocalEngine

PEERS = ("pfllib",)
ROUNDS = 2000  # of a run: PFLlib's default, for which the engine plans; only some are timed
SOURCE = "get it with `git clone https://github.com/TsingZ0/PFLlib` and name its folder: --peer pfllib=PFLlib"


@dataclass(frozen=True)
class Duel:
    """A federation that the peer and Atoll both run: FedAvg with every client, evaluated in every round."""

    dataset: str
    model: str  # the peer's name of it
    target: float  # the least speed-up on two cores
    samples: int = 14_000
    clients: int = 20
    batch: int = 10

    @property
    def name(self) -> str:
        """The name in the table and for `--only`."""
        return f"pfllib-{self.dataset}-{self.model.lower()}-{self.clients}x{self.batch}-skewed"

    def build(self) -> Task:
        """Build the task: skewed clients with 75 % of their samples to train and 25 % to test, as the peer has it."""
        recipe = Recipe(
            self.dataset, partition="dirichlet:0.1", clients=self.clients, samples=self.samples, split="75/0/25",
            model={"DNN": "mlp:100", "CNN": "cnn"}[self.model], training=Training(lr=0.005, batch_size=self.batch),
        )  # fmt: skip
        return recipe.build()


@dataclass(frozen=True)
class Times:
    """Seconds per round of both, by turns, and the accuracies that both found in the last of these rounds."""

    theirs: list[float]
    ours: list[float]
    first: float  # seconds until our first round was done: plans and programs included
    accuracies: tuple[float, float]
    plan: str

    @property
    def ratio(self) -> float:
        """How many times as fast Atoll is."""
        return statistics.median(self.theirs) / statistics.median(self.ours)


class Peer:
    """A process that runs the peer's rounds, one for each call of `round`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line, if there is one, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(answer) if answer else {"error": "it ended; its own message stands above"}
        if "error" in found:
            raise RunError(f"PFLlib must run in this Python. It does not: {found['error']}.", hint=SOURCE)
        return found

    def round(self) -> dict[str, float]:
        """Run one round; return its seconds, and the accuracy before it."""
        return self.ask("round")


@contextmanager
def pfllib(path: Path, duel: Duel, task: Task, device: str) -> Iterator[Peer]:
    """Start PFLlib's FedAvg on the clients of a task; nothing is written into its own folder."""
    source = path.resolve() / "system"
    if not (source / "flcore/servers/serveravg.py").is_file():
        raise RunError(f"`--peer pfllib=PATH` must name a copy of PFLlib. {path} holds no system/flcore.", hint=SOURCE)
    with tempfile.TemporaryDirectory() as place:
        here = Path(place) / "system"  # PFLlib reads ../dataset and writes ../results
        here.mkdir()
        _write_clients(task, Path(place) / "dataset" / "Bench")
        np.savez(here / "start.npz", *(leaf.cpu().numpy() for leaf in task.network.initial.values()))
        script = Path(__file__).with_name("peer_pfllib.py")
        rate = task.training.lr
        words = [script, source, duel.model, task.clients, duel.batch, rate, device]
        process = subprocess.Popen(  # noqa: S603 - this Python, on the user's copy
            [sys.executable, *map(str, words)], cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            peer = Peer(process)
            peer.ask()
            yield peer
        finally:
            with suppress(OSError):
                process.communicate(timeout=60)


def _write_clients(task: Task, folder: Path) -> None:
    """Write each client's samples as PFLlib's own scripts do."""
    for name in ("train", "test"):
        (folder / name).mkdir(parents=True)
        split = task.splits[name]
        for client, (start, stop) in enumerate(itertools.pairwise(split.offsets)):
            rows = split.order[start:stop]
            data = {"x": task.x[rows].numpy(), "y": task.y[rows].numpy()}
            np.savez_compressed(folder / name / f"{client}.npz", data=data)  # type: ignore[arg-type]


def measure(duel: Duel, path: Path, device: str, rounds: int) -> Times:
    """Measure rounds of the peer and of Atoll by turns; our first two, with plans and programs, do not count."""
    task, engine = duel.build(), LocalEngine(device=device)
    theirs, ours = list[float](), list[float]()
    scores = [0.0, 0.0]
    with pfllib(path, duel, task, device) as peer:
        clock = time.perf_counter()

        def on_round(line: Round) -> None:
            nonlocal clock
            ours.append(time.perf_counter() - clock)
            found = peer.round()
            theirs.append(found["seconds"])
            if len(theirs) > 1:  # the peer scores a round's model at the beginning of the next
                scores[0] = found["accuracy"]
            if len(ours) == rounds + 2:
                raise StopIteration
            assert line.evaluation is not None
            scores[1] = line.evaluation["personal"]["test"]["micro"]
            clock = time.perf_counter()

        with suppress(StopIteration):
            federate(task, FedAvg(), rounds=ROUNDS, eval_every=1, engine=engine, on_round=on_round)
    plan = next(str(plan) for (phase, *_), plan in engine.plans.items() if phase == "local")
    return Times(theirs[2:], ours[2:], ours[0], (scores[0], scores[1]), plan)
