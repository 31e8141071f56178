"""Engines that run clients in one way each, as devices, which see what is theirs alone, or on workers of a cluster."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.kernel.cohort import Cohort
from atoll.kernel.job import Done, Lost
from atoll.kernel.params import Tree
from atoll.kernel.task import Facts
from atoll.runtime.engines.cluster.engine import ClusterEngine
from atoll.runtime.engines.cluster.inside import CrewInside
from atoll.runtime.engines.cluster.worker import Worker
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.engines.measuring import FORCED
from atoll.runtime.engines.parts import Part
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.memory import Memory
from atoll.runtime.population import Population
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.tasks import hold_task


class OwnMemory:
    """The memory of one client, or of none: it must not be asked for what others keep."""

    def __init__(self, memory: Memory, client: int | None) -> None:
        self.memory, self.client = memory, client

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Return what the client kept."""
        self._require_own(clients)
        return self.memory.recall(clients, default, before=before)

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Return whether the client kept something."""
        self._require_own(clients)
        return self.memory.holds(clients, before=before)

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Keep something for the client."""
        self._require_own(clients)
        self.memory.keep(clients, tree, round=round)

    def beside(self, name: str) -> OwnMemory:
        """Return the memory of this name, of the same client."""
        return OwnMemory(self.memory.beside(name), self.client)

    def save(self, *, round: int, changes: bool = False) -> Tree:
        """Refuse."""
        raise ConformanceError("What all clients keep must not be read. A client has `cohort.recall`.")

    def load(self, saved: Sequence[Tree], *, round: int) -> None:
        """Refuse."""
        raise ConformanceError("What all clients keep must not be written.")

    def prune(self, *, round: int) -> None:
        """Refuse."""
        raise ConformanceError("What all clients keep must not be written.")

    def holders(self, *, before: int) -> int | None:
        """Refuse."""
        raise ConformanceError("What all clients keep must not be read.")

    def _require_own(self, clients: NDArray[np.int64]) -> None:
        if clients.tolist() != [self.client]:
            who = "The server" if self.client is None else f"Client {self.client}"
            raise ConformanceError(f"{who} must not read what others keep. It asked for client(s) {clients.tolist()}.")


@dataclass(frozen=True)
class Seen(Population):
    """A population as one client sees it, or as the server does."""

    known: Facts = field(kw_only=True)

    @property
    def facts(self) -> Facts:
        """What everybody knows, whoever holds which samples."""
        return self.known


def hold_population(population: Population, client: int | None) -> Seen:
    """Return the population as one client sees it, or as the server does."""
    task, memory = hold_task(population.task, client), OwnMemory(population.memory, client)
    return Seen(task, memory, population.seed, known=population.facts)


def population_of(cohort: Cohort) -> Population:
    """Return the population that a cohort is part of; methods cannot reach it."""
    return cast("Scanner", cohort._host)._population


def with_task(cohort: Cohort, task: Task) -> Cohort:
    """Return a cohort whose clients have the samples of another task; what they know of it is as it was."""
    host = cast("Scanner", copy.copy(cohort._host))
    host._population = replace(host._population, task=task)
    host._held = {}
    return replace(cohort, _host=host)


def put_on_device(cohort: Cohort) -> Cohort:
    """Return a cohort of one client as its device sees it."""
    (client,) = cohort.clients.tolist()
    host = cast("Scanner", copy.copy(cohort._host))
    host._population = hold_population(host._population, client)
    host._held = {}
    host.memory = host._population.memory
    return replace(cohort, _host=host)


PROGRAMS = Programs()  # of all engines, because what a server traces is the same


class Strict(LocalEngine):
    """Lets no cohort fail: elsewhere its clients go again one by one, which hides what went wrong among many."""

    def _attempt(self, part: Part, plan: Plan, clients: NDArray[np.int64]) -> Done[Any] | Lost | Exception:
        outcome = super()._attempt(part, plan, clients)
        if isinstance(outcome, Exception) and len(clients) > 1:
            raise ConformanceError(
                f"Clients must be able to work together. {len(clients)} failed: {type(outcome).__name__}: {outcome}"
            ) from outcome
        return outcome


class Traced(Strict):
    """Traces every step, which the engine does by itself only where there is much work ahead."""

    def _calls(self, part: Part, plan: Plan) -> int:
        return FORCED


class Thrifty(Strict):
    """Traces a step where the run is long enough to win back what tracing costs."""

    def _calls(self, part: Part, plan: Plan) -> int:
        return part.job.calls


class Dear(Strict):
    """Has a checkpoint after every round, so a run that is stopped goes on where it was."""

    is_dear = True


class Devices(LocalEngine):
    """Runs every client as a device would."""

    def _attempt(self, part: Part, plan: Plan, clients: NDArray[np.int64]) -> Done[Any] | Lost | Exception:
        (client,) = clients.tolist()
        return super()._attempt(replace(part, population=hold_population(part.population, client)), plan, clients)


@functools.cache
def find_engine(strategy: str) -> LocalEngine:
    """Return the engine of a strategy; its plan is spelled out, so nothing is measured."""
    kind = {"traced": Traced, "thrifty": Thrifty, "device": Devices, "dear": Dear}.get(strategy, Strict)
    plans = {"traced": "chunk:2 traced", "thrifty": "whole traced", "device": "loop eager", "dear": "whole eager"}
    plan = plans.get(strategy, f"{strategy} eager")
    engine = kind(device="cpu", dtype=torch.float64, strategy=plan)
    engine.programs = PROGRAMS
    return engine


@functools.cache
def find_any_engine(strategy: str) -> LocalEngine | ClusterEngine:
    """Return the engine of a strategy, or of a cluster whose workers live in this process."""
    if strategy == "cluster":
        return ClusterEngine(CrewInside(3, make_worker), find_engine("whole"))
    return find_engine(strategy)


def make_worker() -> Worker:
    """Return a worker of a cluster that lives in this process."""
    worker = Worker({"device": "cpu", "strategy": "chunk:2 eager"}, torch.float64)
    worker.engine.programs = PROGRAMS
    return worker
