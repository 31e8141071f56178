"""Cross-entropy: clients train alone, as `local` does.

w_k = the broadcast model after `epochs` local epochs
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Epochs
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import sgd
from atoll.toolbox.pairs import LocalTraining


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(LocalTraining):
    """Training alone, by the task's own loss."""

    epochs: Epochs = 10  # E: local epochs

    called: ClassVar[str] = "ce"

    def train(self, w: Params, cohort: Cohort) -> Stack:
        """Return each client's model after local training."""
        return sgd(cohort, start=w, epochs=self.epochs)
