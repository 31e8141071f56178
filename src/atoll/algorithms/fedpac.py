"""FedPAC: a shared body whose features are aligned by class, under heads that are mixed for each client.

    client:  h_k <- SGD on F_k(w, h);   w_k <- SGD on F_k(w, h_k) + lam E_{x,y} |z(x; w) - C_y|^2 / d
    server:  w and the centroids C_y by averaging;   head of client i: sum_j a_ij h_j,

             a_i = argmin_a  sum_j a_j^2 V_j + |m_i - sum_j a_j m_j|^2        (a_j >= 0, sum_j a_j = 1)

z is what enters the head, d its size. m_j holds client j's mean features of each class times the class's share, and V_j
the variance of such a mean over its n_j samples: a_i weighs what others add in bias against what they save in variance.

Reference: Xu, Tong, Huang. "Personalized Federated Learning with Feature Alignment and Classifier Collaboration."
ICLR 2023, Algorithm 1. https://arxiv.org/abs/2306.11867
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.algorithms.fedproto import Goal, aligned_gradient
from atoll.kernel.algorithm import Algorithm, Epochs, NonNegative, Positive, Replies, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, spread
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import class_sums, feature_size, membership
from atoll.toolbox.server.mixing import identity_mixing, mark_seen, mix_models, none_seen, rows_for
from atoll.toolbox.server.simplex import minimise

SMALLEST = 1e-3  # a head of less weight is left out


@record
class State:
    """The body, the centroids of classes, and everybody's head."""

    w: Params
    prototypes: Params
    heads: Stack  # each mixed for its client
    mixing: Tensor  # of whose heads it was mixed
    seen: Tensor  # who has sent a head


@record
class Sent:
    """What all clients receive."""

    w: Params
    prototypes: Params


@dataclass(frozen=True, kw_only=True)
class FedPAC(Algorithm):
    """Heads from those clients whose data are alike, on features that mean the same to all."""

    lam: NonNegative = 1.0  # λ: pull of features towards the centroids of their classes
    heads: Literal["mixed", "own"] = "mixed"  # whether a client's head is mixed with others'
    head_epochs: Epochs = 1  # E_h: local epochs per round on the head
    head_lr: Positive | None = None  # step size on the head in the first round; None: the task's
    epochs: Epochs = 5  # E: local epochs per round on the body, after those on the head
    weighting: Weighting = "samples"  # p_k of the body: by training samples, or the same for all

    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[dict[str, str]] = {
        "delta": "model", "head": "state", "moments": "statistic", "classes": "statistic",
    }  # fmt: skip
    cites: ClassVar[str] = "xu2023personalized"

    def start(self, task: Facts) -> State:
        """Return the body, everybody's head, and no centroids yet."""
        size, heads = feature_size(self, task), spread(task.network.initial.part("head").trained, task.clients)
        assert task.classes is not None
        zeros = next(iter(heads.values())).new_zeros(task.classes, size)
        centroids = Params.of(mean=zeros, known=zeros[:, 0])
        body = task.network.initial.without(heads)
        return State(body, centroids, heads, identity_mixing(heads), none_seen(heads))

    def broadcast(self, server: State) -> Sent:
        """Send the body and the centroids."""
        return Sent(server.w, server.prototypes)

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send every client its own mixture of heads; one that never replied gets the mean head of those who did."""
        rows = torch.from_numpy(ids).to(server.mixing.device)
        return server.heads.rows(rows).where(server.seen[rows], self._mean(server))

    def local(self, sent: Sent, cohort: Cohort) -> Update:
        """Describe the data by the received body; train the head, then the body under it; describe them again."""
        start, size = cohort.stacked(sent.w) | cohort.received, sent.prototypes["mean"].shape[1]
        moments = class_moments(cohort, start, sent.prototypes["mean"])
        w_k = self._tune(start, cohort)
        goal = Goal(sent.prototypes, self.lam)
        w_k = sgd(cohort, start=w_k, epochs=self.epochs, only="body", gradient=aligned_body_gradient, given=goal)
        body, head = w_k.without(cohort.received), w_k.only(cohort.received)
        weight = cohort.weights(self.weighting)
        # Sums over the weight by which the server takes their mean: divided by that of counts, it is a mean of samples.
        classes = class_sums(cohort, w_k, size) / weight
        send = {"delta": body - sent.w, "head": head, "moments": moments, "classes": classes}
        return Update(send=send, weight=weight)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average bodies and centroids, and mix the heads of those who replied."""
        order = np.argsort(replies.clients)  # so that their order does not matter to the last bit
        place, rows = (torch.from_numpy(some).to(server.mixing.device) for some in (order, replies.clients[order]))
        trained = replies.stack("head").rows(place)
        weights = self._weights(replies.stack("moments").rows(place)).to(server.mixing)
        heads = mix_models(weights, trained)
        new = {name: leaf.index_copy(0, rows, heads[name]) for name, leaf in server.heads.items()}
        matrix = weights.new_zeros(len(rows), len(server.mixing)).index_copy(1, rows, weights)
        return State(
            w=server.w + replies.mean("delta"),
            prototypes=centroids(server.prototypes, replies.mean("classes")),
            heads=Stack(new, heads.layout),
            mixing=server.mixing.index_copy(0, rows, matrix),
            seen=mark_seen(server.seen, replies.clients),
        )

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return no head but those that are mixed for these clients."""
        heads, only = rows_for(server.heads, ids, self.unicast(server, ids)), mark_seen(none_seen(server.heads), ids)
        return replace(server, heads=heads, mixing=torch.zeros_like(server.mixing), seen=only)

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the newest body under the client's own mixture; one that never replied has the mean head."""
        return cohort.stacked(server.w) | self.unicast(server, cohort.clients)

    def mixing(self, server: State) -> Tensor:
        """Return whose heads a client's own was mixed of, when it last took part."""
        return server.mixing

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Fit the mean head of a new client to the newest body."""
        return self._tune(cohort.stacked(server.w | self._mean(server)), cohort)

    def _mean(self, server: State) -> Params:
        """Return the mean head of those who replied; of all, while that is nobody: they are the initial one."""
        seen = server.seen if server.seen.any() else ~server.seen
        return Params({name: leaf[seen].mean(0) for name, leaf in server.heads.items()}, server.heads.layout)

    def _tune(self, start: Stack, cohort: Cohort) -> Stack:
        decay = cohort.training.lr_decay**cohort.round
        lr = None if self.head_lr is None else torch.full_like(cohort.lr, self.head_lr * decay)
        return sgd(cohort, start=start, epochs=self.head_epochs, only="head", lr=lr)

    def _weights(self, moments: Stack) -> Tensor:
        """Return rows a_i, over those who replied."""
        variance, m = moments["variance"].double(), moments["mean"].double().flatten(1)
        if self.heads == "own":
            return torch.eye(len(m), dtype=m.dtype, device=m.device)
        m = m - m.mean(0)  # only differences count; near the origin the steps of the solver are longest
        alike = m @ m.T
        weights = minimise((alike + torch.diag(variance)).cpu(), alike.cpu()).to(m.device)
        weights = torch.where(weights < SMALLEST, 0, weights)
        return weights / weights.sum(1, keepdim=True)


def aligned_body_gradient(w: Params, batch: Batch, goal: Goal) -> Found:
    """Return the gradient with which features are aligned, for the body alone."""
    g, after, loss = aligned_gradient(w, batch, goal)
    head = w.layout.head if w.layout else ()
    return g.without(head), w | after.without(head), loss


def class_moments(cohort: Cohort, w: Stack, like: Tensor) -> Stack:
    """Return m_k, mean features by class times its share, [classes, size]; and V_k, the variance of such a mean."""
    start = Params.of(sum=torch.zeros_like(like), square=torch.zeros_like(like[0, 0]))
    seen = cohort.scan(_add, start, given=w, shuffle=False, train=False, exact=True)
    mean, square = seen["sum"] / cohort.samples[:, None, None], seen["square"] / cohort.samples
    variance = (square - mean.square().flatten(1).sum(1)).clamp(min=0) / cohort.samples
    return Stack.of(mean=mean, variance=variance)


def _add(seen: Params, batch: Batch, w: Params) -> Params:
    features = batch.features(w)
    same = membership(batch, len(seen["sum"]))
    square = seen["square"] + batch.total(features.square().sum(1))
    return Params.of(sum=seen["sum"] + same.T @ features, square=square)


def centroids(before: Params, classes: Params) -> Params:
    """Return the mean over all samples of each class; a class that nobody had this time keeps its centroid."""
    here = classes["count"] > 0
    mean = classes["sum"] / torch.where(here, classes["count"], 1)[:, None]
    known = torch.maximum(before["known"], here.to(mean.dtype))
    return Params.of(mean=torch.where(here[:, None], mean, before["mean"]), known=known)
