"""Significance of differences: paired tests over clients and samples, intervals over seeds, harm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]

FEWEST_PAIRS = 6  # with fewer, neither Wilcoxon's nor McNemar's test ever gives less than 0.05


# -- tests -------------------------------------------------------------------------------------------------------------


def wilcoxon(a: ArrayLike, b: ArrayLike) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test, one pair per client.

    Clients with a NaN or without a difference are left out; if none is left, 1. Exact up to 50 clients, or up to 13 if
    differences are tied, and a normal approximation beyond. Fewer than 6 clients never give less than 0.05.
    """
    from scipy import stats

    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    # 0.9 - 0.8 and 0.4 - 0.3 are the same difference of accuracies, and tied only after rounding.
    difference = np.round(difference[~np.isnan(difference)], 12)
    difference = difference[difference != 0]
    return float(stats.wilcoxon(difference).pvalue) if len(difference) else 1.0


def mcnemar(a_right: ArrayLike, b_right: ArrayLike) -> float:
    """Return the two-sided p-value of McNemar's exact test for two models on the same samples.

    Of the n samples that exactly one model has right, each is a toss of a fair coin if the models are equally good:

        p = min(1, 2 sum_{i <= k} C(n, i) / 2^n),    k the smaller of the two counts
    """
    from scipy import stats

    table = mcnemar_table(a_right, b_right)
    only_a, only_b = int(table[0, 1]), int(table[1, 0])
    return float(stats.binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def mcnemar_table(a_right: ArrayLike, b_right: ArrayLike) -> NDArray[np.int64]:
    """Count samples: [[both right, only a], [only b, neither]]."""
    a, b = np.asarray(a_right, dtype=bool), np.asarray(b_right, dtype=bool)
    return np.array([[(a & b).sum(), (a & ~b).sum()], [(~a & b).sum(), (~a & ~b).sum()]], dtype=np.int64)


def student(gain: float, error: float, samples: int) -> float:
    """Return the two-sided p-value of a difference of two means with this standard error, by Student's t.

    1 with fewer than 6 samples: no test that pairs so few ever gives less than 0.05.
    """
    if samples < FEWEST_PAIRS or math.isnan(error) or not abs(gain) > 0:
        return 1.0
    from scipy import stats

    return float(2 * stats.t.sf(abs(gain) / error, samples - 1)) if error else 0.0


def holm(pvalues: ArrayLike) -> Values:
    """Adjust p-values of m tests by Holm: the i-th smallest times m + 1 - i, at least its predecessor, at most 1."""
    given = np.asarray(pvalues, dtype=np.float64)
    order = np.argsort(given)
    adjusted = np.empty_like(given)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(given[order] * np.arange(len(given), 0, -1)))
    return adjusted


# -- intervals ---------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float] | Values, share: float = 0.0) -> float | None:
    """Return half the width of the 95 % t-interval of a mean; None for a single value.

    With a `share`, the values are this share of a finite population, drawn without replacement, and the interval is
    that of the population's mean: narrower by sqrt(1 - share), and nothing once all are drawn.
    """
    if len(values) < 2:
        return None
    from scipy import stats

    error = np.std(values, ddof=1) / math.sqrt(len(values)) * math.sqrt(1 - share)
    return float(stats.t.ppf(0.975, len(values) - 1) * error)


def paired_interval(values: ArrayLike, reference: ArrayLike) -> tuple[float, float | None]:
    """Return the mean difference of two methods, one pair per seed, and half the width of its 95 % t-interval."""
    differences = np.asarray(values, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    return float(differences.mean()), interval(differences)


# -- harm --------------------------------------------------------------------------------------------------------------


def standard_error(variance: ArrayLike, reference_variance: ArrayLike, samples: ArrayLike) -> Values:
    """Return the standard error of the difference of two means, from the variances of single samples.

        se^2 = (var_a + var_r) / n,    both means over the same n samples

    For an accuracy a the variance is a (1 - a). NaN with fewer than 2 samples: a single one says nothing of chance.
    """
    total = np.asarray(variance, dtype=np.float64) + np.asarray(reference_variance, dtype=np.float64)
    samples = np.asarray(samples, dtype=np.float64)
    return np.asarray(np.sqrt(total / np.where(samples > 1, samples, np.nan)))


def is_harmed(gain: ArrayLike, error: ArrayLike) -> NDArray[np.bool_]:
    """Return whether each client loses more than `error` against the reference; False where either is not known."""
    return np.asarray(np.asarray(gain, dtype=np.float64) < -np.asarray(error, dtype=np.float64))
