"""Interpolation: every client deploys a mixture of a model v_k of its own and the shared model w.

    P_k = a_k v_k + (1 - a_k) w,        w by federated averaging;   in every round v_k is P_k, trained on

    a_k = d_k l_k(w) / (d_k l_k(w) + (1 - d_k) l_k(v_k)),       d_k = sum_c |p_k(c) - p(c)| / 2

l_k is the loss on the client's validation data, and d_k how far its classes are from everybody's: a client has much of
its own model if its data are unlike all others' and that model is better there. p_k(c) is class c's share of client k's
samples, p(c) the mean over replies so far; where samples have no classes d_k is 1/2. This is FedAMP, "adaptive model
personalization", as a survey has it; it leaves open how data and performance make a_k, and the formula is ours. The
published FedAMP is another method, `fedamp`.

With ``adapt = "grid"`` a_k is the best of 0, 0.1, ..., 1 on validation data, and with ``begin = "own"`` v_k is trained
alone. With ``share = 0`` this is FedAvg, with ``share = 1`` every client that ever takes part trains alone.

Reference: interpolation is one of three approaches in Mansour, Mohri, Ro, Suresh. "Three Approaches for Personalization
with Applications to Federated Learning." 2020, Section 5. https://arxiv.org/abs/2002.10619
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Replies, Share, Update, Weighting, WithEverybody
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.kernel.wrapper import fact
from atoll.toolbox.client import best_share, sgd
from atoll.toolbox.client.labels import label_counts
from atoll.toolbox.client.losses import losses_of


@record
class State:
    """The shared model, and what is known of everybody's classes."""

    w: Params
    classes: Tensor  # sums of shares of classes, over rounds; empty where samples have no classes


@dataclass(frozen=True, kw_only=True)
class Interp(Algorithm):
    """A mixture of the local and the shared model, as much of each as data and performance say."""

    share: Share | None = None  # a_k: share of the client's own model; None: what `adapt` finds
    adapt: Literal["data", "grid"] = "data"  # a_k from classes and validation losses, or the best of 11 on validation
    begin: Literal["mixture", "own"] = "mixture"  # where v_k trains on from: the mixture, or v_k itself, trained alone
    epochs: Epochs = 1  # E: local epochs per round, on each of the two models
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    reads_validation: ClassVar[bool] = True  # the share depends on losses there
    limits: ClassVar[Limits] = {"fedavg": {"share": 0.0}, "local": WithEverybody(share=1.0)}
    cites: ClassVar[str] = "mansour2020three"

    @property
    def tells_classes(self) -> bool:
        """Whether clients say how many samples of each class they have."""
        return self.share is None and self.adapt == "data"

    @fact
    def sends(self) -> Mapping[str, str]:
        """The change of the shared model, and shares of classes if they decide."""
        return {"delta": "model"} | ({"classes": "labels"} if self.tells_classes else {})

    # -- the server --------------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> State:
        """Begin with the initial model, and nothing known of classes."""
        size = task.classes if self.tells_classes and task.one_class_each else 0
        return State(task.network.initial, next(iter(task.network.initial.floating.values())).new_zeros(size or 0))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average the models, and the shares of classes."""
        classes = server.classes
        if len(classes):
            classes = classes + replies.mean("classes")["shares"]
        return State(server.w + replies.mean("delta"), classes)

    def shared(self, server: State) -> Params:
        """Return the shared model."""
        return server.w

    # -- the clients -------------------------------------------------------------------------------------------------
    def local(self, server: State, cohort: Cohort) -> Update:
        """Train the shared model, and the own one from the mixture."""
        w = server.w
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        v = cohort.recall(default=cohort.initial) if self.begin == "own" else self.personalize(server, cohort)
        v_k = sgd(cohort, start=v, epochs=self.epochs)
        send = {"delta": w_k - w}
        if len(server.classes):
            send["classes"] = class_shares(cohort)
        return Update(send=send, weight=cohort.weights(self.weighting), keep=v_k)

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the mixture; a client without validation samples uses w, as does one that never took part."""
        v = cohort.recall(default=server.w)
        return cohort.stacked(server.w).lerp(v, self.share if self.share is not None else self.find(server, v, cohort))

    def find(self, server: State, v: Stack, cohort: Cohort) -> Tensor:
        """Return a_k."""
        if self.adapt == "grid":
            return best_share(cohort, server.w, v, otherwise=0.0)
        of_w, of_v = losses_of([cohort.stacked(server.w), v], cohort, "val").clamp(min=0).unbind(1)
        d = torch.full_like(of_w, 0.5)
        if server.classes.any():
            everybody = server.classes / server.classes.sum()
            d = (class_shares(cohort).value - everybody).abs().sum(1) / 2
        own, both = d * of_w, d * of_w + (1 - d) * of_v
        return torch.where(both > 0, own / torch.where(both > 0, both, 1), 0)


def class_shares(cohort: Cohort) -> Stack:
    """Return which share of each client's training samples is of which class."""
    counts = label_counts(cohort).value.to(cohort.initial_dtype)
    return Stack.of(shares=counts / counts.sum(1, keepdim=True).clamp(min=1))
