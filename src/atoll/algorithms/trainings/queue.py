"""A queue: earlier features of the client's own samples are further negatives of the contrast.

    D_i = sum_{a in batch, a != i} exp(z_i . z_a / t) + v * sum_{j in queue} rho^age_j [y_j != y_i] exp(z_i . q_j / t)

The queue is the client's alone, first in, first out, and lasts for all of its training. Items of the anchor's class are
left out (``queue_same = "ignored"``) or are positives; all items together weigh as much as the batch. What was tried
and found harmful is ``queue_same = "blind"``: 4096 random rows at first, made anew in every epoch, all negatives.

With ``queue_momentum = m`` the features that enter the queue are those of a second encoder, which follows the client's
own: slow <- m slow + (1 - m) w in every step. It begins at w and never leaves.

Reference: He, Fan, Wu, Xie, Girshick. "Momentum Contrast for Unsupervised Visual Representation Learning." CVPR 2020.
https://arxiv.org/abs/1911.05722
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece
from atoll.kernel.algorithm import Natural, NonNegative, Share
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.etf import random_directions
from atoll.toolbox.objectives.prototypical import prototype_leaf
from atoll.toolbox.objectives.terms import Given, QueueSame


@dataclass(frozen=True, kw_only=True)
class Queue(ContrastPiece):
    """A queue of the client's own negatives."""

    queue: Natural = 4096  # room for earlier features, at most a quarter of the client's samples; 0: no queue
    queue_same: QueueSame = "ignored"  # what items of the anchor's class are; blind: all are negatives, as published
    decay: Share = 0.99  # rho: the share of an item's weight that remains after a step
    queue_momentum: Share = 0.0  # m: of the encoder of what is queued; 0: it is the client's own; published: 0.999
    mass: NonNegative = 1.0  # v: the weight of the queue, in batches; 0: as much as it has items

    called: ClassVar[str] = "queue"

    @property
    def adds(self) -> bool:
        """Whether there are places."""
        return self.queue > 0

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return what the queue is, and how it counts."""
        return {
            "queue": self.queue, "queue_same": self.queue_same, "decay": self.decay, "queue_mass": self.mass,
            "queue_momentum": self.queue_momentum,
        }  # fmt: skip

    def provide(self, given: Given, w: Params, cohort: Cohort) -> Given:
        """Return random rows for a queue that begins full."""
        if self.queue_same != "blind":
            return given
        p = w[prototype_leaf(w.layout)]
        rows = random_directions(self.queue, p.shape[1], generator(cohort.task.seed, "queue"))
        return replace(given, rows=rows.to(p))
