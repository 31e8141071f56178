"""Adaptive clipping: its rule by hand, that it finds the quantile, what its count costs, and stops and groupings."""

import math
import threading

import numpy as np
import pytest
import torch

from atoll import LocalEngine, federate
from atoll.algorithms import AFL, Ditto, FedAvg
from atoll.kernel.errors import AtollError, HyperparameterError, PrivacyError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.protect.account import gaussian_epsilon
from atoll.protect.adaptive import COUNTED, AdaptiveClip, Quantile, count_noise, message_noise, share_uncut
from atoll.protect.stages import Place, Sent, joint_norms
from atoll.protect.words import parse_privacy

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
SIZES = (5, 9, 12, 7, 3)


def test_clients_say_whether_they_were_cut_and_are():
    stage = AdaptiveClip(Quantile(2.0, 0.5))
    sent = Sent({"delta": Stack.of(w=torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]]).double())}, None)
    out = stage.apply(sent, Place(0, np.arange(3))).fields
    assert out[COUNTED]["whole"].tolist() == [0.5, -0.5, 0.5]
    assert joint_norms({"delta": out["delta"]}).tolist() == pytest.approx([1.0, 2.0, 2.0])


def test_the_rule_is_the_papers():
    quantile = Quantile(1.0, 0.5)
    quantile.follow(share_uncut(1.5, 0.3, 6.0))  # 4 or 5 of 6 stayed whole
    assert quantile.norm == pytest.approx(math.exp(-0.2 * 0.3))


@pytest.mark.parametrize("first", [0.1, 0.9, 1.1, 10.0])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_the_norm_ends_at_the_quantile_of_norms(first, share):
    """Log-normal norms of median 1: the quantile is exp(Phi^-1(share) / 2). protect.md 1.2."""
    rng, quantile, expected = generator(0, "norms"), Quantile(first, share), 200
    noise = count_noise(1.0, expected)
    ends = []
    for round in range(300):
        norms = np.exp(0.5 * rng.standard_normal(expected))
        quantile.follow(
            share_uncut((norms <= quantile.norm).sum() - expected / 2, noise * rng.standard_normal(), expected)
        )
        ends += [quantile.norm] if round >= 200 else []
    wanted = {0.5: 1.0, 0.8: math.exp(0.5 * 0.8416212336)}[share]
    assert np.mean(ends) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(("expected", "wanted"), [(50, 1.020621), (100, 1.005038)])
def test_count_and_messages_together_cost_one_gaussian(expected, wanted):
    count = count_noise(1.0, expected)
    assert message_noise(1.0, count) == pytest.approx(wanted, abs=1e-6)
    mu = math.hypot(1 / message_noise(1.0, count), 1 / (2 * count))  # a bit of 1/2 or -1/2 moves the sum by 1/2
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(4.377178, abs=1e-6)


def test_few_clients_leave_something_for_the_messages():
    assert message_noise(8.0, count_noise(8.0, 5)) == pytest.approx(8 / math.sqrt(0.75))


def test_a_federation_follows_the_norms_of_its_messages(make_task, caplog):
    """C grows by exp(0.2 x 0.5) a round while all messages are longer, whatever little noise there is on the count."""
    task, norms = make_task(sizes=SIZES * 4), []
    more = {"evaluation": "none", "engine": ENGINE}
    federate(
        task, FedAvg(), rounds=1, **more,
        on_reply=lambda _, arrival: norms.extend(joint_norms(arrival.fields).tolist()),
    )  # fmt: skip
    first = min(norms) / 100
    with caplog.at_level("INFO", logger="atoll.protect"):
        federate(task, FedAvg(), rounds=3, dp=f"client:noise=1e-6,delta=1e-3,clip=adaptive,start={first}", **more)
    told = [float(line.message.split("norm ")[1].split()[0]) for line in caplog.records if "norm" in line.message]
    assert len(told) == 3
    for round, norm in enumerate(told, start=1):  # the count of 20 has noise of 1: within 5 % a round
        assert norm == pytest.approx(first * math.exp(0.1 * round), rel=0.05 * round)


def test_the_same_bits_however_clients_are_grouped_and_after_a_stop(make_task, tmp_path):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 4, "evaluation": "none", "dp": "client:noise=1,clip=adaptive", "cohort": "poisson:0.7"}
    whole = federate(task, Ditto(), engine=ENGINE, **more).server
    single = LocalEngine(device="cpu", strategy="loop", dtype=torch.float64)
    assert (whole - federate(task, Ditto(), engine=single, **more).server).norm() == 0
    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        federate(
            task, Ditto(), engine=ENGINE, folder=tmp_path / "run", stop=stop,
            on_round=lambda line: stop.set() if line.round == 2 else None, **more,
        )  # fmt: skip
    resumed = federate(task, Ditto(), engine=ENGINE, folder=tmp_path / "run", resume=True, **more)
    assert (whole - resumed.server).norm() == 0
    assert "0.5 quantile" in resumed.privacy[0]


def test_the_count_is_in_the_ledger_and_never_reaches_the_method(make_task):
    report = federate(make_task(), FedAvg(), rounds=2, evaluation="none", dp="client:noise=1,clip=adaptive:0.3")
    assert {entry.field for entry in report.ledger.entries if entry.direction == "up"} == {"delta", COUNTED}
    assert COUNTED not in report.server


def test_noise_goes_with_the_norm(make_task):
    promise = parse_privacy("client:noise=2,clip=adaptive,start=3")
    _, rule = promise.protect(1.0, 100, 5, 0)
    zeros = {"delta": Params.of(w=torch.zeros(100_000))}
    noisy, total = rule.in_round(0).close(zeros, torch.ones(()))
    assert noisy["delta"]["w"].std().item() == pytest.approx(3 * message_noise(2.0, 5.0), rel=0.01)
    assert total == 100


@pytest.mark.parametrize("words", ["clip=adaptive:2", "clip=adaptive:x", "clip=1,start=2", "clip=adaptive,start=0"])
def test_words_that_mean_nothing_are_refused(words):
    with pytest.raises(HyperparameterError):
        parse_privacy(f"client:noise=1,{words}")


def test_one_round_cannot_adapt(make_task):
    with pytest.raises(PrivacyError, match="uploads once"):
        federate(make_task(), AFL(), rounds=1, evaluation="none", dp="client:noise=1,clip=adaptive")


def test_sums_that_are_released_twice_are_found():
    """The planted fault: a server that asks for the same round's sums again gets the same noise for twice the price."""
    _, rule = parse_privacy("client:noise=1").protect(1.0, 5, 3, 0)
    closing = rule.in_round(1)
    closing.close({"delta": Params.of(w=torch.zeros(3))}, torch.ones(()))
    with pytest.raises(PrivacyError, match="asked for twice"):
        closing.close({"delta": Params.of(w=torch.zeros(3))}, torch.ones(()))
    rule.in_round(2).close({"delta": Params.of(w=torch.zeros(3))}, torch.ones(()))


def test_selection_by_scores_is_refused_under_a_promise(make_task):
    from atoll import tune

    report = federate(make_task(sizes=SIZES), FedAvg(), rounds=2, dp="client:noise=1,delta=1e-3")
    report.select_round("last")
    with pytest.raises(PrivacyError, match="chosen by scores"):
        report.select_round("best")
    with pytest.raises(AtollError, match="gives these away"):
        tune(make_task(sizes=SIZES), ["ditto"], rounds=2, dp="client:noise=1", progress=False)
