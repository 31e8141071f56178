"""Heads on frozen features: clients train nothing and send statistics of their features; the server makes a head.

    phi(x) = z(x; w)   or, with a `width`,   relu(R z(x; w)),        R drawn once from the seed, which everybody has

z is what enters the head of the network: of the initial one (random, or trained before by somebody), which everybody
has as well, or of one that the server trained on public samples and sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Count, Epochs, Predictor
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import ModelError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size, membership, one_sample
from atoll.toolbox.client.sgd import sgd
from atoll.toolbox.server.triangles import triangle

Server = dict[str, Params]  # `model` and, with a `width`, what stands `beside` it once there is a head
Phi = dict[str, Params]  # what makes features: `w` and, with a `width`, `random`


@dataclass(frozen=True, kw_only=True)
class FrozenFeatures(Algorithm):
    """Base of one-shot methods that only make a linear head: the network's own, or one on random features."""

    features: Literal["initial", "public"] = "initial"  # of the initial network, or of one trained on public samples
    public_epochs: Epochs = 10  # epochs of the server on public samples, to train the latter
    width: Count | None = None  # so many random features of these; None: these themselves

    one_shot: ClassVar[bool] = True
    solved: ClassVar[bool] = True
    trains_by_sgd: ClassVar[bool] = False

    @property
    def deploys_a_model(self) -> bool:
        """With random features the head stands beside the network."""
        return self.width is None

    def start(self, task: Facts) -> Server:
        """The initial network; raises unless its head is a linear layer, if that is to be replaced."""
        size = feature_size(self, task)
        assert task.classes is not None
        if self.width is None:
            head_leaves(self, task.network.initial, (task.classes, size))
        return {"model": task.network.initial}

    def equip(self, server: Server, workbench: Workbench) -> Server:
        """Train the network on public samples, if these make the features."""
        if self.features == "initial":
            return server
        trained = sgd(workbench.cohort(*workbench.public), start=server["model"], epochs=self.public_epochs)
        return {"model": trained.client(0)}

    def broadcast(self, server: Server) -> Params | None:
        """What computes features; nothing if everybody has it."""
        return None if self.features == "initial" else server["model"].without_part("head")

    def phi(self, task: Facts, body: Params | None = None) -> Phi:
        """What makes features, from what was sent and what everybody has."""
        given = {"w": task.network.initial if body is None else body}
        if self.width is not None:
            size = one_sample(task).features(task.network.initial).shape[1]
            draw = generator(task.seed, "random features").normal(size=(size, self.width))
            given["random"] = Params.of(directions=torch.from_numpy(draw * math.sqrt(2 / size)).to(task.sample.device))
        return given

    def headed(self, server: Server, weight: Tensor, bias: Tensor, bench: Workbench) -> Server:
        """The server's state with a head, weight [class, feature] and bias [class]."""
        model = server["model"]
        if self.width is None:
            names = head_leaves(self, model, tuple(weight.shape))
            head = {name: leaf.to(model[name]) for name, leaf in zip(names, (weight, bias), strict=True)}
            return {"model": model | Params(head)}
        return {"model": model, "beside": self.phi(bench.task)["random"] | Params.of(weight=weight, bias=bias)}

    def shared(self, server: Server) -> Params | Predictor:
        """The network with its new head, or with one on random features beside it."""
        return Predictor(server["model"], server["beside"], answer) if "beside" in server else server["model"]


def head_leaves(method: object, w: Params, shape: tuple[int, ...]) -> tuple[str, str]:
    """The names of weight and bias of a linear head of this shape, [class, feature]; raises if the head is another."""
    head = w.part("head")
    weights = [name for name, leaf in head.items() if leaf.shape == shape]
    biases = [name for name, leaf in head.items() if leaf.shape == shape[:1]]
    if len(head) != 2 or not weights or not biases:
        raise ModelError(
            f"{type(method).__name__} must be given a network whose head is one linear layer with a bias, from "
            f"{shape[1]} features to {shape[0]} classes. Got {head}.",
            hint="with `width`, it makes a head of its own.",
        )
    return weights[0], biases[0]


def frozen(batch: Batch, phi: Phi) -> Tensor:
    """The features of a batch, in float64: sums of many squares are to be exact."""
    return expanded(batch.features(phi["w"]).double(), phi)


def expanded(z: Tensor, phi: Phi) -> Tensor:
    """Random features of z, if that is what is asked for."""
    return torch.relu(z @ phi["random"]["directions"]) if "random" in phi else z


def answer(model: Params, beside: Params, batch: Batch) -> Tensor:
    """What a head on random features answers."""
    features = frozen(batch, {"w": model, "random": beside})
    return (features @ beside["weight"].T + beside["bias"]).to(batch.network.dtype)


def moments(
    cohort: Cohort, phi: Any, features: Callable[[Batch, Any], Tensor] = frozen, size: int | None = None
) -> Stack:
    """Each client's samples by class, `count` [class] and `sum` of features [class, feature], and `square`.

    The latter is sum phi phi^T over all samples; only its upper triangle, row after row. `features(batch, phi)` are
    taken of what is the same for all clients, or, if their `size` is told, of what is each client's own.
    """
    task = cohort.task
    assert task.classes is not None, "the task has no classes"
    size = features(one_sample(task), phi).shape[1] if size is None else size

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(len(cohort), *shape, dtype=torch.float64, device=cohort.device)

    start = Stack.of(count=zeros(task.classes), sum=zeros(task.classes, size), square=zeros(size * (size + 1) // 2))
    sums: Stack = cohort.scan(partial(_add, features), start, given=phi, shuffle=False, train=False, exact=True)
    return sums


def _add(features: Callable[[Batch, Any], Tensor], seen: Params, batch: Batch, phi: Any) -> Params:
    z, same = features(batch, phi), membership(batch, len(seen["count"])).double()
    squares = (z * same.sum(1, keepdim=True)).T @ z  # padding is of no class
    return Params.of(
        count=seen["count"] + same.sum(0),
        sum=seen["sum"] + same.T @ z,
        square=seen["square"] + triangle(squares),
    )
