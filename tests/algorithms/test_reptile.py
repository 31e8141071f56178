"""Reptile, by hand."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.reptile import Reptile
from atoll.testing.conformance import personal_models, play


@pytest.mark.parametrize(("beta", "w"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.5, 1.5)])
def test_one_round_by_hand(two_clients: Task, beta: float, w: float) -> None:
    # One step of 0.5 from 0 gives w_k = 0.5, 1.5; their plain mean is 1.
    assert play(two_clients, Reptile(beta=beta)).server["w"] == pytest.approx(w)


def test_clients_train_on_from_w(two_clients: Task) -> None:
    # w = 1; two epochs leave a quarter of the distance to c = 1, 3.
    first, second = personal_models(play(two_clients, Reptile(adapt_epochs=2)))
    assert first["w"] == pytest.approx(1.0)
    assert second["w"] == pytest.approx(3 - 2 / 4)


def test_with_beta_one_the_server_is_that_of_fedavg_with_uniform_weights(two_clients: Task) -> None:
    mine, theirs = (
        play(two_clients, one, rounds=3).server["w"]
        for one in (Reptile(epochs=2), FedAvg(epochs=2, weighting="uniform"))
    )
    assert torch.equal(mine, theirs)


def test_adaptation_is_neither_sent_nor_kept(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (Reptile(), FedAvg()))
    assert mine.ledger.entries == plain.ledger.entries
    assert mine.population.memory.save(round=2) is None


def test_a_client_that_is_lost_does_not_count(two_clients: Task) -> None:
    report = play(two_clients, Reptile(), faults=lambda round, clients: clients == 1)
    assert report.server["w"] == pytest.approx(0.5)


def test_a_new_client_adapts_the_shared_model(two_clients: Task, make_cohort) -> None:
    found = Reptile(adapt_epochs=1).welcome(two_clients.network.initial, make_cohort(two_clients))
    assert found["w"].flatten().tolist() == pytest.approx([0.5, 1.5])
