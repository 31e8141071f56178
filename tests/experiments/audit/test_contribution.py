"""Shapley values and leave-one-out: axioms, closed forms, and runs."""

import numpy as np
import pytest

from atoll import Task, federate
from atoll.data import datasets, partition
from atoll.experiments.audit.contribution import (
    enumerate_shapley,
    find_contributions,
    leave_one_out,
    sample_shapley,
)
from atoll.kernel.errors import PrivacyError, RunError
from atoll.kernel.randomness import generator

WORTH = np.array([3.0, 0.0, 1.0, 1.0, -2.0])  # a null player, and twins


def synergy(players: tuple[int, ...]) -> float:
    """Values add up, and 0 and 4 together are worth 6 more."""
    return float(WORTH[list(players)].sum() + 6 * (0 in players and 4 in players))


def test_exact_values() -> None:
    values = enumerate_shapley(synergy, 5)
    assert values == pytest.approx([6, 0, 1, 1, 1])
    assert values.sum() == pytest.approx(synergy((0, 1, 2, 3, 4)) - synergy(()))
    assert leave_one_out(synergy, 5) == pytest.approx([9, 0, 1, 1, 4])


def test_sampled_values_come_near_and_add_up() -> None:
    values = sample_shapley(synergy, 5, generator(0, "test"), within=0.0)
    assert values.sum() == pytest.approx(9)
    assert values == pytest.approx([6, 0, 1, 1, 1], abs=1.0)
    assert values[1] == 0


def test_orders_are_cut_off_where_nothing_is_left() -> None:
    asked = []

    def enough(players: tuple[int, ...]) -> float:
        asked.append(players)
        return float(len(players) > 0)

    values = sample_shapley(enough, 8, generator(0, "test"))
    assert values == pytest.approx(np.full(8, 1 / 8), abs=0.05)
    assert max(len(one) for one in asked if len(one) < 8) == 1


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.build(datasets.load("digits"), partition.parse("iid"), clients=4, model="linear")


def test_values_of_a_run_add_up_to_what_the_score_moved(task: Task) -> None:
    report = federate(task, "fedavg", rounds=2, progress=False)
    found = find_contributions(report, between=0.0)
    assert sum(found.shapley) == pytest.approx(found.moved)
    start = federate(task.with_training(lr=1e-12), "fedavg", rounds=1, progress=False)
    before, after = (one.evaluations[-1].evaluation["personal"]["val"]["macro"] for one in (start, report))
    assert found.moved == pytest.approx(after - before)
    assert found.rounds == [2] * 4
    assert found.score == pytest.approx(report.scores().tolist())
    assert "Indicative only" in found.describe()


def test_twins_get_the_same_and_a_free_rider_least(task: Task) -> None:
    twins = task.of(np.array([0, 1, 0]))  # clients 0 and 2 have the same samples
    report = federate(twins.with_training(batch_size=10_000), "fedavg", rounds=1, progress=False)
    found = find_contributions(report, between=0.0)
    assert found.shapley[0] == pytest.approx(found.shapley[2], abs=1e-6)
    rider = federate(task, "fedavg", rounds=1, attack="free-rider:0.25", progress=False)
    [lazy] = rider.settings.draw_attackers(4).tolist()
    values = find_contributions(rider, between=0.0).shapley
    assert values[lazy] < min(value for client, value in enumerate(values) if client != lazy)


def test_partial_cohorts_and_attackers(task: Task) -> None:
    report = federate(task, "ditto", rounds=3, cohort=2, attack="sign-flip:0.25", progress=False)
    found = find_contributions(report, between=0.0)
    assert sum(found.rounds) == 6
    assert sum(found.shapley) == pytest.approx(found.moved)


@pytest.mark.parametrize(
    ("method", "settings", "error", "message"),
    [
        ("fedavg", {"secure": "sums"}, PrivacyError, "nobody has single replies"),
        ("fedavg", {"dp": "client:noise=1"}, PrivacyError, "nobody has single replies"),
        ("fedavg", {"aggregate": "median"}, RunError, "aggregate='median'"),
        ("local", {}, RunError, "local has none"),
        ("scaffold", {}, RunError, "scaffold has none"),
    ],
)
def test_refusals(task: Task, method: str, settings: dict, error: type[Exception], message: str) -> None:
    report = federate(task, method, rounds=1, evaluation="none", progress=False, **settings)
    with pytest.raises(error, match=message):
        find_contributions(report)
