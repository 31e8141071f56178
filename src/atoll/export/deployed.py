"""What clients deploy, one after another: their numbers, the rule by which they answer, and the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Engine
from atoll.kernel.errors import ModelError
from atoll.kernel.job import AtTheEnd, Done, Job, Lost
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import Predictor, predictor_of
from atoll.metrics.newcomers import population_of_newcomer
from atoll.runtime.population import Population

Clients = NDArray[np.int64]
Found = tuple[Predictor, Network]


@dataclass(frozen=True)
class Deploy(AtTheEnd):
    """Clients make what they deploy after the last round."""

    name: ClassVar[str] = "deploy"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Found:
        """Return the predictors of a cohort, and their network."""
        cohort = replace(cohort, exact=method.solved)
        return predictor_of(method.personalize(received, cohort)), cohort.task.network


@dataclass(frozen=True)
class DeployNew(AtTheEnd):
    """A client that took no part makes what it deploys, with labels or without."""

    labelled: bool

    name: ClassVar[str] = "deploy new"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Found:
        """Return its predictor, and its network."""
        cohort = replace(cohort if self.labelled else cohort.without("labels"), exact=method.solved)
        return predictor_of(method.welcome(received, cohort)), cohort.task.network


@dataclass(frozen=True)
class DeployShared(AtTheEnd):
    """A client that took no part takes the shared model."""

    name: ClassVar[str] = "deploy shared"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Found | None:
        """Return its predictor, and its network; None of a method without a shared model."""
        model = method.shared(received)
        return None if model is None else (predictor_of(model), cohort.task.network)


def deploy(
    engine: Engine, population: Population, method: Algorithm, server: Tree, clients: Clients, *, round: int
) -> Iterator[tuple[int, Predictor, Network]]:
    """Yield the number, the predictor and the network of each of some clients, in no particular order."""
    job = Job(Deploy(), method, server, clients, round, method.groups(server))
    for outcome in engine.run(job, population):
        if isinstance(outcome, Lost):
            names = ", ".join(population.task.client_name(int(client)) for client in outcome.clients)
            raise ModelError(f"What a client deploys must be made before it is exported. {names}: {outcome.reason}.")
        predictor, network = outcome.result
        for place, client in enumerate(outcome.clients):
            yield int(client), _of_client(predictor, place), network


def deploy_newcomer(
    engine: Engine, method: Algorithm, server: Tree, task: Task, x: Any, y: Any = None, *, seed: int, round: int,
    shared: bool = False,
) -> Found | None:  # fmt: skip
    """Return the predictor and the network of a client that took no part, from its samples and any targets.

    With `shared`, those of the model that all clients share; None if there is none.
    """
    population = population_of_newcomer(task, x, y, seed=seed)
    phase = DeployShared() if shared else DeployNew(labelled=y is not None)
    for outcome in engine.run(Job(phase, method, server, np.arange(1), round), population):
        if isinstance(outcome, Done):
            if outcome.result is None:
                return None
            predictor, network = outcome.result
            return _of_client(predictor, 0), network
    raise ModelError("The new client's work failed; see the log.")


def _of_client(predictor: Predictor, place: int) -> Predictor:
    """Return the predictor of one client of a cohort."""

    def take(leaves: Params | Stack) -> Params:
        return leaves.client(place) if isinstance(leaves, Stack) else leaves

    return replace(predictor, model=take(predictor.model), beside=take(predictor.beside))


def is_untrained(predictor: Predictor, network: Network) -> bool:
    """Return whether a predictor is the initial model: nothing was ever learnt."""
    same = (leaf.equal(network.initial[name].to(leaf)) for name, leaf in predictor.model.trained.items())
    return len(predictor.beside) == 0 and all(same)
