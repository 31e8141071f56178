"""APFL as a survey has it: in every step, a client's own model v_k takes in a share of the shared one.

    w_k <- w_k - eta grad F_k(w_k)
    v_k <- alpha_k w_k + (1 - alpha_k) (v_k - eta grad F_k(v_k)),        w by federated averaging

Deployed is v_k. It begins with the w of the round in which client k first takes part. alpha_k weighs the shared part:
it is the best of 0, 0.1, ..., 1 on the client's validation data, chosen anew in every round, or fixed if not
`adaptive`.

Reference: no paper has this form. A survey describes it under the name of Deng, Kamani, Mahdavi. "Adaptive Personalized
Federated Learning." 2020, whose method is `apfl`. https://arxiv.org/abs/2003.13461
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Share, Update, Weighting, WithEverybody
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Training
from atoll.toolbox.client import best_share, descend, zero_velocity
from atoll.toolbox.client.descent import TwoModels


@record
class Given:
    """What does not change in a round."""

    alpha: Each
    lr: Tensor


@dataclass(frozen=True, kw_only=True)
class APFLSurvey(Algorithm):
    """A personal model, mixed with the shared one in every step."""

    alpha: Share = 0.5  # α: share of w_k in every step of v_k, if it is fixed or a client has no validation data
    adaptive: bool = True  # whether clients choose α on validation data; False: it is `alpha`
    epochs: Epochs = 1  # E: local epochs per round, on both models together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    reads_validation: ClassVar[bool] = True  # α is the best there
    trains_by_sgd: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"local": WithEverybody(alpha=0.0, adaptive=False)}
    cites: ClassVar[str] = "deng2020adaptive"

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models together, step by step on the same batches."""
        v, rest = cohort.recall(default=w), zero_velocity(cohort.training, w)
        alpha = cohort.each(self.alpha)
        if self.adaptive:
            alpha = 1 - best_share(cohort, w, v, otherwise=1 - self.alpha)
            cohort.observe(alpha=alpha)
        carry, given = TwoModels(w, v, rest, rest), Given(alpha, cohort.lr)
        end = cohort.scan(partial(_step, cohort.training), carry, given=given, epochs=self.epochs)
        cohort.observe(**end.losses)
        return Update(send={"delta": end.w - w}, weight=cohort.weights(self.weighting), keep=end.v)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's own model; a client that never took part uses w."""
        return cohort.recall(default=w)


def _step(rule: Training, carry: TwoModels, batch: Batch, given: Given) -> TwoModels:
    """Take one step of one client; both gradients are taken before anything moves."""
    g_w, w_k, main = batch.gradient(carry.w)
    g_v, v_k, personal = batch.gradient(carry.v)
    w_k, velocity_w = descend(rule, w_k, g_w, carry.velocity_w, given.lr)
    v_k, velocity_v = descend(rule, v_k, g_v, carry.velocity_v, given.lr)
    v_k = v_k.lerp(w_k.trained, given.alpha)  # v_k keeps the statistics of its own passes
    return TwoModels(w_k, v_k, velocity_w, velocity_v, carry.main.add(main), carry.personal.add(personal))
