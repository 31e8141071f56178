"""What a client can say about its classes: their directions, from how many samples, and how well it knows them."""

from __future__ import annotations

import torch

from atoll.batch import Batch
from atoll.cohort import Cohort
from atoll.local.features import membership
from atoll.params import Params, Stack
from atoll.prototypes import unit


def evidence(cohort: Cohort, w: Params | Stack, size: int) -> Stack:
    """By class: the `sum` of unit features of training samples, [classes, size], and their `count`.

    And of how many held-out samples, `tested`, the model gets the class right, `correct`. C (size + 3) numbers.
    """
    return directions(cohort, w, size) | right(cohort, w)


def directions(cohort: Cohort, w: Params | Stack, size: int) -> Stack:
    """The `sum` of unit features by class, over each client's training samples, and their `count`."""
    classes = cohort.population.task.classes
    assert classes is not None, "the task has no classes"
    start = Params.of(sum=torch.zeros(classes, size), count=torch.zeros(classes))
    sums: Stack = cohort.scan(_add, start, given=w, shuffle=False, train=False)
    return sums


def right(cohort: Cohort, w: Params | Stack) -> Stack:
    """Of how many held-out samples of each class, `tested`, each model gets the class right, `correct`."""
    classes = cohort.population.task.classes
    assert classes is not None, "the task has no classes"
    start = Params.of(correct=torch.zeros(classes), tested=torch.zeros(classes))
    found: Stack = cohort.scan(_test, start, given=w, split="val", shuffle=False, train=False)
    return found


def _add(seen: Params, batch: Batch, w: Params) -> Params:
    same = membership(batch, len(seen["count"]))
    return Params.of(sum=seen["sum"] + same.T @ unit(batch.features(w)), count=seen["count"] + same.sum(0))


def _test(seen: Params, batch: Batch, w: Params) -> Params:
    same = membership(batch, len(seen["tested"]))
    hits = (batch.outputs(w).argmax(1) == batch.y).to(same.dtype)
    return Params.of(correct=seen["correct"] + hits @ same, tested=seen["tested"] + same.sum(0))
