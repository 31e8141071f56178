"""MTFL on networks whose batch-norm layers can be told apart."""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

from atoll import Cohort, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedbn import FedBN
from atoll.algorithms.mtfl import MTFL
from atoll.models import BodyAndHead
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play

Patch = Literal["yb", "us", "usyb"]
TRAINED = {"body.1.weight", "body.1.bias"}
STATISTICS = {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
PATCHES: dict[Patch, set[str]] = {"yb": TRAINED, "us": STATISTICS, "usyb": TRAINED | STATISTICS}


def network() -> BodyAndHead:
    return BodyAndHead(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.LayerNorm(5), nn.ReLU()), nn.Linear(5, 3))


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(network, sizes=(8, 8, 12), dtype=torch.float64)


each_patch = pytest.mark.parametrize("private", PATCHES)


@each_patch
def test_the_patch_never_leaves_the_client(task: Task, private: Patch) -> None:
    report = play(task, MTFL(private=private), rounds=2)
    assert set(task.network.initial) - set(report.server) == PATCHES[private]
    assert set(report.population.memory.save(round=2)["kept"]) == PATCHES[private]
    shared = len(to_bytes(task.network.initial.without(PATCHES[private])))
    assert report.ledger.by_kind()["up", "model"] == report.ledger.by_kind()["down", "model"] == 2 * 3 * shared


@each_patch
def test_one_round_by_hand(task: Task, private: Patch) -> None:
    # In the first round everybody starts from the same model and trains as in FedAvg; what is shared is then averaged
    # with weights 8 : 8 : 12, and the patches have the same mean, but everybody has its own.
    mtfl, plain = play(task, MTFL(private=private)), play(task, FedAvg())
    assert all(torch.equal(mtfl.server[name], plain.server[name]) for name in mtfl.server)
    models, weights = personal_models(mtfl), torch.tensor([8.0, 8.0, 12.0], dtype=torch.float64) / 28
    for name in PATCHES[private] - {"body.1.num_batches_tracked"}:
        own = torch.stack([model[name] for model in models])
        assert not torch.equal(own[0], own[1])
        torch.testing.assert_close(weights @ own, plain.server[name], rtol=0, atol=1e-12)


def test_the_second_round_begins_with_the_own_patch(task: Task) -> None:
    report = play(task, MTFL(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    first = personal_models(play(task, MTFL()))[1]
    assert all(torch.equal(personal_models(report)[1][name], first[name]) for name in TRAINED)  # absent: kept as it was
    went_on = personal_models(report)[0]
    assert not any(torch.equal(went_on[name], first[name]) for name in TRAINED)


def test_everything_of_batch_norm_is_fedbn(task: Task) -> None:
    mine, theirs = (personal_models(play(task, one, rounds=3)) for one in (MTFL(private="usyb"), FedBN()))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


def test_private_statistics_matter_for_answers_only(task: Task) -> None:
    # In training batch norm uses the statistics of the batch: only private scales and shifts change what is learned.
    yb, us, usyb, plain = (
        play(task, one, rounds=3).server["body.0.weight"] for one in (*(MTFL(private=one) for one in PATCHES), FedAvg())
    )
    assert torch.equal(us, plain)
    assert torch.equal(yb, usyb)
    assert not torch.equal(yb, us)


def test_a_client_that_never_took_part_has_the_initial_patch(task: Task) -> None:
    report = play(task, MTFL(), rounds=2, faults=lambda round, clients: clients == 2)
    model = personal_models(report)[2]
    assert all(torch.equal(model[name], task.network.initial[name]) for name in TRAINED)
    assert torch.equal(model["head.weight"], report.server["head.weight"])


@each_patch
def test_a_new_client_fits_its_patch_and_nothing_else(
    task: Task, make_cohort: Callable[..., Cohort], private: Patch
) -> None:
    server = play(task, MTFL(private=private), rounds=2).server
    cohort = make_cohort(task).without(*["labels"] if private == "us" else [])  # statistics need no labels
    model = MTFL(private=private).welcome(server, cohort).client(0)
    assert all(torch.equal(model[name], server[name]) for name in server)
    assert not any(torch.equal(model[name], task.network.initial[name]) for name in PATCHES[private])


def test_a_network_without_batch_norm_is_said_to_be_fedavg(
    make_task: Callable[..., Task], caplog: pytest.LogCaptureFixture
) -> None:
    play(make_task(dtype=torch.float64), MTFL())
    assert "MTFL shares everything: this model has no 'batchnorm'. This is FedAvg." in caplog.text
