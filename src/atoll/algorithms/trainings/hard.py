"""Hard negatives: those that are most alike weigh more in the contrast, and mixtures of them are added.

    weight of a negative j for an anchor i  ~  exp(beta z_i . z_j)

Mixtures are made after a tenth of all steps: before, all features look alike. `toolbox.objectives.negatives` has them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece
from atoll.kernel.algorithm import NonNegative


@dataclass(frozen=True, kw_only=True)
class Hard(ContrastPiece):
    """Negatives that are hard to tell apart count more."""

    hardness: NonNegative = 0.5  # beta: how much more weight similar negatives get
    synthetic: bool = False  # whether to add mixtures of hard negatives, after a tenth of all steps

    called: ClassVar[str] = "hard"

    @property
    def adds(self) -> bool:
        """Whether negatives are weighed or made."""
        return self.hardness > 0 or self.synthetic

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return how hard negatives are taken."""
        return {"hardness": self.hardness, "synthetic": self.synthetic}
