"""Figures and names in sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_LISTED = 10


def rank_text(values: NDArray[np.float64] | NDArray[np.int64], client: int) -> str:
    """Write the rank among the clients, the largest first; equals share the better one."""
    known = values[~np.isnan(values)]
    if np.ptp(known) == 0:
        return f"the same for all {len(known)} clients"
    return f"rank {int((known > values[client]).sum()) + 1} of {len(known)}"


def percent(share: float) -> str:
    """Write a share of 1 in per cent."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def p_text(p: float) -> str:
    """Write a p-value."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def count_text(number: int, what: str) -> str:
    """Write a number of things."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def join_names(names: Sequence[str]) -> str:
    """Join names as `a, b and c`; of very many, only the first are named."""
    if len(names) > MOST_LISTED:
        return f"{', '.join(names[:MOST_LISTED])} and {len(names) - MOST_LISTED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
