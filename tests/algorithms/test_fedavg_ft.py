"""FedAvg-FT, by hand."""

from typing import Literal

import pytest
import torch
from torch import nn

from atoll import Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedavg_ft import FedAvgFT
from atoll.kernel.randomness import default_generator
from atoll.models import BodyAndHead
from atoll.testing.conformance import personal_models, play


def test_one_round_by_hand(two_clients: Task) -> None:
    # FedAvg gives w = 1.25; one epoch of tuning goes half the way from there to c_k = 1, 3.
    report = play(two_clients, FedAvgFT(tune_epochs=1))
    first, second = personal_models(report)
    assert report.server["w"] == pytest.approx(1.25)
    assert first["w"] == pytest.approx(1.125)
    assert second["w"] == pytest.approx(2.125)


def test_tuning_is_neither_sent_nor_kept(two_clients: Task) -> None:
    tuned, plain = (play(two_clients, one, rounds=3) for one in (FedAvgFT(), FedAvg()))
    assert torch.equal(tuned.server["w"], plain.server["w"])
    assert tuned.ledger.entries == plain.ledger.entries
    assert tuned.population.memory.save(round=3) is None


def test_everybody_tunes_the_same_model_however_often_it_is_asked_for(two_clients: Task) -> None:
    report = play(two_clients, FedAvgFT(tune_epochs=1), rounds=2)
    once, twice = personal_models(report), personal_models(report)
    assert [model["w"] for model in once] == [model["w"] for model in twice]


def test_tuning_the_head_leaves_the_body(body_and_head: Task) -> None:
    # u = h = (1 * 0.5 + 3 * 1.5) / 4 = 1.25 after a round. Then h moves by half of c - u - h, u stays.
    first, second = personal_models(play(body_and_head, FedAvgFT(tune="head", tune_epochs=1)))
    assert first["body.value"] == second["body.value"] == pytest.approx(1.25)
    assert first["head.value"] == pytest.approx(1.25 + 0.5 * (1 - 2.5))
    assert second["head.value"] == pytest.approx(1.25 + 0.5 * (3 - 2.5))


@pytest.mark.parametrize("part", ["all", "head", "norm"])
def test_only_the_asked_part_is_tuned(part: Literal["all", "head", "norm"]) -> None:
    with default_generator(0):
        x = torch.randn(20, 3, dtype=torch.float64)
        # No bias before the norm layer, which would take it away again.
        body = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())
        model = BodyAndHead(body, nn.Linear(4, 2)).double()
    task = Task.of_clients({"0": (x, (x[:, 0] > 0).long())}, model, classes=2, training=Training(lr=0.1))
    report = play(task, FedAvgFT(tune=part, tune_epochs=1))
    tuned = personal_models(report)[0]
    moved = {name for name, leaf in report.server.items() if not torch.equal(leaf, tuned[name])}
    assert moved == set(task.network.layout.part(part))
