"""APFL: every client deploys a mixture of the shared model w and a model v_k of its own.

    min_{v_k}  F_k(alpha_k v_k + (1 - alpha_k) w),        w by federated averaging

    w_k     <- w_k - eta grad F_k(w_k)
    v_k     <- v_k - eta alpha_k grad F_k(vbar_k),        vbar_k = alpha_k v_k + (1 - alpha_k) w_k
    alpha_k <- alpha_k - eta <v_k - w_k, grad F_k(vbar_k)>, cut to [0, 1]       (only if `adaptive`)

v_k begins with the w of the round in which client k first takes part. With ``alpha = 1`` each client trains alone from
there, as `local` if all take part from the first round on; with ``alpha = 0`` this is FedAvg. ``form = "survey"`` is
another method that a survey describes under this name: alpha weighs the shared part, and the models are mixed,
v_k <- alpha_k (w_k - eta grad F_k(w_k)) + (1 - alpha_k) (v_k - eta grad F_k(v_k)); deployed is v_k.

Reference: Deng, Kamani, Mahdavi. "Adaptive Personalized Federated Learning." 2020, Algorithm 1.
https://arxiv.org/abs/2003.13461
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Share, Update, Weighting, WithEverybody
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Training
from atoll.toolbox.client import at_rest, best_share, descend


@dataclass(frozen=True, kw_only=True)
class APFL(Algorithm):
    """A personal model, trained as a part of its mixture with the shared one."""

    form: Literal["published", "survey"] = "published"  # which of the two methods of this name
    alpha: Share = 0.5  # α: share of v_k in the mixture; in the survey's form, of w_k
    adaptive: bool = False  # whether clients adapt α: by gradient; in the survey's form on validation data
    epochs: Epochs = 1  # E: local epochs per round, on both models together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {
        "local": WithEverybody(alpha=1.0, adaptive=False, form="published"),
        "fedavg": {"alpha": 0.0, "adaptive": False, "form": "published"},
    }
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "deng2020adaptive"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models together, step by step on the same batches."""
        kept, rest = self._kept(w, cohort), at_rest(cohort.training, w)
        if self.form == "survey" and self.adaptive:
            kept["alpha"] = Stack.of(alpha=1 - best_share(cohort, w, kept["v"], otherwise=1 - self.alpha))
        carry = {
            "w": w,
            **kept,
            "velocity": {"w": rest, "v": rest},
            "seen": Params.of(main=0.0, personal=0.0, steps=0.0),
        }
        end = cohort.scan(partial(self._step, cohort.training), carry, given={"lr": cohort.lr}, epochs=self.epochs)
        seen = end["seen"] / end["seen"]["steps"].clamp(min=1)
        cohort.observe(**{"loss/main": seen["main"], "loss/personal": seen["personal"]})
        keep = {"v": end["v"], "alpha": end["alpha"]}
        return Update(send={"delta": end["w"] - w}, weight=cohort.weights(self.weighting), keep=keep)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """The mixture with the newest w, under the statistics of its own passes; who never took part uses w."""
        kept = self._kept(w, cohort)
        v: Stack = kept["v"]
        if self.form == "survey":
            return v
        if self.alpha == 0 and not self.adaptive:  # nothing is mixed: w has its own statistics
            return cohort.stacked(w)
        return cohort.stacked(w).lerp(v.trained, kept["alpha"]["alpha"]) | v.buffers

    def _kept(self, w: Params, cohort: Cohort) -> dict[str, Any]:
        alpha = cohort.lr.new_tensor(self.alpha)  # in the model's precision
        return cohort.recall(default={"v": w, "alpha": Params.of(alpha=alpha)})

    def _step(self, rule: Training, carry: dict[str, Any], batch: Batch, given: dict[str, Any]) -> dict[str, Any]:
        """One step of one client; both gradients are taken before anything moves."""
        w, v, alpha, velocity, lr = carry["w"], carry["v"], carry["alpha"]["alpha"], carry["velocity"], given["lr"]
        g_w, w_k, main = batch.gradient(w)
        w_k, velocity_w = descend(rule, w_k, g_w, velocity["w"], lr)
        if self.form == "survey":
            g_v, v_k, personal = batch.gradient(v)
            v_k, velocity_v = descend(rule, v_k, g_v, velocity["v"], lr)
            v_k = v_k.lerp(w_k.trained, alpha)  # v_k keeps the statistics of its own passes
        else:
            g, vbar, personal = batch.gradient(v | w.trained.lerp(v.trained, alpha))
            # BatchNorm's statistics of the mixture are kept with v.
            v_k, velocity_v = descend(rule, v | vbar.buffers, g * alpha, velocity["v"], lr)
            if self.adaptive:
                alpha = (alpha - lr * (v - w).dot(g)).clamp(0, 1)
        seen = carry["seen"] + Params.of(main=main, personal=personal, steps=torch.ones_like(main))
        velocity = {"w": velocity_w, "v": velocity_v}
        return {"w": w_k, "v": v_k, "alpha": Params.of(alpha=alpha), "velocity": velocity, "seen": seen}
