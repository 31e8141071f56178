"""Two stages: first contrast alone, with a public bank if there is one, then everything without the bank.

    epochs 1 .. 0.2 E:    min  SupCon(z, y; batch, bank)
    the others:           min  CE(l, y) + a SupCon(z, y; batch) + b CE(s cos(p, p), (0, ..., C - 1)),  l = s z . p / |p|

This is what the notes propose: one switch. What was run (V6 of the notes) is ``stages = "recurring"``: the first of
every five epochs is one of contrast alone, and the bank stays in all of them.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece
from atoll.kernel.algorithm import NonNegative, Share
from atoll.kernel.errors import HyperparameterError
from atoll.toolbox.objectives.terms import Stages


@dataclass(frozen=True, kw_only=True)
class InStages(ContrastPiece):
    """Contrast alone, and then the rest."""

    stages: Stages = "once"  # contrast alone once, in the first epochs, then no pool; recurring: in every fifth epoch
    stage_share: Share = 0.2  # share of all epochs for a first stage; below 1, it leaves at least one epoch
    contrast_after: NonNegative | None = None  # a outside of stages of contrast alone; None: the same a

    called: ClassVar[str] = "stages"

    @property
    def adds(self) -> bool:
        """Whether there are stages."""
        return self.stages != "never"

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return which epochs are of contrast alone."""
        if self.stages == "recurring" and training.epochs == 1:
            raise HyperparameterError(
                "`epochs` must be at least 2 where stages recur. Got 1, an epoch of contrast alone, which does "
                "not train prototypes.",
                hint="use stages=never for a single epoch.",
            )
        first = self.first_stage(training.epochs) if self.stages == "once" else 0
        return {"stages": self.stages, "stage_epochs": first, "contrast_after": self.contrast_after}

    def first_stage(self, epochs: int) -> int:
        """Return how many epochs it has."""
        longest = epochs if self.stage_share == 1 else max(0, epochs - 1)
        return min(math.ceil(self.stage_share * epochs), longest)
