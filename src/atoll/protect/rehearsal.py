"""What a method does with samples, found without any: its hooks are called on clients whose scans do nothing.

A piece that promises privacy of samples lets `sgd` and `release` read them; who reads them otherwise raises. So a
method is known to be covered, and how often it goes over samples in each hook, before a client has worked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from atoll.compose.hybrids import InClusters
from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import PrivacyError, UncoveredRead
from atoll.kernel.params import Tree
from atoll.kernel.wrapper import Wrapper, title_of, values_of
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.toolbox.client.private import suggest_promise

ROUNDS = 3  # some methods do nothing special before clients come back
MADE = MappingProxyType({
    "prepare": "what clients send before their first round",
    "local": "what clients send and keep",
    "finish": "what clients keep after the last round",
    "personalize": "what clients deploy",
    "welcome": "what new clients deploy",
})  # fmt: skip


def promises_samples(method: Algorithm) -> bool:
    """Return whether a method has a piece in it that promises privacy of samples."""
    return "+dpsgd" in title_of(method) and bool(values_of(method)["sample_clip"])


class IdleScanner(Scanner):
    """Hosts clients whose scans read nothing: what they carry stays as it is, and passes are counted."""

    def scan(self, cohort: Cohort, step: Any, carry: Tree, given: Tree, **how: Any) -> Tree:
        """Count the passes over training samples; return the carry."""
        if how["train"] and how["split"] == "train":
            self.tally.passes += how["epochs"]
        return carry


def rehearse(method: Algorithm, task: Task) -> Mapping[str, int]:
    """Return how often each hook goes over a client's samples, those of `local` in one round; raise if uncovered."""
    population = Population(task, RamMemory(task.clients), 0)
    passes: dict[str, int] = {}
    for part in (method, *_inside_clusters(method)):
        for number in range(len(population.facts.by_architecture)):
            for hook, count in _rehearse_one(part, population.of_architecture(number)).items():
                passes[hook] = max(count, passes.get(hook, 0))
    return passes


def _inside_clusters(method: Algorithm) -> Iterator[Algorithm]:
    """Yield the methods that begin once clusters are found."""
    while isinstance(method, Wrapper):
        if isinstance(method, InClusters):
            yield method.inner
        method = method.inner


def _rehearse_one(method: Algorithm, population: Population) -> dict[str, int]:
    facts, memory, client = population.facts, population.memory, np.arange(1)
    server = method.start(facts)
    passes: dict[str, int] = {}

    def call(hook: str, received: Tree, round: int) -> Any:
        host = IdleScanner(population, Plan(), Programs(), limit=1)
        cohort = Cohort(facts, client, round, host, method.unicast(server, client), guarded=True)
        try:
            made = getattr(method, hook)(received, cohort)
        except UncoveredRead as error:
            split = {"train": "training", "val": "validation"}.get(error.split, error.split)
            raise PrivacyError(
                f"Sample-level privacy covers what `sgd` and `release` make of samples. `{hook}` of {title_of(method)} "
                f"reads {split} samples as they are, so {MADE[hook]} would not be covered.",
                hint=suggest_promise(method),
            ) from error
        passes[hook] = host.passes
        return made

    sent = method.broadcast(server)
    if method.defines("prepare"):
        call("prepare", sent, -1)
    for round in range(ROUNDS):
        update = call("local", sent, round)
        for name, tree in update.beside.items():
            memory.beside(name).keep(client, tree, round=round)
        if update.keep is not None:
            memory.keep(client, update.keep, round=round)
    for hook in ("finish", "personalize", "welcome"):
        call(hook, server, ROUNDS)
    return passes
