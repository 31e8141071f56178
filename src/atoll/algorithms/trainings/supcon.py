"""CE + SupCon: clients learn labels from samples as they are, and what belongs together from two views of them.

    min_w_k  E CE(z(x; w_k), y)  +  lam E SupCon(f(x'; w_k), f(x''; w_k), y)

x', x'' are two independent random views of x (`--augment`), f is what enters the head. SupCon draws the features of one
class together and those of others apart, whatever view. Statistics of BatchNorm are those of x, which is what a
deployed model sees.

Reference: Khosla et al. "Supervised Contrastive Learning." NeurIPS 2020. https://arxiv.org/abs/2004.11362
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from atoll.kernel.algorithm import Epochs, NonNegative, Positive
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.contrastive import supervised_contrast
from atoll.toolbox.pairs import LocalTraining, Start


@dataclass(frozen=True, kw_only=True)
class SupCon(LocalTraining):
    """Cross-entropy, and a contrast of views."""

    epochs: Epochs = 10  # E: local epochs
    lam: NonNegative = 1.0  # λ: weight of the contrast
    temperature: Positive = 0.07  # temperature of the contrast

    called: ClassVar[str] = "supcon"
    follows_samples: ClassVar[bool] = False
    cites: ClassVar[str] = "khosla2020supervised"

    def start(self, task: Facts) -> Start:
        """Return the initial model, which has features."""
        feature_size(self, task)
        return super().start(task)

    def train(self, w: Params, cohort: Cohort) -> Stack:
        """Return each client's model after training with the contrast."""
        gradient = partial(contrast_gradient, lam=self.lam, temperature=self.temperature)
        return sgd(cohort, start=w, epochs=self.epochs, gradient=gradient)


def contrast_gradient(w: Params, batch: Batch, *, lam: float, temperature: float) -> Found:
    """Return the gradient of the loss on the samples as they are, and of the contrast of their views."""
    plain = batch if batch.raw is None else replace(batch, x=batch.raw)
    views = batch.views(2)

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        whole = w | trained
        outputs, after = plain.forward(whole)
        loss = batch.mean(batch.network.loss(outputs, batch.y))
        contrast = supervised_contrast(views.features(whole), views.y, views.mask, temperature=temperature)
        return loss + lam * views.mean(contrast), (loss, after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss
