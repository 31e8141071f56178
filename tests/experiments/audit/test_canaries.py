"""Canary clients: an honest mechanism is not refuted, a broken one is."""

import math

import numpy as np
import pytest
import torch

from atoll import Report, Task, federate
from atoll.data import datasets, partition
from atoll.experiments.audit import audit
from atoll.experiments.audit.canaries import Chirp, choose_guesses, count_right, draw_direction
from atoll.experiments.audit.measures import lower_bound
from atoll.kernel.errors import PrivacyError
from atoll.kernel.params import Stack
from atoll.protect.client_level import NoisySum
from atoll.protect.stages import Place, Sent, joint_norms


@pytest.fixture(scope="module")
def private() -> Report:
    task = Task.build(datasets.load("digits"), partition.parse("iid"), clients=5, model="linear")
    return federate(task, "fedavg", rounds=3, dp="client:noise=2,clip=1", evaluation="none", progress=False)


def test_an_honest_promise_holds(private: Report) -> None:
    found = audit(private, attacks=[], canaries=60)
    assert found.promise is not None
    assert found.holds
    assert 0 <= found.promise.lower <= found.promise.promised
    assert found.promise.promised == pytest.approx(4.3772 * math.sqrt(3) / 2, rel=0.2)
    assert "promised is" in found.sentences[0]


def test_canaries_are_sought_in_the_network_that_travels() -> None:
    task = Task.build(datasets.load("digits"), partition.parse("iid"), clients=5, model="mlp:16")
    report = federate(task, "fml:meme=linear", rounds=1, dp="client:noise=2,clip=1", evaluation="none", progress=False)
    found = audit(report, attacks=[], canaries=20)
    assert found.holds


def test_a_mechanism_that_adds_less_noise_than_it_says_is_found(
    private: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoisySum, "_add_noise", lambda self, where, value: value)
    task = private.task
    strong = federate(task, "fedavg", rounds=1, dp="client:noise=8,clip=1", evaluation="none", progress=False)
    found = audit(strong, attacks=[], canaries=100)
    assert not found.holds
    assert "does not hold" in found.sentences[0]


def test_guesses_are_as_right_as_two_gaussians_say() -> None:
    rng, canaries, mu = np.random.Generator(np.random.Philox(0)), 4000, 1.0
    within = rng.random(canaries) < 0.5
    right = count_right(rng.standard_normal(canaries) + mu * within, within, canaries // 2)
    assert right / canaries == pytest.approx(0.6915, abs=3 * 0.5 / math.sqrt(canaries))
    assert lower_bound(canaries, canaries, right, 1e-9) < 4.377178  # that of a Gaussian at delta 1e-5


def test_guesses_are_chosen_before_scores_are_seen() -> None:
    weak, strong = (choose_guesses(200, mu, 1e-5, seed=0) for mu in (0.5, 5.0))
    assert weak < strong
    assert strong >= 100


def test_a_canary_sends_its_direction_and_nobody_else_does() -> None:
    fields = {"delta": Stack.of(a=torch.ones(3, 4, dtype=torch.float64), b=torch.ones(3, 2, 2, dtype=torch.float64))}
    sent = Chirp(first=7, norm=0.5, seed=0).apply(Sent(fields, None), Place(0, np.array([2, 7, 9])))
    norms = joint_norms(sent.fields)
    assert norms[1:].tolist() == pytest.approx([0.5, 0.5])
    assert torch.equal(sent.fields["delta"]["a"][0], torch.ones(4, dtype=torch.float64))
    like = {("delta", "a"): torch.zeros(4), ("delta", "b"): torch.zeros(2, 2)}
    u = draw_direction(0, 9, like)
    assert torch.allclose(sent.fields["delta"]["b"][2], 0.5 * u["delta", "b"])


def test_what_canaries_cannot_check(private: Report) -> None:
    plain = federate(private.task, "fedavg", rounds=1, evaluation="none", progress=False)
    with pytest.raises(PrivacyError, match="This run makes none"):
        audit(plain, attacks=[], canaries=20)
    with pytest.raises(PrivacyError, match="at least 10"):
        audit(private, attacks=[], canaries=3)
    local = federate(private.task, "fedavg", rounds=1, dp="local:noise=4", evaluation="none", progress=False)
    with pytest.raises(PrivacyError, match="their sum shows next to nothing"):
        audit(local, attacks=[], canaries=20)
