"""Samples that are not stored: they are made when their clients are asked, and forgotten after that.

A federation of a million clients then costs bytes per client, whatever its samples are. Every number is a hash of the
seed, the client and the place of the sample, so a sample is the same whenever, with whomever and wherever it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.batches import Held, Split, find_offsets
from atoll.data.splits import SPLITS, Shares, deal_turns
from atoll.kernel.fingerprints import content


class Source(Protocol):
    """The law by which the samples of clients are made; `repr` says all that decides them."""

    def draw(self, clients: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sample and the target of each pair of a client and a place, on the device of these."""
        ...


@dataclass(frozen=True, kw_only=True)
class GeneratedSplit(Split):
    """A split whose samples are made by a source: client k has `places[k]` and those that follow it."""

    stored: ClassVar[bool] = False

    source: Source
    places: NDArray[np.int64]
    clients: NDArray[np.int64]  # their numbers in the source
    _largest: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def largest(self) -> int:
        """The most samples of any client."""
        if not self._largest:
            self._largest.append(int(np.diff(self.offsets).max(initial=0)))
        return self._largest[0]

    def hold(self, x: Tensor, y: Tensor, clients: NDArray[np.int64]) -> Held:
        """Make the samples of some clients, like `x` and `y`; see `Split.hold`.

        The tensors have room for the largest clients: programs are made for one size.
        """
        sizes, device = self.sizes(clients), self.order.device
        offsets, owner = find_offsets(sizes), np.repeat(np.arange(len(clients)), sizes)
        place = np.arange(offsets[-1]) - offsets[owner] + self.places[clients][owner]
        numbers = np.stack([self.clients[clients][owner], place])
        drawn = self.source.draw(*torch.from_numpy(numbers).to(device))
        room = len(clients) * self.largest
        held = [like.new_empty((room, *like.shape[1:])) for like in (x, y)]
        for tensor, made in zip(held, drawn, strict=True):
            tensor[: len(made)] = made
        order = torch.arange(len(place), device=device)
        return Held(held[0], held[1], Split(order, offsets, among=self), np.arange(len(clients)))

    def of(self, clients: NDArray[np.int64]) -> Self:
        """Return the split of some clients only; see `Split.of`."""
        offsets = find_offsets(self.sizes(clients))
        return self._with(offsets=offsets, places=self.places[clients], clients=self.clients[clients])

    def to(self, device: torch.device, first: int = 0) -> Self:
        """Return the split for samples on a device, where it has no rows; see `Split.to`."""
        return self._with(order=self.order.to(device))

    def _with(self, **changes: object) -> Self:
        return replace(self, **changes, _short={}, _evenness={}, _largest=[])  # type: ignore[arg-type]

    @property
    def digest(self) -> tuple[object, ...]:
        """The law, and who has how many samples; see `Split.digest`."""
        numbers = (self.offsets, self.places, self.clients)
        return repr(self.source), *(content(torch.from_numpy(one)) for one in numbers)


def generate_splits(source: Source, sizes: NDArray[np.int64], shares: Shares) -> dict[str, Split]:
    """Cut the samples that each client has into train, val and test: the first places are for training."""
    turns = deal_turns(shares, int(sizes.max(initial=0)))
    places, clients, found = np.zeros_like(sizes), np.arange(len(sizes)), dict[str, Split]()
    for number, name in enumerate(SPLITS):
        mine = np.concatenate([[0], np.cumsum(turns == number)])[sizes]  # of the first n samples, for every n
        found[name] = GeneratedSplit(
            torch.zeros(0, dtype=torch.int64), find_offsets(mine), source=source, places=places, clients=clients
        )
        places = places + mine
    return found
