"""FedSAM: federated averaging whose clients look for flat minima.

    min_w  sum_k p_k max_{||eps|| <= rho} F_k(w + eps);        local steps along g_s = g(w_k + rho g(w_k) / ||g(w_k)||)

Both gradients are of one batch. With ``adaptive`` the neighbourhood of a weight scales with its size (ASAM):
eps = rho w^2 g / || |w| g ||. With ``rho = 0`` this is FedAvg.

Reference: Qu, Li, Duan, Liu, Tang, Lu. "Generalized Federated Learning via Sharpness Aware Minimization." ICML 2022,
Algorithm 1. https://arxiv.org/abs/2206.02618 (with ASAM: Caldarola, Caputo, Ciccone, ECCV 2022)
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class FedSAM(Algorithm):
    """One shared model, trained where its neighbourhood is good, too."""

    rho: NonNegative = 0.05  # ρ: radius of the neighbourhood
    adaptive: bool = False  # ASAM: the radius of each weight scales with its size
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    follows_samples: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"fedavg": {"rho": 0.0}}
    cites: ClassVar[str] = "qu2022generalized"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train and send as FedAvg, along sharpness-aware gradients."""
        w_k = sgd(cohort, start=w, epochs=self.epochs, radius=self.rho, adaptive=self.adaptive)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))
