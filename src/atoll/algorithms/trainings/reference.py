"""A reference: features stay like those of a teacher that the server trained on public samples, fading.

    ... + weight (1 - t) distance( features of the client,  features of the teacher on public samples )

The distance is a maximum mean discrepancy, one of covariances (CORAL) or a sliced one (`toolbox.objectives.alignment`).
Clients begin with the teacher; features of public samples are sent once.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece, Supplied
from atoll.kernel.algorithm import Count, Epochs, NonNegative
from atoll.kernel.engine import Workbench
from atoll.kernel.params import Params
from atoll.toolbox.objectives.terms import Reference, ReferenceBy
from atoll.toolbox.server.pools import directions, sample


@dataclass(frozen=True, kw_only=True)
class ToReference(ContrastPiece):
    """Features that stay near a teacher's."""

    reference: Reference = "mmd"  # distance of the client's features to those of a teacher
    reference_weight: NonNegative = 1.0  # weight of that distance, fading to 0
    reference_by: ReferenceBy = "prior"  # how it minds classes: the teacher's are as frequent as the client's, or each
    # is compared with its own
    pool_size: Count = 4096  # public samples whose features are sent
    pool_draw: Count = 256  # of which a step compares with so many
    teacher_epochs: Epochs = 20  # of the server on public samples

    called: ClassVar[str] = "reference"
    needs_public_data: ClassVar[bool] = True

    @property
    def adds(self) -> bool:
        """Whether there is a reference."""
        return self.reference != "none"

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return what the distance is."""
        return {
            "reference": self.reference,
            "reference_weight": self.reference_weight,
            "reference_by": self.reference_by,
            "pool_draw": self.pool_draw,
        }

    @property
    def taught_for(self) -> int | None:
        """How long the teacher is trained that clients begin with."""
        return self.teacher_epochs

    def equip(self, start: Supplied, bench: Workbench, first: Params) -> Supplied:
        """Find the teacher's features of public samples."""
        x, y = sample(bench, self.pool_size)
        return replace(start, reference=Params.of(features=directions(bench, start.model, x), y=y))
