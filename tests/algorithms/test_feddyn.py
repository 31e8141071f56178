"""FedDyn, by hand, with alpha = 1."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddyn import FedDyn
from atoll.testing.conformance import personal_models, play


def kept(report) -> list[float]:
    return report.population.memory.save(round=report.settings.rounds)["kept"]["w"].flatten().tolist()


def test_one_round_by_hand(two_clients: Task) -> None:
    # theta = 0.5, 1.5, mean 1, all alike. h = -1, w = 1 + 1.
    report = play(two_clients, FedDyn(alpha=1.0))
    assert report.server.w["w"] == pytest.approx(2.0)
    assert report.server.h["w"] == pytest.approx(-1.0)
    assert kept(report) == pytest.approx([-0.5, -1.5])


def test_the_second_round_has_another_loss(two_clients: Task) -> None:
    # From w = 2: gradients 1, -1 minus q_k = -0.5, -1.5 give theta = 2 - 0.5 * 1.5, 2 - 0.5 * 0.5 = 1.25, 1.75.
    # h = -1 + 0.5, w = 1.5 + 0.5; q_k = -0.5 + 0.75, -1.5 + 0.25.
    report = play(two_clients, FedDyn(alpha=1.0), rounds=2)
    assert report.server.w["w"] == pytest.approx(2.0)
    assert report.server.h["w"] == pytest.approx(-0.5)
    assert kept(report) == pytest.approx([0.25, -1.25])


def test_the_pull_is_that_of_the_squared_norm(two_clients: Task) -> None:
    # In the second step the pull theta - w = c / 2 cancels the gradient -c / 2: theta stays at 0.5, 1.5.
    # Catches: the norm without the square, whose pull is 1 for both.
    assert kept(play(two_clients, FedDyn(alpha=1.0, epochs=2))) == pytest.approx([-0.5, -1.5])


def test_an_absent_client_counts_as_not_having_moved(two_clients: Task) -> None:
    # Round 1 of the first client alone: theta = 0.5; h = -(1/2) 0.5, w = 0.5 + 0.25.
    report = play(two_clients, FedDyn(alpha=1.0), faults=lambda round, clients: clients == 1)
    assert report.server.h["w"] == pytest.approx(-0.25)
    assert report.server.w["w"] == pytest.approx(0.75)


def test_one_model_travels_each_way_without_a_weight(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (FedDyn(), FedAvg()))
    assert mine.ledger.bytes("down") == plain.ledger.bytes("down")
    assert mine.ledger.by_kind()["up", "model"] == plain.ledger.by_kind()["up", "model"]
    assert ("up", "statistic") not in mine.ledger.by_kind()


def test_everybody_deploys_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, FedDyn(alpha=1.0))
    assert [model["w"].item() for model in personal_models(report)] == [pytest.approx(2.0)] * 2
    assert report.algorithm.shared(report.server) is report.server.w


def test_state_is_for_trained_leaves_only(make_task) -> None:
    task = make_task(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)),
        dtype=torch.float64,
    )
    server = play(task, FedDyn()).server
    assert set(server.h) == set(task.network.initial.trained)
    plain = play(task, FedAvg(weighting="uniform")).server
    torch.testing.assert_close(server.w["1.num_batches_tracked"], plain["1.num_batches_tracked"])
