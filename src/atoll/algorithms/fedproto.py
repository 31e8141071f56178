"""FedProto: clients exchange the mean features of each class, prototypes, and no parameters at all.

    min_{v_k}  F_k(v_k) + lam E_{x,y} [known(y) |z(x; v_k) - C_y|^2 / d],        C_y = sum_k n_ky c_ky / sum_k n_ky

z is what enters the head, d its size, c_ky the mean of z over client k's n_ky samples of class y. A client answers with
the class of the nearest prototype among those of its own classes. With ``lam = 0`` each client trains alone.

Reference: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. "FedProto: Federated Prototype Learning across Heterogeneous
Clients." AAAI 2022, Algorithm 1. https://arxiv.org/abs/2105.00243
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import (
    Algorithm,
    Deployed,
    Epochs,
    Limits,
    NonNegative,
    Predictor,
    Replies,
    Update,
    Weighting,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import class_sums, feature_size, features_and_outputs, squared_distances
from atoll.toolbox.client.labels import label_counts

FAR = 20.0  # how much lower than all others the logit of a class is that cannot be the answer


@record
class State:
    """What the server has, and clients receive."""

    prototypes: Params  # mean C_y, and 1 in `known` for classes that have one


@record
class Goal:
    """What features are drawn to, and how strongly."""

    prototypes: Params
    lam: float


@dataclass(frozen=True, kw_only=True)
class FedProto(Algorithm):
    """A model per client, whose features are drawn to prototypes that all clients make together."""

    lam: NonNegative = 1.0  # λ: pull of features towards the prototypes of their classes
    answer: Literal["own", "all", "head"] = "own"  # nearest prototype of own classes, or of all; or the model's head
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # prototypes count by their samples, or the same for all clients that have some

    sends: ClassVar[dict[str, str]] = {"prototypes": "statistic"}
    limits: ClassVar[Limits] = {"local": {"lam": 0.0, "answer": "head"}}
    cites: ClassVar[str] = "tan2022fedproto"

    @property
    def deploys_a_model(self) -> bool:
        """Prototypes stand beside it, if they answer."""
        return self.answer == "head"

    def start(self, task: Facts) -> State:
        """Begin without a prototype for any class."""
        size, like = feature_size(self, task), next(iter(task.network.initial.floating.values()))
        assert task.classes is not None
        zeros = like.new_zeros(task.classes, size)
        return State(Params.of(mean=zeros, known=zeros[:, 0]))

    def local(self, server: State, cohort: Cohort) -> Update:
        """Train the own model on, and send the prototypes that it makes."""
        v = self._train(server, cohort.recall(default=cohort.initial), cohort)
        own = class_sums(cohort, v, server.prototypes["mean"].shape[1])
        if self.weighting == "uniform":
            count = own["count"]
            own = Stack.of(sum=own["sum"] / count.clamp(min=1)[..., None], count=(count > 0).to(count.dtype))
        return Update(send={"prototypes": own}, keep=v)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Return the mean over the samples of each class; a class that nobody had this time keeps its prototype."""
        before, sent = server.prototypes, replies.mean("prototypes")
        here = sent["count"] > 0
        mean = sent["sum"] / torch.where(here, sent["count"], 1)[:, None]
        known = torch.maximum(before["known"], here.to(mean.dtype))
        return State(Params.of(mean=torch.where(here[:, None], mean, before["mean"]), known=known))

    def personalize(self, server: State, cohort: Cohort) -> Deployed:
        """Return the client's own model with the newest prototypes; one that never took part has the initial model."""
        return self._predictor(server, cohort.recall(default=cohort.initial), cohort)

    def welcome(self, server: State, cohort: Cohort) -> Deployed:
        """Train a new client's model to the prototypes first, as if in one round."""
        return self._predictor(server, self._train(server, cohort.stacked(cohort.initial), cohort), cohort)

    def _train(self, server: State, v: Stack, cohort: Cohort) -> Stack:
        goal = Goal(server.prototypes, self.lam)
        return sgd(cohort, start=v, epochs=self.epochs, gradient=aligned_gradient, given=goal)

    def _predictor(self, server: State, v: Stack, cohort: Cohort) -> Deployed:
        if self.answer == "head":
            return v
        prototypes = cohort.stacked(server.prototypes)
        possible = prototypes["known"]
        if self.answer == "own":
            possible = possible * (label_counts(cohort).value > 0)
        return Predictor(v, Stack.of(mean=prototypes["mean"], possible=possible), nearest)


def aligned_gradient(v: Params, batch: Batch, goal: Goal) -> Found:
    """Return the gradient of the loss plus the distance of features to their classes' prototypes, if these exist."""
    wanted, known = goal.prototypes["mean"][batch.y], goal.prototypes["known"][batch.y]

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        features, outputs, after = features_and_outputs(batch, v | trained)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        apart = batch.mean(known * (features - wanted).square().mean(1))
        return loss + goal.lam * apart, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, v.trained)
    return g, v | buffers, loss


def nearest(v: Params, prototypes: Params, batch: Batch) -> Tensor:
    """Return minus the mean squared distance to each prototype; the head's answer where there are none."""
    features, outputs, _ = features_and_outputs(batch, v)
    closeness = -squared_distances(features, prototypes["mean"]) / features.shape[1]
    possible = prototypes["possible"] > 0
    closeness = torch.where(possible, closeness, closeness.amin(1, keepdim=True) - FAR)
    return torch.where(possible.any(), closeness, outputs)
