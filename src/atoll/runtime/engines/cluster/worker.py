"""A worker of a cluster: it holds shards of clients, with their samples and memory, and runs a local engine on them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernel.algorithm import Update
from atoll.kernel.errors import AtollError
from atoll.kernel.job import AssignedJob, Done, Finish, Lost
from atoll.kernel.params import Tree
from atoll.runtime.engines.cluster.messages import (
    Failure,
    Found,
    Lot,
    Message,
    Missing,
    Order,
    Outcome,
    Packed,
    add_up,
    pack,
    tree_of,
)
from atoll.runtime.engines.cluster.shards import ShardTask
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.engines.trainings import TRAINED, Trainings
from atoll.runtime.memory import DiskMemory, RamMemory
from atoll.runtime.population import Population, keep_at_clients, reduce_to_numbers

log = logging.getLogger("atoll.engine")

Clients = NDArray[np.int64]
T = TypeVar("T")
Errand = Callable[[LocalEngine, threading.Event, T], Iterator[Any]]  # a whole run, for example
Epochs = tuple[int, int, int]  # so many clients have done so many epochs of so many


@dataclass(frozen=True)
class Cargo:
    """What a worker gets to hold a shard: its task, the seed, and in which kind of memory its clients keep."""

    task: ShardTask
    seed: int
    memory: str  # ram, or disk: the worker's own


class Worker:
    """Holds shards by their keys, and does orders on them; it knows nothing of how messages travel."""

    def __init__(self, options: dict[str, Any], dtype: torch.dtype, cores: int | None = None) -> None:
        self.engine = LocalEngine(**options, dtype=dtype)
        if cores is not None:
            self.engine.threads = cores
        self._held: dict[Hashable, Population] = {}
        self._abandoned = -1  # the last order that nobody waits for any more
        self._stop = threading.Event()
        self._epochs: list[Epochs] = []

    @cached_property
    def _folder(self) -> Path:
        """A folder on this machine's own disk, which goes when the worker does."""
        folder = tempfile.mkdtemp(prefix="atoll-worker-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    # -- shards ----------------------------------------------------------------------------------------------------
    def hold(self, key: Hashable, cargo: Cargo, kept: Packed, plans: list[Tree], method: Hashable) -> None:
        """Hold a shard from now on; `kept` is what its clients have kept so far, `plans` how their work runs."""
        memory: RamMemory | DiskMemory
        if cargo.memory == "disk":
            memory = DiskMemory(self._folder / f"{len(self._held)}-{os.urandom(4).hex()}.sqlite")
        else:
            memory = RamMemory(cargo.task.clients)
        memory.put(kept.unpack(self.engine.device))
        population = Population(self.engine.place(cargo.task), memory, cargo.seed)
        if method is not None:
            self.engine.import_plans(plans, method, population.facts)
        self._held[key] = population

    def forget(self) -> None:
        """Hold nothing any more: another run begins."""
        self._held.clear()

    def plans(self, key: Hashable, method: Hashable) -> list[Tree]:
        """Return how a method's jobs run here; see `Engine.export_plans`."""
        return self.engine.export_plans(method, self._held[key].facts)

    # -- while an order is done --------------------------------------------------------------------------------------
    def abandon(self, order: int) -> None:
        """Do no more of an order, nor of those before it."""
        self._abandoned = max(self._abandoned, order)

    def follow(self, stop: bool) -> list[Epochs]:
        """Return the epochs of long training that were done since the last call; with `stop`, end it after this one."""
        if stop:
            self._stop.set()
        seen, self._epochs = self._epochs, []
        return seen

    # -- orders ------------------------------------------------------------------------------------------------------
    def run(self, key: Hashable, order: Order, broadcast: Packed) -> Iterator[Message]:
        """Do an order; yield what becomes of its clients, lot after lot."""
        self._stop.clear()
        population = self._held[key]
        trainings = self._trainings(order.trained, order.until)
        population.memory.prune(round=order.round)
        received = broadcast.unpack(self.engine.device)
        try:
            for number, lot in enumerate(order.lots):
                for outcome in self._run_lot(order, lot, received, replace(population, trainings=trainings)):
                    if order.number <= self._abandoned:
                        return
                    yield from self._tell(order, number, outcome)
        except (AtollError, KeyboardInterrupt) as error:
            yield Failure.of(error, final=True)
        if trainings is not None and trainings.found:
            yield Found(tuple(trainings.found))

    def _run_lot(
        self, order: Order, lot: Lot, received: Tree, population: Population
    ) -> Iterator[Done[Any] | Lost | Exception]:
        unicast, clients = (
            lot.unicast.unpack(self.engine.device),
            lot.clients.copy(),
        )  # what arrives is for reading only
        job = AssignedJob(
            order.phase, order.method, None, clients, order.round, calls=order.calls, usual=lot.usual,
            given=received, each=unicast,
        )  # fmt: skip
        return self.engine.outcomes(job, population)

    def _tell(self, order: Order, lot: int, outcome: Done[Any] | Lost | Exception) -> Iterator[Message]:
        if isinstance(outcome, Exception):
            yield Failure.of(outcome)
        elif isinstance(outcome, Lost):
            yield Missing(lot, outcome.clients, outcome.reason)
        else:
            finite = keep_what_counts(order, outcome)
            outcome = add_up(outcome) if order.sums and finite else outcome
            tree, is_update = tree_of(outcome.result)
            notes = pack(dict(outcome.notes))
            yield Outcome(lot, outcome.clients, pack(tree), is_update, notes, outcome.gradients)

    def do(self, errand: Errand[Any], item: Any) -> Iterator[Any]:
        """Do something else than an order with this worker's engine; yield what it yields."""
        self._stop.clear()
        try:
            yield from errand(self.engine, self._stop, item)
        except BaseException as error:  # noqa: BLE001 - whoever sent it decides what to make of it
            yield Failure.of(error, final=True)

    def _trainings(self, folder: Path | None, until: int | None) -> Trainings | None:
        """Return where long training is kept: in the run's folder if it can be seen from here, else in one of ours."""
        if folder is None:
            return None
        seen = folder if folder.parent.is_dir() else self._folder / TRAINED
        made = Trainings(seen, self._stop, lambda *epochs: self._epochs.append(epochs))
        made.until = until
        return made


def keep_what_counts(order: Order, done: Done[Any]) -> bool:
    """Keep for its clients what the run will keep for them: of those whose work is finite. Return whether all is."""
    last = isinstance(order.phase, Finish)
    if last and done.result is not None:
        done = replace(done, result=Update(keep=done.result), notes={})
    if not isinstance(done.result, Update):
        return False
    numbers = reduce_to_numbers(done)
    finite = numbers is None or bool(np.isfinite(numbers).all())
    if numbers is not None and not finite:
        done = done.only(torch.from_numpy(np.flatnonzero(np.isfinite(numbers).all(axis=0))))
    if len(done.clients):
        keep_at_clients(done, order.round - last)
    return finite
