"""FedRAP: a user sees the vectors of items for everybody plus vectors of its own.

    score of item i for user k:  p_k . (c_i + d_i^k) + b_i
    client:  min  cross-entropy - lam mean (d_i^k - c_i)^2 + mu mean |c_i|      over the rows that it touches
    server:  (c_i, b_i) <- (c_i, b_i) + the mean change over the clients that touched item i

p_k and d^k never leave. The second term keeps what is personal apart from what is shared, the third keeps what is
shared small. d^k begins at 0; with a step size of 0 it stays there, and with lam = mu = 0 this is then `fedmf`.

Reference: Li, Long, Zhou. "Federated Recommendation with Additive Personalization." ICLR 2024.
https://arxiv.org/abs/2301.09109
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Limits, NonNegative, Search, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.items import (
    BIAS,
    OWN,
    VECTOR,
    RowRule,
    Touched,
    gather_rows,
    send_rows,
    train_rows,
    write_rows,
)  # fmt: skip
from atoll.toolbox.recommending import Recommending


@dataclass(frozen=True, kw_only=True)
class FedRAP(Recommending):
    """Item vectors of everybody's plus item vectors of the user's own."""

    own_rate: Annotated[NonNegative, Search(0.01, 3, log=True)] = 1.0  # step size of the user's own item vectors
    lam: Annotated[NonNegative, Search(0.001, 0.1, log=True)] = 0.01  # λ: how far own vectors are kept from shared ones
    mu: Annotated[NonNegative, Search(0.0001, 0.01, log=True)] = 0.001  # μ: how sparse shared vectors are kept

    limits: ClassVar[Limits] = {"fedmf": {"own_rate": 0.0, "lam": 0.0, "mu": 0.0}}
    cites: ClassVar[str] = "li2024federated"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the vector, the touched rows and the user's own part of them; send the change of the shared part."""
        touched = Touched(cohort, self.negatives, self.epochs)
        kept = self._recall(cohort)
        p, d = kept.without([OWN]), kept.only([OWN])
        penalty = partial(keep_apart, self.lam, self.mu) if self.lam or self.mu else None
        rule = RowRule(
            self.rate, l2=self.l2, own=tuple(p), own_rate=self.own_rate, read=add_own_vectors, penalty=penalty
        )
        p, rows = train_rows(cohort, p, touched.rows(w) | gather_rows(d, touched.ids), touched, rule)
        return send_rows(touched, w, rows, keep=p | write_rows(d, touched.ids, rows.only([OWN])))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the user's vector with the sum of shared and own item vectors."""
        kept, table = self._recall(cohort), cohort.stacked(w)
        return kept.without([OWN]) | table | Stack({VECTOR: table[VECTOR] + kept[OWN]}, table.layout)

    def _recall(self, cohort: Cohort) -> Stack:
        initial = cohort.initial
        return cohort.recall(default=initial.part("head") | Params({OWN: torch.zeros_like(initial[VECTOR])}))


def add_own_vectors(whole: Params, places: Tensor) -> Tensor:
    """Return the rows at these places, with the user's own vectors added."""
    return torch.cat([whole[VECTOR][places] + whole[OWN][places], whole[BIAS][places][..., None]], -1)


def keep_apart(lam: float, mu: float, whole: Params, beside: Params, places: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG001
    """Return the two penalties of the rows at these places, summed over pairs."""
    c, d = whole[VECTOR][places], whole[OWN][places]
    return (weight * (mu * c.abs().mean(-1) - lam * (d - c).square().mean(-1))).sum()
