"""APFL: every client deploys a mixture of the shared model w and a model v_k of its own.

    min_{v_k}  F_k(alpha_k v_k + (1 - alpha_k) w),        w by federated averaging

    w_k     <- w_k - eta grad F_k(w_k)
    v_k     <- v_k - eta alpha_k grad F_k(vbar_k),        vbar_k = alpha_k v_k + (1 - alpha_k) w_k
    alpha_k <- alpha_k - eta <v_k - w_k, grad F_k(vbar_k)>, cut to [0, 1]       (only if `adaptive`)

v_k begins with the w of the round in which client k first takes part. With ``alpha = 1`` each client trains alone from
there, as `local` if all take part from the first round on; with ``alpha = 0`` this is FedAvg. What a survey describes
under this name is another method, `apfl-survey`.

Reference: Deng, Kamani, Mahdavi. "Adaptive Personalized Federated Learning." 2020, Algorithm 1.
https://arxiv.org/abs/2003.13461
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Search, Share, Update, Weighting, WithEverybody, among
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Training
from atoll.toolbox.client import descend, zero_velocity
from atoll.toolbox.client.descent import MeanLoss


@record
class Kept:
    """What a client keeps."""

    v: Stack
    alpha: Each


@record
class Carry:
    """Both models on their way, and how fast they go."""

    w: Each
    v: Each
    alpha: Each
    velocity_w: Each
    velocity_v: Each
    main: MeanLoss
    personal: MeanLoss


@dataclass(frozen=True, kw_only=True)
class APFL(Algorithm):
    """A personal model, trained as a part of its mixture with the shared one."""

    alpha: Annotated[Share, Search(0.1, 0.9)] = 0.5  # α: share of v_k in the mixture
    adaptive: Annotated[bool, among(False, True)] = False  # whether clients adapt α by gradient
    epochs: Epochs = 1  # E: local epochs per round, on both models together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {
        "local": WithEverybody(alpha=1.0, adaptive=False),
        "fedavg": {"alpha": 0.0, "adaptive": False},
    }
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "deng2020adaptive"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models together, step by step on the same batches."""
        kept, rest = self._recall(w, cohort), zero_velocity(cohort.training, w)
        carry = Carry(w, kept.v, kept.alpha, rest, rest, MeanLoss(), MeanLoss())
        end = cohort.scan(partial(self._step, cohort.training), carry, given=cohort.lr, epochs=self.epochs)
        cohort.observe(**{"loss/main": end.main.value, "loss/personal": end.personal.value})
        keep = Kept(end.v, end.alpha)
        return Update(send={"delta": end.w - w}, weight=cohort.weights(self.weighting), keep=keep)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the mixture with the newest w, under the statistics of its own passes; who never took part uses w."""
        kept = self._recall(w, cohort)
        if self.alpha == 0 and not self.adaptive:  # nothing is mixed: w has its own statistics
            return cohort.stacked(w)
        return cohort.stacked(w).lerp(kept.v.trained, kept.alpha) | kept.v.buffers

    def _recall(self, w: Params, cohort: Cohort) -> Kept:
        return cohort.recall(default=Kept(cohort.stacked(w), cohort.each(self.alpha)))

    def _step(self, rule: Training, carry: Carry, batch: Batch, lr: Tensor) -> Carry:
        """Take one step of one client; both gradients are taken before anything moves."""
        w, v, alpha = carry.w, carry.v, carry.alpha
        g_w, w_k, main = batch.gradient(w)
        w_k, velocity_w = descend(rule, w_k, g_w, carry.velocity_w, lr)
        g, vbar, personal = batch.gradient(v | w.trained.lerp(v.trained, alpha))
        # BatchNorm's statistics of the mixture are kept with v.
        v_k, velocity_v = descend(rule, v | vbar.buffers, g * alpha, carry.velocity_v, lr)
        if self.adaptive:
            alpha = (alpha - lr * (v - w).dot(g)).clamp(0, 1)
        return Carry(w_k, v_k, alpha, velocity_w, velocity_v, carry.main.add(main), carry.personal.add(personal))
