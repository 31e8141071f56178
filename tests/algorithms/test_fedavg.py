"""FedAvg, by hand."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.kernel.params import Params
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play


@pytest.mark.parametrize(
    ("algorithm", "w"),
    [
        # One step of 0.5 from w = 0 gives w_k = 0.5, 1.5; weights are 1 and 3.
        (FedAvg(), (1 * 0.5 + 3 * 1.5) / 4),
        (FedAvg(weighting="uniform"), (0.5 + 1.5) / 2),
        # Two steps give w_k = 0.75, 2.25.
        (FedAvg(epochs=2), (1 * 0.75 + 3 * 2.25) / 4),
        (FedAvg(epochs=0), 0),
    ],
)
def test_one_round_by_hand(two_clients: Task, algorithm: FedAvg, w: float) -> None:
    assert play(two_clients, algorithm).server["w"] == pytest.approx(w)


def test_the_second_round_begins_at_the_mean(two_clients: Task) -> None:
    # From w = 1.25: w_k = 1.125, 2.125.
    assert play(two_clients, FedAvg(), rounds=2).server["w"] == pytest.approx((1 * 1.125 + 3 * 2.125) / 4)


def test_a_client_that_is_lost_does_not_count(two_clients: Task) -> None:
    report = play(two_clients, FedAvg(), faults=lambda round, clients: clients == 1)
    assert report.server["w"] == pytest.approx(0.5)
    assert {message.client for message in report.ledger.messages() if message.direction == "up"} == {0}


def test_everybody_has_the_shared_model_and_keeps_nothing(two_clients: Task) -> None:
    report = play(two_clients, FedAvg())
    assert [model["w"].item() for model in personal_models(report)] == [pytest.approx(1.25)] * 2
    assert report.population.memory.save(round=1) is None


def test_one_model_travels_each_way(two_clients: Task) -> None:
    report = play(two_clients, FedAvg(), rounds=3)
    model = len(to_bytes(Params(report.server, report.server.layout)))
    weight = len(to_bytes(Params.of(weight=torch.ones((), dtype=torch.float64))))
    assert report.ledger.bytes("down") == 3 * 2 * model
    assert report.ledger.bytes("up") == 3 * 2 * (model + weight)
