"""MOCHA, by hand: c = 1, 3, both models begin at 0, steps are 0.5."""

from collections.abc import Callable

import pytest
import torch

from atoll import Cohort, Report, Task
from atoll.algorithms.local import Local
from atoll.algorithms.mocha import Mocha
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def test_one_round_by_hand(two_clients: Task) -> None:
    # From 0 there is no pull: w = 0.5, 1.5. Then W^T W = w w^T with the root w w^T / |w| and the trace |w|.
    report = play(two_clients, Mocha(floor=0.1))
    w = torch.tensor([0.5, 1.5], dtype=torch.float64)
    assert deployed(report) == pytest.approx(w.tolist())
    covariance = 2 * torch.outer(w, w) / 2.5 + 0.1 * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(report.server.omega @ covariance, torch.eye(2, dtype=torch.float64))


def test_the_second_round_feels_the_relationship(two_clients: Task) -> None:
    # Omega w = w / (2 + floor): both lie on one line, so that the pull is towards 0.
    # catches: PFLlib's FedMTL, whose relationship has no gradient, so that clients train alone (0.75 and 2.25).
    expected = [w - 0.5 * ((w - c) + 0.3 * w / 2.1) for w, c in ((0.5, 1), (1.5, 3))]
    assert deployed(play(two_clients, Mocha(lam=0.3, floor=0.1), rounds=2)) == pytest.approx(expected)


def test_models_are_measured_from_the_initial_one() -> None:
    c, start = torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.tensor([10.0], dtype=torch.float64)
    plain = deployed(play(quadratics(c, lr=0.5), Mocha(lam=0.3), rounds=4))
    moved = deployed(play(quadratics(c + 10, start=start, lr=0.5), Mocha(lam=0.3), rounds=4))
    assert moved == pytest.approx([one + 10 for one in plain])


def test_lam_zero_is_training_alone(two_clients: Task) -> None:
    mine, theirs = (personal_models(play(two_clients, one, rounds=3)) for one in (Mocha(lam=0.0), Local()))
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(mine, theirs, strict=True))


def test_who_was_never_heard_of_draws_nobody_and_is_drawn_to_the_mean(two_clients: Task) -> None:
    report = play(two_clients, Mocha(floor=0.1), rounds=2, faults=lambda round, clients: clients == 1)
    # One client heard of: its covariance is 1 by itself; the other's is 1 by definition.
    expected = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64) / 1.1
    torch.testing.assert_close(report.server.omega, expected)
    assert report.algorithm.mixing(report.server).tolist() == [[0, 0], [1, 0]]
    assert deployed(report)[1] == pytest.approx(deployed(report)[0])


def test_a_client_that_trains_for_the_first_time_begins_where_it_is_drawn() -> None:
    # c = 1, 2, 5: the second is lost in round 0, which leaves w = 0.5, 2.5. It begins at 1.5, where there is no pull.
    task = quadratics(torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64), lr=0.5)
    report = play(task, Mocha(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 0))
    assert deployed(report)[1] == pytest.approx(1.75)
    assert report.server.w["w"][1].item() == pytest.approx(1.75)


def test_the_last_model_of_an_absent_client_still_counts(two_clients: Task) -> None:
    report = play(two_clients, Mocha(), rounds=3, faults=lambda round, clients: (clients == 1) & (round > 0))
    assert report.server.w["w"][1].item() == pytest.approx(1.5)
    assert report.algorithm.mixing(report.server)[0, 1] > 0
    assert deployed(report)[1] == pytest.approx(1.5)


def test_two_numbers_of_models_go_down_and_one_model_comes_up(two_clients: Task) -> None:
    report = play(two_clients, Mocha(), rounds=2)
    model = two_clients.network.initial
    received = {"u": model, "omega": type(model).of(kk=torch.zeros((), dtype=torch.float64))}
    assert report.ledger.bytes("up") == 2 * 2 * len(to_bytes(model))
    assert report.ledger.bytes("down") == 2 * 2 * len(to_bytes(received))


def test_a_new_client_trains_alone_once(two_clients: Task, make_cohort: Callable[..., Cohort]) -> None:
    assert Mocha().welcome({}, make_cohort(two_clients))["w"].flatten().tolist() == pytest.approx([0.5, 1.5])


def test_nobody_moves_without_steps(two_clients: Task) -> None:
    report = play(two_clients, Mocha(epochs=0), rounds=2)
    assert torch.isfinite(report.server.omega).all()
    assert deployed(report) == [0, 0]


def test_a_pull_that_overshoots_is_named() -> None:
    assert Mocha(lam=0.6, floor=0.1).pulls(lr=0.5) == {"lr * lam / floor": pytest.approx(3.0)}
