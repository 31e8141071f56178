"""FAFI with a queue: earlier features of the client's own samples are further negatives of the contrast.

    D_i = sum_{a in batch, a != i} exp(z_i . z_a / t) + v * sum_{j in queue} rho^age_j [y_j != y_i] exp(z_i . q_j / t)

The queue is the client's alone, first in, first out, and lasts for all of its training. Items of the anchor's class are
left out (``queue_same = "ignored"``) or are positives; all items together weigh as much as the batch. What was tried
and found harmful is ``queue_same = "blind"``: 4096 random rows at first, made anew in every epoch, all negatives.

With ``queue = 0`` this is FAFI.

Reference: He, Fan, Wu, Xie, Girshick. "Momentum Contrast for Unsupervised Visual Representation Learning." CVPR 2020,
for the queue; https://arxiv.org/abs/1911.05722. There is no momentum encoder here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.algorithms.fafi import FAFI
from atoll.kernel.algorithm import Limits, Natural, NonNegative, Share
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Tree
from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.etf import random_directions
from atoll.toolbox.objectives.prototypical import Objective, prototype_leaf
from atoll.toolbox.objectives.terms import Composed, QueueSame


@dataclass(frozen=True, kw_only=True)
class FAFIQueue(FAFI):
    """FAFI with a queue of negatives."""

    queue: Natural = 4096  # places for earlier features, at most a quarter of the client's samples; 0: no queue
    queue_same: QueueSame = "ignored"  # what items of the anchor's class are; blind: all are negatives, as published
    decay: Share = 0.99  # rho: what is left of an item's weight after a step
    mass: NonNegative = 1.0  # v: the queue weighs as much as so many batches; 0: as much as it has items

    minimises: ClassVar[type[Objective]] = Composed
    limits: ClassVar[Limits] = {"fafi": {"queue": 0}}

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective."""
        mine = {"queue": self.queue, "queue_same": self.queue_same, "decay": self.decay, "mass": self.mass}
        return {**super().settings, **mine}

    def given(self, received: Tree, cohort: Cohort) -> dict[str, Any]:
        """Random rows for a queue that begins full, which everybody can make from the seed."""
        given = super().given(received, cohort)
        if self.queue and self.queue_same == "blind":
            p = cohort.initial[prototype_leaf(cohort.initial.layout)]
            draw = generator(cohort.task.seed, "queue")
            given["rows"] = Params.of(features=random_directions(self.queue, p.shape[1], draw).to(p))
        return given
