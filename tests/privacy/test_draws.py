"""Draws from a secret: the distributions that are asked for, and nothing that a seed would repeat."""

import numpy as np
import pytest
from scipy import stats

from atoll.kernel.randomness import generator
from atoll.protect.draws import SecretDraws, draws_of

KEY = bytes(range(32))
COUNT = 100_000
LEAST = 1e-4  # p-values below this fail


def test_a_seed_draws_as_before_and_a_secret_does_not():
    seeded = draws_of(7, "noise", 3, "body").standard_normal((5,))
    np.testing.assert_array_equal(seeded, generator(7, "noise", 3, "body").standard_normal(5))
    first, again, other = (
        draws_of(key, "noise", 3, "body").standard_normal((5,)) for key in (KEY, KEY, bytes(reversed(KEY)))
    )
    np.testing.assert_array_equal(first, again)
    assert not np.isclose(first, other).any()
    assert not np.isclose(first, draws_of(KEY, "noise", 4, "body").standard_normal((5,))).any()


def test_normal_draws_are_normal():
    draws = SecretDraws(KEY)
    found = draws.standard_normal((2, COUNT))
    assert stats.kstest(found.ravel(), "norm").pvalue > LEAST
    assert abs(np.corrcoef(found)[0, 1]) < 4 / COUNT**0.5
    assert abs(np.corrcoef(found[0, 1:], found[0, :-1])[0, 1]) < 4 / COUNT**0.5
    assert np.isfinite(found).all()


@pytest.mark.parametrize("mean", [0.0, 0.3, 9.9])
def test_few_are_poisson_numbers(mean):
    found = SecretDraws(KEY).poisson(mean, (COUNT,))
    at = np.arange(int(found.max()) + 2)
    expected = COUNT * stats.poisson(mean).pmf(at)
    enough = expected > 5
    seen = np.bincount(found, minlength=len(at))[enough]
    assert ((seen - expected[enough]) ** 2 / expected[enough]).sum() < stats.chi2(max(1, enough.sum())).ppf(1 - LEAST)


@pytest.mark.parametrize("mean", [10.0, 137.5, 1e6, 3e9])
def test_many_are_poisson_numbers(mean):
    """By their distribution function, smoothed: each number is spread evenly over its step."""
    found = SecretDraws(KEY).poisson(mean, (50, COUNT // 50)).ravel()
    below, here = stats.poisson(mean).cdf(found - 1), stats.poisson(mean).pmf(found)
    spread = below + here * generator(0, "spread").random(COUNT)
    assert stats.kstest(spread, "uniform").pvalue > LEAST
    assert found.mean() == pytest.approx(mean, abs=4 * (mean / COUNT) ** 0.5)
    assert found.var() == pytest.approx(mean, rel=4 * (2 / COUNT) ** 0.5 + 1 / mean)
