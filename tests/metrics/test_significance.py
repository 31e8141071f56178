import math

import numpy as np
import pytest
from scipy import stats

from atoll.kernel.randomness import generator
from atoll.metrics.significance import (
    holm,
    interval,
    is_harmed,
    mcnemar,
    mcnemar_table,
    paired_interval,
    standard_error,
    wilcoxon,
)

NAN = math.nan


def outcomes(both, only_a, only_b, neither):
    """Per-sample outcomes of two models with this table."""
    a = [True] * (both + only_a) + [False] * (only_b + neither)
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return a, b


# -- Wilcoxon ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [6, 20, 80])
def test_wilcoxon_is_that_of_scipy(clients):
    rng = generator(0, "test scores")
    a = rng.random(clients)
    b = a - 0.1 + 0.3 * rng.random(clients)
    assert wilcoxon(a, b) == pytest.approx(stats.wilcoxon(a, b).pvalue, abs=1e-12)


def test_wilcoxon_by_hand():
    # Differences 1, 2, 3, 4, 5, -6: the negative ranks sum to 6. Of the 64 ways to give signs, 14 have a sum of at
    # most 6: {}, 1, 2, 3, 4, 5, 6, 1+2, 1+3, 1+4, 1+5, 2+3, 2+4, 1+2+3. Two-sided: 28 / 64.
    assert wilcoxon([1, 2, 3, 4, 5, 0], [0, 0, 0, 0, 0, 6]) == pytest.approx(28 / 64, abs=1e-12)
    assert wilcoxon([1, 2, 3, 4, 5, 6], [0] * 6) == pytest.approx(2 / 64, abs=1e-12)


def test_wilcoxon_leaves_out_clients_without_score_or_difference():
    a, b = [0.9, NAN, 0.5, 0.7, 0.8, 0.3], [0.8, 0.4, 0.5, 0.4, 0.3, NAN]
    assert wilcoxon(a, b) == wilcoxon([0.9, 0.7, 0.8], [0.8, 0.4, 0.3]) == pytest.approx(2 / 8, abs=1e-12)


def test_wilcoxon_sees_ties_that_rounding_hides():
    assert 0.9 - 0.8 != 0.4 - 0.3
    assert wilcoxon([0.9, 0.4, 0.2, 0.7], [0.8, 0.3, 0.3, 0.1]) == wilcoxon([1, 1, 0, 6], [0, 0, 1, 0])


@pytest.mark.parametrize(("a", "b"), [([], []), ([0.5], [0.5]), ([NAN], [0.3]), ([0.1] * 9, [0.1] * 9), ([1], [0])])
def test_wilcoxon_finds_nothing_where_nothing_can_be_found(a, b):
    assert wilcoxon(a, b) == 1


# -- McNemar -----------------------------------------------------------------------------------------------------------


def test_mcnemar_by_hand():
    a, b = outcomes(both=40, only_a=9, only_b=2, neither=7)
    assert mcnemar_table(a, b).tolist() == [[40, 9], [2, 7]]
    # 11 samples are right for one model only, and b has 2 of them:
    # p = 2 (C(11,0) + C(11,1) + C(11,2)) / 2^11 = 2 (1 + 11 + 55) / 2048 = 134 / 2048 = 0.0654296875
    assert mcnemar(a, b) == mcnemar(b, a) == pytest.approx(134 / 2048, abs=1e-12)


@pytest.mark.parametrize(
    ("only_a", "only_b", "expected"),
    [
        (0, 0, 1.0),  # the same answers
        (1, 0, 1.0),  # 2 * 1/2
        (3, 3, 1.0),  # 2 (1 + 6 + 15 + 20) / 64 is more than 1
        (6, 0, 2 / 64),
    ],
)
def test_mcnemar_at_the_edges(only_a, only_b, expected):
    assert mcnemar(*outcomes(5, only_a, only_b, 5)) == pytest.approx(expected, abs=1e-12)


def test_mcnemar_of_no_samples():
    assert mcnemar([], []) == 1
    assert mcnemar_table([], []).tolist() == [[0, 0], [0, 0]]


# -- Holm --------------------------------------------------------------------------------------------------------------


def test_holm_by_hand():
    # Sorted 0.005, 0.01, 0.03, 0.04, times 4, 3, 2, 1: 0.02, 0.03, 0.06, and 0.04 is raised to 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], abs=1e-12)


def test_holm_of_few():
    assert holm([0.2]).tolist() == [0.2]
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_interval_by_hand():
    # With 2 degrees of freedom t has a closed form: t(0.975) = 0.95 sqrt(2 / (1 - 0.95^2)) = 4.3027. The std is 1.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3), abs=1e-12)
    low, high = stats.t.interval(0.95, 2, loc=2, scale=1 / math.sqrt(3))
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((high - low) / 2, abs=1e-12)


def test_one_seed_has_no_interval():
    assert interval([0.5]) is None
    assert interval([]) is None
    assert paired_interval([0.5], [0.25]) == (0.25, None)


def test_an_interval_of_a_finite_population_is_narrower():
    values = [0.2, 0.4, 0.9]
    assert interval(values, 0.75) == pytest.approx(interval(values) / 2)
    assert interval(values, 1.0) == 0


def test_a_paired_interval_is_one_of_the_differences():
    a, b = [0.9, 0.7, 0.5], [0.8, 0.6, 0.4]  # seeds differ much, the methods always by 0.1
    mean, half = paired_interval(a, b)
    assert (mean, half) == (pytest.approx(0.1, abs=1e-12), pytest.approx(0, abs=1e-12))
    assert interval(a) > 0.3


# -- harm --------------------------------------------------------------------------------------------------------------


def test_harm_is_beyond_one_standard_error():
    a, r, samples = np.array([0.5, 0.5, 0.0, 1.0, NAN]), np.array([0.55, 0.55, 1.0, 1.0, NAN]), [20, 2000, 3, 3, 0]
    error = standard_error(a * (1 - a), r * (1 - r), samples)
    # (0.25 + 0.2475) / 20 = 0.024875, so that 0.05 is within 0.158; with 2000 samples it is beyond 0.0158
    assert error[:2] == pytest.approx([math.sqrt(0.024875), math.sqrt(0.00024875)], abs=1e-12)
    assert error[2:4].tolist() == [0, 0]
    assert math.isnan(error[4])
    assert is_harmed(a - r, error).tolist() == [False, True, True, False, False]
    assert is_harmed(a - r, 0).tolist() == [True, True, True, False, False]


def test_a_single_sample_says_nothing_of_chance():
    """catches: a client whose only test sample turned wrong, harmed beyond an error of 0."""
    error = standard_error([0.0], [0.0], [1])
    assert math.isnan(error[0])
    assert not is_harmed([-1.0], error)[0]


def test_standard_error_of_any_mean():
    assert standard_error([4.0], [5.0], [9]).tolist() == [1.0]
