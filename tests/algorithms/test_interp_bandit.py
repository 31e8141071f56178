"""A bandit that learns how to mix: what it tries, what it remembers, and where it ends."""

import math

import numpy as np
import pytest
import torch

from atoll import Task, Training
from atoll.algorithms.interp_bandit import InterpBandit, Kept
from atoll.kernel.objective import absolute_error, squared_error
from atoll.kernel.params import Stack
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.tasks import build_task


def kept(report) -> Kept:
    return report.population.memory.save(round=report.settings.rounds)["kept"]


def test_bounds_by_hand() -> None:
    rewards, trials = torch.tensor([[0.8, 0.6, 0.0]]), torch.tensor([[2.0, 1.0, 0.0]])
    bound = InterpBandit(arms=3, explore=0.5).bounds(Kept(Stack({}), rewards, trials))[0]
    width = [0.5 * math.sqrt(2 * math.log(3) / n) for n in (2, 1)]
    assert bound.tolist() == pytest.approx([0.4 + width[0], 0.6 + width[1], math.inf])


def test_every_share_is_tried_once_first() -> None:
    report = play(build_task(), InterpBandit(arms=4, fade=1.0), rounds=4)
    trials = kept(report).trials
    has_val = torch.tensor(report.task.splits["val"].sizes(np.arange(6))) > 0
    assert trials[has_val].tolist() == [[1.0] * 4] * int(has_val.sum())
    assert not trials[~has_val].any()


def test_old_rewards_fade() -> None:
    report = play(build_task(), InterpBandit(arms=1, fade=0.5), rounds=3)
    assert kept(report).trials[0].tolist() == pytest.approx([1 + 0.5 + 0.25])


def offset_clients() -> Task:
    """Regression to c_k = -1, 1, 1, 1: the first client is served by its own model, and no mixture is better."""
    data = {
        str(k): (torch.ones(16, 1, dtype=torch.float64), torch.full((16,), c, dtype=torch.float64))
        for k, c in enumerate((-1.0, 1.0, 1.0, 1.0))
    }
    model = torch.nn.Linear(1, 1, bias=False).double()
    training = Training(lr=0.1, batch_size=16)
    return Task.of_clients(
        data, model, loss=squared_error, score=absolute_error, training=training, shares=(0.5, 0.25, 0.25)
    )


@pytest.mark.purpose("interp-bandit")
def test_a_client_that_is_unlike_the_others_learns_to_use_its_own_model() -> None:
    report = play(offset_clients(), InterpBandit(arms=5, explore=0.05), rounds=40)
    means = kept(report).rewards / kept(report).trials
    assert int(means[0].argmax()) == 0  # a share of 1
    assert float(personal_models(report)[0]["weight"]) == pytest.approx(-1.0, abs=0.05)


@pytest.mark.purpose("interp-bandit")
def test_a_bandit_that_forgets_finds_a_share_that_was_bad_at_first() -> None:
    # In the first round the own model is untrained and worth nothing; one that never forgets does not try it again.
    first, last = (
        kept(play(offset_clients(), InterpBandit(arms=5, explore=0.05, fade=fade), rounds=60)).trials[0]
        for fade in (1.0, 0.9)
    )
    assert float(first[0]) == 1
    assert int(last.argmax()) == 0


def test_a_client_without_validation_samples_uses_the_shared_model() -> None:
    task = build_task()
    report = play(task, InterpBandit(), rounds=2)
    alone = [k for k in range(6) if task.splits["val"].sizes(np.array([k]))[0] == 0]
    assert alone
    for k in alone:
        assert all(torch.equal(personal_models(report)[k][name], leaf) for name, leaf in report.server.items())
