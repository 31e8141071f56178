"""pFedMe, by hand: with lam = 1 and steps of 0.5, one step from w is exactly the proximal point (w + c_k) / 2."""

import pytest
import torch
from torch import nn

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.pfedme import PFedMe
from atoll.testing.conformance import personal_models, play


def values(report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def test_one_round_by_hand(two_clients: Task) -> None:
    # theta = 0.5, 1.5; w_k goes half of the way there, to 0.25, 0.75; w is the mean with weights 1, 3.
    # Catches: theta that is another name of the model and is overwritten by w_k before evaluation; personal models
    # that are never updated.
    report = play(two_clients, PFedMe(lam=1.0, inner_steps=1, eta=0.5))
    assert values(report) == pytest.approx([0.5, 1.5])
    assert report.server["w"] == pytest.approx((1 * 0.25 + 3 * 0.75) / 4)


def test_the_second_round_is_around_the_received_model(two_clients: Task) -> None:
    # From w = 0.625: theta = (w + c_k) / 2, w_k half of the way there.
    report = play(two_clients, PFedMe(lam=1.0, inner_steps=1, eta=0.5), rounds=2)
    assert values(report) == pytest.approx([0.8125, 1.8125])
    assert report.server["w"] == pytest.approx((1 * 0.71875 + 3 * 1.21875) / 4)


def test_inner_steps_feel_the_pull(two_clients: Task) -> None:
    # lam = 0.5: theta = c / 2 after one step, then c / 2 - 0.5 (-c / 2 + 0.5 c / 2) = 0.625 c.
    # Catches: the model itself as its own anchor, where the pull is nothing and theta = 0.75 c.
    assert values(play(two_clients, PFedMe(lam=0.5, inner_steps=2))) == pytest.approx([0.625, 1.875])


def test_theta_goes_on_from_batch_to_batch_and_w_k_follows(two_clients: Task) -> None:
    # lam = 1, one inner step, eta = 0.5, two batches. First: theta = c / 2, w_k = c / 4. Second:
    # theta = c / 2 - 0.5 (-c / 2 + (c / 2 - c / 4)) = 0.625 c, w_k = c / 4 + 0.5 (0.625 - 0.25) c = 0.4375 c.
    report = play(two_clients, PFedMe(lam=1.0, inner_steps=1, eta=0.5, epochs=2))
    assert values(report) == pytest.approx([0.625, 1.875])
    assert report.server["w"] == pytest.approx(0.4375 * (1 * 1 + 3 * 3) / 4)


@pytest.mark.parametrize(("beta", "w"), [(0.0, 0.0), (0.5, 0.3125), (2.0, 1.25)])
def test_beta_is_the_step_of_the_server(two_clients: Task, beta: float, w: float) -> None:
    assert play(two_clients, PFedMe(lam=1.0, inner_steps=1, eta=0.5, beta=beta)).server["w"] == pytest.approx(w)


def test_without_inner_steps_nothing_moves(two_clients: Task) -> None:
    report = play(two_clients, PFedMe(inner_steps=0), rounds=2)
    assert report.server["w"] == 0
    assert values(report) == [0, 0]


def test_theta_stays_on_the_client(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (PFedMe(), FedAvg()))
    assert mine.ledger.entries == plain.ledger.entries


def test_a_client_that_never_took_part_uses_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, PFedMe(), rounds=2, faults=lambda round, clients: clients == 1)
    assert torch.equal(personal_models(report)[1]["w"], report.server["w"])


def test_a_lost_client_keeps_its_theta(two_clients: Task) -> None:
    algorithm = PFedMe(lam=1.0, inner_steps=1)
    report = play(two_clients, algorithm, rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    assert values(report)[1] == pytest.approx(1.5)


def test_a_new_client_finds_its_proximal_point_around_the_shared_model(two_clients: Task, make_cohort) -> None:
    algorithm = PFedMe(lam=1.0, inner_steps=1)
    w = two_clients.network.initial.map(lambda leaf: leaf + 1.0)
    assert algorithm.welcome(w, make_cohort(two_clients))["w"].flatten().tolist() == pytest.approx([1.0, 2.0])


def test_every_pass_is_a_gradient(two_clients: Task) -> None:
    assert play(two_clients, PFedMe(inner_steps=3, epochs=2)).history[0]["gradients"] == 2 * 3 * 2


def test_statistics_travel_and_frozen_leaves_stay(make_task) -> None:
    def model() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        module[2].requires_grad_(False)
        return module

    task = make_task(model, dtype=torch.float64)
    report = play(task, PFedMe(), rounds=2)
    initial = task.network.initial
    assert not torch.equal(report.server["1.running_mean"], initial["1.running_mean"])
    assert torch.equal(report.server["2.weight"], initial["2.weight"])
    assert not torch.equal(report.server["0.weight"], initial["0.weight"])
