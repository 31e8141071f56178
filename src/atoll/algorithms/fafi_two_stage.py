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

from atoll.algorithm import Limits, Share
from atoll.algorithms.fafi_bank import FAFIBank
from atoll.local.terms import Stages


@dataclass(frozen=True, kw_only=True)
class FAFITwoStage(FAFIBank):
    """Contrast with a public bank, and then FAFI."""

    stages: Stages = "once"  # contrast alone once, in the first epochs, then no pool; recurring: in every fifth epoch
    stage_share: Share = 0.2  # of all epochs, for a first stage

    limits: ClassVar[Limits] = {"fafi": {"stages": "never", "pool": "none"}, "fafi-bank": {"stages": "never"}}

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective."""
        first = math.ceil(self.stage_share * self.epochs) if self.stages == "once" else 0
        return {**super().settings, "stages": self.stages, "stage_epochs": first}
