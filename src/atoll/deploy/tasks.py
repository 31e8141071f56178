"""Tasks whose samples are elsewhere: as a site holds one, and as a coordinator does, who has none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.batches import Held, Split, find_offsets
from atoll.data.splits import SPLITS
from atoll.data.task import Task
from atoll.kernel.network import Network
from atoll.kernel.task import Facts, Training
from atoll.runtime.population import Population

Clients = NDArray[np.int64]


@dataclass(frozen=True)
class SplitElsewhere(Split):
    """A split whose samples are at sites: it knows how many there are, once the sites have told."""

    stored: ClassVar[bool] = False
    here: ClassVar[bool] = False
    counts: NDArray[np.int64] = field(kw_only=True)  # of each client; -1: not known yet

    def sizes(self, clients: Clients) -> NDArray[np.int64]:
        """Return how many samples these clients have; 0 for those that have not told."""
        return np.maximum(self.counts[clients], 0)

    def hold(self, x: Tensor, y: Tensor, clients: Clients) -> Held:
        """Return a sample of zeros for each client: what the network takes can be tried with it."""
        order = torch.zeros(len(clients), dtype=torch.int64, device=x.device)
        return Held(x, y, Split(order, np.arange(len(clients) + 1)), np.arange(len(clients)))

    def of(self, clients: Clients) -> Self:
        """Return the split of some clients only; see `Split.of`."""
        return replace(self, offsets=find_offsets(np.ones(len(clients), np.int64)), counts=self.counts[clients])

    def to(self, device: torch.device, first: int = 0) -> Self:
        """Return itself: there are no rows to move, and what sites tell is known wherever it stands."""
        return self

    @property
    def is_known(self) -> bool:
        """Whether all sites have told how many samples their clients have."""
        return bool((self.counts >= 0).all())

    @property
    def digest(self) -> tuple[object, ...]:
        """Nothing but the number of clients: nobody here knows the samples."""
        return "elsewhere", len(self.counts)


def task_elsewhere(
    name: str, network: Network, sample: Tensor, target: Tensor, *, clients: int, classes: int | None,
    training: Training, names: Sequence[str] | None = None, facts: Mapping[str, Any] | None = None,
    public: tuple[Tensor, Tensor] | None = None, recommends: bool = False,
) -> Task:  # fmt: skip
    """Return the task of a coordinator: everything that everybody knows, and nobody's samples."""
    offsets = np.arange(clients + 1)
    splits = {
        split: SplitElsewhere(torch.zeros(0, dtype=torch.int64), offsets, counts=np.full(clients, -1, np.int64))
        for split in SPLITS
    }
    return Task(
        name=name, x=torch.zeros_like(sample)[None], y=torch.zeros_like(target)[None], splits=splits, network=network,
        classes=classes, training=training, names=None if names is None else tuple(names), public=public,
        facts=dict(facts or {}), recommends=recommends,
    )  # fmt: skip


def learn_sizes(task: Task, clients: Clients, sizes: Mapping[str, Sequence[int]]) -> None:
    """Write down how many samples some clients say they have, by split."""
    for name, split in task.splits.items():
        assert isinstance(split, SplitElsewhere)
        split.counts[clients] = sizes[name]


def place_at_site(task: Task, numbers: Sequence[int], clients: int) -> Task:
    """Return the task of a site in a federation of so many clients, in which its own have these numbers.

    Draws depend on a client's number, so it is the same at a site as in a simulation. Each of the other clients has
    one sample that is not a number; nothing ever reads it.
    """
    own, nobody = np.asarray(numbers, dtype=np.int64), len(task.x)

    def deal(split: Split) -> Split:
        sizes = np.ones(clients, dtype=np.int64)
        sizes[own] = split.sizes(np.arange(task.clients))
        offsets = find_offsets(sizes)
        order = torch.full((int(offsets[-1]),), nobody, device=split.order.device)
        for local, client in enumerate(own):
            order[offsets[client] : offsets[client + 1]] = split.order[split.offsets[local] : split.offsets[local + 1]]
        return Split(order, offsets)

    blank = torch.full_like(task.x[:1], math.nan if task.x.is_floating_point() else 0)
    return replace(
        task, x=torch.cat([task.x, blank]), y=torch.cat([task.y, torch.zeros_like(task.y[:1])]),
        splits={name: deal(split) for name, split in task.splits.items()}, names=None, groups=None, central=None,
        unseen=None, scaling=None,
    )  # fmt: skip


@dataclass(frozen=True)
class SitePopulation(Population):
    """The clients of a federation as one site holds them: what everybody knows was told by the coordinator."""

    known: Facts = field(kw_only=True)

    @property
    def facts(self) -> Facts:
        """What everybody may know of the task."""
        return self.known
