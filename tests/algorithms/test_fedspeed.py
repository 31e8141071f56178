"""FedSpeed, by hand, with alpha = 1 and rho = 0.2."""

import pytest

from atoll import Task
from atoll.algorithms.feddyn import FedDyn
from atoll.algorithms.fedspeed import FedSpeed
from atoll.testing.conformance import play

NEAR = {"abs": 1e-6}  # 1e-7 is added to the norm of a gradient
METHOD = FedSpeed(alpha=1.0, rho=0.2)


def kept(report) -> list[float]:
    return report.population.memory.save(round=report.settings.rounds)["kept"]["w"].flatten().tolist()


def test_one_round_by_hand(two_clients: Task) -> None:
    # Gradients at -0.2: theta = 0.6, 1.6, mean 1.1, all alike. h = -1.1, w = 1.1 + 1.1.
    report = play(two_clients, METHOD)
    assert report.server.w["w"].item() == pytest.approx(2.2, **NEAR)
    assert report.server.h["w"].item() == pytest.approx(-1.1, **NEAR)
    assert kept(report) == pytest.approx([-0.6, -1.6], **NEAR)


def test_the_second_round_climbs_along_the_loss_and_not_along_the_terms(two_clients: Task) -> None:
    # From 2.2: gradients 1.2 + 0.2 and -0.8 - 0.2, minus q_k: 2.0 and 0.6. theta = 1.2, 1.9; h = -0.45.
    # With q_k in it, the second client's ascent would go the other way: -0.8 + 1.6 > 0.
    report = play(two_clients, METHOD, rounds=2)
    assert report.server.w["w"].item() == pytest.approx(2.0, **NEAR)
    assert report.server.h["w"].item() == pytest.approx(-0.45, **NEAR)
    assert kept(report) == pytest.approx([0.4, -1.3], **NEAR)


def test_the_pull_is_taken_at_theta_itself(two_clients: Task) -> None:
    # The second step: -0.4 - 0.2 + 0.6 = 0 and -1.4 - 0.2 + 1.6 = 0. A pull taken uphill would be 0.4 and 1.4.
    assert kept(play(two_clients, FedSpeed(alpha=1.0, rho=0.2, epochs=2))) == pytest.approx([-0.6, -1.6], **NEAR)


def test_it_costs_two_gradients_a_step_and_the_bytes_of_feddyn(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (METHOD, FedDyn()))
    assert [line["gradients"] for line in mine.history] == [2 * line["gradients"] for line in plain.history]
    assert mine.ledger.by_kind() == plain.ledger.by_kind()


def test_a_mixture_of_both_gradients_by_hand(two_clients: Task) -> None:
    # Gradients -1 and -3 at 0, -1.2 and -3.2 uphill; half of each is -1.1 and -3.1: theta = 0.55, 1.55.
    report = play(two_clients, FedSpeed(alpha=1.0, rho=0.2, mix=0.5))
    assert kept(report) == pytest.approx([-0.55, -1.55], **NEAR)


def test_without_the_gradient_uphill_it_is_feddyn(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=3) for one in (FedSpeed(mix=0.0), FedDyn(alpha=0.1)))
    assert mine.server.w["w"].tolist() == plain.server.w["w"].tolist()
    assert [line["gradients"] for line in mine.history] == [line["gradients"] for line in plain.history]
