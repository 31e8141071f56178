"""Noise in shares under masks: the account, the noise that is left whoever drops out, and what the server reads."""

import numpy as np
import pytest
import torch

from atoll import LocalEngine, federate
from atoll.algorithms import Ditto, FedAvg, FedPer
from atoll.kernel.errors import AtollError
from atoll.kernel.params import Stack
from atoll.kernel.randomness import generator
from atoll.protect.account import composed_epsilon
from atoll.protect.masks import default_threshold
from atoll.protect.secure import MODULUS
from atoll.protect.shares import (
    ORDERS,
    STEPS,
    NoiseInShares,
    PrivacyInShares,
    RoundedClip,
    divergence_epsilon,
    draw_skellam,
    find_shares_noise,
    shares_epsilon,
    skellam_divergence,
)
from atoll.protect.stages import Place, Sent
from atoll.protect.words import parse_privacy

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
SIZES = (5, 9, 12, 7, 3, 8)


def test_the_account_is_the_papers():
    """protect.md 1.5: both norms 1, variance 10, delta 1e-5: 1.390997 at order 14; 1.308497 for a Gaussian."""
    orders = np.arange(2, 200, dtype=np.float64)
    assert divergence_epsilon(orders, skellam_divergence(orders, 10.0, 1.0, 1.0), 1e-5) == pytest.approx(
        1.390997, abs=1e-6
    )
    assert divergence_epsilon(orders, orders / 20, 1e-5) == pytest.approx(1.308497, abs=1e-6)


@pytest.mark.parametrize(("noise", "messages"), [(1.0, 1), (4.0, 20), (0.7, 3)])
def test_with_fine_steps_it_costs_what_a_gaussian_costs(noise, messages):
    """RDP by dp-accounting, whose orders are others."""
    pytest.importorskip("dp_accounting")
    gaussian = composed_epsilon(noise, 1.0, messages, 1e-5, "rdp")
    assert shares_epsilon(noise, messages, 1e-5) == pytest.approx(gaussian, rel=0.01)
    assert shares_epsilon(noise, messages, 1e-5) >= divergence_epsilon(ORDERS, messages * ORDERS / (2 * noise**2), 1e-5)


def test_noise_is_found_for_epsilon():
    found = find_shares_noise(4.0, 20, 1e-5)
    assert shares_epsilon(found, 20, 1e-5) <= 4
    assert shares_epsilon(found - 0.002, 20, 1e-5) > 4


def test_skellam_numbers_have_mean_0_and_their_variance_and_add_up():
    rng, count = generator(0, "skellam"), 200_000
    drawn = draw_skellam(rng, 50.0, (count,))
    assert abs(drawn.mean()) < 4 * (50 / count) ** 0.5
    assert drawn.var() == pytest.approx(50.0, rel=4 * (2 / count) ** 0.5 * 1.1)
    added = sum(draw_skellam(rng, 10.0, (count,)) for _ in range(5))
    assert added.var() == pytest.approx(50.0, rel=4 * (2 / count) ** 0.5 * 1.1)
    kurtosis = (((drawn - drawn.mean()) / drawn.std()) ** 4).mean()
    assert kurtosis == pytest.approx(3 + 1 / 50, abs=0.06)


def test_rounded_messages_stay_within_the_norm():
    """The worst case: every number is rounded up by half a step."""
    scale, numbers = 64.0, 400
    rows = torch.full((1, numbers), (0.5 + 1e-6) / scale + 2 / scale, dtype=torch.float64)
    out = RoundedClip(1.0, scale).apply(Sent({"delta": Stack.of(w=rows)}, None), Place(0, np.arange(1))).fields
    assert (out["delta"]["w"] * scale).round().norm().item() <= scale
    with pytest.raises(AtollError, match="too many"):
        RoundedClip(0.1, 1.0).apply(Sent({"delta": Stack.of(w=rows)}, None), Place(0, np.arange(1)))


@pytest.mark.parametrize("lost", [0, 1])
def test_whoever_drops_out_the_sum_has_the_noise_that_was_promised(make_task, lost):
    """Messages cut to next to nothing: the mean is noise, of at least z C over those who replied."""
    task = make_task(lambda: torch.nn.Linear(400, 30), sizes=(4,) * 6, shape=(400,), classes=30)
    report = federate(
        task, FedAvg(), rounds=1, evaluation="none", secure="masks", dp="client:noise=50,clip=1e-3,delta=1e-2",
        faults=lambda _, clients: clients < lost,
    )  # fmt: skip
    moved = torch.cat([leaf.flatten() for leaf in (report.server - task.network.initial).values()])
    left, threshold = 6 - lost, default_threshold(6)
    wanted = 50 * 1e-3 * (left / threshold) ** 0.5 / left
    assert moved.double().std().item() == pytest.approx(wanted, rel=0.04)
    assert left >= threshold


def test_without_noise_to_speak_of_it_is_the_secure_mean(make_task):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 2, "evaluation": "none", "engine": ENGINE}
    noisy = federate(task, FedPer(), secure="masks", dp="client:noise=1e-4,clip=50,delta=1e-2", **more).server
    plain = federate(task, FedPer(weighting="uniform"), **more).server
    one, two = (getattr(state, "w", state) for state in (noisy, plain))
    assert (one - two).norm() < 0.05
    assert (one - two).norm() > 0


def test_the_same_bits_however_clients_are_grouped(make_task):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    single = LocalEngine(device="cpu", strategy="loop", dtype=torch.float64)
    one, two = (
        federate(
            task, Ditto(), rounds=2, evaluation="none", engine=engine, secure="masks", dp="client:noise=1,delta=1e-2"
        )
        for engine in (ENGINE, single)
    )
    assert (one.server - two.server).norm() == 0
    (sentence,) = one.privacy
    assert "noise in shares" in sentence
    assert "holds against a server that follows the protocol" in sentence


def test_who_was_asked_less_often_spends_less(make_task):
    report = federate(
        make_task(sizes=SIZES), FedAvg(), rounds=4, cohort=4, evaluation="none", secure="masks",
        dp="client:epsilon=3,delta=1e-2",
    )  # fmt: skip
    promise = parse_privacy("client:epsilon=3,delta=1e-2")
    assert PrivacyInShares.of(promise).spent(1.0, 4)["pld"] <= 3
    assert report.client_epsilon <= 3
    assert "of 4 clients that are asked" in report.privacy[0]


def test_noise_and_sum_fit_in_32_bits():
    promise = PrivacyInShares.of(parse_privacy("client:noise=100,clip=2"))
    for asked in (3, 50, 1000):
        encoding = promise.encoding(asked, 100.0)
        steps = encoding.scale * 2
        spread = 100 * steps * (asked / default_threshold(asked)) ** 0.5
        assert asked * (steps + 0.5) + 10 * spread < MODULUS / 2
        assert steps <= STEPS
    with pytest.raises(AtollError, match="32 bits"):
        promise.encoding(10**6, 100.0)


def test_noise_wraps_around_as_masked_integers_do():
    words = Stack.of(masked=torch.zeros(1, 1000, dtype=torch.uint32))
    out = NoiseInShares(100.0).apply(Sent({"delta": words}, None), Place(0, np.arange(1))).fields["delta"]["masked"]
    wide = out.to(torch.int64)
    signed = torch.where(wide >= MODULUS // 2, wide - MODULUS, wide).double()
    assert signed.std().item() == pytest.approx(10, rel=0.15)
    assert (signed < 0).any()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"secure": "sums"}, "needs masks"),
        ({"secure": "masks", "cohort": "poisson:0.8"}, "fixed size"),
        ({"secure": "masks", "dp": "client:noise=1,clip=adaptive"}, "not offered under masks"),
        ({"secure": "masks", "participation": "random:0.9"}, "there may be fewer"),
    ],
)
def test_what_would_take_noise_away_is_refused(make_task, settings, text):
    more = {"dp": "client:noise=1,delta=1e-2", **settings}
    with pytest.raises(AtollError, match=text):
        federate(make_task(sizes=SIZES), FedAvg(), rounds=2, evaluation="none", **more)
