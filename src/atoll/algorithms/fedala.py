"""FedALA: a client begins with as much of the shared model, weight by weight, as lowers its own loss.

    theta_k = v_k + (w - v_k) * W_k            (v_k: the client's model of last time; W_k in [0, 1], one per parameter)
    W_k    <- W_k - eta_w grad F_k(theta_k) * (w - v_k), cut to [0, 1]
    v_k    <- SGD on F_k from theta_k,         w by averaging the v_k

W_k is for the upper layers; of the lower ones a client takes w. It is learned on a random share of the training data
before each training: the first time until the loss settles, then one epoch.

Reference: Zhang, Hua, Wang, Song, Xue, Ma, Guan. "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning." AAAI 2023, Algorithm 1. https://arxiv.org/abs/2212.01197
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch

from atoll.kernel.algorithm import (
    Algorithm,
    Epochs,
    Limits,
    NonNegative,
    Search,
    Share,
    Steps,
    Update,
    Weighting,
    WithEverybody,
    among,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Part, Stack
from atoll.kernel.record import Each, record
from atoll.toolbox.client import sgd

RECENT = 10  # epochs whose losses must lie close together


@record
class Kept:
    """A client's model and weights, and how often it took part."""

    v: Stack
    weight: Stack  # W_k
    visits: Each


@record
class Learning:
    """Weights on their way through an epoch, and what was seen in it."""

    weight: Each
    loss: Each = 0.0
    samples: Each = 0.0


@record
class Given:
    """What does not change in an epoch."""

    v: Stack | Params
    w: Params
    asked: Each  # how many samples make up the share
    lr: Each


@dataclass(frozen=True, kw_only=True)
class FedALA(Algorithm):
    """Clients aggregate the shared model and their own by learned weights."""

    layers: Annotated[Part, among("last:1", "last:2", "all")] = "last:1"  # those with weights W_k, from the top
    weights_lr: Annotated[NonNegative, Search(0.1, 10, log=True)] = 1.0  # η_w: step size on W_k
    initial_weight: Share = 1.0  # W_k before it is learned: 1 is the shared model, 0 the client's own
    share: Share = 0.8  # s: share of the training samples that W_k is learned on, redrawn in each round
    threshold: NonNegative = 0.1  # W_k has settled when the last 10 epochs' losses have a smaller standard deviation
    first_epochs: Steps = 50  # largest number of epochs on W_k, the first time
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {"local": WithEverybody(layers="all", initial_weight=0.0, weights_lr=0.0)}
    cites: ClassVar[str] = "zhang2023fedala"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Aggregate, train, and remember both the model and the weights."""
        kept = self._recall(w, cohort)
        weight = self._learn(w, kept, cohort)
        start = cohort.stacked(w) | cohort.map(blend, kept.v.only(weight), w.only(weight), weight)
        v = sgd(cohort, start=start, epochs=self.epochs)
        keep = Kept(v, weight, kept.visits + 1)
        return Update(send={"delta": v - w}, weight=cohort.weights(self.weighting), keep=keep)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's own model; a client that never took part uses w."""
        return self._recall(w, cohort).v

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        """Train a new client from w, as on its first visit."""
        return sgd(cohort, start=w, epochs=self.epochs)

    def _recall(self, w: Params, cohort: Cohort) -> Kept:
        weight = cohort.initial.part(self.layers).trained.map(lambda leaf: torch.full_like(leaf, self.initial_weight))
        return cohort.recall(default=Kept(cohort.stacked(w), cohort.stacked(weight), cohort.each(0.0)))

    def _learn(self, w: Params, kept: Kept, cohort: Cohort) -> Stack:
        """Learn W_k; who comes for the first time, with w as its own model, has nothing to learn."""
        weight, visits = kept.weight, kept.visits
        going = (visits > 0) if len(weight) and self.weights_lr else torch.zeros_like(visits, dtype=torch.bool)
        losses = visits.new_full((len(cohort), RECENT), torch.inf)
        asked = (cohort.samples * self.share).ceil()
        for _ in range(self.first_epochs):
            if not going.any():
                break
            given = Given(kept.v.only(weight), w, asked, going * visits.new_tensor(self.weights_lr))
            end = cohort.scan(learn, Learning(weight), given=given, stream="weights", train=False)
            weight, loss = end.weight, end.loss / asked.clamp(min=1)
            losses = torch.cat([losses[:, 1:], loss[:, None]], 1)
            settled = losses.std(1, correction=0) < self.threshold  # of fewer than 10 epochs it is not a number
            going = going & (visits == 1) & ~settled
        return weight


def learn(carry: Learning, batch: Batch, given: Given) -> Learning:
    """Take one step on one client's W_k: by the chain rule, its gradient is that of the model times w - v_k."""
    weight, v, w = carry.weight, given.v, given.w
    assert isinstance(v, Params)  # one client's
    # The order of samples is random, and the same in every epoch of a round: the first of them are the share.
    place = carry.samples + torch.arange(len(batch.x), device=batch.x.device)
    mask = (place < given.asked).to(carry.samples.dtype)
    some = replace(batch, mask=mask if batch.mask is None else mask * batch.mask)
    g, _, loss = some.gradient(w | blend(v, w.only(v), weight), only=weight)
    used = some.count > 0
    slope = Params({name: torch.where(used, leaf * (w[name] - v[name]), 0) for name, leaf in g.items()}, g.layout)
    weight = weight.moved(slope, -given.lr).map(lambda leaf: leaf.clamp(0, 1))
    loss = torch.where(used, loss, 0) * some.count
    return Learning(weight, carry.loss + loss, carry.samples + batch.count)


def blend(v: Params, w: Params, weight: Params) -> Params:
    """Return the aggregated model, v + (w - v) * W: exact at both ends."""
    return Params({name: v[name] * (1 - share) + w[name] * share for name, share in weight.items()}, v.layout)
