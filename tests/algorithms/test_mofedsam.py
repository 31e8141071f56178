"""MoFedSAM, by hand, with rho = 0.2 and alpha = 1/2."""

from dataclasses import replace

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedfsa import FedFSA
from atoll.algorithms.mofedsam import MoFedSAM
from atoll.testing.conformance import personal_models, play

NEAR = {"abs": 1e-6}  # 1e-7 is added to the norm of a gradient
METHOD = MoFedSAM(rho=0.2, alpha=0.5)


def test_the_first_round_has_no_momentum_and_is_slow(two_clients: Task) -> None:
    # Gradients at -0.2: -1.2, -3.2. Half of them: steps to 0.3 and 0.8, of mean 0.675; one step of size 0.5.
    server = play(two_clients, METHOD).server
    assert server.w["w"].item() == pytest.approx(0.675, **NEAR)
    assert server.momentum["w"].item() == pytest.approx(-1.35, **NEAR)


def test_the_second_round_goes_half_along_the_first(two_clients: Task) -> None:
    # From 0.675: -0.525 and -2.525, mixed with -1.35: -0.9375 and -1.9375. Their mean is -1.6875.
    server = play(two_clients, METHOD, rounds=2).server
    assert server.w["w"].item() == pytest.approx(0.675 + 0.5 * 1.6875, **NEAR)
    assert server.momentum["w"].item() == pytest.approx(-1.6875, **NEAR)


def test_momentum_is_divided_by_the_step_size_of_its_round(two_clients: Task) -> None:
    # Catches: a division by the first round's step size, by which momentum fades as the step size decays.
    decaying = replace(two_clients, training=replace(two_clients.training, lr_decay=0.5))
    server = play(decaying, METHOD, rounds=2).server
    assert server.w["w"].item() == pytest.approx(0.675 + 0.25 * 1.6875, **NEAR)
    assert server.momentum["w"].item() == pytest.approx(-1.6875, **NEAR)


def test_clients_with_more_steps_have_gone_further(two_clients: Task) -> None:
    # Batches of one: 1 and 3 steps. Momentum is the mean update over the mean way, not the mean of their quotients.
    task = replace(two_clients, training=replace(two_clients.training, batch_size=1))
    server = play(task, METHOD).server
    way = 0.25 * 0.5 + 0.75 * 1.5
    assert server.momentum["w"].item() == pytest.approx(-server.w["w"].item() / way)


def test_nobody_moves_without_epochs(two_clients: Task) -> None:
    server = play(two_clients, MoFedSAM(epochs=0)).server
    assert server.momentum["w"].item() == 0.0


def test_two_models_travel_down_and_one_up(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (METHOD, FedAvg()))
    assert mine.ledger.bytes("down") > 1.9 * plain.ledger.bytes("down")
    assert mine.ledger.by_kind()["up", "model"] == plain.ledger.by_kind()["up", "model"]


def test_everybody_deploys_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, METHOD)
    assert [model["w"].item() for model in personal_models(report)] == [report.server.w["w"].item()] * 2
    assert report.algorithm.shared(report.server) is report.server.w


def test_statistics_of_batchnorm_are_aggregated_and_have_no_momentum(make_task) -> None:
    # Catches: messages that hold parameters only, which leave the server's statistics at their initial values.
    task = make_task(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)),
        dtype=torch.float64,
    )
    server = play(task, METHOD).server
    assert set(server.momentum) == set(task.network.initial.trained)
    assert (server.w["1.running_mean"] - task.network.initial["1.running_mean"]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (MoFedSAM(rho=0.0), True),
        (MoFedSAM(rho=0.1), False),
        (FedFSA(rho=0.0, rho_larger=0.0, top_c=1), True),
        (FedFSA(rho=0.0, rho_larger=0.2, top_c=0), True),
        (FedFSA(rho=0.0, rho_larger=0.2, top_c=1), False),
    ],
)
def test_that_no_radius_is_left_is_said(two_clients: Task, caplog, method: MoFedSAM, said: bool) -> None:
    method.start(two_clients.public_facts())
    assert (f"{type(method).__name__} with radius 0" in caplog.text) == said
