import math

import numpy as np
import pytest

from atoll.kernel.randomness import generator
from atoll.metrics import fairness
from atoll.metrics.fairness import (
    bottom,
    deciles,
    entropy_fairness,
    gini,
    jain,
    percentiles,
    spread,
    summary,
    variation,
    worst,
)

NAN = math.nan
EXAMPLE = [0.9, 0.8, 0.5]
FIGURES = [worst, bottom, spread, variation, gini, jain, entropy_fairness]


def test_the_example_of_three_accuracies():
    # (2.2)^2 / (3 * (0.81 + 0.64 + 0.25)) = 4.84 / 5.1
    assert jain(EXAMPLE) == pytest.approx(4.84 / 5.1, abs=1e-12)
    shares = [9 / 22, 8 / 22, 5 / 22]
    assert entropy_fairness(EXAMPLE) == pytest.approx(-sum(q * math.log(q) for q in shares) / math.log(3), abs=1e-12)
    assert round(jain(EXAMPLE), 3) == 0.949
    assert round(entropy_fairness(EXAMPLE), 3) == 0.974
    # Of error rates: (0.8)^2 / (3 * (0.01 + 0.04 + 0.25)) = 0.64 / 0.9, which shows the difference.
    assert jain([0.1, 0.2, 0.5]) == pytest.approx(0.64 / 0.9, abs=1e-12)


def test_gini_is_the_double_sum():
    a = generator(0, "test scores").random(17)
    double_sum = np.abs(a[:, None] - a).sum() / (2 * len(a) ** 2 * a.mean())
    assert gini(a) == pytest.approx(double_sum, abs=1e-12)
    assert gini([0, 0, 0, 1]) == pytest.approx(0.75, abs=1e-12)  # 6 pairs of 1, by 2 * 16 / 4


def test_one_that_has_all():
    assert jain([0, 0, 0, 1]) == 0.25
    assert entropy_fairness([0, 0, 0, 1]) == 0


def test_dispersion():
    # mean 2, variance (1 + 0 + 1) / 3
    assert variation([1, 2, 3]) == pytest.approx(math.sqrt(2 / 3) / 2, abs=1e-12)
    assert spread([1, 2, 4]) == 3


@pytest.mark.parametrize("level", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("clients", [1, 3, 10])
def test_equal_clients_are_perfectly_fair(level, clients):
    same = [level] * clients
    assert spread(same) == 0
    assert [gini(same), variation(same)] == [pytest.approx(0, abs=1e-12)] * 2
    assert [jain(same), entropy_fairness(same)] == [pytest.approx(1, abs=1e-12)] * 2
    assert max(jain(same), entropy_fairness(same)) <= 1


@pytest.mark.parametrize("figure", FIGURES)
def test_a_client_without_samples_is_left_out(figure):
    assert figure([0.9, NAN, 0.8, NAN, 0.5]) == figure(EXAMPLE)
    assert math.isnan(figure([]))
    assert math.isnan(figure([NAN, NAN]))


@pytest.mark.parametrize("figure", [variation, gini, jain, entropy_fairness])
def test_there_are_no_shares_of_negative_amounts(figure):
    assert math.isnan(figure([1.0, -0.5]))


def test_the_lower_end_is_the_upper_one_for_errors():
    scores = [*range(20, 0, -1), NAN]
    assert (worst(scores), bottom(scores)) == (1, 1.5)
    assert worst(scores, higher_is_better=False) == 20
    assert bottom(scores, higher_is_better=False) == 19.5


@pytest.mark.parametrize(("clients", "share", "count"), [(1, 0.1, 1), (10, 0.1, 1), (11, 0.1, 2), (100, 0.07, 7)])
def test_the_bottom_is_rounded_up(clients, share, count):
    assert bottom(range(clients), share) == pytest.approx((count - 1) / 2)


def test_deciles():
    assert deciles([*range(11), NAN]) == {f"p{10 * i}": i for i in range(1, 10)}
    assert set(deciles([0.3]).values()) == {0.3}
    assert all(map(math.isnan, deciles([]).values()))


def test_percentiles():
    assert percentiles([*range(101), NAN]) == [0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100]
    assert all(map(math.isnan, percentiles([NAN])))


def test_wilson_bound_solves_its_equation():
    # The bound L is where the share p lies z standard errors of L above it: (p - L)^2 = z^2 L (1 - L) / n.
    for right, samples in [(1, 7), (5, 10), (80, 100), (10, 10)]:
        low, p = fairness.wilson_lower(right, samples), right / samples
        assert low < p
        assert (p - low) ** 2 == pytest.approx(1.96**2 * low * (1 - low) / samples, abs=1e-12)


def test_wilson_bound_by_hand():
    # p = 1: (1 + z^2/2n - z^2/2n) / (1 + z^2/n) = n / (n + z^2) = 10 / 13.8416
    assert fairness.wilson_lower(10, 10) == pytest.approx(10 / 13.8416, abs=1e-12)
    assert fairness.wilson_lower(0, 10) == 0
    assert math.isnan(fairness.wilson_lower(0, 0))


def test_the_worst_client_has_the_lowest_bound_of_those_that_tie():
    bound = fairness.worst_wilson([0.9, 0.5, NAN, 0.5], [10, 100, 0, 4])
    assert bound == fairness.wilson_lower(2, 4) < fairness.wilson_lower(50, 100)
    assert math.isnan(fairness.worst_wilson([NAN], [0]))


def test_summary():
    figures = summary([0.9, NAN, 0.8, 0.5], [10, 0, 20, 4])
    assert list(figures) == [
        "macro", "micro", "worst", "worst_wilson", "bottom10",
        "p10", "p20", "p30", "p40", "p50", "p60", "p70", "p80", "p90",
        "variance", "std", "cv", "spread", "gini", "jain", "jain_error", "entropy",
    ]  # fmt: skip
    assert {type(value) for value in figures.values()} == {float}
    assert figures["macro"] == pytest.approx(2.2 / 3, abs=1e-12)
    assert figures["micro"] == pytest.approx((9 + 16 + 2) / 34, abs=1e-12)
    assert figures["worst_wilson"] == fairness.wilson_lower(2, 4)
    assert figures["jain_error"] == pytest.approx(0.64 / 0.9, abs=1e-12)
    assert figures["std"] ** 2 == pytest.approx(figures["variance"], abs=1e-12)
    assert (figures["worst"], figures["p50"]) == (0.5, 0.8)


def test_summary_of_a_score_that_is_no_share():
    figures = summary([3.0, 1.0], [5, 5], higher_is_better=False, share=False)
    assert (figures["worst"], figures["bottom10"]) == (3.0, 3.0)
    assert {name for name, value in figures.items() if math.isnan(value)} == {"worst_wilson", "jain_error"}


def test_summary_without_scores_is_nan_throughout():
    for nobody in (summary([], []), summary([NAN], [0])):
        assert all(map(math.isnan, nobody.values()))
        assert list(nobody) == list(summary([1.0], [1]))
