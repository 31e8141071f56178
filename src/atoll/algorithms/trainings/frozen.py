"""Frozen features: clients train nothing; what they send are statistics of features that are the same for all.

    phi(x) = z(x; w)   or, with a `width`,   relu(R z(x; w)),        R drawn once from the seed, which everybody has

z is what enters the head of the network: of the initial one (random, or trained before by somebody), which everybody
has as well, or of one that the server trained on public samples and sends. An answer makes a linear head: the network's
own, or one on random features.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Count, Epochs, Predictor
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.features import feature_size, one_sample
from atoll.toolbox.pairs import FROZEN, LocalTraining, Start
from atoll.toolbox.server.frozen import Phi, answer, head_leaves


@dataclass(frozen=True, kw_only=True)
class Frozen(LocalTraining):
    """No training: the features of one network for all."""

    features: Literal["initial", "public"] = "initial"  # of the initial network, or of one trained on public samples
    public_epochs: Epochs = 10  # epochs of the server on public samples, to train the latter
    width: Count | None = None  # the number of random functions of these features; None: the features themselves

    called: ClassVar[str] = "frozen"
    offers: ClassVar[frozenset[str]] = frozenset({FROZEN})
    trains_by_sgd: ClassVar[bool] = False

    @property
    def deploys_a_model(self) -> bool:
        """With random features the head stands beside the network."""
        return self.width is None

    def start(self, task: Facts) -> Start:
        """Return the initial network; raise unless its head is a linear layer, if that is to be replaced."""
        size = feature_size(self, task)
        assert task.classes is not None
        if self.width is None:
            head_leaves(self, task.network.initial, (task.classes, size))
        return Start(task.network.initial)

    def equip(self, start: Start, bench: Workbench) -> Start:
        """Train the network on public samples, if these make the features."""
        if self.features == "initial":
            return start
        trained = sgd(bench.cohort(*bench.public), start=start.model, epochs=self.public_epochs)
        return Start(trained.client(0))

    def broadcast(self, start: Start) -> Params | None:
        """Return what computes features; nothing if everybody has it."""
        return None if self.features == "initial" else start.model.without_part("head")

    def train(self, body: Params | None, cohort: Cohort) -> Phi:
        """Return what makes features."""
        return self.phi(cohort.task, body)

    def phi(self, task: Facts, body: Params | None = None) -> Phi:
        """Return what makes features, from what was sent and what everybody has."""
        w = task.network.initial if body is None else body
        if self.width is None:
            return Phi(w)
        size = one_sample(task).features(task.network.initial).shape[1]
        draw = generator(task.seed, "random features").normal(size=(size, self.width))
        return Phi(w, torch.from_numpy(draw * math.sqrt(2 / size)).to(task.sample.device))

    def make_head(self, start: Start, weight: Tensor, bias: Tensor, bench: Workbench) -> Params:
        """Return the network with a head, weight [class, feature] and bias [class]; or a head on random features."""
        directions = self.phi(bench.task).directions
        if directions is not None:
            return Params.of(directions=directions, weight=weight, bias=bias)
        names = head_leaves(self, start.model, tuple(weight.shape))
        head = {name: leaf.to(start.model[name]) for name, leaf in zip(names, (weight, bias), strict=True)}
        return start.model | Params(head)

    def deploy(self, start: Start, w: Params) -> Params | Predictor:
        """Return the network with its new head, or with one on random features beside it."""
        return w if self.width is None else Predictor(start.model, w, answer)
