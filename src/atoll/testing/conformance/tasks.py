"""The task that checks are played on, and what a device or the server holds of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll import models
from atoll.data.batches import Split
from atoll.data.task import Task, Training
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.randomness import default_generator, generator
from atoll.kernel.wrapper import title_of
from atoll.models import BodyAndHead

SIZES = (13, 1, 12, 5, 6, 2)  # samples of each client; the fourth has one class only
NINE = (*SIZES, 14, 4, 12)  # of the clients of long runs
NEWCOMERS = (9, 3, 1, 4, 6, 2, 8, 5, 7, 3)  # samples of clients that are never seen: there are more of them
FEATURES, CLASSES, ITEMS = 12, 3, 9
PUBLIC = 11  # samples that everybody may see
CENTRAL = 7  # samples of the server's test set


@functools.cache
def build_task(kind: str = "plain", sizes: tuple[int, ...] = SIZES, *, items_by: str = "") -> Task:
    """Make clients of these sizes, with a tiny network; the fourth client has a single class.

    For a method that recommends, classes are items: clients have them in time order, some more than once.
    """
    if items_by:
        return build_recommendation(sizes, items_by)
    draw = generator(0, "conformance")
    centers = draw.normal(size=(CLASSES, FEATURES))

    def samples(y: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(centers[y] + draw.normal(size=(len(y), FEATURES))), torch.from_numpy(y)

    data = {}
    for client, size in enumerate(sizes):
        y = np.zeros(size, np.int64) if client == 3 else draw.integers(CLASSES, size=size)
        data[f"client {client}"] = samples(y)
    with default_generator(0):
        model = build_model(kind)
    training = Training(lr=0.1, batch_size=4)
    task = Task.of_clients(data, model.double(), name="conformance", classes=CLASSES, training=training)
    public, central = (samples(draw.integers(CLASSES, size=size)) for size in (PUBLIC, CENTRAL))
    return replace(task, public=public, central=central)


def task_for(method: Algorithm) -> Task:
    """Return the task of long runs."""
    return build_task(sizes=NINE, items_by=method.items_by)


def build_recommendation(sizes: tuple[int, ...], items_by: str) -> Task:
    """Make users who know so many items, whose samples nobody reads; the fourth knows one item, again and again."""
    draw = generator(0, "conformance items")
    data = {}
    for client, size in enumerate(sizes):
        y = np.zeros(size, np.int64) if client == 3 else draw.integers(ITEMS, size=size)
        data[f"client {client}"] = torch.from_numpy(draw.normal(size=(size, FEATURES))), torch.from_numpy(y)
    with default_generator(0):
        model = models.build(items_by, (FEATURES,), ITEMS, rank=3)
    training = Training(lr=0.1, batch_size=4)
    task = Task.of_clients(data, model.double(), name="conformance", classes=ITEMS, training=training)
    return replace(task, recommends=True)


def draw_number(method: Algorithm, purpose: str, low: int, high: int) -> int:
    """Draw a round, or the like, for a method: the same in every run, and nothing that its author can count on."""
    return int(generator(0, f"conformance {purpose} {title_of(method)}").integers(low, high))


def build_model(kind: str) -> nn.Module:
    """Make a tiny network: a plain one, or an odd one with BatchNorm and dropout."""
    # Of a rectified unit that only one sample reaches, the gradient is a copy of that sample: the plain one is smooth.
    layers: dict[str, list[nn.Module]] = {
        "plain": [nn.Tanh()],
        "odd": [nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU()],
    }
    return BodyAndHead(nn.Sequential(nn.Linear(FEATURES, 8), *layers[kind]), nn.Linear(8, CLASSES))


def poison(task: Task) -> Task:
    """Return the task with other labels of the test samples."""
    test, y = task.splits["test"].order, task.y.clone()
    y[test] = (task.y[test] + 1) % (task.classes or CLASSES)
    return replace(task, y=y)


def alter(task: Task, name: str) -> Task:
    """Return the task with other samples of one split, and half as many; those for tests are not even numbers."""
    split = task.splits[name]
    x, y = task.x.clone(), task.y.clone()
    x[split.order] = math.nan if name == "test" else 1 - 2 * task.x[split.order]
    y[split.order] = (task.y[split.order] + 1) % CLASSES
    fewer = deal([split.order[a:b][: (b - a) // 2] for a, b in zip(split.offsets, split.offsets[1:], strict=False)])
    central = task.central and (1 - 2 * task.central[0], task.central[1]) if name == "test" else task.central
    return replace(task, x=x, y=y, splits={**task.splits, name: fewer}, central=central)


@functools.lru_cache(maxsize=64)
def hold_task(task: Task, client: int | None) -> Task:
    """Return the task as the device of a client holds it, or the server: nobody else's samples, nor how many.

    Clients keep their numbers, so their draws are the same. Each of the others has one sample, which is not a number.
    """
    mine = task.splits["train"].order[:0] if client is None else find_samples(task, client)
    x, y = torch.full_like(task.x, math.nan), torch.zeros_like(task.y)
    x[mine], y[mine] = task.x[mine], task.y[mine]
    train = task.splits["train"]
    splits = {
        name: deal([
            split.order[split.offsets[k] : split.offsets[k + 1]] if k == client else train.order[[train.offsets[k]]]
            for k in range(task.clients)
        ])
        for name, split in task.splits.items()
    }  # fmt: skip
    return replace(task, x=x, y=y, splits=splits, names=None, groups=None, central=None, unseen=None, facts={})


def deal(parts: Sequence[Tensor]) -> Split:
    """Make the split in which each client has these samples."""
    return Split(torch.cat([*parts]), np.cumsum([0, *map(len, parts)]).astype(np.int64))


def find_samples(task: Task, client: int) -> Tensor:
    """List the numbers of all samples of a client."""
    parts = [split.order[split.offsets[client] : split.offsets[client + 1]] for split in task.splits.values()]
    return torch.cat(parts)
