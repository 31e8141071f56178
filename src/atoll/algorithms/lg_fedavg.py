"""LG-FedAvg: each client keeps its own body (local representation), the head on top of it is shared.

    min_{h, w_1..w_N}  sum_k p_k F_k(w_k, h)              (h averaged, w_k never sent)

The complement of FedPer: clients may see different inputs, but what they make of them must mean the same to one head.
With ``private = "none"`` this is FedAvg, with ``private = "all"`` every client trains alone.

Reference: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. "Think Locally, Act Globally: Federated
Learning with Local and Global Representations." 2020. https://arxiv.org/abs/2001.01523
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.fedper import FedPer
from atoll.kernel.algorithm import Limits
from atoll.kernel.params import Part


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(FedPer):
    """Personal bodies under a shared head."""

    private: Part = "body"  # the leaves that never leave the client

    limits: ClassVar[Limits] = {**FedPer.limits, "fedper": {"private": "head"}}
    cites: ClassVar[str] = "liang2020think"
