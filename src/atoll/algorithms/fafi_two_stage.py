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

from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.answers.features import FusedFeatures
from atoll.algorithms.trainings.bank import Bank
from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.stages import InStages
from atoll.kernel.algorithm import Limits
from atoll.toolbox.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class FAFITwoStage(Pair, training=(PrototypeContrast, Bank, InStages), answering=FusedFeatures):
    """Contrast with a public bank, and then FAFI."""

    limits: ClassVar[Limits] = {"fafi": {"stages": "never", "pool": "none"}, "fafi-bank": {"stages": "never"}}
    cites: ClassVar[str] = "zeng2025does"
