"""MOCHA, primal: every client has its own model, and how clients are related is learned beside them.

    min_{W, Omega}  sum_k F_k(w_k) + (lam / 2) tr(W Omega W^T)

    server:  Omega^-1 = N R / tr(R) + floor I,  R = (W^T W)^{1/2}
             u_k = sum_{j != k} Omega_kj w_j
    client:  w_k <- w_k - eta [ grad F_k(w_k) + lam (Omega_kk w_k + u_k) ]

The columns w_k of W are measured from the initial model. Unrelated clients have Omega near I: each is held to the
initial model; clients that move alike are held together. One that was never heard of is held to the mean of the others,
and begins there. With ``lam = 0`` every client trains alone. The paper solves the dual of convex problems; this is the
same objective by gradient steps, for networks and small federations.

Reference: Smith, Chiang, Sanjabi, Talwalkar. "Federated Multi-Task Learning." NeurIPS 2017,
Algorithm 1. https://arxiv.org/abs/1705.10467
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Positive, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import Penalty, sgd
from atoll.toolbox.client.own import own_or_sent
from atoll.toolbox.server.mixing import (
    identity_mixing,
    initial_models,
    mark_seen,
    mean_for_unseen,
    mix_models,
    none_seen,
    products,
    rows_for,
    with_replies,
)


@record
class State:
    """Everybody's last model, and the relationship between all pairs."""

    w: Stack  # measured from the initial model
    omega: Tensor
    seen: Tensor  # who has sent a model


@record
class Sent:
    """What a client is told of its relationship to the others."""

    u: Stack
    omega: Stack  # Omega_kk


@record
class Relation:
    """The same beside what it is measured from, for every step."""

    lam: float
    start: Params
    u: Stack | Params
    omega: Stack | Params


@dataclass(frozen=True, kw_only=True)
class Mocha(Algorithm):
    """Personal models with a learned relationship between all pairs of clients."""

    lam: NonNegative = 0.1  # λ: strength of the relationship
    floor: Positive = 0.1  # added to the covariance before it is inverted: no client is pulled harder than λ/floor
    epochs: Epochs = 1  # E: local epochs per round

    sums_suffice: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"local": {"lam": 0.0}}
    cites: ClassVar[str] = "smith2017federated"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step may pull: no entry of Omega exceeds 1 / floor."""
        return {"lr * lam / floor": lr * self.lam / self.floor}

    def start(self, task: Facts) -> State:
        """Begin with nobody moved, and all unrelated."""
        w = initial_models(task, copies=3).zeros()  # the state before and after a round, and what is sent
        return State(w, identity_mixing(w) / (1 + self.floor), none_seen(w))

    def broadcast(self, server: State) -> None:
        """Send nothing: nothing is the same for all."""

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Sent:
        """Send u_k and Omega_kk."""
        rows, own = server.omega[torch.from_numpy(ids)], server.omega.diagonal()[torch.from_numpy(ids)]
        others = rows.scatter(1, torch.from_numpy(ids).to(rows.device)[:, None], 0)
        return Sent(mix_models(others, server.w), Stack.of(kk=own))

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Train the own model under its relationship to the others; who has none yet begins where that leads."""
        w, sent = cohort.recall(default=cohort.initial), cohort.received
        start = w if self.lam == 0 else w.where(cohort.has_kept, w | resting_point(sent, cohort))
        relation = Relation(self.lam, cohort.initial.trained, sent.u, sent.omega)
        w_k = sgd(cohort, start=start, epochs=self.epochs, penalty=Penalty(_relation, relation))
        return Update(send={"delta": w_k.trained - w.trained}, keep=w_k)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Relate all clients that ever replied; the others draw nobody and go to the mean."""
        w = with_replies(server.w, replies.clients, replies.stack("delta"))
        seen = mark_seen(server.seen, replies.clients)
        values, vectors = torch.linalg.eigh(products(w))
        noise = values[-1] * len(values) * torch.finfo(values.dtype).eps  # whose root would not be small any more
        root = (vectors * values.where(values > noise, 0).sqrt()) @ vectors.mT
        covariance = seen.sum() * root / root.trace().clamp(min=torch.finfo(root.dtype).tiny)
        one = identity_mixing(w)
        covariance = torch.where(seen & seen[:, None], covariance, one)
        omega = torch.linalg.inv(covariance + self.floor * one)
        to_mean = omega.diagonal()[:, None] * (one - mean_for_unseen(one, seen))
        return State(w, torch.where(seen[:, None], omega, to_mean), seen)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return u_k in the place of everybody's model: as that of the next client, the only one that k relates to."""
        sent, rows, clients = (
            self.unicast(server, ids),
            torch.from_numpy(ids).to(server.omega.device),
            len(server.omega),
        )
        omega = torch.zeros_like(server.omega)
        omega[rows, (rows + 1) % clients] = 1
        omega[rows, rows] = sent.omega.value
        return State(rows_for(server.w, (ids + 1) % clients, sent.u), omega, mark_seen(none_seen(server.w), ids))

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the client's own model; if it never trained, its resting point, or the initial model if lam = 0."""
        if self.lam == 0:
            return cohort.recall(default=cohort.initial)
        return own_or_sent(cohort, lambda: resting_point(self.unicast(server, cohort.clients), cohort))

    def mixing(self, server: State) -> Tensor:
        """Return where clients are drawn: w_k to the sum of -Omega_kj / Omega_kk w_j."""
        omega = server.omega
        return -(omega - torch.diag(omega.diagonal())) / omega.diagonal()[:, None]

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Train a new client alone once: relationships need a model to compare."""
        return sgd(cohort, start=cohort.initial, epochs=self.epochs)


def resting_point(sent: Sent, cohort: Cohort) -> Stack:
    """Return the trained leaves at which a client's relationship leaves it in peace: w_k = -u_k / Omega_kk."""
    return cohort.initial.trained - sent.u / sent.omega.value


def _relation(g: Params, w: Params, given: Relation) -> Params:
    """Add the gradient of (lam / 2) tr(W Omega W^T) in one client's column to g."""
    moved = w.only(g) - given.start.only(g)
    return g.moved(moved, given.lam * given.omega.value).moved(given.u.only(g), given.lam)
