"""A client's training samples as a memory: their features and classes, and what the nearest of them say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.features import squared_distances
from atoll.toolbox.client.passes import many_at_once


def datastore(cohort: Cohort, w: Params | Stack, size: int, capacity: int | None) -> Stack:
    """Store each client's `features`, [places, size], their `labels`, and which places are `taken`.

    A client with more samples than `capacity` stores as many, drawn at random.
    """
    task = cohort.task
    largest = task.largest["train"]
    places = min(largest, capacity or largest)
    empty = {"features": torch.zeros(places + 1, size), "labels": torch.zeros(places + 1, dtype=torch.int64)}
    start = Params.of(seen=0.0, **empty)
    found = cohort.scan(
        _store, start, given=w, batch_size=many_at_once(cohort), stream="store", train=False, exact=True
    )
    taken = torch.arange(places, device=cohort.samples.device) < cohort.samples[:, None]
    return Stack.of(
        features=found["features"][:, :places] * taken[..., None],
        labels=found["labels"][:, :places] * taken,
        taken=taken,
    )


def _store(store: Params, batch: Batch, w: Params) -> Params:
    """Write down a batch; what has no place goes to the last one, which nobody reads."""
    last = len(store["labels"]) - 1
    place = (store["seen"].long() + torch.arange(len(batch.y), device=batch.y.device)).clamp(max=last)
    rows = place[:, None].expand(-1, store["features"].shape[1])
    return Params.of(
        seen=store["seen"] + len(batch.y),
        features=store["features"].scatter(0, rows, batch.features(w).to(store["features"].dtype)),
        labels=store["labels"].scatter(0, place, batch.y),
    )


def say_neighbours(store: Params | Any, features: Tensor, *, count: int, scale: float, classes: int) -> Tensor:
    """Return the shares of the classes among the nearest stored samples, each by exp(-distance^2 / (scale * size)).

    A store without samples says that all classes are as likely.
    """
    size = features.shape[1]
    closeness = -squared_distances(features, store["features"]) / (scale * size)
    closeness = torch.where(store["taken"], closeness, -torch.inf)
    closeness, places = closeness.topk(min(count, closeness.shape[1]), dim=1)
    empty = ~store["taken"].any()
    weights = torch.where(empty, 0, closeness).softmax(1)
    votes = (store["labels"][places][..., None] == torch.arange(classes, device=places.device)).to(weights.dtype)
    return torch.where(empty, 1 / classes, (weights[..., None] * votes).sum(1))
