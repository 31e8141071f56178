"""Interpolation: every client deploys a mixture of a model v_k of its own and the shared model w.

    P_k = a_k v_k + (1 - a_k) w,        v_k trained alone, w by federated averaging

a_k is given, or the best of 0, 0.1, ..., 1 on the client's validation data, chosen anew whenever the client needs its
model. With ``share = 0`` this is FedAvg, with ``share = 1`` every client that ever takes part trains alone. A survey
describes it under the name FedAMP, "adaptive model personalization"; the published FedAMP is another method, `fedamp`.

Reference: interpolation is one of three approaches in Mansour, Mohri, Ro, Suresh. "Three Approaches for Personalization
with Applications to Federated Learning." 2020, Section 5. https://arxiv.org/abs/2002.10619
"""

from dataclasses import dataclass
from typing import ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Share, Update, Weighting, WithEverybody
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import best_share, sgd


@dataclass(frozen=True, kw_only=True)
class Interp(Algorithm):
    """A mixture of the local and the shared model, as much of each as validation data say."""

    share: Share | None = None  # a_k: share of the own model; None: the best one on each client's validation data
    epochs: Epochs = 1  # E: local epochs per round, on each of the two models
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    reads_validation: ClassVar[bool] = True  # the share is the best there
    limits: ClassVar[Limits] = {"fedavg": {"share": 0.0}, "local": WithEverybody(share=1.0)}
    cites: ClassVar[str] = "mansour2020three"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models; neither sees the other."""
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        v = sgd(cohort, start=cohort.recall(default=cohort.initial), epochs=self.epochs)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting), keep=v)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the mixture; a client without validation samples uses w, as does one that never took part."""
        v = cohort.recall(default=w)
        share = best_share(cohort, w, v, otherwise=0.0) if self.share is None else self.share
        return cohort.stacked(w).lerp(v, share)
