"""Conflict: the gradients of the contrast and of the rest are compared, and projected apart where they disagree.

    cos(g_contrast, g_rest),     g_contrast <- g_contrast - min(0, g_contrast . g_rest) g_rest / |g_rest|^2

Reference: Yu et al. "Gradient Surgery for Multi-Task Learning." NeurIPS 2020. https://arxiv.org/abs/2001.06782
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from atoll.algorithms.trainings.fafi import PrototypeContrast
from atoll.algorithms.trainings.pieces import ContrastPiece
from atoll.toolbox.objectives.prototypical import Conflict, Step


@dataclass(frozen=True, kw_only=True)
class OfGradients(ContrastPiece):
    """Gradients of contrast and classification, compared or projected apart."""

    conflict: Conflict = "projected"  # of contrast and the rest: their gradients' cosine measured, or projected apart

    called: ClassVar[str] = "conflict"

    @property
    def adds(self) -> bool:
        """Whether gradients are looked at."""
        return self.conflict != "ignored"

    def settings(self, training: PrototypeContrast) -> dict[str, Any]:
        """Return nothing: the objective stays as it is."""
        return {}

    def change(self, step: Step) -> Step:
        """Return the step that minds conflicts."""
        return replace(step, conflict=self.conflict)
