"""What enters a model's head: beside its answers, class by class, in its moments, and how far apart it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import ModelError, name_in_messages
from atoll.kernel.network import Variant
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.labels import require_classes
from atoll.toolbox.client.private import cut_rows

SUM_POWERS = {"sum": 1, "count": 0}  # of the norm of a sample's features: how far it moves each leaf


def one_sample(task: Facts) -> Batch:
    """Make up a sample as a batch, to find out what shape a network makes of it: nobody's own is read."""
    x, y = task.sample[None], task.target[None]
    return Batch(x + 1 if x.is_floating_point() else x, y, None, None, task.network, Variant(train=False))


def feature_size(method: object, task: Facts) -> int:
    """Return how many numbers enter the head of a task's network; raise unless samples have a class and a row."""
    name = name_in_messages(method)
    require_classes(method, task)
    with torch.no_grad():
        one = one_sample(task)
        features = one.features(task.network.initial)
        one.head(task.network.initial, features)
    if features.ndim != 2:
        raise ModelError(f"{name} needs one row of features per sample. Got features of shape {tuple(features.shape)}.")
    return features.shape[1]


def features_and_outputs(batch: Batch, w: Params) -> tuple[Tensor, Tensor, Params]:
    """Return what enters the head, what the model answers, and w with the buffers of the pass: one pass for both."""
    features, after = replace(batch, variant=replace(batch.variant, features=True)).forward(w)
    outputs, after = outputs_of(batch, after, features)
    return features, outputs, after


def outputs_of(batch: Batch, w: Params, features: Tensor) -> tuple[Tensor, Params]:
    """Return what the head of w answers to features of the batch's own samples, and w with the buffers of the pass."""
    return replace(batch, x=features, variant=replace(batch.variant, head=True)).forward(w)


def membership(batch: Batch, classes: int) -> Tensor:
    """Return 1 where a sample is of a class, [samples, classes]; padding is of none."""
    same = (batch.y[:, None] == torch.arange(classes, device=batch.y.device)).to(batch.network.dtype)
    return same if batch.mask is None else same * batch.mask[:, None]


def class_sums(cohort: Cohort, w: Params | Stack, size: int, *, unit: bool = False) -> Stack:
    """Sum up each client's training samples by class: the `sum` of features, [classes, size], and their `count`.

    With `unit`, each feature vector counts by its direction alone. Under sample-level privacy features are cut to its
    norm; `SUM_POWERS` says what one sample then moves.
    """
    classes = cohort.task.classes
    assert classes is not None, "the task has no classes"
    start = Params.of(sum=torch.zeros(classes, size), count=torch.zeros(classes))
    sums: Stack = cohort.scan(
        partial(_add, unit, cut_rows(cohort)), start, given=w, shuffle=False, train=False, exact=True
    )
    return sums


def _add(unit: bool, cut: Callable[[Tensor], Tensor], seen: Params, batch: Batch, w: Params) -> Params:
    same, features = membership(batch, len(seen["count"])), batch.features(w)
    features = cut(F.normalize(features, dim=-1) if unit else features)
    return Params.of(sum=seen["sum"] + same.T @ features, count=seen["count"] + same.sum(0))


def moments(cohort: Cohort, w: Params | Stack) -> Stack:
    """Return the mean and standard deviation of every feature over each client's training samples: two leaves."""
    task = cohort.task
    zeros = torch.zeros(one_sample(task).features(task.network.initial).numel())
    seen = cohort.scan(
        _add_moments,
        Params.of(first=zeros, second=zeros),
        given=w,
        shuffle=False,
        train=False,
        labels=False,
        exact=True,
    )
    mean, square = (seen[name] / cohort.samples[:, None] for name in ("first", "second"))
    return Stack.of(mean=mean, deviation=(square - mean**2).clamp(min=0).sqrt())


def _add_moments(seen: Params, batch: Batch, w: Params) -> Params:
    features = batch.features(w).flatten(1)
    real = features if batch.mask is None else features * batch.mask[:, None]
    return Params.of(first=seen["first"] + real.sum(0), second=seen["second"] + (real * features).sum(0))


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared distances between rows of a and rows of b, [rows of a, rows of b]."""
    return (a.square().sum(1)[:, None] - 2 * a @ b.T + b.square().sum(1)).clamp(min=0)
