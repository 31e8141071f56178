"""What a client can say about its classes: their directions, from how many samples, and how well it knows them."""

from __future__ import annotations

import torch

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.features import class_sums, membership


def evidence(cohort: Cohort, w: Params | Stack, size: int) -> Stack:
    """Return, by class, the `sum` of unit features of training samples, [classes, size], and their `count`.

    With them go the held-out samples, `tested`, and those that the model gets right, `correct`. C (size + 3) numbers.
    """
    return class_sums(cohort, w, size, unit=True) | count_correct(cohort, w)


def count_correct(cohort: Cohort, w: Params | Stack) -> Stack:
    """Count the held-out samples of each class, `tested`, and those that each model gets right, `correct`."""
    classes = cohort.task.classes
    assert classes is not None, "the task has no classes"
    start = Params.of(correct=torch.zeros(classes), tested=torch.zeros(classes))
    found: Stack = cohort.scan(_test, start, given=w, split="val", shuffle=False, train=False)
    return found


def _test(seen: Params, batch: Batch, w: Params) -> Params:
    same = membership(batch, len(seen["tested"]))
    hits = (batch.outputs(w).argmax(1) == batch.y).to(same.dtype)
    return Params.of(correct=seen["correct"] + hits @ same, tested=seen["tested"] + same.sum(0))
