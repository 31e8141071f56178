"""federate(): the only round loop. Read this file first.

A round: the server chooses a cohort and sends it its state; the engine runs the method's `local` on the cohort; what
the clients send passes the channel, which counts it; the server aggregates; from time to time all clients are
evaluated. What the clients keep stays in their memory. A client that fails, drops out or is late leaves the round
valid.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.compose import create
from atoll.compose.architectures import within_architectures
from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm, Arrival, Replies
from atoll.kernel.engine import Engine
from atoll.kernel.job import Job, Local
from atoll.kernel.params import Tree
from atoll.kernel.randomness import generator
from atoll.metrics.afterwards import evaluate_round
from atoll.metrics.evaluation import collect_observations
from atoll.records.configuration import Settings
from atoll.records.opening import open_run, rewind
from atoll.records.report import Report
from atoll.records.rounds import Round
from atoll.records.runs import Run, peak_memory
from atoll.runtime.channel import Channel, Stage
from atoll.runtime.engines import LocalEngine
from atoll.runtime.engines.trainings import TRAINED, OnEpoch, Trainings
from atoll.runtime.exchange import Exchange, Traffic
from atoll.runtime.files import alone_in
from atoll.runtime.guards import require_same_kind, require_sound, warn_of_limits, warn_of_overshooting
from atoll.runtime.interruptions import interruptions
from atoll.runtime.memory import open_memory
from atoll.runtime.participation import Late, Moment
from atoll.runtime.population import Population

log = logging.getLogger("atoll.federation")

Clients = NDArray[np.int64]
CHECKPOINT_SECONDS = 30.0


def federate(
    task: Task,
    algorithm: Algorithm | str,
    *,
    settings: Settings | None = None,
    engine: Engine | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    stages: Sequence[Stage] = (),
    faults: Callable[[int, Clients], NDArray[np.bool_]] | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_epoch: OnEpoch | None = None,
    stop: threading.Event | None = None,
    trained: Path | str | None = None,
    **more: Any,
) -> Report:
    """Run `algorithm` on `task` and report on every client.

    A method may be given by its name: `federate(task, "ditto:lam=0.1")`. Settings can be given as keywords:
    `federate(task, Ditto(lam=0.1), rounds=50, cohort=10)`. With a `folder` the run is written there and can be
    resumed after an interruption, bit for bit. `stages` change what clients send;
    `faults(round, clients)` says which clients are lost; `on_round` is called with each round's metrics,
    `on_epoch` in the long training of one-shot methods with how many clients have done how many of all epochs.
    Once `stop` is set the run ends after its round; by default Ctrl-C and SIGTERM set it. The clients of a one-shot
    method train long: their progress is kept in the folder `trained`, by default in the run's, where other runs
    whose clients train the same way find it.
    """
    method = create(algorithm) if isinstance(algorithm, str) else algorithm
    settings = replace(settings or Settings(), **more)
    settings.check(task, method)
    opened = Session.open(
        task, within_architectures(method, task.public_facts()), settings, engine or LocalEngine(), folder, stages,
        resume=resume, faults=faults, on_round=on_round, on_epoch=on_epoch, stop=stop, trained=trained,
    )  # fmt: skip
    with opened as session:
        for round in session.rounds():
            cohort = session.choose(round)
            replies = session.exchange(round, cohort)  # broadcast, local work, channel, ledger
            if replies is not None:
                session.server = session.method.aggregate(session.server, replies)
            session.close(round)  # check, evaluate, record, save a checkpoint
    return session.report()


@dataclass
class Session:
    """A federation under way: who takes part, by which method, where, and how far it is."""

    task: Task
    method: Algorithm
    settings: Settings
    engine: Engine
    population: Population
    channel: Channel
    exchanges: Exchange
    run: Run | None
    held: ExitStack  # the lock of the folder, its log, the handlers of signals
    stop: threading.Event
    trainings: Trainings | None
    faults: Callable[[int, Clients], NDArray[np.bool_]] | None
    on_round: Callable[[Round], None] | None
    server: Tree
    late: Late
    met: NDArray[np.bool_]  # which clients have done the exchanges before their first round
    first: int = 0
    outcomes: NDArray[np.float64] | None = None  # the score of every test sample after the last round
    history: list[Round] = field(default_factory=list)
    saved_at: float = field(default_factory=time.monotonic)

    @classmethod
    def open(
        cls,
        task: Task,
        method: Algorithm,
        settings: Settings,
        engine: Engine,
        folder: Path | str | None,
        stages: Sequence[Stage],
        *,
        resume: bool,
        on_epoch: OnEpoch | None,
        stop: threading.Event | None,
        trained: Path | str | None,
        **hooks: Any,  # faults and on_round
    ) -> Session:
        """Begin a federation, or continue one from its newest whole checkpoint."""
        warn_of_limits(method)
        warn_of_overshooting(method, task.training.lr)
        with ExitStack() as held:
            if folder is not None:
                held.enter_context(alone_in(Path(folder)))
            run, resumed = open_run(task, method, settings, engine, folder, resume=resume)
            here = engine.place(task)
            memory = open_memory(settings.memory, task.clients, run.folder if run else None)
            if run:
                held.enter_context(run.logging())
            stop = held.enter_context(interruptions(enabled=run is not None)) if stop is None else stop
            kept_in = Path(trained) if trained else run.folder / TRAINED if run else None
            trainings = Trainings(kept_in, stop, on_epoch) if method.one_shot and kept_in else None
            population = Population(here, memory, settings.seed)
            channel = Channel(stages)
            exchanges = Exchange(method, engine, population, replace(population, trainings=trainings), channel)
            session = cls(
                task, method, settings, engine, population, channel, exchanges, run, held, stop, trainings, **hooks,
                server=method.start(population.facts), late=Late(settings.late, settings.delay, settings.seed),
                met=np.zeros(task.clients, dtype=bool),
            )  # fmt: skip
            if run and resumed:
                session._resume(run)
            if session.first == 0:
                alone = replace(population, trainings=trainings.for_server() if trainings else None)
                session.server = method.equip(session.server, engine.bench(alone, -1))
            session.held = held.pop_all()
        return session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.__exit__(kind, error, trace)

    def _resume(self, run: Run) -> None:
        loaded = run.load(self.population.task.layouts, self.engine.device)
        self.first = rewind(run, loaded, self.population.memory)
        self.channel.ledger.entries.extend(run.ledger())
        self.history, self.outcomes = run.metrics(), run.outcomes()
        if loaded is not None:
            state = loaded[1]
            require_same_kind(state["server"], self.server)
            self.server, self.met = state["server"], state["met"].cpu().numpy().copy()
            self.late.load(state.get("late", []))
            self.engine.import_plans(state["plans"], self.method, self.population.facts)

    # -- a round -----------------------------------------------------------------------------------------------------
    def rounds(self) -> Iterator[int]:
        """Yield the rounds that are left."""
        for round in range(self.first, self.settings.rounds):
            self.began, self.written = time.perf_counter(), len(self.channel.ledger.entries)
            yield round

    def choose(self, round: int) -> Clients:
        """Choose the cohort of a round; return those of it that do not drop out."""
        self.cohort = choose(self.settings, self.population.task.clients, round, self.late.clients)
        self.traffic = Traffic(asked=len(self.cohort))
        lost = generator(self.settings.seed, "drop", round).random(len(self.cohort)) < self.settings.drop
        if self.faults is not None:
            lost |= np.asarray(self.faults(round, self.cohort), dtype=bool)
        if lost.any():
            self.traffic.lost["dropped out"] += int(lost.sum())
        return self.cohort[~lost]

    def exchange(self, round: int, present: Clients) -> Replies | None:
        """Send the server's state and have the clients work; return their replies, or None if nobody replies."""
        self.present, met = present, self.met
        self.server, prepared = self.exchanges.prepare(self.server, present[~met[present]], round, self.traffic)
        met[prepared] = True
        job = Job(
            Local(), self.method, self.server, present, round, self.method.groups(self.server),
            calls=self.settings.rounds, usual=self.settings.cohort_size(len(met)),
        )  # fmt: skip
        self.arrivals = self.late.pass_on(self.exchanges.gather(job, self.traffic), round, len(met))
        first: Arrival | None = next(self.arrivals, None)
        if first is None:
            log.warning("round %d: no client replied; the server's state stays as it is", round)
            return None
        keep, bench = not self.method.sums_suffice, self.engine.bench(self.population, round)
        return Replies(itertools.chain([first], self.arrivals), keep=keep, workbench=bench)

    def close(self, round: int) -> None:
        """End a round: check the state, evaluate, record, save a checkpoint, call `on_round`, and stop if asked to."""
        for _ in self.arrivals:  # clients train even if the method reads no reply
            pass
        require_sound(self.server, round, self.population.task.name)
        traffic, settings, done = self.traffic, self.settings, round + 1
        if traffic.lost:
            log.info("round %d: lost %d of %d clients", round, traffic.lost.total(), traffic.asked)
        took = time.perf_counter() - self.began
        if done == settings.rounds:
            everybody = list_present(settings, len(self.met), round)
            reachable = np.setdiff1d(everybody, np.setdiff1d(self.cohort, self.present))
            self.exchanges.finish(self.server, reachable, done, traffic)
        found = self._describe(round)
        if settings.evaluates_after(done):
            found["evaluation"], self.outcomes = evaluate_round(
                self.engine, self.population, self.method, self.server, round=done, last=done == settings.rounds,
                calls=settings.rounds // settings.every + 1, everybody=settings.evaluation == "all", seed=settings.seed,
            )  # fmt: skip
        found["seconds"] = {"round": took, "evaluation": time.perf_counter() - self.began - took}
        if self.trainings and self.trainings.found:
            found["seconds"]["found"] = sum(self.trainings.found)
        line = Round.of_json({**found, "memory": peak_memory(self.engine.device)})
        self.history.append(line)
        stopping = self.stop.is_set() and done < settings.rounds  # a signal that comes later waits for the next round
        if self.run:
            self._record(self.run, line, done, stopping=stopping)
        if self.on_round:
            self.on_round(line)
        if stopping:
            how = f"; continue with `atoll resume {self.run.folder}`" if self.run else ""
            raise KeyboardInterrupt(f"stopped after round {done}{how}")

    def _describe(self, round: int) -> dict[str, Any]:
        """Return what happened in a round, as a line of metrics.jsonl."""
        traffic = self.traffic
        return {
            "round": round + 1,
            "asked": traffic.asked,
            "replied": traffic.replied,
            "lost": dict(traffic.lost),
            "loss": traffic.losses(),
            **({"observed": seen} if (seen := collect_observations(traffic.notes)) else {}),
            "gradients": traffic.gradients,
            "bytes": self.channel.ledger.bytes_in_round(round),
        }

    def _record(self, run: Run, line: Round, done: int, *, stopping: bool) -> None:
        """Write a round down; from time to time, also a checkpoint."""
        if self.outcomes is not None:
            run.save_outcomes(self.outcomes)
        run.record(line, self.channel.ledger.entries[self.written :])
        due = self.settings.evaluates_after(done) or time.monotonic() - self.saved_at > CHECKPOINT_SECONDS
        if due or stopping or done == self.settings.rounds:
            memory, facts = self.population.memory, self.population.facts
            state = {
                "server": self.server, "memory": memory.save(round=done), "late": self.late.save(),
                "plans": self.engine.export_plans(self.method, facts), "met": torch.from_numpy(self.met),
            }  # fmt: skip
            run.save(done, state, self.population.task.layouts, memory.holders(before=done))
            memory.prune(round=run.checkpoints()[0])
            self.saved_at = time.monotonic()

    def report(self) -> Report:
        """Return the evidence of the run."""
        return Report.of_run(
            self.task, self.method, self.settings, self.history, self.channel.ledger, self.server, self.population,
            self.engine, self.outcomes, self.run,
        )  # fmt: skip


def list_present(settings: Settings, clients: int, round: int) -> Clients:
    """Return the clients that are there in a round, as the schedule says."""
    return np.flatnonzero(settings.schedule(Moment(round, clients, settings.seed, settings.rounds))).astype(np.int64)


def choose(settings: Settings, clients: int, round: int, busy: Clients | None = None) -> Clients:
    """Draw the clients asked in a round, of those that are there and not busy with an older reply."""
    present = list_present(settings, clients, round)
    if busy is not None:
        present = np.setdiff1d(present, busy)
    size = settings.cohort_size(clients)
    if size >= len(present):
        return present
    drawn = generator(settings.seed, "cohort", round).choice(present, size, replace=False)
    return np.sort(drawn).astype(np.int64)
