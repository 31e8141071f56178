"""Ditto: one shared model w for the federation, one personal model v_k per client.

    min_v  F_k(v) + (lam / 2) ||v - w||^2,        w by federated averaging

v_k begins with the w of the round in which client k first takes part. With ``lam = 0`` each client trains alone from
there, and does what `local` does if all take part from the first round on; as ``lam`` grows, v_k is held to w.

Reference: Li, Hu, Beirami, Smith. "Ditto: Fair and Robust Federated Learning Through Personalization."
ICML 2021, Algorithm 1. https://arxiv.org/abs/2012.04221
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Search, Update, Weighting, WithEverybody
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client import proximal, sgd


@dataclass(frozen=True, kw_only=True)
class Ditto(Algorithm):
    """A personal model per client, regularised towards the shared one."""

    lam: Annotated[NonNegative, Search(0.01, 2, log=True)] = 1.0  # λ: pull of the personal model towards the shared one
    epochs: Epochs = 1  # local epochs on w
    personal_epochs: Annotated[Epochs, Search(among=(1, 2, 5))] = 1  # local epochs on v_k
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {"local": WithEverybody(lam=0.0)}
    cites: ClassVar[str] = "li2021ditto"

    def pulls(self, lr: float) -> dict[str, float]:
        """Return how far a step pulls v_k to w."""
        return {"lr * lam": lr * self.lam}

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models; the anchor is the received w, so their order does not matter."""
        v = cohort.recall(default=w)
        w_k = sgd(cohort, start=w, epochs=self.epochs)
        v = sgd(cohort, start=v, epochs=self.personal_epochs, penalty=proximal(self.lam, center=w))
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting), keep=v)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's own model; a client that never took part uses w."""
        return cohort.recall(default=w)
