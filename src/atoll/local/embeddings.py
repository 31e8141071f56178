"""What enters the head of a model, summed up for each client."""

from __future__ import annotations

import torch

from atoll.batch import Batch
from atoll.cohort import Cohort
from atoll.models.network import Variant
from atoll.params import Params, Stack


def moments(cohort: Cohort, w: Params | Stack) -> Stack:
    """Mean and standard deviation of every feature over each client's training samples: two leaves."""
    task = cohort.population.task
    one = Batch(task.x[:1], task.y[:1], None, None, task.network, Variant(train=False))
    zeros = torch.zeros(one.features(task.network.initial).numel())
    seen = cohort.scan(_add, Params.of(first=zeros, second=zeros), given=w, shuffle=False, train=False, labels=False)
    mean, square = (seen[name] / cohort.samples[:, None] for name in ("first", "second"))
    return Stack.of(mean=mean, deviation=(square - mean**2).clamp(min=0).sqrt())


def _add(seen: Params, batch: Batch, w: Params) -> Params:
    features = batch.features(w).flatten(1)
    real = features if batch.mask is None else features * batch.mask[:, None]
    return Params.of(first=seen["first"] + real.sum(0), second=seen["second"] + (real * features).sum(0))
