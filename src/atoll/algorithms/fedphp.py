"""FedPHP: what a client learned is inherited by a private model h_k, a moving average that teaches the next one.

    w_k  <- SGD from w on (1 - lam) F_k(w_k) + lam R(w_k, h_k),        w by averaging the w_k
    h_k  <- mu_k h_k + (1 - mu_k) w_k,                                 mu_k = mu min(1, visits_k / ramp)

R is what w_k and h_k answer differently: the cross-entropy with h_k's softened answers (``way = "kd"``), or the
discrepancy of what enters their heads (``way = "mmd"``). Deployed is h_k. With ``lam = 0`` w is that of FedAvg.

Reference: Li, Zhan, Shao, Li, Song. "FedPHP: Federated Personalization with Inherited Private Models." ECML PKDD 2021,
Algorithm 1. https://doi.org/10.1007/978-3-030-86486-6_36
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Positive, Share, Steps, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import features_and_outputs
from atoll.toolbox.objectives.discrepancy import mean_discrepancy
from atoll.toolbox.server.distillation import divergence


@record
class Kept:
    """A client's private model, and how often it took part."""

    h: Stack
    visits: Each


@dataclass(frozen=True, kw_only=True)
class FedPHP(Algorithm):
    """Federated averaging under a teacher of each client's own."""

    way: Literal["kd", "mmd"] = "kd"  # what is learned from h_k: its answers, or its features
    lam: Share = 0.05  # λ: weight of h_k in the loss; the data have 1 − λ
    temperature: Positive = 4.0  # softens the answers of h_k
    mu: Share = 0.9  # μ: the largest share of the old h_k in the new one
    ramp: Steps = 30  # visits until μ_k is μ; in the paper, the expected number in the whole run
    epochs: Epochs = 1  # E: local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    follows_samples: ClassVar[bool] = False
    cites: ClassVar[str] = "li2021fedphp"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train w under h_k, then let h_k inherit from it."""
        kept = self._recall(w, cohort)
        h, visits = kept.h, kept.visits
        lesson = partial(taught_gradient, method=self) if self.lam else None
        w_k = sgd(cohort, start=w, epochs=self.epochs, gradient=lesson, given=h)
        inherited = w_k.lerp(h, self.mu * (visits / self.ramp).clamp(max=1))
        keep = Kept(inherited, visits + 1)
        return Update(send={"delta": w_k - w}, weight=cohort.weights(self.weighting), keep=keep)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's inherited model; a client that never took part uses w."""
        return self._recall(w, cohort).h

    def _recall(self, w: Params, cohort: Cohort) -> Kept:
        """Recall what a client kept; on a first visit w is the teacher: it knows more than the initial model."""
        return cohort.recall(default=Kept(cohort.stacked(w), cohort.each(0.0)))


def taught_gradient(w: Params, batch: Batch, h: Params, *, method: FedPHP) -> Found:
    """Return the gradient of a client's loss with what it learns from its teacher, who does not learn."""
    teacher = batch.deployed
    answers = method.way == "kd"
    wanted = (teacher.outputs(h) / method.temperature).softmax(1) if answers else teacher.features(h)

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        if answers:
            outputs, after = batch.forward(w | trained)
            apart = batch.mean(divergence(outputs, wanted))
        else:
            features, outputs, after = features_and_outputs(batch, w | trained)
            apart = mean_discrepancy(features.flatten(1), wanted.flatten(1), batch.mask)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        return (1 - method.lam) * loss + method.lam * apart, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss
