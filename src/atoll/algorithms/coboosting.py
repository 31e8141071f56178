"""Co-Boosting: DENSE whose samples and ensemble improve each other.

    generator:  min_G  E (1 - p_y(x)) CE(z(x), y) + BN(x) - E KL_3( z(x) || s(x) ),      x = G(noise)
    ensemble:   v <- clip(v - mu decay^t sign grad_v E CE(z(x), y), 0, 1),      z(x) = sum_k v_k z_k(x) / sum_k v_k
    student:    min_w  E KL_4( z(x') || s(x'; w) ),      x' = x + eps sign grad_x u . softmax(z(x) / 4)

Samples count the more, the less the ensemble sees their class in them (p_y, which is not differentiated). The clients'
votes v begin alike and follow, in epoch t, what was made up before. The student is shown samples that were moved to
where the ensemble's answers change (output diversified sampling), with u from U(-1, 1) for every sample and class.

Reference: Dai, Zhang, Li, Liu, Yang, Han. "Enhancing One-Shot Federated Learning Through Data and Ensemble
Co-Boosting." ICLR 2024. https://arxiv.org/abs/2402.15070
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.coboosting import BoostedStudent
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class CoBoosting(Pair, training=CrossEntropy, answering=BoostedStudent):
    """Distillation on hard samples from an ensemble with votes."""

    cites: ClassVar[str] = "dai2024enhancing"
