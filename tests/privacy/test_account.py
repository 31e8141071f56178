"""The account: test vectors of protect.md 1.7, limits and order."""

import math

import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from atoll import federate
from atoll.kernel.errors import HyperparameterError, UnknownName
from atoll.protect.account import (
    composed_epsilon,
    find_mu,
    find_noise,
    gaussian_delta,
    gaussian_epsilon,
    passes_epsilon,
)


@pytest.mark.parametrize(
    ("noise", "share", "rounds", "delta", "rdp", "pld"),
    [
        (1, 1, 1, 1e-5, 4.728507, 4.377178),
        (1, 1, 10, 1e-5, 19.053598, 17.856587),
        (10, 1, 1, 1e-6, 0.429952, 0.396857),
        (1, 0.1, 1, 1e-5, 2.133006, 1.684544),
        (0.5, 0.5, 1, 1e-5, 9.721757, 8.981457),
        (1, 0.05, 200, 1e-3, 3.751395, 3.162054),
        (0.8, 0.01, 1000, 1e-5, 3.695613, 3.141018),
        (1, 0.1, 100, 1e-5, 7.903850, 7.046603),
        (2, 0.5, 50, 1e-5, 10.287808, 9.473594),
        (1.1, 1 / 240, 3600, 1e-5, 1.265491, 1.118498),
    ],
)
def test_composition_agrees_with_the_table(noise, share, rounds, delta, rdp, pld):
    assert composed_epsilon(noise, share, rounds, delta, "rdp") == pytest.approx(rdp, abs=1e-5)
    assert composed_epsilon(noise, share, rounds, delta, "pld") == pytest.approx(pld, abs=1e-4)


@pytest.mark.parametrize(("mu", "delta", "epsilon"), [(1, 1e-5, 4.377178096), (10**0.5, 1e-5, 17.856586830),
                                                      (0.1, 1e-6, 0.396857378)])  # fmt: skip
def test_a_gaussian_has_a_closed_form(mu, delta, epsilon):
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, abs=1e-8)
    assert gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("noise", "share", "exact"), [(1, 0.1, 1.684543814), (0.5, 0.5, 8.981456746)])
def test_one_round_of_chance_has_a_closed_form(noise, share, exact):
    """Leaving a client out of one sampled Gaussian: the larger direction in these rows of the table."""

    def delta(epsilon):
        x = noise**2 * math.log((math.exp(epsilon) - 1 + share) / share) + 0.5
        return (1 - share - math.exp(epsilon)) * ndtr(-x / noise) + share * ndtr((1 - x) / noise)

    assert brentq(lambda epsilon: delta(epsilon) - 1e-5, 0.01, 20, xtol=1e-13) == pytest.approx(exact, abs=1e-8)
    assert composed_epsilon(noise, share, 1, 1e-5) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(("order", "expected"), [(2, 1.285101e-4), (8, 5.840703e-4)])
def test_renyi_divergences_of_a_sampled_gaussian(order, expected):
    """Q = 0.01, z = 1.1: the sum of protect.md 1.7, and what the accountant that we call has."""
    accounting = pytest.importorskip("dp_accounting.rdp")
    events = pytest.importorskip("dp_accounting")
    share, noise = 0.01, 1.1
    terms = [
        math.comb(order, j) * (1 - share) ** (order - j) * share**j * math.exp(j * (j - 1) / (2 * noise**2))
        for j in range(order + 1)
    ]
    assert math.log(sum(terms)) / (order - 1) == pytest.approx(expected, rel=1e-6)
    account = accounting.RdpAccountant(orders=[order])
    account.compose(events.PoissonSampledDpEvent(share, events.GaussianDpEvent(noise)))
    epsilon = account.get_epsilon(1e-5)
    converted = epsilon - math.log((order - 1) / order) + (math.log(1e-5) + math.log(order)) / (order - 1)
    assert converted == pytest.approx(expected, abs=1e-9)


def test_a_fixed_size_is_not_chance():
    """N=1000, 50 a round, 200 rounds, z=1: why such a cohort is refused. Replacing a client moves the sum by 2 C."""
    accounting = pytest.importorskip("dp_accounting.rdp")
    events = pytest.importorskip("dp_accounting")
    account = accounting.RdpAccountant(neighboring_relation=events.NeighboringRelation.REPLACE_ONE)
    account.compose(events.SampledWithoutReplacementDpEvent(1000, 50, events.GaussianDpEvent(0.5)), 200)
    assert account.get_epsilon(1e-3) == pytest.approx(53.8, abs=0.1)
    assert composed_epsilon(1.0, 0.05, 200, 1e-3) == pytest.approx(3.16, abs=0.01)


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


@pytest.mark.parametrize(("kind", "secure"), [("client", "none"), ("client", "masks"), ("local", "none")])
def test_an_epsilon_that_cannot_be_reached_is_told_which_can(make_task, kind, secure):
    words = f"{kind}:epsilon=1e-6,delta=1e-12"
    with pytest.raises(HyperparameterError, match=r"No noise up to 10000 keeps 40 .* reach epsilon=0.00\d+ at delta"):
        federate(make_task(sizes=(8, 9, 10)), "fedavg", rounds=40, dp=words, secure=secure)


def test_mu_is_found_for_the_smallest_promises():
    for epsilon, delta in ((1e-9, 1e-12), (1e-3, 1e-15), (5.0, 1e-300)):
        mu = find_mu(epsilon, delta)
        assert gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-2, abs=1e-15)


def test_fields_that_are_named_as_public_must_be_sent(make_task):
    with pytest.raises(UnknownName, match="Unknown field of FedAvg 'detla'. Did you mean: delta"):
        federate(make_task(sizes=(8, 9, 10)), "fedavg", rounds=1, dp="client:noise=1,delta=1e-2,public=detla")
