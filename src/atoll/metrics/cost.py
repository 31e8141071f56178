"""The cost of a score: rounds and bytes until it is reached."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]  # (round, value) of every evaluation, in order
WINDOW = 3


def rounds_to(curve: Curve, target: float, window: int = WINDOW, *, higher_is_better: bool = True) -> int | None:
    """Return the first evaluated round at which the mean of the last `window` evaluations reaches the target, or None.

    A curve with fewer evaluations, as of a one-shot method, is judged by all of them.
    """
    width = max(1, min(window, len(curve)))
    for end in range(width, len(curve) + 1):
        # Exact, unlike a sum of floats: the mean of 0.7, 0.7 and 0.7 reaches 0.7.
        mean = statistics.mean(value for _, value in curve[end - width : end])
        if mean >= target if higher_is_better else mean <= target:
            return curve[end - 1][0]
    return None


def bytes_to(
    curve: Curve,
    cumulative_bytes: Sequence[float],
    target: float,
    window: int = WINDOW,
    *,
    higher_is_better: bool = True,
) -> float | None:
    """Return the bytes spent by the round of `rounds_to`; `cumulative_bytes` has one entry per point of the curve."""
    spent = {round: total for (round, _), total in zip(curve, cumulative_bytes, strict=True)}
    reached = rounds_to(curve, target, window, higher_is_better=higher_is_better)
    return None if reached is None else spent[reached]
