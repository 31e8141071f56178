"""FedSAM, by hand. In one dimension the gradient h (w - c) is taken at w + rho sign(w - c)."""

import pytest

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedsam import FedSAM
from atoll.kernel.errors import HyperparameterError
from atoll.testing.conformance import personal_models, play

NEAR = {"abs": 1e-6}  # 1e-7 is added to the norm of a gradient


def test_one_round_by_hand(two_clients: Task) -> None:
    # Gradients at -0.2: -1.2, -3.2. Steps to 0.6 and 1.6, weights 1/4 and 3/4.
    report = play(two_clients, FedSAM(rho=0.2))
    assert report.server["w"].item() == pytest.approx(1.35, **NEAR)


def test_the_second_step_climbs_from_where_the_first_ended(two_clients: Task) -> None:
    # From 0.6 and 1.6: gradients -0.4 - 0.2, -1.4 - 0.2. Steps to 0.9 and 2.4.
    report = play(two_clients, FedSAM(rho=0.2, epochs=2))
    assert report.server["w"].item() == pytest.approx(0.25 * 0.9 + 0.75 * 2.4, **NEAR)


def test_adaptive_climbs_by_the_size_of_the_weights(two_clients: Task) -> None:
    # Round 1: w is 0, and nothing climbs: steps to 0.5 and 1.5, w = 1.25.
    # Round 2: eps = 0.2 * 1.25 sign(g): gradients 0.25 + 0.25, -1.75 - 0.25; steps -0.25 and 1.
    report = play(two_clients, FedSAM(rho=0.2, adaptive=True), rounds=2)
    assert report.server["w"].item() == pytest.approx(1.25 - 0.25 * 0.25 + 0.75 * 1.0, **NEAR)


def test_weights_may_be_uniform(two_clients: Task) -> None:
    report = play(two_clients, FedSAM(rho=0.2, weighting="uniform"))
    assert report.server["w"].item() == pytest.approx(1.1, **NEAR)


def test_it_costs_two_gradients_a_step_and_the_bytes_of_fedavg(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (FedSAM(), FedAvg()))
    assert [line["gradients"] for line in mine.history] == [2 * line["gradients"] for line in plain.history]
    assert mine.ledger.by_kind() == plain.ledger.by_kind()


def test_everybody_deploys_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, FedSAM(rho=0.2))
    assert [model["w"].item() for model in personal_models(report)] == [report.server["w"].item()] * 2


def test_a_radius_is_not_negative() -> None:
    with pytest.raises(HyperparameterError, match=r"`rho` of FedSAM must be a float in \[0, inf\)\. Got -0.1"):
        FedSAM(rho=-0.1)
