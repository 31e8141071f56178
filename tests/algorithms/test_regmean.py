"""RegMean, by hand: Gram matrices, what is solved, and what is averaged."""

from collections.abc import Callable

import pytest
import torch
from ratings import make_ratings
from samples import own
from torch import nn

from atoll import Batch, Cohort, Task
from atoll.algorithms.answers.regmean import RIDGE, damp
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.regmean import RegMean
from atoll.compose import create
from atoll.kernel.errors import ModelError
from atoll.kernel.network import Variant
from atoll.models.cnn import LeNet
from atoll.models.split import BodyAndHead
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.client.layers import inputs_of, matrix
from atoll.toolbox.server.triangles import symmetric


def test_damping_and_ridge_by_hand() -> None:
    gram = torch.tensor([[4.0, 2.0], [2.0, 0.0]], dtype=torch.float64)
    found = damp(gram, damping=0.25)
    assert found.flatten().tolist() == pytest.approx([4 + 2 * RIDGE, 0.5, 0.5, 2 * RIDGE])


def test_each_client_sends_the_mean_of_its_squares_and_its_matrix_times_that(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(dtype=torch.float64)
    algorithm = RegMean(epochs=2, damping=0.5)
    update = algorithm.local(task.network.initial, make_cohort(task))
    trained = algorithm.training.train(task.network.initial, make_cohort(task))
    assert update.weight is not None
    assert update.weight.tolist() == [5, 1, 12, 7]
    assert not update.send["rest"]
    for k in range(task.clients):
        x, y = own(task, k)
        batch = Batch(x, y, None, None, task.network, Variant(train=False))
        for layer, rows in inputs_of(batch, trained.client(k), ["body.1", "head"]).items():
            gram = symmetric(update.send["grams"][layer][k])
            expected = damp(rows[:, 0].T @ rows[:, 0] / len(x), 0.5)
            torch.testing.assert_close(gram, expected, rtol=0, atol=1e-12)
            product = matrix(trained.client(k), layer) @ gram
            torch.testing.assert_close(update.send["products"][layer][k], product, rtol=0, atol=1e-12)


def test_layers_solve_their_regression(make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]) -> None:
    task = make_task(dtype=torch.float64)
    algorithm = RegMean(epochs=2)
    update = algorithm.local(task.network.initial, make_cohort(task))
    found = play(task, algorithm).server.answer
    n = torch.tensor([5.0, 1.0, 12.0, 7.0], dtype=torch.float64)
    for layer in ("body.1", "head"):
        grams = symmetric(update.send["grams"][layer])
        left = matrix(found, layer) @ torch.einsum("k,kij->ij", n, grams)
        right = torch.einsum("k,koi->oi", n, update.send["products"][layer])
        torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


def test_what_is_not_linear_is_averaged(make_task: Callable[..., Task]) -> None:
    def model() -> nn.Module:
        return BodyAndHead(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 3))

    task = make_task(model, dtype=torch.float64)
    mean, found = play(task, FedAvg(epochs=2)).server, play(task, RegMean(epochs=2)).server.answer
    assert len(mean.part("norm")) == 5
    for name, leaf in mean.part("norm").items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-12)
    assert not torch.allclose(found["head.weight"], mean["head.weight"])


def test_convolutions_are_averaged(make_task: Callable[..., Task]) -> None:
    task = make_task(lambda: LeNet((1, 16, 16), 3), shape=(1, 16, 16), dtype=torch.float64)
    mean, found = play(task, FedAvg(epochs=2)).server, play(task, RegMean(epochs=2)).server.answer
    torch.testing.assert_close(found["body.3.weight"], mean["body.3.weight"], rtol=0, atol=1e-12)
    assert not torch.allclose(found["body.7.weight"], mean["body.7.weight"])


def test_everybody_gets_the_merged_model(make_task: Callable[..., Task]) -> None:
    report = play(make_task(dtype=torch.float64), RegMean(epochs=2))
    for model in personal_models(report):
        assert all(torch.equal(model[name], leaf) for name, leaf in report.server.answer.items())


@pytest.mark.parametrize("method", ["regmean", "fedlpa"])
def test_a_network_without_linear_layers_has_nothing_to_merge(method: str) -> None:
    with pytest.raises(ModelError, match=f"{method} needs a network with linear layers.* has none"):
        create(method).start(make_ratings().public_facts())
