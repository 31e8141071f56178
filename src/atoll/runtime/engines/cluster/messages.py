"""What travels between the engine of a cluster and its workers: orders down, outcomes up, trees as plain bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.kernel.algorithm import Algorithm, Update
from atoll.kernel.errors import AtollError
from atoll.kernel.job import Done, Phase
from atoll.kernel.params import Structure, Tree, flatten, rows_of, spread, unflatten
from atoll.kernel.replies import Arrival, Replies

Clients = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """A tree whose tensors are plain bytes, which travel without being copied into a pickle."""

    structure: Structure
    leaves: tuple[tuple[torch.dtype, tuple[int, ...], NDArray[np.uint8]], ...]

    def unpack(self, device: torch.device) -> Tree:
        """Return the tree with its tensors on a device."""
        made = []
        for dtype, shape, data in self.leaves:
            own = torch.from_numpy(np.array(data))  # a copy, because what was sent may be read by others, too
            leaf = own.view(dtype).reshape(shape) if len(own) else torch.empty(shape, dtype=dtype)
            made.append(leaf.to(device))
        return unflatten(self.structure, made)


def pack(tree: Tree) -> Packed:
    """Write the tensors of a tree as bytes."""
    leaves, structure = flatten(tree)
    # Copied: one row of an expanded leaf counts as contiguous, and cannot be seen as bytes.
    here = [leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for leaf in leaves]
    data = [leaf.flatten().view(torch.uint8).numpy() for leaf in here]
    packed = ((leaf.dtype, tuple(leaf.shape), one) for leaf, one in zip(here, data, strict=True))
    return Packed(structure, tuple(packed))


@dataclass(frozen=True)
class Lot:
    """Some clients of one architecture and group, all of one shard, and what each of them is sent by itself."""

    clients: Clients  # by falling size
    unicast: Packed
    usual: int

    def without(self, done: Clients) -> Lot:
        """Return the lot of those that are not done."""
        left = np.flatnonzero(~np.isin(self.clients, done))
        unicast = pack(rows_of(self.unicast.unpack(torch.device("cpu")), torch.from_numpy(left)))
        return replace(self, clients=self.clients[left], unicast=unicast)


@dataclass(frozen=True)
class Order:
    """A shard's part of a job; what all clients are sent travels beside it, once for all workers of a machine."""

    number: int  # orders of an engine are numbered
    phase: Phase
    method: Algorithm
    round: int
    calls: int
    lots: tuple[Lot, ...]
    sums: bool = False  # whether the sums over clients of what they send are enough
    trained: Path | None = None  # where long training is kept
    until: int | None = None  # the epoch after which it pauses


@dataclass(frozen=True)
class Outcome:
    """What came of some clients of a lot, as it travels."""

    lot: int
    clients: Clients
    result: Packed
    is_update: bool
    notes: Packed
    gradients: int


@dataclass(frozen=True)
class Missing:
    """Clients of a lot whose work failed, and why."""

    lot: int
    clients: Clients
    reason: str


@dataclass(frozen=True)
class Failure:
    """What a client's work raised; if it is `final`, the whole job ends with it."""

    error: BaseException
    final: bool = False

    @classmethod
    def of(cls, error: BaseException, *, final: bool = False) -> Failure:
        """Return an error as it travels: one that is not Atoll's may hold anything, and becomes its text."""
        if not isinstance(error, AtollError | KeyboardInterrupt):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, final)


@dataclass(frozen=True)
class Found:
    """Seconds of long training that were done before and not again."""

    seconds: tuple[float, ...]


Message = Outcome | Missing | Failure | Found


def tree_of(result: Any) -> tuple[Tree, bool]:
    """Return the result of some clients' work as a tree, and whether it was an Update."""
    if not isinstance(result, Update):
        return result, False
    tree = {
        "send": dict(result.send), "weight": result.weight, "keep": result.keep, "beside": dict(result.beside),
        "of_model": result.of_model, "summed": result.summed,
    }  # fmt: skip
    return tree, True


def add_up(done: Done[Update]) -> Done[Update]:
    """Add up what some clients send: one row in place of one for each of them."""
    update = done.result
    leaves = [leaf for value in update.send.values() for leaf in value.values()]
    if not leaves:
        return done
    weight = leaves[0].new_ones(len(done.clients), dtype=torch.float32) if update.weight is None else update.weight
    replies = Replies([Arrival(done.clients, update.send, weight)], keep=False)
    sums = {name: spread(replies.sum(name), 1) for name in update.send}
    total = None if update.weight is None else replies.total[None]
    return replace(done, result=replace(update, send=sums, weight=total, summed=True))


def result_of(tree: Tree, is_update: bool) -> Any:
    """Return the result that `tree_of` was given."""
    return Update(**tree) if is_update else tree
