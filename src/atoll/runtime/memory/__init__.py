"""The memory of clients between rounds: in RAM, or on disk for more clients than RAM holds.

A memory is only ever asked for the clients of a cohort. What is kept in a round becomes visible in the next one, and a
run that is resumed sees exactly what was kept up to its checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from atoll.kernel.engine import Memory
from atoll.kernel.errors import UnknownName, unknown
from atoll.runtime.memory.disk import DiskMemory
from atoll.runtime.memory.ram import RamMemory

__all__ = ["MEMORIES", "DiskMemory", "Memory", "RamMemory", "open_memory"]

MEMORIES = ("ram", "disk")


def open_memory(kind: str, clients: int, folder: Path | None) -> Memory:
    """Open a memory for a run: `ram`, or `disk` inside the run's folder."""
    if kind == "ram":
        return RamMemory(clients)
    if kind == "disk":
        if folder is None:
            raise UnknownName("A memory on disk must have a folder.", hint="give the run a folder.")
        return DiskMemory(folder / "memory.sqlite")
    raise unknown("memory", kind, MEMORIES)
