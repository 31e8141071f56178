"""Lanes: a few clients train at a time, and a lane that has finished its client takes the next one.

Real clients are unequal. If all of a cohort begin together, the largest ends alone, and a program is needed for every
number of clients that are still at work. In lanes there is one program, of one width, and all lanes are busy until
the end: clients are dealt to lanes from the longest to the shortest, each to the lane that has least to do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Turns(NamedTuple):
    """Lanes that change after a tick: whose result is stored, and who begins in the first of these lanes."""

    lanes: Tensor
    ended: Tensor  # clients
    begin: Tensor  # clients; fewer than lanes when nobody is left


@dataclass(frozen=True)
class Lanes:
    """Who trains in which lane at which tick."""

    steps: NDArray[np.int64]  # of each client
    width: int

    @cached_property
    def queues(self) -> list[list[int]]:
        """The clients of each lane, in their order."""
        queues: list[list[int]] = [[] for _ in range(self.width)]
        loads = [(0, lane) for lane in range(self.width)]
        for client in np.argsort(-self.steps, kind="stable").tolist():
            if self.steps[client]:
                load, lane = heapq.heappop(loads)
                queues[lane].append(client)
                heapq.heappush(loads, (load + int(self.steps[client]), lane))
        return queues

    @cached_property
    def ticks(self) -> int:
        """How long it takes until all have ended."""
        return max((int(self.steps[queue].sum()) for queue in self.queues if queue), default=0)

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """Who begins in each lane; a lane without anybody repeats the first client, and nobody reads it."""
        return np.array([queue[0] if queue else self.queues[0][0] for queue in self.queues], dtype=np.int64)

    @cached_property
    def table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The client in each lane at each tick, and which of its steps it takes: both [tick, lane].

        A lane that has nothing left repeats its last step, and nobody reads it.
        """
        client = np.repeat(self.first[None], self.ticks, axis=0)
        step = np.zeros_like(client)
        for lane, queue in enumerate(self.queues):
            at = 0
            for one in queue:
                size = int(self.steps[one])
                client[at : at + size, lane] = one
                step[at : at + size, lane] = np.arange(size)
                at += size
            if queue:
                client[at:, lane], step[at:, lane] = queue[-1], self.steps[queue[-1]] - 1
        return client, step

    def busy(self, ticks: int) -> int:
        """Return how many steps clients take in so many ticks."""
        return sum(min(int(self.steps[queue].sum()), ticks) for queue in self.queues)

    def turns(self, device: torch.device) -> dict[int, Turns]:
        """Return what changes after which tick, as tensors on a device, to which they are copied at once."""
        at: dict[int, list[tuple[bool, int, int, int]]] = {}
        for lane, queue in enumerate(self.queues):
            following = [*queue, -1][1:]
            for client, new, end in zip(queue, following, np.cumsum(self.steps[queue]).tolist(), strict=True):
                at.setdefault(end, []).append((new < 0, lane, client, new))
        changes = [sorted(at[tick]) for tick in at]  # those lanes that go on come first
        table = place(np.array(list(chain(*changes)), dtype=np.int64).reshape(-1, 4).T, device)
        found, start = {}, 0
        for tick, some in zip(at, changes, strict=True):
            new = start + sum(not idle for idle, *_ in some)
            _, lanes, ended, begin = table[:, start : start + len(some)]
            found[tick], start = Turns(lanes, ended, begin[: new - start]), start + len(some)
        return found


def choose_width(clients: int, evenness: float) -> int:
    """Return how many lanes a cohort of so many clients has: with so many, all end at about the same time."""
    return max(1, min(clients, round(clients * evenness + 0.49)))


def place(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return numbers as a tensor where the clients are."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
