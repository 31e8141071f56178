"""Balance: rare classes count as much as frequent ones.

    classification    CE(l + log(n_c + 1), y)                       (`prior`)
    contrast          a mean over classes of means over samples     (`balanced`)
    samples           weigh n_y^-q, or are drawn so                 (`rarity`)

`toolbox.objectives.balance` has these losses.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece
from atoll.kernel.algorithm import Share
from atoll.toolbox.objectives.terms import Prior, RarityBy


@dataclass(frozen=True, kw_only=True)
class Balance(ContrastPiece):
    """Losses of clients that have few samples of some classes, and none of others."""

    balanced: bool = True  # whether every class counts the same in the contrast, absent ones by their prototypes
    prior: Prior = "none"  # logits + log(n_c + 1) in the cross-entropy; restricted: absent classes' logits are halved
    rarity: Share = 0.0  # q: samples weigh n_y^-q
    rarity_by: RarityBy = "weights"  # how: by weights of losses, or drawn so from their batch, with replacement

    called: ClassVar[str] = "balance"

    @property
    def adds(self) -> bool:
        """Whether anything is balanced."""
        return self.balanced or self.prior != "none" or self.rarity > 0

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return what is balanced."""
        return {
            "balanced": self.balanced,
            "prior": self.prior,
            "rarity": self.rarity,
            "rarity_by": self.rarity_by,
        }
