"""FML: every client has a model of its own, and the two models that it trains teach each other.

    v_k <- v_k - eta grad_v [ alpha F_k(v_k) + (1 - alpha) E_x KL( softmax(z(x; w_k)) || softmax(z(x; v_k)) ) ]
    w_k <- w_k - eta grad_w [ beta  F_k(w_k) + (1 - beta)  E_x KL( softmax(z(x; v_k)) || softmax(z(x; w_k)) ) ]

w_k begins at the shared w and is averaged; v_k never leaves. Both learn on the same batches, from what the other one
answered before the step. With ``alpha = 1`` each v_k is trained alone, as `local`; with ``beta = 1`` w is FedAvg's.

Reference: Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu. "Federated Mutual Learning." 2020.
https://arxiv.org/abs/2006.16765
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, Search, Share, Update, Weighting, WithEverybody
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts, Training
from atoll.toolbox.client import descend, zero_velocity
from atoll.toolbox.client.descent import Found, TwoModels
from atoll.toolbox.server.distillation import divergence


@dataclass(frozen=True, kw_only=True)
class FML(Algorithm):
    """A personal and a shared model that teach each other."""

    alpha: Annotated[Share, Search(0.1, 0.9)] = 0.5  # α: weight of the data in the loss of v_k; the rest is w_k's
    beta: Annotated[Share, Search(0.1, 0.9)] = 0.5  # β: weight of the data in the loss of w_k; the rest is v_k's
    epochs: Epochs = 1  # E: local epochs per round, on both models together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    limits: ClassVar[Limits] = {"local": WithEverybody(alpha=1.0)}
    trains_by_sgd: ClassVar[bool] = False
    cites: ClassVar[str] = "shen2020federated"

    def start(self, task: Facts) -> Params:
        """Return the initial model, of a task with classes."""
        if task.classes is None:
            raise TaskError(f"The models of FML teach each other probabilities of classes. {task.name} has no classes.")
        return task.network.initial

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train both models together, step by step on the same batches."""
        rest = zero_velocity(cohort.training, w)
        carry = TwoModels(w, cohort.recall(default=w), rest, rest)
        end = cohort.scan(partial(self._step, cohort.training), carry, given=cohort.lr, epochs=self.epochs)
        cohort.observe(**end.losses)
        return Update(send={"delta": end.w - w}, weight=cohort.weights(self.weighting), keep=end.v)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        """Return the client's own model; a client that never took part uses w."""
        return cohort.recall(default=w)

    def _step(self, rule: Training, carry: TwoModels, batch: Batch, lr: Tensor) -> TwoModels:
        """Take one step of one client; both gradients are taken before anything moves."""
        g_w, w, main = taught_gradient(carry.w, batch, carry.v, self.beta)
        g_v, v, personal = taught_gradient(carry.v, batch, carry.w, self.alpha)
        w, velocity_w = descend(rule, w, g_w, carry.velocity_w, lr)
        v, velocity_v = descend(rule, v, g_v, carry.velocity_v, lr)
        return TwoModels(w, v, velocity_w, velocity_v, carry.main.add(main), carry.personal.add(personal))


def taught_gradient(w: Params, batch: Batch, other: Params, share: float) -> Found:
    """Return the gradient of a share of the data's loss, and of the distance to another model, which does not learn."""
    if share == 1:
        return batch.gradient(w)
    wanted = batch.forward(other)[0].softmax(1)

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        outputs, after = batch.forward(w | trained)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        apart = batch.mean(divergence(outputs, wanted))
        return share * loss + (1 - share) * apart, (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss
