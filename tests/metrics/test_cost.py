import math

import pytest

from atoll.metrics.cost import bytes_to, rounds_to

CURVE = [(5, 0.2), (10, 0.9), (15, 0.4), (20, 0.7), (25, 0.8), (30, 0.9)]  # means of three: 0.5, 0.667, 0.633, 0.8


@pytest.mark.parametrize(("target", "reached"), [(0.5, 15), (0.6, 20), (0.66, 20), (0.67, 30), (0.8, 30), (0.81, None)])
def test_one_lucky_evaluation_does_not_reach_the_target(target, reached):
    assert rounds_to(CURVE, target) == reached


def test_a_window_of_one_is_the_curve_itself():
    assert rounds_to(CURVE, 0.85, window=1) == 10


def test_an_error_reaches_its_target_from_above():
    errors = [(round, 1 - value) for round, value in CURVE]
    assert rounds_to(errors, 0.45, higher_is_better=False) == 20
    assert rounds_to(errors, 0.1, higher_is_better=False) is None


def test_a_short_curve_is_judged_by_all_of_it():
    assert rounds_to([(1, 0.7)], 0.7) == 1
    assert rounds_to([(1, 0.5), (2, 0.9)], 0.7) == 2
    assert rounds_to([(1, 0.5), (2, 0.8)], 0.7) is None
    assert rounds_to([], 0.1) is None


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
def test_a_flat_curve_reaches_its_own_height(value):
    assert rounds_to([(1, value), (2, value), (3, value)], value) == 3


def test_a_diverged_evaluation_reaches_nothing():
    assert rounds_to([(1, 0.9), (2, math.nan), (3, 0.9), (4, 0.9), (5, 0.9)], 0.8) == 5


def test_bytes_to_are_those_of_the_round():
    spent = [100, 200, 300, 400, 500, 600]
    assert bytes_to(CURVE, spent, 0.6) == 400
    assert bytes_to(CURVE, spent, 0.85, window=1) == 200
    assert bytes_to(CURVE, spent, 0.81) is None
    with pytest.raises(ValueError, match="shorter"):
        bytes_to(CURVE, spent[:-1], 0.6)
