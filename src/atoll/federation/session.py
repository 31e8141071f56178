"""A federation under way: opened or resumed, written down round by round, and reported on at the end."""

from __future__ import annotations

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

from atoll.data.task import Task
from atoll.federation.exchange import Exchange, Traffic
from atoll.federation.guards import require_same_kind, warn_of_limits, warn_of_overshooting
from atoll.federation.opening import open_run, prune, rewind, settle_memory
from atoll.federation.participation import Late
from atoll.federation.report import Report
from atoll.federation.selection import Experience, gather_losses
from atoll.federation.settings import Settings, count_messages
from atoll.kernel.algorithm import Algorithm, Arrival
from atoll.kernel.engine import Engine
from atoll.kernel.errors import CohortError
from atoll.kernel.params import Tree
from atoll.kernel.wrapper import title_of
from atoll.metrics.evaluation import Arrays
from atoll.protect.channel import Channel
from atoll.protect.ledger import Ledger
from atoll.protect.stages import Stage
from atoll.records.rounds import Round
from atoll.records.runs import Run
from atoll.records.writer import Writer
from atoll.runtime.engines.trainings import TRAINED, OnEpoch, Trainings
from atoll.runtime.files import alone_in
from atoll.runtime.interruptions import interruptions
from atoll.runtime.memory import open_memory
from atoll.runtime.population import MANY_CLIENTS, Population

Clients = NDArray[np.int64]
CHECKPOINT_SECONDS = 30.0


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
    writer: Writer
    held: ExitStack  # the lock of the folder, its log, the handlers of signals
    stop: threading.Event
    trainings: Trainings | None
    faults: Callable[[int, Clients], NDArray[np.bool_]] | None
    on_round: Callable[[Round], None] | None
    server: Tree
    late: Late
    met: NDArray[np.bool_]  # which clients have done the exchanges before their first round
    scored: Clients | None  # who is evaluated; None if nobody is
    known: Experience  # what is known of clients, for a selection that reads it
    on_reply: Callable[[int, Arrival], None] | None = None
    on_point: Callable[[dict[str, Any], Tree], None] | None = None  # of a curve by epoch
    first: int = 0  # the round to begin with
    outcomes: Arrays | None = None  # what was found after the last round, by name
    history: list[Round] = field(default_factory=list)
    saved_at: float = field(default_factory=time.monotonic)
    # of the round under way
    began: float = 0.0
    written: int = 0  # lines of the ledger that are in the folder
    cohort: Clients = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # who was asked
    present: Clients = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # and did not drop out
    traffic: Traffic = field(default_factory=lambda: Traffic(asked=0))
    arrivals: Iterator[Arrival] = field(default_factory=lambda: iter(()))
    points: list[dict[str, Any]] = field(default_factory=list)  # of a curve by epoch
    aside: float = 0.0  # seconds that its answers and scores took

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
        **hooks: Any,  # faults, on_round, on_reply and on_point
    ) -> Session:
        """Begin a federation, or continue one from its newest whole checkpoint."""
        warn_of_limits(method)
        warn_of_overshooting(method, task.training.lr)
        if settings.curve and (stages or engine.is_dear):
            raise CohortError(
                "`curve` has clients answer after every point of it: in a simulation they can, and without stages that "
                "count on one message."
            )
        with ExitStack() as held:
            if folder is not None:
                held.enter_context(alone_in(Path(folder)))
            settings = settle_memory(settings, task, engine, folder, resume=resume)
            run, resumed = open_run(task, method, settings, engine, folder, resume=resume)
            attackers = settings.draw_attackers(task.clients)
            here = engine.place(settings.poison(task, attackers))
            memory = open_memory(settings.memory, task.clients, run.folder if run else None)
            if run:
                held.enter_context(run.logging())
            stop = held.enter_context(interruptions(enabled=run is not None)) if stop is None else stop
            kept_in = Path(trained) if trained else run.folder / TRAINED if run else None
            long = method.one_shot and (kept_in or settings.curve)
            trainings = Trainings(kept_in, stop, on_epoch) if long else None
            population = Population(here, memory, settings.seed)
            protection = settings.protect(
                stages,
                task.clients,
                attackers,
                here.network.dtype,
                count_messages(settings.rounds, method),
                engine.secret,
            )
            channel = Channel(protection.stages, Ledger(listed=task.clients <= MANY_CLIENTS), settings.seed)
            trainers = replace(population, trainings=trainings)
            exchanges = Exchange(method, engine, population, trainers, channel, protection)
            session = cls(
                task, method, settings, engine, population, channel, exchanges, run, Writer(engine.device), held, stop,
                trainings, **hooks, server=method.start(population.facts), met=np.zeros(task.clients, dtype=bool),
                late=Late(settings.late, settings.delay, settings.seed),
                scored=settings.draw_scored(task.clients) if settings.scores_clients else None,
                known=Experience.none(task.clients),
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
        try:
            self.writer.close(error)
            if self.run and error is None:
                prune(self.run, self.population.memory)
        finally:
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
            if "known" in state:
                self.known = Experience.load(state["known"])
            if "rule" in state:
                self.exchanges.protection.load(state["rule"])
            self.engine.import_plans(state["plans"], self.method, self.population.facts)

    @property
    def adds_up(self) -> bool:
        """Whether nobody here looks at single replies: the server takes their mean, and nothing stands in between."""
        plain = self.method.sums_suffice and not self.method.defines("aggregate") and self.task.architecture is None
        guard = self.exchanges.protection
        untouched = not self.channel.stages and guard.rule is None and guard.attack is None and not self.settings.late
        return plain and untouched and self.on_reply is None

    @property
    def tires(self) -> bool:
        """Whether clients' energy ends, so how often they were asked counts."""
        return self.task.devices is not None and self.task.devices.tire

    @property
    def busy(self) -> NDArray[np.int64]:
        """Who cannot be asked: clients whose older reply is on its way, and those without energy."""
        if self.task.devices is None or not self.tires:
            return self.late.clients
        return np.union1d(self.late.clients, self.task.devices.exhausted(self.known.asked)).astype(np.int64)

    def watch(self, arrivals: Iterator[Arrival], round: int) -> Iterator[Arrival]:
        """Yield replies as they arrive, and show each to `on_reply`."""
        for arrival in arrivals:
            if self.on_reply is not None:
                self.on_reply(round, arrival)
            yield arrival

    def learn(self, round: int) -> None:
        """Remember who was asked and, for a selection that reads them, the losses that clients sent."""
        rule = self.settings.selection
        if self.settings.select_clients == "uniform":
            if self.tires:
                self.known.asked[self.cohort] += 1
            return
        clients, losses = gather_losses(self.traffic.notes) if rule.reads_losses else (self.cohort[:0], np.empty(0))
        if rule.reads_losses and self.traffic.replied and not len(clients):
            raise CohortError(
                f"`select_clients={self.settings.select_clients}` reads the losses of training, and clients of "
                f"{title_of(self.method)} report none.",
                hint="use `select_clients=turns`, or leave it out.",
            )
        self.channel.record_losses(clients, round)
        self.known.learn(round, self.cohort, clients, losses, rule.fade)

    def rounds(self) -> Iterator[int]:
        """Yield the rounds that are left."""
        for round in range(self.first, self.settings.rounds):
            self.began, self.written = self.engine.clock(), len(self.channel.ledger.entries)
            yield round

    def record(self, line: Round, *, stopping: bool) -> None:
        """Have a round written down beside the work; from time to time, also a checkpoint.

        After the first round, and whenever there is a checkpoint, the lines of the round are in the folder on return;
        in between they may be a moment behind, as the checkpoint itself may be.
        """
        self.history.append(line)
        if self.run is None:
            return
        run, done, outcomes, entries = self.run, line.round, self.outcomes, self.channel.ledger.entries[self.written :]
        self.writer.put(lambda: run.record(line, entries, outcomes))
        due = self.settings.evaluates_after(done) or time.monotonic() - self.saved_at > CHECKPOINT_SECONDS
        due = due or stopping or done == self.settings.rounds or self.engine.is_dear
        if due or done == self.first + 1:  # trackers begin with what is in the folder
            self.writer.wait()
        if due:
            self._save(run, done)

    def _save(self, run: Run, done: int) -> None:
        """Have a checkpoint written of everything as it is now; the one before must be on disk."""
        memory, layouts = self.population.memory, self.population.task.layouts
        prune(run, memory)
        changes, holders = memory.save(round=done, changes=True), memory.holders(before=done)
        rule = self.exchanges.protection.save()
        state = {
            "server": self.server, "late": self.late.save(), "met": torch.from_numpy(self.met.copy()),
            "plans": self.engine.export_plans(self.method, self.population.facts),
            **({"known": self.known.save()} if self.settings.select_clients != "uniform" or self.tires else {}),
            **({} if rule is None else {"rule": rule}),
        }  # fmt: skip
        self.writer.put(lambda: run.save(done, state, layouts, changes=changes, kept=holders))
        self.saved_at = time.monotonic()

    def report(self) -> Report:
        """Return the evidence of the run."""
        return Report.of_run(
            self.task, self.method, self.settings, self.history, self.channel.ledger, self.server, self.population,
            self.engine, self.outcomes, self.run,
        )  # fmt: skip
