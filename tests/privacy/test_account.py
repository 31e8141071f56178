"""The account: test vectors of protect.md 1.7, limits and order."""

import math

import pytest

from atoll.privacy.account import composed_epsilon, find_noise, gaussian_delta, gaussian_epsilon, passes_epsilon


@pytest.mark.parametrize(
    ("noise", "share", "rounds", "delta", "rdp", "pld"),
    [
        (1, 1, 1, 1e-5, 4.728507, 4.377178),
        (1, 1, 10, 1e-5, 19.053598, 17.856587),
        (10, 1, 1, 1e-6, 0.429952, 0.396857),
        (1, 0.1, 1, 1e-5, 2.133006, 1.684544),
        (0.5, 0.5, 1, 1e-5, 9.721757, 8.981457),
        (1, 0.05, 200, 1e-3, 3.751395, 3.162054),
        (1, 0.1, 100, 1e-5, 7.903850, 7.046603),
        (2, 0.5, 50, 1e-5, 10.287808, 9.473594),
    ],
)
def test_composition_agrees_with_the_table(noise, share, rounds, delta, rdp, pld):
    assert composed_epsilon(noise, share, rounds, delta, "rdp") == pytest.approx(rdp, abs=1e-4)
    assert composed_epsilon(noise, share, rounds, delta, "pld") == pytest.approx(pld, abs=1e-3)


@pytest.mark.parametrize(("mu", "delta", "epsilon"), [(1, 1e-5, 4.377178096), (10**0.5, 1e-5, 17.856586830),
                                                      (0.1, 1e-6, 0.396857378)])  # fmt: skip
def test_a_gaussian_has_a_closed_form(mu, delta, epsilon):
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, abs=1e-8)
    assert gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-6)


def test_more_noise_tells_less_and_more_rounds_or_clients_tell_more():
    base = composed_epsilon(1.0, 0.1, 20, 1e-5)
    assert composed_epsilon(2.0, 0.1, 20, 1e-5) < base < composed_epsilon(1.0, 0.1, 40, 1e-5)
    assert base < composed_epsilon(1.0, 0.2, 20, 1e-5) < composed_epsilon(1.0, 1.0, 20, 1e-5)
    assert composed_epsilon(0.0, 0.1, 1, 1e-5) == math.inf
    assert gaussian_epsilon(0.0, 1e-5) == 0


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_the_noise_that_is_found_keeps_the_promise_and_little_less_would_not(share):
    noise = find_noise(4.0, share, 10, 1e-5)
    assert composed_epsilon(noise, share, 10, 1e-5) <= 4.0 < composed_epsilon(noise * 0.99, share, 10, 1e-5)


def test_passes_over_shuffled_samples_add_up():
    """n=600, B=60, E=1, R=20 of protect.md 1.4: what counts is E R, not the batch."""
    assert passes_epsilon(1.0, 20, 1e-5) == pytest.approx(28.37, abs=0.01)
    assert passes_epsilon(2.0, 20, 1e-5) == pytest.approx(11.48, abs=0.01)
    assert passes_epsilon(1.0, 100, 1e-5) == pytest.approx(91.8, abs=0.1)
    assert passes_epsilon(0.0, 0, 1e-5) == 0
    assert passes_epsilon(0.0, 1, 1e-5) == math.inf
