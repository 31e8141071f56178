"""FAFI with anchors: classes have directions that everybody knows before training, so clients end up alike.

    ... + lambda(t) [ mean_{c owned} (1 - cos(p_c, a_c)) + mean_i (1 - cos(z_i, a_{y_i})) ],  lambda(t) = lambda (1 - t)

a_c are the corners of a simplex (an equiangular tight frame), which every client makes from the seed: nothing is sent.
t is the share of all steps that is done, however they are cut into rounds. Only directions are pulled: unit anchors
that also pull at lengths, ``anchor_loss = "mse"``, shrink prototypes, which raises the temperature of the softmax, and
that is most of what they do. Other settings of that line of work (V5 to V8, V14 of the fork) are options: see the page.

With ``anchors = "none"`` this is FAFI.

Reference: Papyan, Han, Donoho. "Prevalence of Neural Collapse during the Terminal Phase of Deep Learning Training."
PNAS 2020, for the simplex. https://arxiv.org/abs/2008.08186
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.features import FusedFeatures
from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.frame import Frame
from atoll.kernel.algorithm import Limits
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FAFIETF(Pair, training=(PrototypeContrast, Frame), answering=FusedFeatures):
    """FAFI with the corners of a simplex as fixed directions of classes."""

    limits: ClassVar[Limits] = {"fafi": {"anchors": "none"}}
    cites: ClassVar[str] = "zeng2025does"
