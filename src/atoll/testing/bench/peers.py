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
from atoll.federation.loop import federate
from atoll.kernel.errors import RunError, unknown
from atoll.records.rounds import Round
from atoll.runtime.engines.local import LocalEngine
from atoll.testing.bench.table import Row

PEERS = ("pfllib",)
TARGETS = {"DNN": 12.0, "CNN": 2.0}  # times as fast on two cores, by PFLlib's name of the model
SOURCE = "get it with `git clone https://github.com/TsingZ0/PFLlib` and name its folder: pfllib=PFLlib"


@dataclass(frozen=True)
class Duel:
    """A federation that the peer and Atoll both run: FedAvg with every client, evaluated in every round."""

    dataset: str
    model: str  # the peer's name of it
    path: Path  # of the peer's code
    target: float | None = None  # the least speed-up on two cores
    samples: int = 14_000
    clients: int = 20
    batch: int = 10
    rounds: int = 2000  # of a run: PFLlib's default, for which the engine plans; only some are timed

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

    def measure(self, device: str, repeats: int) -> Row:
        """Measure rounds of the peer and of Atoll by turns; both's first two, in which programs are made, do not count.

        The engine plans for as many rounds as the peer's command has by default.
        """
        task, engine = self.build(), LocalEngine(device=device)
        rounds = list[tuple[float, float]]()
        accuracies = [0.0, 0.0]  # after the last round but one: the peer scores a model at the beginning of a round
        with pfllib(self, task, device) as peer:
            clock = time.perf_counter()

            def on_round(line: Round) -> None:
                nonlocal clock
                ours = time.perf_counter() - clock
                found = peer.round()
                rounds.append((found["seconds"], ours))
                accuracies[0] = found["accuracy"]
                if len(rounds) == repeats + 2:
                    raise StopIteration
                assert line.evaluation is not None
                accuracies[1] = line.evaluation["personal"]["test"]["micro"]
                clock = time.perf_counter()

            with suppress(StopIteration):
                federate(task, FedAvg(), rounds=self.rounds, eval_every=1, engine=engine, on_round=on_round)
        theirs, ours = (statistics.median(values) for values in zip(*rounds[2:], strict=True))
        plan = next(str(plan) for (phase, *_), plan in engine.plans.items() if phase == "local")
        images = int(task.splits["train"].offsets[-1])
        note = "{} training images; accuracy {:.3f} theirs, {:.3f} ours".format(images, *accuracies)
        return Row(
            workload=self.name, unit="s per round", beside="PFLlib", theirs=theirs, atoll=ours, first=rounds[0][1],
            least=self.target, plan=plan, note=note,
        )  # fmt: skip


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
def pfllib(duel: Duel, task: Task, device: str) -> Iterator[Peer]:
    """Start PFLlib's FedAvg on the clients of a task; nothing is written into its own folder."""
    source = duel.path.resolve() / "system"
    if not (source / "flcore/servers/serveravg.py").is_file():
        raise RunError(
            f"The path of the peer must be a copy of PFLlib. {duel.path} holds no system/flcore.", hint=SOURCE
        )
    with tempfile.TemporaryDirectory() as place:
        here = Path(place) / "system"  # PFLlib reads ../dataset and writes ../results
        here.mkdir()
        _write_clients(task, Path(place) / "dataset" / "Bench")
        np.savez(here / "start.npz", *(leaf.cpu().numpy() for leaf in task.network.initial.values()))
        script = Path(__file__).with_name("peer_pfllib.py")
        rate = task.training.lr
        words = [script, source, duel.model, task.clients, duel.batch, rate, device]
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            peer = Peer(process)
            peer.ask()
            yield peer
        finally:
            with suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=60)  # no more requests: it ends
            process.kill()


def _write_clients(task: Task, folder: Path) -> None:
    """Write each client's samples as PFLlib's own scripts do."""
    for name in ("train", "test"):
        (folder / name).mkdir(parents=True)
        split = task.splits[name]
        for client, (start, stop) in enumerate(itertools.pairwise(split.offsets)):
            rows = split.order[start:stop]
            data = {"x": task.x[rows].numpy(), "y": task.y[rows].numpy()}
            np.savez_compressed(folder / name / f"{client}.npz", data=data)  # type: ignore[arg-type]


def duels(peers: list[str]) -> list[Duel]:
    """Return what is measured beside each peer, from words such as `pfllib=PATH`."""
    found = []
    for words in peers:
        name, equals, path = words.partition("=")
        if name not in PEERS:
            raise unknown("peer", name, PEERS)
        if not equals or not path:
            raise RunError(f"A peer must be a name and a folder, NAME=PATH. Got {words!r}.", hint=SOURCE)
        sets = ("mnist", "fashion-mnist")
        found += [Duel(data, model, Path(path), target) for data in sets for model, target in TARGETS.items()]
    return found
