"""How many cores this process may use."""

from __future__ import annotations

import os


def count_cores() -> int:
    """Return how many cores this process may use, which in a container are not all of the machine's."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
