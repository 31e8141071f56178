"""FedCGS: the head of a frozen network from Gaussians, one per class with a covariance in common.

    client:  n_kc,   sum of phi(x) over its samples of class c,   sum of phi(x) phi(x)^T over all its samples
    server:  W_c = S^-1 mu_c,   b_c = log(n_c / n) - mu_c^T S^-1 mu_c / 2

mu_c is the mean of class c and S a covariance: within classes, which is Bayes' rule for these Gaussians (linear
discriminant analysis), or total, as the authors' code has it. S is shrunk to a multiple of I. Nothing is trained, and
sums are all that is needed: however samples are dealt to clients, the head is the same.

Reference: Guan, Zhou, Gu. "Capture Global Feature Statistics for One-Shot Federated Learning." AAAI 2025.
https://arxiv.org/abs/2503.06962
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.fedcgs import Gaussian
from atoll.algorithms.trainings.frozen import Frozen
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FedCGS(Pair, training=Frozen, answering=Gaussian):
    """A Gaussian head on the features of all clients, from sums."""

    cites: ClassVar[str] = "guan2025capture"
