"""FAFI: clients train encoders and class prototypes by contrast, and upload once; their features are fused.

    client k:   min  CE(l, y) + a SupCon(z, y) + b CE(s cos(p, p), (0, ..., C - 1)),     l_c = s z . p_c / |p_c|
    server:     p_c = mean of p_kc / |p_kc| over the clients that own class c,   F(x) = sum_k w_k(x) f_k(x) / |f_k(x)|
    answer:     the c with the largest  cos(F(x), p_c)

f_k(x) is what enters the head of client k's network, z = f / |f| on two augmented views of every sample; the prototypes
p_kc are the rows of the head's weight, which has no other use. The client is in `trainings.fafi`, the server
in `answers.features`; `toolbox.server.fusion` has the rules for w_k.

The released code differs from its description. ``profile = "faithful"`` has its settings; every difference is an option
of its own, filled in by the profile where it is None, so an ablation can walk from one to the other. How the code
deals, augments and normalises samples is the task's business: on other data this is FAFI with the released settings,
not FAFI as released.

Reference: Zeng, Huang, Zhou, Wu, Wan, Chen, Cai. "Does One-shot Give the Best Shot? Mitigating Model Inconsistency in
One-shot Federated Learning." ICML 2025. https://openreview.net/forum?id=2XvF67vbCK
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.features import FusedFeatures
from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FAFI(Pair, training=PrototypeContrast, answering=FusedFeatures):
    """Encoders and prototypes, trained by contrast; features are fused."""

    cites: ClassVar[str] = "zeng2025does"
