"""FedAMP: every client is drawn towards clients whose models are like its own.

    min_W  sum_k F_k(w_k) + lam sum_{i<j} A(||w_i - w_j||^2),        A(x) = 1 - exp(-x / sigma)

    server:  xi_ij = alpha A'(||w_i - w_j||^2) for j != i,  xi_ii = 1 - sum_{j != i} xi_ij,  u_i = sum_j xi_ij w_j
    client:  w_i <- min_w F_i(w) + (lam / (2 alpha)) ||w - u_i||^2

HeurFedAMP (``variant = "heur"``) has xi_ij proportional to exp(sharpness cos(w_i, w_j)) and a constant xi_ii instead.
With ``lam = 0`` every client trains alone. The server holds the last model of every client; one that it never heard of
has the mean of the others as u_i, and begins there.

Reference: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang. "Personalized Cross-Silo Federated Learning on Non-IID Data."
AAAI 2021, Algorithm 1. https://arxiv.org/abs/2007.03797
"""

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Positive, Replies, Search, Share, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import proximal, sgd
from atoll.toolbox.client.own import own_or_sent
from atoll.toolbox.server.mixing import (
    cosines,
    identity_mixing,
    initial_models,
    mark_seen,
    mean_for_unseen,
    mix_models,
    none_seen,
    rows_for,
    squared_distances,
    with_replies,
)

log = logging.getLogger("atoll.algorithms")


@record
class State:
    """Everybody's last model, and who attends to whom."""

    w: Stack
    xi: Tensor
    seen: Tensor  # who has sent a model


@dataclass(frozen=True, kw_only=True)
class FedAMP(Algorithm):
    """Attention between clients, in the space of their parameters."""

    variant: Literal["amp", "heur"] = "amp"  # FedAMP or HeurFedAMP
    lam: Annotated[NonNegative, Search(0.01, 10, log=True)] = 1.0  # λ: pull towards similar clients; a client feels λ/α
    alpha: Positive = 1.0  # α: how far messages move a model; amp lowers it for ξ where ξ_ii would be negative
    sigma: Positive | Literal["median"] = "median"  # σ of amp; "median": that of all squared distances of the round
    sharpness: NonNegative = 25.0  # σ of heur: 0 attends to all others equally
    self_weight: Share = 0.1  # ξ_ii of heur
    begin: Literal["own", "received"] = "own"  # where local training begins: at w_i or at u_i
    epochs: Epochs = 1  # E: local epochs per round

    sums_suffice: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"local": {"lam": 0.0, "begin": "own"}}
    cites: ClassVar[str] = "huang2021personalized"

    def __post_init__(self) -> None:
        if str(self.variant) == "interp":  # under this name a survey describes another method
            raise HyperparameterError(
                "`variant` of FedAMP must be one of 'amp', 'heur'. Got 'interp' instead.",
                hint="interpolation between a local and the shared model is a method of its own: `interp`.",
            )
        super().__post_init__()

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls w_i to u_i."""
        return {"lr * lam / alpha": lr * self.lam / self.alpha}

    def start(self, task: Facts) -> State:
        """Begin with nobody heard of, so everybody attends to itself alone."""
        w = initial_models(task, copies=3)  # the state before and after a round, and what is sent
        return State(w, identity_mixing(w), none_seen(w))

    def broadcast(self, server: State) -> None:
        """Send nothing: nothing is the same for all."""

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send every client a mixture of its own, u_i."""
        return mix_models(server.xi[torch.from_numpy(ids)], server.w)

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Train the own model, drawn to the received mixture; who has none yet begins there."""
        w, u = cohort.recall(default=cohort.initial), cohort.received
        start = w if self.begin == "own" else w | u
        if not self.takes_nothing:
            start = start.where(cohort.has_kept, w | u)
        w_i = sgd(cohort, start=start, epochs=self.epochs, penalty=proximal(self.lam / self.alpha, center=u))
        return Update(send={"delta": w_i.trained - w.trained}, keep=w_i)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Find the attention between the last models of all clients that ever replied."""
        w = with_replies(server.w, replies.clients, replies.stack("delta"))
        seen = mark_seen(server.seen, replies.clients)
        pairs = (seen & seen[:, None]).fill_diagonal_(False)
        xi = self._amp(w, pairs) if self.variant == "amp" else self._heur(w, pairs)
        return State(w, mean_for_unseen(xi + torch.diag(1 - xi.sum(1)), seen), seen)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return u_i in the place of everybody's model."""
        u = self.unicast(server, ids)
        return State(rows_for(server.w, ids, u), identity_mixing(server.w), mark_seen(none_seen(server.w), ids))

    @property
    def takes_nothing(self) -> bool:
        """Whether clients take nothing from others."""
        return self.lam == 0 and self.begin == "own"

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the client's own model; one that never trained has u_i, or the initial model if it takes nothing."""
        if self.takes_nothing:
            return cohort.recall(default=cohort.initial)
        return own_or_sent(cohort, lambda: self.unicast(server, cohort.clients))

    def mixing(self, server: State) -> Tensor:
        """Return the attention xi."""
        return server.xi

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Train a new client alone once: attention needs a model to compare."""
        return sgd(cohort, start=cohort.initial, epochs=self.epochs)

    def _amp(self, w: Stack, pairs: Tensor) -> Tensor:
        """Return xi_ij = alpha A'(||w_i - w_j||^2), for the largest alpha up to the given one with no row above 1."""
        apart = squared_distances(w)
        tiny = torch.finfo(apart.dtype).tiny
        # A median of nothing, where there are no two clients yet, is nan.
        sigma = apart[pairs].median().nan_to_num(1) if self.sigma == "median" else apart.new_tensor(self.sigma)
        sigma = sigma.clamp(min=tiny)
        near = torch.exp(-apart / sigma) * pairs
        asked, most = self.alpha / sigma, 1 / near.sum(1).max().clamp(min=tiny)
        if asked > most:
            log.info("self-weights would be negative with alpha=%g: xi is that of alpha=%g", self.alpha, most * sigma)
        return near * torch.minimum(asked, most)

    def _heur(self, w: Stack, pairs: Tensor) -> Tensor:
        """Return xi_ij = (1 - xi_ii) exp(sharpness cos(w_i, w_j)), divided by the sum over all others."""
        scores = (self.sharpness * cosines(w)).masked_fill(~pairs, -torch.inf)
        return (1 - self.self_weight) * torch.softmax(scores, 1).nan_to_num(0)  # nan: nobody else was heard of
