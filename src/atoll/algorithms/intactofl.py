"""IntactOFL: all clients' models are kept as experts; a gate that the server trained decides whom to listen to.

    answer:  z(x) = mean_k g_k(x) z_k(x),        g(x) = K softmax(A x + b)
    gate:    min_{A, b}  E CE(z(x'), y) + balance std g(x') + E KL_4( mean_k z_k(x') || z(x') )

over samples that are made up as in DENSE, with the gated experts as teachers and the plain ensemble as their rival, and
moved to x' as in Co-Boosting; or over public samples as they are. With ``gate = "linear"`` it is that of the released
code, g(x) = A x + b. Both begin at g = 1, as the plain ensemble of all K models, and stay there without epochs.

Reference: Zeng, Xu, Zhou, Wu, Kang, Cai, Niyato. "One-shot-but-not-degraded Federated Learning." ACM Multimedia 2024.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.intactofl import Gated
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class IntactOFL(Pair, training=CrossEntropy, answering=Gated):
    """A mixture of the clients' models as experts."""

    cites: ClassVar[str] = "zeng2024one"
