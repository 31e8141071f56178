"""A frame: classes have directions that everybody knows before training, so clients end up alike.

    ... + lambda(t) [ mean_{c owned} (1 - cos(p_c, a_c)) + mean_i (1 - cos(z_i, a_{y_i})) ],  lambda(t) = lambda (1 - t)

a_c are the corners of a simplex (an equiangular tight frame), which every client makes from the seed: nothing is sent.
t is the share of all steps that is done, however they are cut into rounds. Only directions are pulled: unit anchors
that also pull at lengths, ``anchor_loss = "mse"``, shrink prototypes, which raises the temperature of the softmax, and
that is most of what they do.

Reference: Papyan, Han, Donoho. "Prevalence of Neural Collapse during the Terminal Phase of Deep Learning Training."
PNAS 2020, for the simplex. https://arxiv.org/abs/2008.08186
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece
from atoll.kernel.algorithm import NonNegative
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.etf import random_directions, simplex_etf
from atoll.toolbox.objectives.prototypical import prototype_leaf
from atoll.toolbox.objectives.terms import Given, Schedule

Anchors = Literal["none", "etf", "random"]


@dataclass(frozen=True, kw_only=True)
class Frame(ContrastPiece):
    """The corners of a simplex as fixed directions of classes."""

    anchors: Anchors = "etf"  # the class directions that everybody knows
    anchor: NonNegative = 1.0  # lambda: weight of the pull to the anchors
    anchor_loss: Literal["direction", "mse"] = "direction"  # of prototypes and features, or of prototypes with lengths
    anchor_schedule: Schedule = "linear"  # how lambda changes over all steps; auto: in proportion to the other terms
    anchor_moves: bool = False  # whether the anchors move from the first prototypes to their final place

    called: ClassVar[str] = "frame"

    @property
    def adds(self) -> bool:
        """Whether there is a pull."""
        return self.anchors != "none" and self.anchor > 0

    def require(self, training: PrototypeContrast, task: Facts) -> None:
        """Raise if the classes have no room for a simplex."""
        if self.anchors == "etf":
            simplex_etf(task.classes or 0, feature_size(training, task), generator(0, "whether there is one"))

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return how strong the pull is, and at what."""
        return {
            "anchor": self.anchor,
            "anchor_loss": self.anchor_loss,
            "anchor_schedule": self.anchor_schedule,
            "anchor_moves": self.anchor_moves,
        }

    def provide(self, given: Given, w: Params, cohort: Cohort) -> Given:
        """Return the anchors, and where prototypes begin."""
        p = w[prototype_leaf(w.layout)]
        make = simplex_etf if self.anchors == "etf" else random_directions
        rows = make(p.shape[0], p.shape[1], generator(cohort.task.seed, "anchors")).to(p)
        return replace(given, anchors=rows, first=p)
