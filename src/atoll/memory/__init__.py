"""What clients keep between rounds: in RAM, or on disk for more clients than RAM holds.

A memory is only ever asked for the clients of a cohort. What is kept in a round becomes visible in the next one, and a
run that is resumed sees exactly what was kept up to its checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.errors import UnknownName, unknown
from atoll.memory.disk import DiskMemory
from atoll.memory.ram import RamMemory
from atoll.params import Tree

__all__ = ["MEMORIES", "DiskMemory", "Memory", "RamMemory", "open_memory"]

MEMORIES = ("ram", "disk")


class Memory(Protocol):
    """Keeps one tree per client."""

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """What these clients kept before a round, stacked; rows of `default` for those that kept nothing."""
        ...

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Whether each of these clients kept anything before a round."""
        ...

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Remember the rows of a stacked tree, one per client."""
        ...

    def save(self, *, round: int) -> Tree:
        """What a checkpoint after `round` rounds must hold; a memory that is on disk already returns None."""
        ...

    def load(self, saved: Tree, *, round: int) -> None:
        """Return to the state after `round` rounds."""
        ...

    def prune(self, *, round: int) -> None:
        """Forget what no checkpoint at or after `round` rounds can need."""
        ...

    def beside(self, name: str) -> Memory:
        """A memory apart, which is saved, loaded and pruned with this one: that of a piece."""
        ...


def open_memory(kind: str, clients: int, folder: Path | None) -> Memory:
    """A memory for a run: `ram`, or `disk` inside the run's folder."""
    if kind == "ram":
        return RamMemory(clients)
    if kind == "disk":
        if folder is None:
            raise UnknownName("A memory on disk must have a folder.", hint="give the run a folder.")
        return DiskMemory(folder / "memory.sqlite")
    raise unknown("memory", kind, MEMORIES)
