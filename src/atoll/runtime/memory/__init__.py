"""The memory of clients between rounds: in RAM, or on disk for more clients than RAM holds; by default, by size.

A memory is only ever asked for the clients of a cohort. What is kept in a round becomes visible in the next one, and a
run that is resumed sees exactly what was kept up to its checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from atoll.kernel.engine import Memory
from atoll.kernel.errors import UnknownName, unknown
from atoll.runtime.memory.disk import DiskMemory
from atoll.runtime.memory.ram import RamMemory

__all__ = ["MEMORIES", "DiskMemory", "Memory", "RamMemory", "choose_memory", "open_memory"]

MEMORIES = ("auto", "ram", "disk")
SHARE = 1 / 8  # of the device's memory, which what clients keep may take; a checkpoint holds it twice more
UNKNOWN = 16 * 2**30  # bytes, where a system does not say how much memory it has


def choose_memory(kept: int, device: torch.device) -> str:
    """Return where clients should keep so many bytes in all: in RAM (or on the GPU), or on disk if that is too much."""
    return "ram" if kept <= SHARE * _memory_of(device) else "disk"


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return UNKNOWN


def open_memory(kind: str, clients: int, folder: Path | None) -> Memory:
    """Open a memory for a run: `ram`, or `disk` inside the run's folder."""
    if kind == "ram":
        return RamMemory(clients)
    if kind == "disk":
        if folder is None:
            raise UnknownName("A memory on disk must have a folder.", hint="give the run a folder.")
        return DiskMemory(folder / "memory.sqlite")
    raise unknown("memory", kind, MEMORIES)
