"""FedProx: federated averaging with local training held near the received model.

    min_v  F_k(v) + (mu / 2) ||v - w||^2                  (each client, from v = w)

With ``mu = 0`` this is FedAvg; as ``mu`` grows, clients move less.

Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. "Federated Optimization in Heterogeneous Networks."
MLSys 2020, Algorithm 2. https://arxiv.org/abs/1812.06127
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Search, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.toolbox.client import proximal, sgd


@dataclass(frozen=True, kw_only=True)
class FedProx(Algorithm):
    """One shared model; the proximal term limits client drift."""

    mu: Annotated[NonNegative, Search(0.001, 1, log=True)] = 0.1  # μ: pull towards the received model
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {"fedavg": {"mu": 0.0}}
    cites: ClassVar[str] = "li2020federated"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls the local model to w."""
        return {"lr * mu": lr * self.mu}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train from w, pulled back to w."""
        w_k = sgd(cohort, start=w, epochs=self.epochs, penalty=proximal(self.mu, center=w))
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))
