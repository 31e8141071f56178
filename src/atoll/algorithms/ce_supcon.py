"""CE + SupCon: clients learn labels from samples as they are, and what belongs together from two views of them.

    min_w_k  E CE(z(x; w_k), y)  +  lam E SupCon(f(x'; w_k), f(x''; w_k), y)

x', x'' are two independent random views of x (`--augment`), f is what enters the head. SupCon draws the features of one
class together and those of others apart, whatever view. The models then answer together, as in the ensemble.

With ``lam = 0``, and without random views, this is the ensemble. Statistics of BatchNorm are those of x, which is what
a deployed model sees.

Reference: Khosla et al. "Supervised Contrastive Learning." NeurIPS 2020. https://arxiv.org/abs/2004.11362; as what
one-shot clients minimise: variant 24 in the repositories that continue FAFI's code.
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.ensemble import Together
from atoll.algorithms.trainings.supcon import SupCon
from atoll.kernel.algorithm import Limits
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class CESupCon(Pair, training=SupCon, answering=Together):
    """An ensemble of models that were trained with a contrast of views."""

    limits: ClassVar[Limits] = {"ensemble": {"lam": 0.0}}
    cites: ClassVar[str] = "khosla2020supervised"
