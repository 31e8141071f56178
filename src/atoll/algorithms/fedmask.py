"""FedMask: the weights of a network stay as they are; clients learn which of them to keep, and only masks travel.

    s_k <- s_k where u and m_k agree; elsewhere START if u = 1, else -START
    s_k <- s_k - eta s'(s_k) W g,   g = grad F_k(W m_k),   m_k = P_k 1[s_k > 0]            for E local epochs
    P_k <- P_k without the `prune` share of every layer's smallest s_k                     once, in its first round
    u   <- 1[ sum_k p_k m_k >= 1/2 sum_k p_k P_k ]                                         a vote of those who have it

s' is the slope of the sigmoid: gradients pass the threshold as if it were one. Deployed is W m_k. W is the task's
network, trained before or random, and every client has it: two bits of a weight go up, m_k and P_k, and one comes
down. Only weights of layers are masked. Biases and norm layers stay as they are, but running statistics are each
client's own. With ``score_lr = 0`` and ``prune = 0`` everybody deploys the network as it came.

Reference: Li, Sun, Zeng, Zhang, Li, Chen. "FedMask: Joint Computation and Communication-Efficient Personalized
Federated Learning via Heterogeneous Masking." SenSys 2021. https://doi.org/10.1145/3485730.3485929
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import (
    Algorithm,
    Arrival,
    Epochs,
    NonNegative,
    Range,
    Replies,
    Search,
    Update,
    Weighting,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, spread
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.bits import from_bits, to_bits
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.pruning import Decision, layer_weights, masked, prune_least, pruned_share

START = 0.01  # a score before training, and after a vote against it


@record
class State:
    """The network, which nobody changes, and the votes."""

    w: Params
    votes: Params


@record
class Kept:
    """What a client keeps: scores of weights beside its buffers, and 1 for weights that it has not pruned."""

    scores: Stack
    held: Stack


@record
class Given:
    """What does not change while scores are trained: the network, and the weights of it that a client has."""

    w: Params
    own: Stack


@dataclass(frozen=True, kw_only=True)
class FedMask(Algorithm):
    """A mask for each client over one network that nobody trains."""

    score_lr: Annotated[NonNegative, Search(1.0, 100.0, log=True)] = 10.0  # eta: step size of scores
    prune: Annotated[float, Range(0, 1, open_high=True), Search(0.1, 0.5)] = 0.2  # share of a layer pruned for good
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    sends: ClassVar[Mapping[str, str]] = {"kept": "mask", "held": "mask"}
    sent_and_kept: ClassVar[frozenset[str]] = frozenset({"held"})
    sums_suffice: ClassVar[bool] = False  # a byte holds eight weights, so bytes cannot be added up
    cites: ClassVar[str] = "li2021fedmask"

    def start(self, task: Facts) -> State:
        """Begin with votes for everything."""
        w = task.network.initial
        return State(w, layer_weights(w).map(torch.ones_like))

    def broadcast(self, server: State) -> Params:
        """Send the votes; everybody has the network."""
        return pack(spread(server.votes, 1)).client(0)

    def local(self, votes: Params, cohort: Cohort) -> Update:
        """Agree with the votes, train scores, prune once; send what is kept, and what could be."""
        before, weights = self._recall(cohort), layer_weights(cohort.initial)
        own = masked(cohort.stacked(weights), before.held)
        size = cohort.lr.new_tensor(self.score_lr * cohort.training.lr_decay**cohort.round)
        scores = sgd(
            cohort, start=agree(before, unpack(cohort.stacked(votes), weights)), epochs=self.epochs, lr=size,
            gradient=score_gradient, given=Given(cohort.initial, own),
        )  # fmt: skip
        held, first = before.held, Decision(~cohort.has_kept)
        if self.prune and first.ready.any():  # sorting takes longer than an epoch of a small client
            held = cohort.map(partial(prune_least, share=self.prune), held, scores.only(held), first)
        kept = mask_of(scores, held)
        cohort.observe(pruned=pruned_share(kept))
        send = {"kept": pack(kept), "held": pack(held)}
        return Update(send=send, weight=cohort.weights(self.weighting), keep=Kept(scores, held))

    def aggregate(self, server: State, replies: Replies) -> State:
        """Let those who have a weight vote on it; for one that nobody has, the last vote stands."""
        masks = replies.map(partial(unpack_reply, like=server.votes))
        kept, held = masks.mean("kept"), masks.mean("held")
        votes = {
            name: torch.where(held[name] > 0, (kept[name] >= held[name] / 2).to(last), last)
            for name, last in server.votes.items()
        }
        return State(server.w, Params(votes, server.votes.layout))

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the network under the client's mask; under the votes, for a client that never took part."""
        own = self._recall(cohort)
        scores = own.scores.where(cohort.has_kept, agree(own, cohort.stacked(server.votes)))
        return masked(cohort.stacked(cohort.initial) | scores.buffers, mask_of(scores, own.held))

    def shared(self, server: State) -> Params:
        """Return the network under the votes."""
        return masked(server.w, server.votes)

    def _recall(self, cohort: Cohort) -> Kept:
        weights = layer_weights(cohort.initial)
        scores = cohort.initial.buffers | weights.map(lambda leaf: torch.full_like(leaf, START))
        held = weights.map(torch.ones_like)
        return cohort.recall(default=Kept(cohort.stacked(scores), cohort.stacked(held)))


def agree(own: Kept, votes: Stack) -> Stack:
    """Return the scores on which a client and the votes agree, and new ones where they do not."""
    scores = {
        name: torch.where((own.scores[name] > 0) == (vote > 0), own.scores[name], (2 * vote - 1) * START)
        for name, vote in votes.items()
    }
    return own.scores | Stack(scores, own.scores.layout)


def mask_of(scores: Stack, held: Stack) -> Stack:
    """Return 1 for what a client keeps: weights that it has, and whose scores are above the threshold."""
    return Stack({name: there * (scores[name] > 0) for name, there in held.items()}, held.layout)


def score_gradient(scores: Params, batch: Batch, given: Given) -> Found:
    """Return the gradient of the loss for scores, as if the threshold had the slope of the sigmoid."""
    kept = {name: _where_positive(scores[name], own) for name, own in given.own.items()}
    g, after, loss = batch.gradient(given.w | scores.buffers | Params(kept, given.own.layout))
    slopes = {}
    for name, own in given.own.items():
        e = scores[name].exp()  # `sigmoid` itself has other bits at the end of a row
        slopes[name] = g[name] * own / (e + e.reciprocal() + 2)
    return Params(slopes, given.own.layout), scores | after.buffers, loss


def pack(mask: Stack) -> Stack:
    """Pack masks into bits."""
    return Stack.of(bits=to_bits(torch.cat([leaf.flatten(1) > 0 for leaf in mask.values()], 1), 1))


def unpack(packed: Stack, like: Params) -> Stack:
    """Return the masks that `pack` packed, over weights `like` these."""
    sizes = [leaf.numel() for leaf in like.values()]
    parts = torch.split(from_bits(packed["bits"], 1, sum(sizes)), sizes, 1)
    masks = {
        name: part.reshape(-1, *leaf.shape).to(leaf) for (name, leaf), part in zip(like.items(), parts, strict=True)
    }
    return Stack(masks, like.layout)


def unpack_reply(arrival: Arrival, like: Params) -> Arrival:
    """Return the reply with masks of numbers, which can be averaged."""
    return arrival._replace(fields={name: unpack(field, like) for name, field in arrival.fields.items()})


def _where_positive(scores: Tensor, values: Tensor) -> Tensor:
    """Return values where scores are above 0, and 0 elsewhere; `where` takes a CPU eight times as long."""
    found: Tensor = torch.ops.aten.threshold_backward(values, scores, 0.0)
    return found
