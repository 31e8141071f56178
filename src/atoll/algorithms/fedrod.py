"""FedRoD: one body under two heads; a generic one for all classes, and a personal one on top of its answers.

    generic:   min_{w, h}  sum_k p_k E_k [ CE(h(z) + gamma log n_k, y) ],        z = body(x; w), averaged
    personal:  min_{h_k}   E_k [ CE(h(z) + h_k(z), y) ],                         h(z) and z held fixed, never sent

n_k are client k's class counts: the balanced softmax, under which the generic model serves every class alike whatever
the clients have. A client answers h(z) + h_k(z). With ``gamma = 0`` the generic model is FedAvg's.

Reference: Chen, Chao. "On Bridging Generic and Personalized Federated Learning for Image Classification." ICLR 2022,
Algorithm 1, with linear personal heads. https://arxiv.org/abs/2107.00778
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, NonNegative, Predictor, Search, Update, Weighting
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts, Training
from atoll.toolbox.client import descend, sgd, zero_velocity
from atoll.toolbox.client.descent import Found, MeanLoss
from atoll.toolbox.client.features import feature_size, features_and_outputs, outputs_of
from atoll.toolbox.client.labels import label_counts

FEWEST = 1e-8  # samples that a class counts as having if there are none: its logarithm must exist


@record
class Carry:
    """The generic model and the personal head on their way."""

    w: Each
    head: Each
    velocity_w: Each
    velocity_head: Each
    main: MeanLoss
    personal: MeanLoss


@record
class Given:
    """What does not change on the way."""

    lr: Tensor
    prior: Each  # what is added to logits, by the client's labels


@dataclass(frozen=True, kw_only=True)
class FedRoD(Algorithm):
    """A shared model for all classes alike, and a personal head that adds what a client's own data say."""

    gamma: Annotated[NonNegative, Search(0, 2)] = 1.0  # γ: how far the generic loss is balanced over classes
    epochs: Epochs = 1  # E: local epochs per round, on everything together
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all

    trains_by_sgd: ClassVar[bool] = False
    deploys_a_model: ClassVar[bool] = False
    cites: ClassVar[str] = "chen2022bridging"

    def start(self, task: Facts) -> Params:
        """Return the generic model."""
        feature_size(self, task)
        return task.network.initial

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train the generic model and, on what it answers, the personal head, step by step on the same batches."""
        rule, head = cohort.training, cohort.recall(default=cohort.initial.part("head"))
        prior = self.gamma * label_counts(cohort).value.clamp(min=FEWEST).log()
        carry = Carry(w, head, zero_velocity(rule, w), zero_velocity(rule, head), MeanLoss(), MeanLoss())
        end = cohort.scan(partial(step, rule), carry, given=Given(cohort.lr, prior), epochs=self.epochs)
        cohort.observe(**{"loss/main": end.main.value, "loss/personal": end.personal.value})
        return Update(send={"delta": end.w - w}, weight=cohort.weights(self.weighting), keep=end.head)

    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        """Return both heads; the personal one of a client that never took part says nothing yet."""
        silent = cohort.initial.part("head").map(torch.zeros_like)
        return Predictor(w, cohort.recall(default=silent), both_heads)

    def welcome(self, w: Params, cohort: Cohort) -> Predictor:
        """Fit a personal head of a new client to the generic model."""
        head = sgd(cohort, cohort.initial.part("head"), epochs=self.epochs, gradient=personal_gradient, given=w)
        return Predictor(w, head, both_heads)


def step(rule: Training, carry: Carry, batch: Batch, given: Given) -> Carry:
    """Take one step of one client."""
    w, head = carry.w, carry.head

    def balanced(trained: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Params]]:
        features, outputs, after = features_and_outputs(batch, w | trained)
        loss = batch.mean(batch.network.loss(outputs + given.prior, batch.y))
        return loss, (loss, features, outputs, after.buffers)

    g, (main, features, generic, buffers) = batch.differentiate(balanced, w.trained)
    g_head, head, personal = residual_gradient(w, head, batch, features, generic)
    w, velocity_w = descend(rule, w | buffers, g, carry.velocity_w, given.lr)
    head, velocity_head = descend(rule, head, g_head, carry.velocity_head, given.lr)
    return Carry(w, head, velocity_w, velocity_head, carry.main.add(main), carry.personal.add(personal))


def residual_gradient(w: Params, head: Params, batch: Batch, features: Tensor, generic: Tensor) -> Found:
    """Return the gradient of the personal head, added to generic answers that are held fixed."""

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        more, after = outputs_of(batch, w | head | trained, features)
        loss = batch.mean(batch.network.loss(generic + more, batch.y))
        return loss, (loss, after.buffers.only(head))

    g, (loss, buffers) = batch.differentiate(objective, head.trained)
    return g, head | buffers, loss


def personal_gradient(head: Params, batch: Batch, w: Params) -> Found:
    """Return the gradient of the personal head beside a generic model that is not trained."""
    features, generic, _ = features_and_outputs(batch, w)
    return residual_gradient(w, head, batch, features, generic)


def both_heads(w: Params, head: Params, batch: Batch) -> Tensor:
    """Return what both heads answer together."""
    features, generic, _ = features_and_outputs(batch, w)
    return generic + outputs_of(batch, w | head, features)[0]
