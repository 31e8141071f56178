"""The server's work with data: it answers with models, and trains on samples as one client would.

Methods find it in `replies.workbench`. It never holds clients' data: only the task's public samples, and what the
method itself makes (distilled targets, generated samples).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from atoll.data.batches import Split
from atoll.kernel.batch import HIDDEN, Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator, number
from atoll.kernel.task import Facts
from atoll.runtime.engines.plan import Plan, arithmetic
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population

if TYPE_CHECKING:
    from atoll.runtime.engines.local import LocalEngine

ANSWERS_AT_ONCE = 512  # samples


@dataclass(frozen=True)
class Workbench:
    """The server's place to work in one round."""

    _population: Population
    _engine: LocalEngine
    round: int

    @property
    def task(self) -> Facts:
        """The public facts of the task."""
        return self._population.facts

    @property
    def network(self) -> Network:
        """The clients' network."""
        return self._population.task.network

    @property
    def public(self) -> tuple[Tensor, Tensor]:
        """Samples that everybody may see, with targets that a method need not look at."""
        return self._population.task.public_for("This method")

    def of_architecture(self, number: int) -> Workbench:
        """Return the same workbench with the network of one architecture."""
        return replace(self, _population=self._population.of_architecture(number))

    def with_network(self, network: Network) -> Workbench:
        """Return the same workbench for models of another network."""
        return replace(self, _population=self._population.with_network(network))

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's generator for a purpose, in this round."""
        return generator(self.task.seed, f"server, {purpose}", self.round)

    @torch.no_grad()
    def answers(self, models: Params | Stack, x: Tensor, *, features: bool = False) -> Tensor:
        """Return the answers of a model to samples, [n, ...], or of each of several, [model, n, ...].

        With `features`, return the inputs of the head instead, in fp32, because methods solve equations with them.
        """
        network, precision = self.network, "fp32" if features else self._engine.precision
        variant = replace(self.variant, features=features, precision=precision)
        network.module(variant)  # this thread's copy: inside `vmap` it cannot be made
        names, pieces = tuple(models), torch.split(x, ANSWERS_AT_ONCE)

        def one(leaves: tuple[Tensor, ...], some: Tensor) -> Tensor:
            w = Params(dict(zip(names, leaves, strict=True)), models.layout)
            return Batch(some, HIDDEN, None, None, network, variant).outputs(w)

        with arithmetic(precision):
            if isinstance(models, Params):
                return torch.cat([one(tuple(models.values()), some) for some in pieces])
            if self._engine.best_alone(self._population.task):
                alone = [models.client(k) for k in range(models.clients)]
                return torch.stack([self.answers(model, x, features=features) for model in alone])
            every = vmap(one, in_dims=(0, None))
            return torch.cat([every(tuple(models.values()), some) for some in pieces], dim=1)

    @property
    def variant(self) -> Variant:
        """The way a network runs here."""
        return Variant(train=False, precision=self._engine.precision, channels_last=self._engine.channels_last)

    def batch(self, x: Tensor) -> Batch:
        """Return samples without targets as a batch, for the rule by which a predictor answers."""
        return Batch(x, HIDDEN, None, None, self.network, self.variant)

    def score(self, model: Params, x: Tensor, y: Tensor) -> float:
        """Return how good a model is on samples of the server; more is better."""
        metric = self.network.score
        return float(metric(self.answers(model, x), y).cpu().double().mean()) * (1 if metric.higher_is_better else -1)

    def cohort(
        self,
        x: Tensor,
        y: Tensor,
        *,
        network: Network | None = None,
        batch_size: int | None = None,
        first: int | None = None,
        augmented: bool = True,
    ) -> Cohort:
        """Return a cohort of one that holds these samples, for `sgd` and `scan`; it may have a `network` of its own.

        With `first`, it reads so many of the samples only: programs are made for one size, and a set that grows is
        best held in tensors as large as it will be. Samples are augmented as the clients' are, unless `augmented`
        says otherwise or their shape is another.
        """
        task = self._population.task
        size = len(x) if first is None else first
        everything = Split(torch.arange(size, device=x.device), np.array([0, size]))
        nothing = Split(everything.order[:0], np.array([0, 0]))
        mine = replace(
            task, x=x, y=y, splits={"train": everything, "val": nothing, "test": nothing},
            network=network or task.network, classes=task.classes if network is None else None,
            names=("server",), groups=None, networks=(), architecture=None, devices=None,
            augment=task.augment if augmented and x.shape[1:] == task.x.shape[1:] else None,
            training=task.training if batch_size is None else replace(task.training, batch_size=batch_size),
        )  # fmt: skip
        # A seed of its own: the first client is number 0 as well, and must not share its draws with the server.
        population = Population(mine, RamMemory(1), number(self.task.seed, "server"))
        # Traced at least, and on a GPU captured. Plain, because it is always alone: there are no bits of a cohort to
        # agree with, and programs without `vmap` are made faster.
        engine = self._engine
        plan = Plan(
            "loop", mode="compiled" if engine.compiles else "traced", graph=True, own_data=True,
            channels_last=engine.channels_last, plain=True, precision=engine.precision,
        )  # fmt: skip
        scanner = Scanner(population, plan, engine.programs, trainings=self._population.trainings)
        return Cohort(population.facts, np.array([0]), self.round, scanner)
