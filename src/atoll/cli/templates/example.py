"""Example: federated averaging, then each client takes a few steps of its own.

    w <- w + sum_k p_k (w_k - w);        v_k = SGD on F_k from w, for `personal_epochs` epochs

w_k is w after `epochs` local epochs, p_k the share of client k in the samples. With ``personal_epochs = 0`` this is
FedAvg.

Reference: say here which paper this is, and which of its algorithms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Example(Algorithm):
    """A shared model with a personal last step."""

    epochs: Epochs = 1  # E: local epochs per round
    personal_epochs: Epochs = 3  # epochs of the personal last step

    limits: ClassVar[Mapping[str, Mapping[str, Any]]] = {"fedavg": {"personal_epochs": 0}}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the shared model and send what changed; all clients of the cohort at once."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights("samples"))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the model a client would deploy: w, trained on with its own training data."""
        return sgd(cohort, start=w, epochs=self.personal_epochs, stream="personal")
