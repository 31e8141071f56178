"""FedAvg-FT: federated averaging, then each client fine-tunes the shared model on its own data.

    w by FedAvg;        v_k = SGD on F_k from w, for `tune_epochs` epochs over the leaves in `tune`

Nothing of the tuning is sent or kept: a client tunes the newest shared model whenever it needs its own.
With ``tune_epochs = 0`` this is FedAvg.

Reference: Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage. "Federated Evaluation of On-device Personalization."
2019. https://arxiv.org/abs/1910.10252
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Update, Weighting, among
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(Algorithm):
    """The strongest simple baseline of personalization."""

    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all
    tune: Annotated[Literal["all", "head", "norm"], among("all", "head")] = "all"  # which leaves are fine-tuned
    tune_epochs: Annotated[Epochs, among(1, 2, 5, 10, 20)] = 5  # E_ft: epochs of fine-tuning

    limits: ClassVar[Limits] = {"fedavg": {"tune_epochs": 0}}
    cites: ClassVar[str] = "wang2019federated"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train and send as FedAvg."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Tune the model on the client's training data, never on its test data."""
        return sgd(cohort, start=w, epochs=self.tune_epochs, only=self.tune, stream="tune")
