"""What a network is trained for and judged by: losses and metrics, one value per sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.errors import TaskError

PerSample = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one value per sample


@dataclass(frozen=True)
class Metric:
    """A figure of merit, and how to read it; calling it gives one value per sample."""

    name: str
    per_sample: PerSample
    higher_is_better: bool = True
    share: bool = False  # between 0 and 1, shown in percent

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one value per sample."""
        return self.per_sample(outputs, targets)

    @property
    def facts(self) -> dict[str, str | bool]:
        """What a report must know of it, as JSON."""
        return {"name": self.name, "higher_is_better": self.higher_is_better, "share": self.share}


def metric_of(score: PerSample) -> Metric:
    """Return a metric as it is, and a bare function as a metric that is better when higher."""
    if not callable(score):
        raise TaskError(
            f"The metric of a task must be a function of outputs and targets, one value per sample. Got {score!r}.",
            hint="a metric by its name is chosen where the task is run: federate(task, ..., metric='f1').",
        )
    return score if isinstance(score, Metric) else Metric(getattr(score, "__name__", "score").replace("_", " "), score)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's cross-entropy of class logits; axes beyond the class axis (tokens) are averaged."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses if losses.ndim == 1 else losses.flatten(1).mean(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's squared error, averaged over its targets; a last axis of one may be missing."""
    errors = (outputs.reshape(targets.shape) - targets).square()
    return errors if errors.ndim == 1 else errors.flatten(1).mean(1)


def _right(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's share of targets with the largest logit: 1 or 0, or between them for tokens."""
    right = (outputs.argmax(1) == targets).to(outputs.dtype)
    return right if right.ndim == 1 else right.flatten(1).mean(1)


def _distance(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = (outputs.reshape(targets.shape) - targets).abs()
    return errors if errors.ndim == 1 else errors.flatten(1).mean(1)


accuracy = Metric("accuracy", _right, share=True)
absolute_error = Metric("mean absolute error", _distance, higher_is_better=False)
