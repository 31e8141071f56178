"""Open sets: clients learn to answer "unknown" to what is of none of their classes.

    min_w_k  E CE(o(x), y)  +  a E CE(o(x~), u)  +  b E CE(o(x'), u)  +  c E CE(o(x) without o_y, u)

o(x) are the outputs for all classes and one more, u, for unknown samples. x~ is a sample of the client that was
destroyed (`toolbox.objectives.outliers`). x' is x~ after some steps x~ + e sign(grad_x CE(o(x~), u)), to where the
model would take it for one of its classes. By the last term u is the second answer to every sample, before classes
that the client never saw.

Reference: Diao, Li, He. "Towards Addressing Label Skews in One-Shot Federated Learning." ICLR 2023.
https://openreview.net/forum?id=rzrqh85f4Sc
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.algorithm import Epochs, NonNegative, Steps
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError, name_in_messages
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.features import feature_size
from atoll.toolbox.objectives.openset import disguise, open_logits, placeholder_losses, with_unknown
from atoll.toolbox.objectives.outliers import destroy
from atoll.toolbox.pairs import UNKNOWN, LocalTraining, Start


@dataclass(frozen=True, kw_only=True)
class OpenSet(LocalTraining):
    """Cross-entropy with one more class, of outliers made from the client's own samples."""

    epochs: Epochs = 10  # E: local epochs
    destroyed: NonNegative = 1.0  # a: weight of destroyed samples
    adversarial: NonNegative = 1.0  # b: weight of destroyed samples that were moved
    placeholder: NonNegative = 1.0  # c: weight of "unknown" as the second answer to every sample
    attack_steps: Steps = 5  # how many times destroyed samples are moved
    attack_size: NonNegative = 0.004  # e: how far each value of a sample moves in a step
    augmented: bool = True  # whether x are views of samples, where the task changes them; else samples as they are

    called: ClassVar[str] = "openset"
    follows_samples: ClassVar[bool] = False
    offers: ClassVar[frozenset[str]] = frozenset({UNKNOWN})
    cites: ClassVar[str] = "diao2023towards"

    def start(self, task: Facts) -> Start:
        """Return the initial model, which has features, of a task whose samples can be destroyed."""
        if not task.sample.is_floating_point():
            raise TaskError(f"{name_in_messages(self)} destroys samples of numbers. {task.name} has others.")
        feature_size(self, task)
        return super().start(task)

    def train(self, w: Params, cohort: Cohort) -> Stack:
        """Return each client's model with its unknown."""
        whole = with_unknown(w, feature_size(self, cohort.task))
        classes = cohort.task.classes
        assert classes is not None, "the task has classes"
        gradient = partial(open_gradient, how=self, classes=classes)
        return sgd(cohort, start=whole, epochs=self.epochs, only=whole, gradient=gradient, draws=True)


def open_gradient(w: Params, batch: Batch, *, how: OpenSet, classes: int) -> Found:
    """Return the gradient of the loss of samples and outliers, which pass the network together."""
    if batch.raw is not None and not how.augmented:
        batch = replace(batch, x=batch.raw)
    outliers = replace(batch, x=destroy(batch), y=torch.full_like(batch.y, classes), augment=None, raw=None)
    parts, weights = [batch, outliers], [1.0, how.destroyed]
    if how.adversarial:
        parts.append(disguise(outliers, w, how.attack_steps, how.attack_size))
        weights.append(how.adversarial)
    together = replace(
        batch,
        x=torch.cat([part.x for part in parts]),
        y=torch.cat([part.y for part in parts]),
        mask=None if batch.mask is None else torch.cat([batch.mask] * len(parts)),
        augment=None,
        raw=None,
    )

    def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        logits, after = open_logits(together, w | trained)
        each = F.cross_entropy(logits, together.y, reduction="none").chunk(len(parts))
        loss = sum((weight * batch.mean(one) for weight, one in zip(weights, each, strict=True)), torch.zeros(()))
        loss = loss + how.placeholder * batch.mean(placeholder_losses(logits[: len(batch.x)], batch.y))
        return loss, (batch.mean(each[0]), after.buffers)

    g, (loss, buffers) = batch.differentiate(objective, w.trained)
    return g, w | buffers, loss
