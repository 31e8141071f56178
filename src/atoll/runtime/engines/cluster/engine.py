"""The engine of a cluster: it divides jobs among workers, who hold shards of the clients.

The driver, which runs the round loop, keeps everything that lasts: the server's state, and the memory of all clients.
Workers hold copies of their clients' samples and memory, and nothing that could not be given to another worker. So a
worker that dies costs the time to do its part again, and changes no number.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.kernel.errors import EngineError
from atoll.kernel.job import Done, Job, Lost
from atoll.kernel.params import Tree, rows_of
from atoll.kernel.task import Facts
from atoll.runtime.engines.cluster.messages import (
    Failure,
    Found,
    Lot,
    Message,
    Missing,
    Order,
    Outcome,
    Packed,
    pack,
    result_of,
)
from atoll.runtime.engines.cluster.shards import cut_shards, cut_task
from atoll.runtime.engines.cluster.worker import Cargo, Epochs, Errand
from atoll.runtime.engines.local import LocalEngine, require_survivors
from atoll.runtime.engines.parts import Part, parts_of, sort_by_size
from atoll.runtime.engines.trainings import Trainings
from atoll.runtime.memory import DiskMemory, RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench

log = logging.getLogger("atoll.engine")

Clients = NDArray[np.int64]
T = TypeVar("T")
TRIES = 2  # of the work of a shard in one job: what kills two workers would kill a third


class WorkerLost(Exception):
    """A worker is gone, with all that it held."""


class Crew(Protocol):
    """The workers of a cluster, and how messages reach them. A worker is named by a number that is used once."""

    @property
    def workers(self) -> Sequence[int]:
        """The workers that are there."""
        ...

    def share(self, value: Any) -> Any:
        """Put a value where all workers can read it; return what stands for it in the other calls."""
        ...

    def hold(self, worker: int, key: Hashable, cargo: Any, kept: Any, *more: Any) -> Any:
        """Have a worker hold a shard; return what `settle` waits for."""
        ...

    def settle(self, worker: int, pending: Any) -> None:
        """Wait until a worker holds a shard; raise WorkerLost if it cannot."""
        ...

    def run(self, worker: int, key: Hashable, order: Order, broadcast: Any) -> Iterator[Message | None]:
        """Begin an order; yield its messages, and None whenever there is none for a while. May raise WorkerLost."""
        ...

    def do(self, worker: int, errand: Errand[Any], item: Any) -> Iterator[Any]:
        """Send a worker on an errand; yield what it yields, and None whenever there is nothing for a while."""
        ...

    def abandon(self, worker: int, order: int) -> None:
        """Tell a worker that nobody waits for an order any more."""
        ...

    def follow(self, worker: int, *, stop: bool) -> list[Epochs]:
        """Ask a worker how far its long training is; with `stop`, end it after its epoch."""
        ...

    def plans(self, worker: int, key: Hashable, method: Hashable) -> list[Tree]:
        """Ask a worker how a method's jobs run there."""
        ...

    def replace(self, worker: int) -> int:
        """Return the worker that takes over from one that is lost: a new one, or one of the others."""
        ...

    def forget(self) -> None:
        """Have all workers let go of what they hold."""
        ...


@dataclass(eq=False)
class Shard:
    """Some clients of a population, and who holds them."""

    key: Hashable
    clients: Clients
    cargo: Any  # as the crew shares it
    worker: int
    held_by: int | None = None  # the worker that really holds it


@dataclass(eq=False)
class Division:
    """A population and its shards; it holds the population, so no other one is taken for it."""

    population: Population
    shards: list[Shard]
    of_client: NDArray[np.int64]  # the number of each client's shard


@dataclass(eq=False)
class Stream:
    """The messages of a shard's order, which is given again to another worker if the first one dies."""

    shard: Shard
    order: Order
    messages: Iterator[Message | None]
    numbers: list[int]  # of the parts that the lots are of
    tries: int = 1
    done: Clients = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class ClusterEngine:
    """Runs jobs on the workers of a crew; the server's own work stays here, on the `local` engine."""

    def __init__(self, crew: Crew, local: LocalEngine) -> None:
        self.crew, self.local = crew, local
        self._divisions: dict[Hashable, Division] = {}
        self._numbers = itertools.count()
        self._plans: tuple[list[Tree], Hashable] = ([], None)

    # -- what is said of it ------------------------------------------------------------------------------------------
    @property
    def options(self) -> Mapping[str, Any]:
        """What was asked for, as it is written into a run's configuration."""
        return self.local.options

    @property
    def device(self) -> torch.device:
        """Where the server's tensors live."""
        return self.local.device

    @property
    def precision(self) -> str:
        """The precision of all arithmetic."""
        return self.local.precision

    @property
    def timeout(self) -> float | None:
        """After how many seconds a reply counts as lost."""
        return self.local.timeout

    @property
    def secret(self) -> bytes | None:
        """What noise is drawn from: nothing but the seed."""
        return None

    @property
    def is_dear(self) -> bool:
        """Whether every round is worth a checkpoint: it can be played again."""
        return False

    def clock(self) -> float:
        """Return seconds, to time a round."""
        return time.perf_counter()

    def place(self, task: Task) -> Task:
        """Move the tensors of the task to where the server computes; a new run begins, and workers hold nothing yet."""
        if self._divisions:
            self.crew.forget()
            self._divisions.clear()
        self._plans = ([], None)
        return self.local.place(task)

    def bench(self, population: Population, round: int) -> Workbench:
        """Return the server's place to work in a round: here."""
        return self.local.bench(population, round)

    def export_plans(self, method: Hashable, facts: Facts) -> list[Tree]:
        """Return how a method's jobs run at the workers, one plan of each kind."""
        found: dict[Hashable, Tree] = {}
        for shard in (shard for division in self._divisions.values() for shard in division.shards):
            if shard.held_by is not None:
                try:
                    for plan in self.crew.plans(shard.held_by, shard.key, method):
                        found.setdefault((plan["phase"], plan["architecture"], plan["clients"]), plan)
                except WorkerLost:  # the next job will find out
                    continue
        return [*found.values()]

    def import_plans(self, plans: list[Tree], method: Hashable, facts: Facts) -> None:
        """Have workers go on as `export_plans` says."""
        self._plans = plans, method

    # -- jobs --------------------------------------------------------------------------------------------------------
    def run(self, job: Job, population: Population) -> Iterator[Done[Any] | Lost]:
        """Do a job; yield the outcomes of all clients in the order of `LocalEngine.run`."""
        yield from require_survivors(self._outcomes(job, population), job)

    def _outcomes(self, job: Job, population: Population) -> Iterator[Done[Any] | Lost | Exception]:
        division = self._divide(population)
        parts = [replace(part, clients=sort_by_size(part)) for part in parts_of(job, population)]
        sent = [job.assign(part.clients).unicast for part in parts]
        broadcast = self.crew.share(pack(job.broadcast))
        trainings = population.trainings
        orders = self._write_orders(job, division, parts, sent, trainings)
        self._have_held([division.shards[number] for number in orders])
        streams = {
            number: Stream(shard := division.shards[number], order, self._begin(shard, order, broadcast), numbers)
            for number, (order, numbers) in orders.items()
        }
        try:
            for number, part in enumerate(parts):
                for stream in (stream for stream in streams.values() if number in stream.numbers):
                    yield from self._read(stream, number, part, sent[number], broadcast, trainings)
            for stream in streams.values():  # what comes after the last outcome
                for message in stream.messages:
                    if isinstance(message, Found) and trainings is not None:
                        trainings.found += message.seconds
        finally:
            for stream in streams.values():
                self.crew.abandon(stream.shard.worker, stream.order.number)

    def _write_orders(
        self, job: Job, division: Division, parts: Sequence[Part], sent: Sequence[Tree], trainings: Trainings | None
    ) -> dict[int, tuple[Order, list[int]]]:
        """Return the order of each shard that has clients in a job, with the numbers of the parts these belong to."""
        lots: dict[int, list[tuple[int, Lot]]] = {}
        for number, (part, unicast) in enumerate(zip(parts, sent, strict=True)):
            of_client = division.of_client[part.clients]
            for shard in np.unique(of_client).tolist():
                places = np.flatnonzero(of_client == shard)
                rows = pack(rows_of(unicast, torch.from_numpy(places)))
                usual = min(part.usual, len(division.shards[shard].clients))
                lots.setdefault(shard, []).append((number, Lot(part.clients[places], rows, usual)))
        folder = None if trainings is None or trainings.folder is None else Path(trainings.folder).resolve()
        until = None if trainings is None else trainings.until
        if until is not None and folder is None:
            raise EngineError(
                "On a cluster, a training that pauses for a curve must be kept in a folder. There is none.",
                hint="give the run a `folder`, or leave out `curve`.",
            )
        return {
            shard: (
                Order(
                    next(self._numbers), job.phase, job.method, job.round, job.calls, tuple(lot for _, lot in mine),
                    sums=job.sums and self.local.dtype != torch.float64, trained=folder,
                    until=until,
                ),
                [number for number, _ in mine],
            )
            for shard, mine in sorted(lots.items())
        }  # fmt: skip

    def _begin(self, shard: Shard, order: Order, broadcast: Any) -> Iterator[Message | None]:
        return self.crew.run(shard.worker, shard.key, order, broadcast)

    def _read(
        self, stream: Stream, number: int, part: Part, unicast: Tree, broadcast: Any, trainings: Trainings | None
    ) -> Iterator[Done[Any] | Lost | Exception]:
        """Yield the outcomes of a shard's clients of one part; if their worker dies, another one does the rest."""
        place = stream.numbers.index(number)
        clients = stream.order.lots[place].clients
        left = {*clients.tolist()}
        while left:
            try:
                message = next(stream.messages)
            except WorkerLost as death:
                gave_up = stream.tries >= TRIES
                self._move(stream.shard)
                if gave_up:
                    some = np.array([client for client in clients if client in left])
                    yield Lost(some, f"its worker died {TRIES} times: {death}")
                    stream.done, left = np.concatenate([stream.done, some]), set()
                self._begin_again(stream, broadcast, death)
                continue
            match message:
                case None:
                    self._follow(stream.shard, trainings)
                case Failure(error, final=True):
                    raise error
                case Failure(error):
                    assert isinstance(error, Exception)
                    yield error
                case Missing():
                    left -= {*message.clients.tolist()}
                    stream.done = np.concatenate([stream.done, message.clients])
                    yield Lost(message.clients.copy(), message.reason)
                case Outcome():
                    left -= {*message.clients.tolist()}
                    stream.done = np.concatenate([stream.done, message.clients])
                    yield self._done(message, part, unicast)

    def _done(self, outcome: Outcome, part: Part, unicast: Tree) -> Done[Any]:
        order, clients = np.argsort(part.clients), outcome.clients.copy()  # what arrives is for reading only
        rows = torch.from_numpy(order[np.searchsorted(part.clients, clients, sorter=order)])
        return Done(
            clients, result_of(outcome.result.unpack(self.device), outcome.is_update),
            part.population.memory, rows_of(unicast, rows), outcome.notes.unpack(self.device), outcome.gradients,
        )  # fmt: skip

    def _follow(self, shard: Shard, trainings: Trainings | None) -> None:
        """Ask about long training while it lasts, and have it end if it must."""
        if trainings is None:
            return
        try:
            for epochs in self.crew.follow(shard.worker, stop=trainings.stop.is_set()):
                if trainings.on_epoch:
                    trainings.on_epoch(*epochs)
        except WorkerLost:  # the stream says so, too
            pass

    # -- errands -----------------------------------------------------------------------------------------------------
    def spread(self, errand: Errand[T], items: Sequence[T], stop: threading.Event) -> Iterator[tuple[int, Any]]:
        """Send workers on an errand with each of some items; yield what it yields, with the item's number.

        A worker that is done takes the next item; an item whose worker dies is given to another one. What an errand
        raises is yielded, too, and sets `stop`; once that is set, errands are told to end.
        """
        waiting, events = deque(enumerate(items)), queue.Queue[tuple[int, Any] | None]()
        changing = threading.Lock()

        def work(worker: int) -> None:
            with contextlib.suppress(IndexError):
                while not stop.is_set():
                    number, item = waiting.popleft()
                    for attempt in range(1, TRIES + 1):
                        try:
                            for event in self.crew.do(worker, errand, item):
                                if event is not None:
                                    events.put((number, event))
                                elif stop.is_set():
                                    self.crew.follow(worker, stop=True)
                            break
                        except WorkerLost as error:
                            log.warning("a worker died (%s); what it did is done again by another one", error)
                            with changing:
                                worker = self.crew.replace(worker)
                            if attempt == TRIES:
                                reason = f"What is sent to a worker must not end it. {TRIES} workers died: {error}"
                                events.put((number, Failure(EngineError(reason), final=True)))
            events.put(None)

        workers = [*self.crew.workers][: len(items)]
        for worker in workers:
            threading.Thread(target=guard(work, events), args=(worker,), daemon=True).start()
        at_work = len(workers)
        while at_work:
            event = events.get()
            if event is None:
                at_work -= 1
            elif isinstance(event[1], Failure):
                if not isinstance(event[1].error, KeyboardInterrupt):
                    stop.set()
                yield event[0], event[1].error
            else:
                yield event

    # -- who holds what ----------------------------------------------------------------------------------------------
    def _divide(self, population: Population) -> Division:
        """Return the shards of a population; it is divided when it is first seen."""
        task, memory = population.task, population.memory
        key = id(task), id(memory), population.seed
        if key not in self._divisions:
            cut, digest, workers = cut_shards(task, len(self.crew.workers)), task.samples, self.crew.workers
            kind = "disk" if isinstance(memory, DiskMemory) else "ram"
            shards = []
            for number, clients in enumerate(cut):
                cargo = self.crew.share(Cargo(cut_task(task, clients, digest=digest), population.seed, kind))
                shards.append(Shard((*key, number), clients, cargo, workers[number]))
            of_client = np.empty(task.clients, dtype=np.int64)
            for number, clients in enumerate(cut):
                of_client[clients] = number
            self._divisions[key] = Division(population, shards, of_client)
        return self._divisions[key]

    def _have_held(self, shards: Sequence[Shard]) -> None:
        """Give workers the shards that they do not hold yet, all at once."""
        pending = {id(shard): self._give(shard) for shard in shards if shard.held_by != shard.worker}
        for shard in shards:
            if id(shard) in pending:
                try:
                    self.crew.settle(shard.worker, pending[id(shard)])
                    shard.held_by = shard.worker
                except WorkerLost as error:
                    log.warning("a worker died before it held its clients: %s", error)
                    self._move(shard)
                    self.crew.settle(shard.worker, self._give(shard))
                    shard.held_by = shard.worker

    def _give(self, shard: Shard) -> Any:
        """Send a shard to its worker, with what its clients have kept so far."""
        division = next(one for one in self._divisions.values() if shard in one.shards)
        memory = division.population.memory
        assert isinstance(memory, RamMemory | DiskMemory), "a driver holds the memory of all clients itself"
        kept: Packed = pack(memory.copy(shard.clients))
        return self.crew.hold(shard.worker, shard.key, shard.cargo, self.crew.share(kept), *self._plans)

    def _move(self, shard: Shard) -> None:
        """Find another worker for the shards of a worker that died."""
        before = shard.worker
        after = self.crew.replace(before)
        for one in (one for division in self._divisions.values() for one in division.shards):
            if one.worker == before:
                one.worker = after

    def _begin_again(self, stream: Stream, broadcast: Any, reason: Exception) -> None:
        """Give the rest of an order to the worker that now has the shard."""
        stream.tries += 1
        lots = tuple(lot.without(stream.done) for lot in stream.order.lots)
        left = sum(len(lot.clients) for lot in lots)
        log.warning(
            "round %d: a worker died (%s); the work of %d client(s) is done again by another one",
            stream.order.round, reason, left,
        )  # fmt: skip
        self._have_held([stream.shard])
        stream.order = replace(stream.order, number=next(self._numbers), lots=lots)
        stream.messages = self._begin(stream.shard, stream.order, broadcast)


def guard(work: Callable[[int], None], events: queue.Queue[tuple[int, Any] | None]) -> Callable[[int], None]:
    """Return the work of a thread such that nobody waits for it in vain: what it raises becomes an event."""

    def guarded(worker: int) -> None:
        try:
            work(worker)
        except BaseException as error:  # noqa: BLE001 - it is raised where events are read
            events.put((-1, Failure(error, final=True)))
            events.put(None)

    return guarded
