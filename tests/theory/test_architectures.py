"""What methods must come to where clients have different architectures and the answer is known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll import Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddf import FedDF
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator
from atoll.models import MLP, Linear
from atoll.testing.conformance import play

CLASSES, FEATURES = 3, 4


def drawn(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    with default_generator(seed):
        return torch.randn(samples, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (samples,))


def federation(models: Sequence[nn.Module], clients: int = 5) -> Task:
    """Clients with normal samples, who have these models in turn; some public samples."""
    rows = {str(k): drawn(4 + 3 * k, seed=k) for k in range(clients)}
    training = Training(lr=0.5, batch_size=5)
    task = Task.of_clients(rows, models, classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))
    return replace(task, public=drawn(10, seed=99))


def model(hidden: int | None) -> nn.Module:
    with default_generator(0):
        made = Linear((FEATURES,), CLASSES) if hidden is None else MLP((FEATURES,), CLASSES, hidden=(hidden,))
        return made.double()


def assert_equal(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(leaf, right[name]) for name, leaf in left.items())


@pytest.mark.limit("fedavg", "feddf")
@pytest.mark.parametrize("sizes", [(8, None), (8, 3), (8, 8)], ids=str)
def test_averages_are_those_of_each_architecture_alone(sizes: tuple[int | None, int | None]) -> None:
    models = [model(hidden) for hidden in sizes]
    states = play(federation(models), FedAvg(), 2).server.states
    for number, own in enumerate(models):
        alone = play(
            federation([own]), FedAvg(), 2, faults=lambda round, clients, others=1 - number: clients % 2 == others
        )
        assert_equal(states[number], alone.server)
    # Without distillation, FedDF does the same.
    undistilled = play(federation(models), FedDF(server_epochs=0), 2).server.states
    for mine, theirs in zip(undistilled, states, strict=True):
        assert_equal(mine, theirs)


@pytest.mark.limit("feddf")
def test_a_single_model_in_a_list_is_the_model() -> None:
    listed, plain = (federation(models) for models in ([model(8)], model(8)))  # type: ignore[arg-type]
    assert listed.architecture is None
    assert_equal(play(listed, FedDF(server_epochs=1)).server, play(plain, FedDF(server_epochs=1)).server)


class Bias(nn.Module):
    """Logits that are parameters, whatever the sample."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.b, self.scale = nn.Parameter(torch.zeros(2, dtype=torch.float64)), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.b + 0 * x


def biased(*labels: int, models: Sequence[nn.Module]) -> Task:
    """Clients with one sample of a class: a step of size 4 gives a plain bias the logits 2 and -2."""
    rows = {str(k): (torch.zeros(1, 2, dtype=torch.float64), torch.tensor([one])) for k, one in enumerate(labels)}
    task = Task.of_clients(rows, models, classes=2, training=Training(lr=4.0, batch_size=1), shares=(1.0, 0.0, 0.0))
    return replace(task, public=(torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)))


@pytest.mark.closed_form("feddf")
def test_the_same_architecture_twice_differs_by_its_averages_only() -> None:
    # Clients 0 and 2 know class 0 and have the first model, clients 1 and 3 know class 1 and have the second.
    task = biased(0, 1, 0, 1, models=[Bias(), Bias()])
    averages = play(task, FedDF(server_epochs=0)).server.states
    assert [state["b"].tolist() for state in averages] == [[2.0, -2.0], [-2.0, 2.0]]
    # All four answer together: (1/2, 1/2). Adam's first step goes by its size towards that, from either average.
    stepped = play(task, FedDF(server_epochs=1, server_lr=0.25)).server.states
    assert torch.cat([state["b"] for state in stepped]).tolist() == pytest.approx([1.75, -1.75, -1.75, 1.75], abs=1e-6)


@pytest.mark.closed_form("feddf")
def test_every_architecture_learns_to_answer_as_all_clients_do() -> None:
    # Logits: 2 and -2 of the first model for class 0; of the second, whose steps count 0.5 * 0.5, 0.5 and -0.5.
    task = biased(0, 1, 0, models=[Bias(), Bias(0.5)])
    first, second = play(task, FedDF(server_epochs=400, server_lr=0.1)).server.states
    mean = (2 - 0.5 + 2) / 3
    assert first["b"].tolist() == pytest.approx([mean, -mean], abs=1e-2)
    assert (0.5 * second["b"]).tolist() == pytest.approx([mean, -mean], abs=1e-2)


@pytest.mark.closed_form("feddf")
def test_an_architecture_without_replies_is_taught_by_the_others() -> None:
    task = biased(0, 1, models=[Bias(), Bias()])
    lost = {"faults": lambda round, clients: np.asarray(clients) == 1}
    first, second = play(task, FedDF(server_epochs=400, server_lr=0.1), **lost).server.states
    assert first["b"].tolist() == pytest.approx([2.0, -2.0], abs=1e-2)
    assert second["b"].tolist() == pytest.approx([2.0, -2.0], abs=1e-2)
    assert play(task, FedAvg(), **lost).server.states[1]["b"].tolist() == [0.0, 0.0]
