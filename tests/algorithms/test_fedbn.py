"""FedBN on networks whose names mislead."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll import Cohort, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedbn import FedBN
from atoll.models import BodyAndHead
from atoll.testing.conformance import personal_models, play


def network() -> BodyAndHead:
    layers = OrderedDict(subnet=nn.Linear(4, 5), centred=nn.BatchNorm1d(5), scaled=nn.LayerNorm(5), bend=nn.ReLU())
    return BodyAndHead(nn.Sequential(layers), nn.Linear(5, 3))


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(network, sizes=(8, 8, 12), dtype=torch.float64)


def test_batch_normalisation_is_private_with_its_statistics_whatever_it_is_called(task: Task) -> None:
    # catches: layers found by the letters "bn" in their names (PFLlib), which would keep `subnet` and share `centred`.
    report = play(task, FedBN(), rounds=2)
    assert set(task.network.initial) - set(report.server) == {
        f"body.centred.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert set(report.population.memory.save(round=2)["kept"]) == set(task.network.layout.part("batchnorm"))


def test_every_kind_of_normalisation_is_private_if_asked(task: Task) -> None:
    report = play(task, FedBN(private="norm"))
    assert {name.split(".")[1] for name in set(task.network.initial) - set(report.server)} == {"centred", "scaled"}


def test_one_round_by_hand(task: Task) -> None:
    # In the first round everybody starts from the same model, so that clients do what those of FedAvg do;
    # then the server averages all but batch norm, and every client keeps its own.
    bn, avg = play(task, FedBN()), play(task, FedAvg())
    assert all(torch.equal(bn.server[name], avg.server[name]) for name in bn.server)
    models = personal_models(bn)
    weights = torch.tensor([8.0, 8.0, 12.0], dtype=torch.float64) / 28
    for name in ("body.centred.weight", "body.centred.running_mean", "body.centred.running_var"):
        own = torch.stack([model[name] for model in models])
        assert not torch.equal(own[0], own[1])
        torch.testing.assert_close(weights @ own, avg.server[name], rtol=0, atol=1e-12)


def test_a_new_client_has_statistics_of_its_own_samples(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    server = play(task, FedBN(), rounds=2).server
    cohort = make_cohort(task)
    models = FedBN().welcome(server, cohort.without("labels"))
    for position in range(task.clients):
        model = models.client(position)
        mine = task.x[task.splits["train"].order[slice(*task.splits["train"].offsets[position : position + 2])]]
        entering = mine @ server["body.subnet.weight"].T + server["body.subnet.bias"]
        torch.testing.assert_close(model["body.centred.running_mean"], entering.mean(0), rtol=0, atol=0.1)
        assert torch.equal(model["body.centred.weight"], task.network.initial["body.centred.weight"])
        assert all(torch.equal(model[name], server[name]) for name in server)  # nothing is trained
