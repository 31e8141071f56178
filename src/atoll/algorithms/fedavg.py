"""FedAvg: every client trains the shared model for a while, the server averages.

    min_w  sum_k p_k F_k(w),        w <- w + sum_k p_k (w_k - w)

w_k is w after `epochs` local epochs; p_k are the sample shares of the cohort, or uniform. One local step recovers
gradient descent on the sum; many steps drift towards the mean of the clients' own optima. Where clients have different
architectures, each has a model of its own, averaged over its clients.

Reference: McMahan, Moore, Ramage, Hampson, Agüera y Arcas. "Communication-Efficient Learning of Deep Networks from
Decentralized Data." AISTATS 2017, Algorithm 1. https://arxiv.org/abs/1602.05629
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Update, Weighting
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """One shared model for all clients."""

    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    mixes_architectures: ClassVar[bool] = True
    cites: ClassVar[str] = "mcmahan2017communication"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the shared model and send what changed."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting))
