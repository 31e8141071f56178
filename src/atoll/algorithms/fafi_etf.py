"""FAFI with anchors: classes have directions that everybody knows before training, so that clients end up alike.

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
from typing import Any, ClassVar, Literal

from atoll.algorithms.fafi import FAFI
from atoll.kernel.algorithm import Limits, NonNegative
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Tree
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.etf import random_directions, simplex_etf
from atoll.toolbox.objectives.prototypical import Objective, prototype_leaf
from atoll.toolbox.objectives.terms import Composed, Schedule
from atoll.toolbox.oneshot import Server

Anchors = Literal["none", "etf", "random"]


@dataclass(frozen=True, kw_only=True)
class FAFIETF(FAFI):
    """FAFI with the corners of a simplex as fixed directions of classes."""

    anchors: Anchors = "etf"  # directions of classes that everybody has
    anchor: NonNegative = 1.0  # lambda: weight of the pull to them
    anchor_loss: Literal["direction", "mse"] = "direction"  # of prototypes and features, or of prototypes with lengths
    anchor_schedule: Schedule = "linear"  # of lambda over all steps; auto: in proportion to the other terms
    anchor_moves: bool = False  # the anchors move from the first prototypes to where they are

    minimises: ClassVar[type[Objective]] = Composed
    limits: ClassVar[Limits] = {"fafi": {"anchors": "none"}}

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective."""
        return {
            **super().settings,
            "anchor": self.anchor if self.anchors != "none" else 0.0,
            "anchor_loss": self.anchor_loss,
            "anchor_schedule": self.anchor_schedule,
            "anchor_moves": self.anchor_moves,
        }

    def start(self, task: Facts) -> Server:
        """As FAFI; raises if the classes have no room for a simplex."""
        server = super().start(task)
        if self.anchors == "etf":
            simplex_etf(task.classes or 0, feature_size(self, task), generator(0, "whether there is one"))
        return server

    def given(self, received: Tree, cohort: Cohort) -> dict[str, Any]:
        """The anchors, which everybody can make from the seed, and where prototypes begin."""
        given = super().given(received, cohort)
        if self.anchors != "none":
            w: Params = received if isinstance(received, Params) else received["model"]
            p = w[prototype_leaf(w.layout)]
            make = simplex_etf if self.anchors == "etf" else random_directions
            rows = make(p.shape[0], p.shape[1], generator(cohort.task.seed, "anchors")).to(p)
            given["anchors"] = Params.of(rows=rows, start=p)
        return given
