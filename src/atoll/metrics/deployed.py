"""What is asked of deployed models after a run: what their average is worth, which parts differ, how sharp they are.

    average      the score of v = (1/K) sum_k v_k on the test samples of all clients
    parts        ||v_k - v|| / ||v||, leaf by leaf: 0 where all clients share a leaf
    sharpness    F_k(v_k + rho g / ||g||) - F_k(v_k),     g = grad F_k(v_k), over client k's training samples

The last is how much the loss rises within a distance rho, to first order: what SAM makes small (Foret et al., ICLR
2021). At a minimum of F_k itself g is 0, and so is it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Engine
from atoll.kernel.errors import ModelError
from atoll.kernel.job import AtTheEnd, Done, Job, Phase
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import Predictor
from atoll.kernel.wrapper import title_of
from atoll.metrics.evaluation import ClientScores, evaluate
from atoll.metrics.measures import OWN
from atoll.runtime.population import Population
from atoll.toolbox.client.losses import losses_of

TINY = 1e-12  # a gradient shorter than this has no direction


def score_average(
    engine: Engine, population: Population, algorithm: Algorithm, server: Tree, *, round: int, metric: str = OWN
) -> ClientScores:
    """Score the average of all clients' models, each counted the same, on every client's test samples."""
    averaged = _average(engine, _job(Deploy(), population, algorithm, server, round), population)
    kinds = population.task.network.initial
    averaged = Params({name: leaf.to(kinds[name].dtype) for name, leaf in averaged.items()}, averaged.layout)
    return evaluate(
        engine, population, Algorithm(), averaged, round=round, model="shared", splits=("test",), metric=metric
    )["test"]


def measure_parts(
    engine: Engine, population: Population, algorithm: Algorithm, server: Tree, *, round: int
) -> tuple[list[str], NDArray[np.float64]]:
    """Return the leaves of a model, and how far each client's lie from the average of all clients', in its lengths."""
    job = _job(Deploy(), population, algorithm, server, round)
    average = _average(engine, job, population).floating
    found = np.full((population.task.clients, len(average)), np.nan)
    for outcome in engine.run(job, population):
        if isinstance(outcome, Done):
            for place, (name, mean) in enumerate(average.items()):
                apart = (outcome.result["model"][name].double() - mean).flatten(1).norm(dim=1)
                found[outcome.clients, place] = (apart / mean.norm().clamp(min=TINY)).cpu().numpy()
    return [*average], found


def _average(engine: Engine, job: Job, population: Population) -> Params:
    """Return the average of what clients deploy, in float64; of whole numbers, the largest."""
    if population.task.architecture is not None:
        raise ModelError("Models must have one architecture to be averaged. These have several.")
    total, largest, layout = dict[str, Tensor](), dict[str, Tensor](), None
    for outcome in engine.run(job, population):
        if isinstance(outcome, Done):
            models: Stack = outcome.result["model"]
            layout = models.layout
            for name, leaf in models.items():
                if leaf.is_floating_point():
                    part = leaf.double().sum(0)
                    total[name] = total[name] + part if name in total else part
                else:
                    part = leaf.amax(0)
                    largest[name] = torch.maximum(largest[name], part) if name in largest else part
    mean = {name: leaf / population.task.clients for name, leaf in total.items()}
    return Params({name: (mean | largest)[name] for name in population.task.network.initial}, layout)


def measure_sharpness(
    engine: Engine, population: Population, algorithm: Algorithm, server: Tree, *, round: int, rho: float
) -> NDArray[np.float64]:
    """Return how sharp each client's loss is at the model that it deploys."""
    found = np.full(population.task.clients, np.nan)
    for outcome in engine.run(_job(Sharpness(rho), population, algorithm, server, round), population):
        if isinstance(outcome, Done):
            found[outcome.clients] = outcome.result["rise"].value.double().cpu().numpy()
    return found


def _job(phase: Phase, population: Population, algorithm: Algorithm, server: Tree, round: int) -> Job:
    return Job(phase, algorithm, server, np.arange(population.task.clients), round, algorithm.groups(server))


@dataclass(frozen=True)
class Deploy(AtTheEnd):
    """Clients show the models that they deploy."""

    name: ClassVar[str] = "deploy"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> dict[str, Stack]:
        """Return each client's model."""
        return {"model": deployed_models(method, received, cohort)}


@dataclass(frozen=True)
class Sharpness(AtTheEnd):
    """Clients measure how much their loss rises around the models that they deploy."""

    rho: float

    name: ClassVar[str] = "sharpness"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> dict[str, Stack]:
        """Return the rise of each client's loss."""
        v = deployed_models(method, received, cohort)
        start = Params({name: torch.zeros_like(leaf) for name, leaf in cohort.initial.trained.items()})
        g = cohort.scan(_add_gradient, start, given=v, shuffle=False, train=False)
        g = Stack(g, v.layout)  # a sum: its length does not matter
        uphill = v.moved(g / (g.norm() + TINY), self.rho)
        low, high = losses_of([v, uphill], cohort).unbind(1)
        return {"rise": Stack.of(rise=high - low)}


def deployed_models(method: Algorithm, received: Tree, cohort: Cohort) -> Stack:
    """Return the model that each client deploys; raise for a method that deploys more than models."""
    deployed = method.personalize(received, cohort)
    if isinstance(deployed, Predictor):
        raise ModelError(
            f"What clients deploy must be models of the task's network. Those of {title_of(method)} deploy more."
        )
    return cohort.stacked(deployed)


def _add_gradient(total: Params, batch: Batch, v: Params) -> Params:
    g, _, _ = batch.gradient(v)
    return total.moved(g, batch.count)
