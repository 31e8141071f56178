"""AFL: the head of a frozen network by least squares, exactly as if all samples were in one place.

    min_W  sum_i |W^T f_i - e_{y_i}|^2 + gamma |W|^2,        f = (phi(x), 1)

    client:  G_k = sum_i f_i f_i^T,   Q_k = sum_i f_i e_{y_i}^T
    server:  W = (sum_k G_k + gamma I)^-1  sum_k Q_k

Nothing is trained, and sums are all that is needed: however samples are dealt to clients, W is the same.

Reference: He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang. "AFL: A Single-Round Analytic Approach for Federated Learning
with Pre-trained Models." CVPR 2025. https://arxiv.org/abs/2405.16240
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.afl import Ridge
from atoll.algorithms.trainings.frozen import Frozen
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class AFL(Pair, training=Frozen, answering=Ridge):
    """Ridge regression on the features of all clients, from sums."""

    cites: ClassVar[str] = "he2025afl"
