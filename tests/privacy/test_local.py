"""Local privacy: noise on every message, its size and account, single replies, and what is counted."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from atoll import LocalEngine, federate
from atoll.algorithms import IFCA, Ensemble, FedAMP, FedAvg, Fedora, OneShotMargins
from atoll.kernel.errors import AtollError, PrivacyError
from atoll.kernel.params import Stack
from atoll.protect.account import find_mu, gaussian_delta, gaussian_epsilon
from atoll.protect.ledger import Entry
from atoll.protect.local_level import LocalNoise
from atoll.protect.releases import count_most, require_counted
from atoll.protect.stages import Place, Sent
from atoll.protect.words import parse_privacy

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
SIZES = (5, 9, 12, 7, 3)


def test_noise_is_found_by_the_closed_form():
    """protect.md 1.5, for sensitivity 1: 3.7306 at epsilon 1, 0.4999 at 10; the classical formula is wrong at both."""
    assert 1 / find_mu(1.0, 1e-5) == pytest.approx(3.7306, abs=1e-4)
    assert 1 / find_mu(10.0, 1e-5) == pytest.approx(0.4999, abs=1e-4)
    assert gaussian_delta(1.0, find_mu(1.0, 1e-5)) == pytest.approx(1e-5)
    found = parse_privacy("local:epsilon=8").resolve(1.0, 9)
    assert gaussian_epsilon(2 * 3 / found.noise, 1e-5) == pytest.approx(8.0, abs=0.01)
    assert gaussian_epsilon(2 * 3 / found.noise, 1e-5) <= 8


def test_every_message_has_noise_of_its_own_after_it_is_cut():
    stage, count = LocalNoise(2.0, 3.0), 50_000
    sent = Sent({"delta": Stack.of(w=torch.full((2, count), 1e3), n=torch.ones(2, dtype=torch.int64))}, None)
    out = stage.apply(sent, Place(4, np.array([3, 8]))).fields["delta"]
    noise = out["w"] - 2.0 / count**0.5
    assert noise.std().item() == pytest.approx(6.0, rel=4 / (4 * count) ** 0.5)
    assert abs(torch.corrcoef(noise)[0, 1].item()) < 4 / count**0.5
    assert out["n"].tolist() == [0, 0]
    alone = stage.apply(
        Sent({"delta": sent.fields["delta"].rows(torch.tensor([1]))}, None), Place(4, np.array([8]))
    ).fields["delta"]
    assert torch.equal(alone["w"][0], out["w"][1])
    later = stage.apply(sent, Place(5, np.array([3, 8]))).fields["delta"]
    assert not torch.equal(later["w"], out["w"])


def test_a_field_named_as_public_stays_as_it_is():
    stage = LocalNoise(1.0, 5.0, frozenset({"cluster"}))
    sent = Sent({"delta": Stack.of(w=torch.zeros(1, 3)), "cluster": Stack.of(number=torch.tensor([7]))}, None)
    out = stage.apply(sent, Place(0, np.arange(1))).fields
    assert out["cluster"]["number"].item() == 7
    assert out["delta"]["w"].abs().max() > 0


@pytest.mark.parametrize("method", [FedAvg(), FedAMP(), Fedora(), Ensemble(), OneShotMargins()])
def test_methods_that_read_single_replies_run_and_all_their_messages_are_counted(make_task, method):
    task, rounds = make_task(sizes=(8, 9, 12, 7, 6)), 1 if method.one_shot else 3
    report = federate(task, method, rounds=rounds, evaluation="none", dp="local:noise=4,delta=1e-3")
    (sentence,) = report.privacy
    messages = rounds + (method.exchanges if method.defines("prepare") else 0)
    assert f"after {messages} messages" in sentence
    assert f"epsilon {gaussian_epsilon(2 * math.sqrt(messages) / 4, 1e-3):.2f} " in sentence
    assert "the server included" in sentence
    assert "weight" not in {entry.field for entry in report.ledger.entries}


def test_who_was_asked_less_often_spends_less(make_task):
    report = federate(
        make_task(sizes=SIZES), FedAvg(), rounds=6, cohort=1, evaluation="none", dp="local:epsilon=5,delta=1e-3"
    )
    most = count_most(report.ledger.entries, exchanges=0)
    assert 2 <= most < 6
    assert f"after {most} messages" in report.privacy[0]
    noise = parse_privacy("local:epsilon=5,delta=1e-3").resolve(1.0, 6).noise  # found for the most there could be
    assert f"epsilon {gaussian_epsilon(2 * math.sqrt(most) / noise, 1e-3):.2f} " in report.privacy[0]


def test_numbers_do_not_depend_on_the_grouping(make_task):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    single = LocalEngine(device="cpu", strategy="loop", dtype=torch.float64)
    one, two = (
        federate(task, FedAvg(), rounds=2, evaluation="none", engine=engine, dp="local:noise=1,clip=0.1").server
        for engine in (ENGINE, single)
    )
    assert (one - two).norm() == 0


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        (IFCA(), {}, "sends as cluster"),
        (FedAvg(), {"secure": "masks"}, "nothing is left to hide|not offered"),
        (FedAvg(), {"cohort": 2, "select_clients": "power-of-choice:4"}, "no mechanism covers"),
        (FedAvg(), {"compress": "topk:0.1"}, "packed"),
        (FedAvg(), {"dp": "local:noise=1,delta=0.5"}, "below 1 over the number of clients"),
    ],
)
def test_promises_that_would_be_lies_are_refused(make_task, method, settings, text):
    more = {"dp": "local:noise=1,delta=1e-3", **settings}
    with pytest.raises(AtollError, match=text):
        federate(make_task(sizes=SIZES), method, rounds=3, evaluation="none", **more)


# -- the ledger beside the account ---------------------------------------------------------------------------------


def up(round, field, clients, kind="model"):
    return Entry("up", round, field, kind, 4, clients)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([up(0, "delta", (1, 2)), up(0, "loss", (1,), "statistic")], "no promise covers"),
        ([up(0, "delta", (1, 2)), up(-1, "delta", (1,))], "before the first round"),
        ([up(3, "delta", (1, 2)), up(3, "delta", (2,))], "twice"),
    ],
)
def test_what_was_not_counted_is_found_in_the_ledger(entries, text):
    require_counted(entries[:1], {"delta"}, exchanges=0)
    with pytest.raises(PrivacyError, match=text):
        require_counted(entries, {"delta"}, exchanges=0)


def test_an_undercounted_release_planted_in_a_method_is_found(make_task):
    """A method whose exchange before the first round hides from the account: the ledger has it."""

    @dataclass(frozen=True, kw_only=True)
    class Sly(FedAvg):
        def defines(self, hook):
            return False if hook == "prepare" and not _running.get("on") else super().defines(hook)

        def prepare(self, broadcast, cohort):
            return type(self.local(broadcast, cohort))(send={"delta": cohort.stacked(cohort.initial)})

    _running: dict = {}
    from atoll.federation.exchange import Exchange

    honest = Exchange.prepare

    def sneak(self, *arguments):
        _running["on"] = True
        try:
            return honest(self, *arguments)
        finally:
            _running.clear()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Exchange, "prepare", sneak)
        for words in ("client:noise=1,delta=1e-3", "local:noise=1,delta=1e-3"):
            report = federate(make_task(sizes=SIZES), Sly(), rounds=2, evaluation="none", dp=words)
            with pytest.raises(PrivacyError, match="before the first round"):
                _ = report.privacy
