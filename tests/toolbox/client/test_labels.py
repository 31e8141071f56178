"""Clients count their classes."""

from collections.abc import Callable

import torch

from atoll import Task
from atoll.kernel.cohort import Cohort
from atoll.toolbox.client import passes
from atoll.toolbox.client.labels import label_counts


def test_counts_are_those_of_the_training_samples(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort], monkeypatch
) -> None:
    monkeypatch.setattr(passes, "AT_ONCE", 5)  # several batches, the last of them short
    task = make_task(sizes=(9, 1, 12), shares=(0.75, 0.0, 0.25))
    counts = label_counts(make_cohort(task))["counts"]
    train = task.splits["train"]
    for k in range(3):
        own = task.y[train.order[train.offsets[k] : train.offsets[k + 1]]]
        assert torch.equal(counts[k], torch.bincount(own, minlength=3).to(counts.dtype))
