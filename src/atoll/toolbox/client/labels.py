"""Classes of samples: that there are some, and how many training samples of each the clients have."""

from __future__ import annotations

import torch

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError, name_in_messages
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.passes import many_at_once


def require_classes(method: object, task: Facts) -> None:
    """Raise unless every sample of a task is of one class."""
    if not task.one_class_each:
        raise TaskError(f"{name_in_messages(method)} needs samples of one class each. {task.name} has none.")


def label_counts(cohort: Cohort) -> Stack:
    """Count each client's training samples by class, one row per client, under the name `counts`."""
    classes = cohort.task.classes
    assert classes is not None, "the task has no classes"
    start = Params.of(counts=torch.zeros(classes))
    counts: Stack = cohort.scan(_count, start, batch_size=many_at_once(cohort), shuffle=False, train=False)
    return counts


def _count(seen: Params, batch: Batch, given: None) -> Params:  # noqa: ARG001
    counts = seen["counts"]
    same = (batch.y[:, None] == torch.arange(len(counts), device=batch.y.device)).to(counts.dtype)
    return Params.of(counts=counts + (same if batch.mask is None else same * batch.mask[:, None]).sum(0))
