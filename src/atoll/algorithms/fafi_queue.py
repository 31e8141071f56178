"""FAFI with a queue: earlier features of the client's own samples are further negatives of the contrast.

    D_i = sum_{a in batch, a != i} exp(z_i . z_a / t) + v * sum_{j in queue} rho^age_j [y_j != y_i] exp(z_i . q_j / t)

The queue is the client's alone, first in, first out, and lasts for all of its training. Items of the anchor's class are
left out (``queue_same = "ignored"``) or are positives; all items together weigh as much as the batch. What was tried
and found harmful is ``queue_same = "blind"``: 4096 random rows at first, made anew in every epoch, all negatives.

With ``queue_momentum = m`` a second encoder makes what is queued, slow <- m slow + (1 - m) w. With ``queue = 0`` this
is FAFI.

Reference: He, Fan, Wu, Xie, Girshick. "Momentum Contrast for Unsupervised Visual Representation Learning." CVPR 2020.
https://arxiv.org/abs/1911.05722
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.features import FusedFeatures
from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.queue import Queue
from atoll.kernel.algorithm import Limits
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FAFIQueue(Pair, training=(PrototypeContrast, Queue), answering=FusedFeatures):
    """FAFI with a queue of negatives."""

    limits: ClassVar[Limits] = {"fafi": {"queue": 0}}
    cites: ClassVar[str] = "zeng2025does"
