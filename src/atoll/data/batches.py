"""Batches: a table of the samples that each client sees at each step, built on the device from hashed keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.fingerprints import content
from atoll.kernel.randomness import Keys


class Held(NamedTuple):
    """Samples and targets of some clients, and where each client's are: it is number `clients[k]` of `split`."""

    x: Tensor
    y: Tensor
    split: Split
    clients: NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Split:
    """The samples of every client in one split: client k owns `order[offsets[k] : offsets[k + 1]]`.

    `order` are rows of the task's samples. A split whose samples are not `stored` has none, and overrides what reads
    them: `hold`, `of`, `to` and `digest`.
    """

    stored: ClassVar[bool] = True
    here: ClassVar[bool] = True  # whether samples can be read at all; those of other sites cannot
    order: Tensor
    offsets: NDArray[np.int64]
    among: Split | None = None  # all clients, where these are some of them
    _short: dict[int, bool] = field(default_factory=dict, repr=False, compare=False)
    _evenness: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Split of {self.offsets[-1]:,} samples of {len(self.offsets) - 1:,} clients>"

    def has_short_batch(self, batch_size: int) -> bool:
        """Return whether any client's last batch is short. All clients count, so every cohort computes alike."""
        if self.among is not None:
            return self.among.has_short_batch(batch_size)
        if batch_size not in self._short:
            self._short[batch_size] = bool((np.diff(self.offsets) % batch_size).any())
        return self._short[batch_size]

    def evenness(self, batch_size: int) -> float:
        """Return the mean number of steps of a client over that of the largest one: 1 if all are equal."""
        if self.among is not None:
            return self.among.evenness(batch_size)
        if batch_size not in self._evenness:
            steps = -(-np.diff(self.offsets) // batch_size)
            self._evenness[batch_size] = float(steps.mean() / max(steps.max(initial=0), 1))
        return self._evenness[batch_size]

    def sizes(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many samples these clients have."""
        sizes: NDArray[np.int64] = self.offsets[clients + 1] - self.offsets[clients]
        return sizes

    def hold(self, x: Tensor, y: Tensor, clients: NDArray[np.int64]) -> Held:
        """Return the samples of some clients, of a task that holds `x` and `y`."""
        return Held(x, y, self, clients)

    def of(self, clients: NDArray[np.int64]) -> Split:
        """Return the split of some clients only."""
        parts = [self.order[self.offsets[k] : self.offsets[k + 1]] for k in clients]
        return Split(torch.cat(parts) if parts else self.order[:0], find_offsets(self.sizes(clients)))

    def to(self, device: torch.device, first: int = 0) -> Split:
        """Return the split on a device, of samples that begin at row `first` there."""
        return Split((self.order + first if first else self.order).to(device), self.offsets)

    @property
    def is_known(self) -> bool:
        """Whether it is known how many samples every client has."""
        return True

    @property
    def digest(self) -> tuple[object, ...]:
        """Who has which samples, as digests."""
        return content(self.order), content(torch.from_numpy(self.offsets))


def find_offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each client's samples begin, and where the last one's end."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class BatchTable:
    """Batch t of client k is `index[t, k]`; `valid[t, k]` marks what is not padding; None: nothing is padding.

    The step comes first, so the batches of step t lie together for any number of clients.
    """

    index: Tensor
    valid: Tensor | None
    steps: NDArray[np.int64]  # per client


def batch_table(
    split: Split,
    clients: NDArray[np.int64],
    keys: Keys | None,
    *,
    batch_size: int,
    epochs: int,
    limit: int | None,
    first: int = 0,
) -> BatchTable:
    """Return the batches of `epochs` passes over the clients' samples, shuffled in every epoch if there are keys.

    `first` is the number of the first epoch, for clients that have done others before.
    """
    device = split.order.device
    host_sizes = split.sizes(clients)
    per_epoch = -(-host_sizes // batch_size)
    steps = per_epoch * epochs
    if limit is not None:
        steps = np.minimum(steps, limit)
    longest, most = int(host_sizes.max(initial=0)), int(steps.max(initial=0))
    if most == 0:
        empty = torch.zeros((0, len(clients), batch_size), dtype=torch.int64, device=device)
        return BatchTable(empty, None, steps)
    facts = np.stack([host_sizes, split.offsets[clients], np.maximum(per_epoch, 1)])
    sizes, starts, passes = torch.from_numpy(facts).to(device)

    most_epochs = epochs if limit is None else min(epochs, limit)
    time = torch.arange(most, device=device)[:, None]
    epoch, batch = (time // passes).clamp(max=most_epochs - 1), time % passes  # (step, client)
    place = batch[:, :, None] * batch_size + torch.arange(batch_size, device=device)
    real = place < sizes[:, None]
    place = torch.where(real, place, 0)
    if keys is not None:
        shuffled = _orders(keys, sizes, longest, range(first, first + most_epochs))
        client = torch.arange(len(clients), device=device)[:, None]
        place = shuffled[client, epoch[:, :, None], place]
    # Steps past a client's last one repeat samples of it; nothing reads what is computed from them.
    index = split.order[(starts[:, None] + place).clamp(max=len(split.order) - 1)]
    return BatchTable(index, real if split.has_short_batch(batch_size) else None, steps)


def _orders(keys: Keys, sizes: Tensor, longest: int, epochs: range) -> Tensor:
    """Return a permutation of each client's samples for every epoch: (client, epoch, place)."""
    epoch = torch.arange(epochs.start, epochs.stop, device=sizes.device)
    per_epoch = Keys(keys.low[:, None], keys.high[:, None]).fold(epoch)
    place = torch.arange(longest, device=sizes.device)
    bits = Keys(per_epoch.low[:, :, None], per_epoch.high[:, :, None]).bits(place)
    bits = torch.where(place < sizes[:, None, None], bits, 1 << 32)  # what does not exist sorts last
    return bits.argsort(dim=-1, stable=True)
