"""Shards: which clients a worker holds, and the part of the task that it needs for them.

Shards are contiguous in the order in which an engine takes clients, by falling size. So the replies of the shards,
one after another, come in the order of a single machine, and sums of them have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.batches import Split
from atoll.data.task import Task

Clients = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ShardTask(Task):
    """A task that holds the samples of some of its clients; all keep their numbers and sizes."""

    whole: str = field(default="", kw_only=True)  # the digest of the samples of all clients

    @property
    def samples(self) -> str:
        """The digest of the whole task's samples: training that is kept is found again, however it was cut."""
        return self.whole


def cut_shards(task: Task, shards: int) -> list[Clients]:
    """Divide clients into at most so many shards with equally many training samples."""
    sizes = task.splits["train"].sizes(np.arange(task.clients))
    order = np.argsort(-sizes, kind="stable").astype(np.int64)
    shards = min(shards, task.clients)
    middle = np.cumsum(sizes[order]) - sizes[order] / 2  # the shard in which most of a client lies is its own
    bounds = np.searchsorted(middle, sizes.sum() * np.arange(1, shards) / shards)
    bounds = np.maximum(bounds, np.arange(1, shards))  # nobody's shard is empty
    bounds = np.minimum(bounds, task.clients - shards + np.arange(1, shards))
    return np.split(order, np.maximum.accumulate(bounds))


def cut_task(task: Task, clients: Clients, *, digest: str) -> ShardTask:
    """Return what a worker needs to hold of a task for some of its clients, on the CPU."""
    public = None if task.public is None else (task.public[0][:0], task.public[1][:0])  # that there are some
    x, y, splits = task.x, task.y, dict(task.splits)
    if splits["train"].stored:
        mine = np.zeros(task.clients, dtype=np.bool_)
        mine[clients] = True
        held = {name: np.repeat(mine, np.diff(split.offsets)) for name, split in splits.items()}
        orders = {name: split.order.cpu() for name, split in splits.items()}
        used = torch.cat([orders[name][torch.from_numpy(here)] for name, here in held.items()])
        rows = torch.from_numpy(np.unique(used.numpy()))
        place = torch.zeros(len(x), dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        splits = {
            name: Split(torch.where(torch.from_numpy(here), place[orders[name]], 0), splits[name].offsets)
            for name, here in held.items()
        }
        x, y = x[rows.to(x.device)], y[rows.to(y.device)]
    values = {
        name: getattr(task, name)
        for name in ("name", "network", "classes", "training", "augment", "networks", "recommends")
    }
    shard = ShardTask(
        **values, x=x, y=y, splits=splits, public=public, architecture=task.architecture, whole=digest,
    )  # fmt: skip
    moved: ShardTask = shard.to(torch.device("cpu"), task.network.dtype)  # type: ignore[assignment]
    return moved
