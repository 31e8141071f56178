"""RegMean: linear layers are merged so that on the clients' own inputs they answer as the clients' layers do.

    min_M  sum_k sum_{a enters the layer at client k} |M a - M_k a|^2
    M = (sum_k M_k G_k) (sum_k G_k)^-1,        G_k = sum a a^T,  its off-diagonal entries times `damping`

Clients train w_k alone. A client sends G_k, and M_k G_k in place of M_k, so sums suffice. All other leaves are
averaged.

Reference: Jin, Ren, Preotiuc-Pietro, Cheng. "Dataless Knowledge Fusion by Merging Weights of Language Models."
ICLR 2023. https://arxiv.org/abs/2212.09849
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.regmean import Regression
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class RegMean(Pair, training=CrossEntropy, answering=Regression):
    """One-shot training, and linear layers merged by least squares on their inputs."""

    cites: ClassVar[str] = "jin2023dataless"
