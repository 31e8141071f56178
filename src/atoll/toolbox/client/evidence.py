"""What a client can say about its classes: their directions, from how many samples, and how well it knows them."""

from __future__ import annotations

import torch

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.features import class_sums, membership


def evidence(cohort: Cohort, w: Params | Stack, size: int) -> Stack:
    """By class: the `sum` of unit features of training samples, [classes, size], and their `count`.

    And of how many held-out samples, `tested`, the model gets the class right, `correct`. C (size + 3) numbers.
    """
    return class_sums(cohort, w, size, unit=True) | right(cohort, w)


def right(cohort: Cohort, w: Params | Stack) -> Stack:
    """Of how many held-out samples of each class, `tested`, each model gets the class right, `correct`."""
    classes = cohort.task.classes
    assert classes is not None, "the task has no classes"
    start = Params.of(correct=torch.zeros(classes), tested=torch.zeros(classes))
    found: Stack = cohort.scan(_test, start, given=w, split="val", shuffle=False, train=False)
    return found


def _test(seen: Params, batch: Batch, w: Params) -> Params:
    same = membership(batch, len(seen["tested"]))
    hits = (batch.outputs(w).argmax(1) == batch.y).to(same.dtype)
    return Params.of(correct=seen["correct"] + hits @ same, tested=seen["tested"] + same.sum(0))
