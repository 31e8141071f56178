"""Measures of attacks against closed forms and the published vectors of one-run audits."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from atoll.experiments.audit.measures import auc, bootstrap, lower_bound, psnr, ssim, tpr
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.randomness import generator


def test_the_same_distribution_has_an_auc_of_one_half() -> None:
    draws = generator(0, "test").standard_normal((2, 20_000))
    assert auc(*draws) == pytest.approx(0.5, abs=3 * math.sqrt(1 / (6 * 20_000)))
    assert tpr(*draws) == pytest.approx(0.01, abs=0.003)


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_two_gaussians(mu: float) -> None:
    members, others = generator(1, "test").standard_normal((2, 40_000))
    assert auc(members + mu, others) == pytest.approx(norm.cdf(mu / math.sqrt(2)), abs=3 * 0.002)
    assert tpr(members + mu, others) == pytest.approx(norm.cdf(norm.ppf(0.01) + mu), abs=0.02)


def test_a_lookup_table_gives_all_away() -> None:
    assert auc(np.ones(5), np.zeros(7)) == tpr(np.ones(5), np.zeros(7)) == 1.0


def test_ties_count_half_and_are_no_hits() -> None:
    assert auc(np.ones(3), np.ones(4)) == 0.5
    assert tpr(np.ones(300), np.ones(300)) == 0.0


def test_an_interval_holds_its_figure() -> None:
    members, others = generator(2, "test").standard_normal((2, 300))
    for found in bootstrap(members + 1, others, seed=0):
        assert found.low <= found.value <= found.high
        assert found.high - found.low > 0.01
    area = bootstrap(members + 1, others, seed=0)[0]
    assert area.low < norm.cdf(1 / math.sqrt(2)) < area.high


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "epsilon"),
    [
        (100, 100, 75, 0, 0.702214),
        (1000, 1000, 600, 0, 0.297468),
        (1000, 100, 95, 1e-5, 2.165176),
        (1000, 100, 100, 1e-5, 3.465376),
        (10, 10, 10, 0, 1.051873),
    ],
)
def test_one_run_audit(canaries: int, guesses: int, right: int, delta: float, epsilon: float) -> None:
    assert lower_bound(canaries, guesses, right, delta) == pytest.approx(epsilon, abs=1e-5)


def test_all_right_without_delta_has_a_closed_form() -> None:
    for guesses in (5, 20, 60):
        p = 0.05 ** (1 / guesses)
        assert lower_bound(100, guesses, guesses, 0) == pytest.approx(math.log(p / (1 - p)), abs=1e-6)


def test_guesses_by_chance_bound_nothing() -> None:
    assert lower_bound(100, 100, 50, 1e-5) == 0.0
    assert lower_bound(100, 0, 0, 1e-5) == 0.0
    with pytest.raises(HyperparameterError, match="Got 5 of 4 of 10"):
        lower_bound(10, 4, 5, 0)


def test_psnr() -> None:
    assert psnr(np.zeros(4), np.full(4, 0.1), 1.0) == pytest.approx(20)
    assert psnr(np.zeros(4), np.zeros(4), 1.0) == math.inf


def test_ssim_of_constant_pictures_has_a_closed_form() -> None:
    """Without variance only the means count: (2ab + c) / (a^2 + b^2 + c), c = 0.0001."""
    a, b = np.full((1, 9, 9), 0.3), np.full((1, 9, 9), 0.8)
    assert ssim(a, b, 1.0) == pytest.approx((2 * 0.24 + 1e-4) / (0.09 + 0.64 + 1e-4))


def test_ssim_is_one_of_the_same_and_falls_with_noise() -> None:
    rng = generator(0, "pictures")
    true = rng.random((3, 12, 12))
    values = [ssim(true + size * rng.standard_normal(true.shape), true, 1.0) for size in (0.0, 0.1, 0.5, 3.0)]
    assert values[0] == pytest.approx(1.0)
    assert values == sorted(values, reverse=True)
    assert ssim(1 - true, true, 1.0) < 0
    assert values[-1] >= -1


def test_ssim_of_one_window_by_hand() -> None:
    """A picture of 7 x 7 is one window: means, sample variances and the covariance of all its pixels."""
    rng = generator(1, "pictures")
    a, b = rng.random((1, 7, 7)), rng.random((1, 7, 7))
    (va, cov), (_, vb) = np.cov(a.ravel(), b.ravel())
    c1, c2 = 0.01**2, 0.03**2
    top = (2 * a.mean() * b.mean() + c1) * (2 * cov + c2)
    assert ssim(a, b, 1.0) == pytest.approx(top / ((a.mean() ** 2 + b.mean() ** 2 + c1) * (va + vb + c2)))
