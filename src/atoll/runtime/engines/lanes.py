"""Lanes: a few clients train at a time, and a lane that has finished its client takes the next one.

Real clients are unequal. If all of a cohort begin together, the largest ends alone, and a program is needed for every
number of clients that are still at work. In lanes there is one program, of one width, and all lanes are busy until
the end: clients are dealt to lanes from the longest to the shortest, each to the lane that has least to do.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Clients = NDArray[np.int64]


class Turns(NamedTuple):
    """Lanes that change after a tick: whose result is stored, and who begins in the first of these lanes."""

    lanes: Tensor
    ended: Tensor  # clients
    begin: Tensor  # clients; fewer than lanes when nobody is left


@dataclass(frozen=True)
class Lanes:
    """Who trains in which lane at which tick."""

    steps: Clients  # of each client
    width: int

    @cached_property
    def _deal(self) -> tuple[Clients, Clients, Clients, Clients]:
        """Who has steps to take, the longest first, the lane and the first tick of each, and the load of every lane."""
        clients = np.argsort(-self.steps, kind="stable")
        clients = clients[: np.count_nonzero(self.steps)]
        lane, start = np.arange(len(clients)), np.zeros(len(clients), dtype=np.int64)
        loads = np.zeros(self.width, dtype=np.int64)
        loads[: len(clients)] = self.steps[clients[: self.width]]
        heap = [(load, number) for number, load in enumerate(loads.tolist())] if len(clients) > self.width else []
        heapq.heapify(heap)
        for place in range(self.width, len(clients)):
            start[place], lane[place] = heap[0]
            loads[lane[place]] += self.steps[clients[place]]
            heapq.heapreplace(heap, (int(loads[lane[place]]), int(lane[place])))
        return clients, lane, start, loads

    @cached_property
    def queues(self) -> list[list[int]]:
        """The clients of each lane, in their order."""
        clients, lane, _, _ = self._deal
        return [clients[lane == number].tolist() for number in range(self.width)]

    @property
    def ticks(self) -> int:
        """How long it takes until all have ended."""
        return int(self._deal[3].max(initial=0))

    @property
    def first(self) -> Clients:
        """Who begins in each lane; a lane without anybody repeats the first client, and nobody reads it."""
        begin = self._deal[0][: self.width]
        return np.concatenate([begin, np.repeat(begin[:1], self.width - len(begin))])

    @cached_property
    def table(self) -> tuple[Clients, Clients]:
        """The client in each lane at each tick, and which of its steps it takes: both [tick, lane].

        A lane that has nothing left repeats its last step, and nobody reads it.
        """
        clients, lane, start, loads = self._deal
        taken = self.steps[clients]
        number = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        at = np.repeat(start, taken) + number, np.repeat(lane, taken)
        client = np.repeat(self.first[None], self.ticks, axis=0)
        step = np.zeros_like(client)
        client[at], step[at] = np.repeat(clients, taken), number
        for idle in np.flatnonzero((loads > 0) & (loads < self.ticks)).tolist():
            end = int(loads[idle])
            client[end:, idle], step[end:, idle] = client[end - 1, idle], step[end - 1, idle]
        return client, step

    def busy(self, ticks: int) -> int:
        """Return how many steps clients take in so many ticks."""
        return int(np.minimum(self._deal[3], ticks).sum())

    def turns(self, device: torch.device) -> dict[int, Turns]:
        """Return what changes after which tick, as tensors on a device, to which they are copied at once."""
        clients, lane, start, _ = self._deal
        ends = start + self.steps[clients]
        following = {(int(one), int(begin)): who for one, begin, who in zip(lane, start, clients, strict=True) if begin}
        new = np.array(
            [following.get(key, -1) for key in zip(lane.tolist(), ends.tolist(), strict=True)], dtype=np.int64
        )
        order = np.lexsort((lane, new < 0, ends))  # in each tick, those lanes that go on come first
        ends, new = ends[order], new[order]
        table = place(np.stack([lane[order], clients[order], new]), device)
        bounds = np.flatnonzero(np.diff(ends, prepend=-1, append=-1))
        found = {}
        for begin, end in itertools.pairwise(bounds.tolist()):
            lanes, ended, begun = table[:, begin:end]
            found[int(ends[begin])] = Turns(lanes, ended, begun[: int((new[begin:end] >= 0).sum())])
        return found


def choose_width(clients: int, evenness: float) -> int:
    """Return how many lanes a cohort of so many clients has: with so many, all end at about the same time."""
    return max(1, min(clients, round(clients * evenness + 0.49)))


def place(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return numbers as a tensor where the clients are."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
