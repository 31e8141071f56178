"""FedLPA: the mode of the product of the clients' posteriors, each a Gaussian per layer by Laplace's approximation.

    posterior of client k:  vec M ~ N( vec M_k, (A_k x B_k)^-1 ),    A_k = E[a a^T],   B_k = E[g g^T]
    min_M  sum_k p_k <M - M_k, B_k (M - M_k) A_k>,   that is   sum_k p_k B_k M A_k = sum_k p_k B_k M_k A_k

M is the matrix of a linear layer or a convolution with its bias, a what enters it, g the gradient of a sample's loss
at its output (the Kronecker factors of the empirical Fisher matrix), both damped: A_k + damping I, B_k + damping I.
Clients train w_k alone. The server solves by conjugate gradients. All other leaves are averaged.

Reference: Liu, Liu, Ye, Shen, Li, Jiang, Li. "FedLPA: One-shot Federated Learning with Layer-Wise Posterior
Aggregation." NeurIPS 2024. https://arxiv.org/abs/2310.00339
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.fedlpa import MostLikely
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FedLPA(Pair, training=CrossEntropy, answering=MostLikely):
    """One-shot training, and layers merged as the most likely ones under all clients' posteriors."""

    cites: ClassVar[str] = "liu2024fedlpa"
