"""How evenly a figure is spread over clients. A client without test samples is NaN and left out; no clients give NaN.

Shares, as in Jain's index, Gini's coefficient and the entropy, are of amounts: with a negative value they are NaN.
Clients that are all equal are perfectly fair, also where all have nothing.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atoll.data.statistics import gini

Scores = NDArray[np.float64]
DECILES = tuple(range(10, 100, 10))
PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)  # of clients that are too many to be listed


def drop_nan(values: ArrayLike) -> Scores:
    """Return the values that are not NaN."""
    array = np.asarray(values, dtype=np.float64)
    return array[~np.isnan(array)]


# -- the lower end -----------------------------------------------------------------------------------------------------


def worst(scores: ArrayLike, *, higher_is_better: bool = True) -> float:
    """Return the score of the worst client: min a."""
    some = drop_nan(scores)
    return math.nan if not len(some) else float(some.min() if higher_is_better else some.max())


def bottom(scores: ArrayLike, share: float = 0.1, *, higher_is_better: bool = True) -> float:
    """Return the mean of the ceil(share * N) worst clients."""
    some = np.sort(drop_nan(scores))
    if not len(some):
        return math.nan
    # 0.07 * 100 is 7.000000000000001, which is seven clients and not eight.
    count = max(1, math.ceil(round(share * len(some), 9)))
    return float((some[:count] if higher_is_better else some[-count:]).mean())


def deciles(scores: ArrayLike) -> dict[str, float]:
    """Return the 10th, 20th, ..., 90th percentile over clients, interpolated, as p10 to p90."""
    some = drop_nan(scores)
    values = np.percentile(some, DECILES) if len(some) else np.full(len(DECILES), np.nan)
    return {f"p{decile}": float(value) for decile, value in zip(DECILES, values, strict=True)}


def percentiles(values: ArrayLike) -> list[float]:
    """Return the values at `PERCENTILES` over clients, interpolated."""
    some = drop_nan(values)
    return np.percentile(some, PERCENTILES).tolist() if len(some) else [math.nan] * len(PERCENTILES)


def wilson_lower(right: float, samples: float, z: float = 1.96) -> float:
    """Return Wilson's lower bound of a share p = right / samples, at 97.5 % for z = 1.96.

    (p + z^2 / 2n - z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    if samples <= 0:
        return math.nan
    p, ratio = right / samples, z * z / samples
    lower = p + ratio / 2 - z * math.sqrt(p * (1 - p) / samples + ratio / (4 * samples))
    return max(0.0, lower / (1 + ratio))  # of no right answers it is 0, up to rounding


def worst_wilson(scores: ArrayLike, samples: ArrayLike) -> float:
    """Return Wilson's lower bound of the worst client's accuracy; of several worst clients, the lowest bound."""
    scores, samples = np.asarray(scores, dtype=np.float64), np.asarray(samples)
    at = np.flatnonzero(scores == worst(scores))
    return min((wilson_lower(float(scores[k] * samples[k]), int(samples[k])) for k in at), default=math.nan)


# -- dispersion --------------------------------------------------------------------------------------------------------


def spread(scores: ArrayLike) -> float:
    """Return the distance between the best and the worst client: max a - min a."""
    some = drop_nan(scores)
    return float(np.ptp(some)) if len(some) else math.nan


def variation(scores: ArrayLike) -> float:
    """Return the coefficient of variation: std(a) / mean(a)."""
    some = _amounts(scores)
    return math.nan if some is None else float(some.std() / some.mean()) if some.any() else 0.0


def jain(scores: ArrayLike) -> float:
    """Return Jain's index, (sum a)^2 / (N sum a^2), from 1/N if one has all to 1 if all are equal.

    Accuracies lie close to each other in this measure: 0.9, 0.8 and 0.5 have 0.949. Of error rates it tells more.
    """
    some = _amounts(scores)
    if some is None:
        return math.nan
    return min(1.0, float(some.sum() ** 2 / (len(some) * (some @ some)))) if some.any() else 1.0


def entropy_fairness(scores: ArrayLike) -> float:
    """Return the entropy of the clients' shares over its largest value: -sum q log q / log N, with q = a / sum a.

    For accuracies it is as close to 1 as Jain's index: 0.974 in the example there.
    """
    some = _amounts(scores)
    if some is None:
        return math.nan
    if len(some) == 1 or not some.any():
        return 1.0
    from scipy.special import entr

    return min(1.0, float(entr(some / some.sum()).sum() / math.log(len(some))))


def _amounts(scores: ArrayLike) -> Scores | None:
    """Return the values that are not NaN; None if there are none, or if one is negative."""
    some = drop_nan(scores)
    return some if len(some) and (some >= 0).all() else None


# -- all of it ---------------------------------------------------------------------------------------------------------


def summary(
    scores: ArrayLike, samples: ArrayLike, *, higher_is_better: bool = True, share: bool = True, mean: bool = True
) -> dict[str, float]:
    """Return every figure of this module for one score per client, always in the same order.

    With `share`, the score is between 0 and 1, such as an accuracy; others have no error rate. With `mean`, it is a
    mean over samples. A Wilson bound needs both, a share of samples; else it is NaN.
    """
    scores, samples = np.asarray(scores, dtype=np.float64), np.asarray(samples)
    there = ~np.isnan(scores)
    some = scores[there]
    any_share = share and len(some) > 0
    return {
        "macro": float(some.mean()) if len(some) else math.nan,
        "micro": float(some @ samples[there] / samples[there].sum()) if len(some) else math.nan,
        "worst": worst(some, higher_is_better=higher_is_better),
        "worst_wilson": worst_wilson(some, samples[there]) if any_share and mean else math.nan,
        "bottom10": bottom(some, higher_is_better=higher_is_better),
        **deciles(some),
        "variance": float(some.var()) if len(some) else math.nan,
        "std": float(some.std()) if len(some) else math.nan,
        "cv": variation(some),
        "spread": spread(some),
        "gini": gini(some),
        "jain": jain(some),
        "jain_error": jain(1 - some) if any_share else math.nan,
        "entropy": entropy_fairness(some),
    }
