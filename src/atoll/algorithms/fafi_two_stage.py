"""FAFI in two stages: first contrast with a public bank alone, then FAFI without the bank.

    epochs 1 .. 0.2 E:    min  SupCon(z, y; batch, bank)
    the others:           min  CE(l, y) + a SupCon(z, y; batch) + b CE(s cos(p, p), (0, ..., C - 1)),  l = s z . p / |p|

This is what the notes propose: one switch. What was run (V6 of the notes) is ``stages = "recurring"``: the first of
every five epochs is one of contrast alone, and the bank stays in all of them. With ``pool = "none"``, the first stage
has the batch alone to contrast with.

With ``stages = "never"`` this is FAFI with a bank, and with ``pool = "none"`` as well FAFI.

Reference: none; the plan of the notes that Atoll is built from. The contrast: Khosla et al. "Supervised Contrastive
Learning." NeurIPS 2020. https://arxiv.org/abs/2004.11362
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.algorithms.fafi_bank import FAFIBank
from atoll.kernel.algorithm import Limits, Share
from atoll.kernel.errors import HyperparameterError
from atoll.toolbox.objectives.terms import Stages


@dataclass(frozen=True, kw_only=True)
class FAFITwoStage(FAFIBank):
    """Contrast with a public bank, and then FAFI."""

    stages: Stages = "once"  # contrast alone once, in the first epochs, then no pool; recurring: in every fifth epoch
    stage_share: Share = 0.2  # of all epochs, for a first stage; below 1, it leaves an epoch at least

    limits: ClassVar[Limits] = {"fafi": {"stages": "never", "pool": "none"}, "fafi-bank": {"stages": "never"}}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages == "recurring" and self.epochs == 1:
            raise HyperparameterError(
                "`epochs` must be at least 2 where stages recur. Got 1, an epoch of contrast alone, which does "
                "not train prototypes.",
                hint="use stages=never for a single epoch.",
            )

    @property
    def first_stage(self) -> int:
        """Of how many epochs it is."""
        longest = self.epochs if self.stage_share == 1 else max(0, self.epochs - 1)
        return min(math.ceil(self.stage_share * self.epochs), longest)

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective."""
        first = self.first_stage if self.stages == "once" else 0
        return {**super().settings, "stages": self.stages, "stage_epochs": first}
