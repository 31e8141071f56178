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
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Positive, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import Penalty, sgd
from atoll.toolbox.client.own import own_or_sent
from atoll.toolbox.server.mixing import alone, everybody, heard, mean_for_unseen, mixed, nobody, products, with_replies


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
        """No entry of Omega exceeds 1 / floor."""
        return {"lr * lam / floor": lr * self.lam / self.floor}

    def start(self, task: Facts) -> dict[str, Any]:
        """Nobody has moved, and all are unrelated."""
        w = everybody(task, copies=3).zeros()  # the state before and after a round, and what is sent
        return {"w": w, "omega": alone(w) / (1 + self.floor), "seen": nobody(w)}

    def broadcast(self, server: dict[str, Any]) -> None:
        """Nothing is the same for all."""

    def unicast(self, server: dict[str, Any], ids: NDArray[np.int64]) -> dict[str, Stack]:
        """u_k and Omega_kk."""
        rows, own = server["omega"][torch.from_numpy(ids)], server["omega"].diagonal()[torch.from_numpy(ids)]
        others = rows.scatter(1, torch.from_numpy(ids).to(rows.device)[:, None], 0)
        return {"u": mixed(others, server["w"]), "omega": Stack.of(kk=own)}

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Train the own model under its relationship to the others; who has none yet begins where that leads."""
        w = cohort.recall(default=cohort.initial)
        start = w if self.lam == 0 else w.where(cohort.has_kept, w | drawn_to(cohort.received, cohort))
        penalty = Penalty(_relation, {"lam": self.lam, "start": cohort.initial.trained, **cohort.received})
        w_k = sgd(cohort, start=start, epochs=self.epochs, penalty=penalty)
        return Update(send={"delta": w_k.trained - w.trained}, keep=w_k)

    def aggregate(self, server: dict[str, Any], replies: Replies) -> dict[str, Any]:
        """The relationship between all clients that were ever heard of; the others draw nobody and go to the mean."""
        w = with_replies(server["w"], replies.clients, replies.stack("delta"))
        seen = heard(server["seen"], replies.clients)
        values, vectors = torch.linalg.eigh(products(w))
        noise = values[-1] * len(values) * torch.finfo(values.dtype).eps  # whose root would not be small any more
        root = (vectors * values.where(values > noise, 0).sqrt()) @ vectors.mT
        covariance = seen.sum() * root / root.trace().clamp(min=torch.finfo(root.dtype).tiny)
        covariance = torch.where(seen & seen[:, None], covariance, alone(w))
        omega = torch.linalg.inv(covariance + self.floor * alone(w))
        to_mean = omega.diagonal()[:, None] * (alone(w) - mean_for_unseen(alone(w), seen))
        return {"w": w, "omega": torch.where(seen[:, None], omega, to_mean), "seen": seen}

    def personalize(self, server: dict[str, Any], cohort: Cohort) -> Stack:
        """The client's own model; one that never trained has what it is drawn to, or the initial one if lam = 0."""
        if self.lam == 0:
            return cohort.recall(default=cohort.initial)
        return own_or_sent(cohort, lambda: drawn_to(self.unicast(server, cohort.clients), cohort))

    def mixing(self, server: dict[str, Any]) -> Tensor:
        """Where clients are drawn: w_k to the sum of -Omega_kj / Omega_kk w_j."""
        omega: Tensor = server["omega"]
        return -(omega - torch.diag(omega.diagonal())) / omega.diagonal()[:, None]

    def welcome(self, server: dict[str, Any], cohort: Cohort) -> Stack:
        """A new client trains alone once: relationships need a model to compare."""
        return sgd(cohort, start=cohort.initial, epochs=self.epochs)


def drawn_to(received: dict[str, Stack], cohort: Cohort) -> Stack:
    """The trained leaves at which a client's relationship leaves it in peace: w_k = -u_k / Omega_kk."""
    return cohort.initial.trained - received["u"] / received["omega"]["kk"]


def _relation(g: Params, w: Params, given: dict[str, Any]) -> Params:
    """The sum of g and the gradient of (lam / 2) tr(W Omega W^T) in one client's column."""
    moved = w.only(g) - given["start"].only(g)
    return g.moved(moved, given["lam"] * given["omega"]["kk"]).moved(given["u"].only(g), given["lam"])
