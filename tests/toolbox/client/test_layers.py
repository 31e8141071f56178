"""Linear maps inside networks: the gradient of a matrix is the sum of g a^T over places."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from atoll import Batch, Params, Stack, Task
from atoll.algorithms.answers.regmean import Regression
from atoll.kernel.network import Variant
from atoll.models import MLP
from atoll.models.cnn import LeNet
from atoll.models.split import BodyAndHead
from atoll.toolbox.client.layers import inputs_of, linear_maps, matrix, output_gradients, squares, with_matrix


def lenet() -> nn.Module:
    return LeNet((1, 16, 16), 3)


def strided() -> nn.Module:
    """Convolutions with stride, padding and without a bias, one of them in groups."""
    body = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
    )
    return BodyAndHead(body, nn.Linear(4 * 6 * 6, 3))


def some(task: Task, mask: Tensor | None = None) -> Batch:
    return Batch(task.x[:4], task.y[:4], mask, None, task.network, Variant(train=False))


@pytest.fixture
def images(make_task: Callable[..., Task]) -> Callable[[Callable[[], nn.Module]], Task]:
    return lambda model: make_task(model, shape=(1, 16, 16), dtype=torch.float64)


def test_linear_layers_and_on_demand_plain_convolutions_are_maps(images: Callable[..., Task]) -> None:
    task = images(strided)
    assert linear_maps(Regression(), task.public_facts()) == {"head": (3, 145)}
    assert linear_maps(Regression(), task.public_facts(), convolutions=True) == {
        "body.0": (4, 9),
        "head": (3, 145),
    }  # not the one in groups


class Unused(MLP):
    """A linear layer that never runs."""

    def __init__(self) -> None:
        super().__init__((4,), 3, hidden=(6,))
        self.idle = nn.Linear(2, 2)


def test_a_layer_that_does_not_run_is_no_map(make_task: Callable[..., Task]) -> None:
    assert linear_maps(Regression(), make_task(Unused).public_facts()) == {"body.1": (6, 5), "head": (3, 7)}


@pytest.mark.parametrize("model", [lenet, strided])
@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_inputs_and_gradients_make_the_gradient_of_the_matrix(
    images: Callable[..., Task], model: Callable[[], nn.Module], mask: Tensor | None
) -> None:
    task = images(model)
    batch, w = some(task, mask), task.network.initial
    maps = linear_maps(Regression(), task.public_facts(), convolutions=True)
    a, g = inputs_of(batch, w, maps), output_gradients(batch, w, maps)
    whole, _, _ = batch.gradient(w)
    for layer, shape in maps.items():
        found = torch.einsum("npo,npi->oi", g[layer], a[layer])
        assert found.shape == shape
        torch.testing.assert_close(found, matrix(whole, layer) * batch.count, rtol=1e-9, atol=1e-12)


def test_a_layer_answers_with_its_matrix(images: Callable[..., Task]) -> None:
    task = images(lenet)
    batch, w = some(task), task.network.initial
    rows = inputs_of(batch, w, ["head"])["head"][:, 0]
    torch.testing.assert_close(rows @ matrix(w, "head").T, batch.outputs(w), rtol=1e-12, atol=0)
    again = with_matrix(w, "body.3", matrix(w, "body.3"))
    assert all(torch.equal(again[name], leaf) for name, leaf in w.items())
    other = with_matrix(w, "body.3", 2 * matrix(w, "body.3"))
    assert torch.equal(other["body.3.weight"], 2 * w["body.3.weight"])
    assert torch.equal(other["body.3.bias"], 2 * w["body.3.bias"])


def test_matrices_of_all_clients() -> None:
    w = Stack.of(**{"c.weight": torch.arange(24.0).reshape(2, 3, 2, 2, 1), "c.bias": torch.ones(2, 3)})
    assert matrix(w, "c").shape == (2, 3, 5)
    assert torch.equal(matrix(w, "c")[1], matrix(w.client(1), "c"))


def test_padding_does_not_count_in_squares(images: Callable[..., Task]) -> None:
    task = images(lenet)
    rows = torch.arange(24.0).reshape(4, 2, 3).double()
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    real = rows[[0, 2]].flatten(0, 1)
    assert torch.equal(squares(some(task, mask), rows), real.T @ real)
    assert torch.equal(squares(some(task), rows), rows.flatten(0, 1).T @ rows.flatten(0, 1))


def test_many_models_at_once(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64)
    w, maps = task.network.initial, linear_maps(Regression(), task.public_facts())
    task.network.module(Variant(train=False))

    def one(scale: Tensor) -> dict[str, Tensor]:
        model = Params({name: leaf * scale for name, leaf in w.items()}, w.layout)
        batch = Batch(task.x[:4], task.y[:4], None, None, task.network, Variant(train=False), vectorised=True)
        return {"a": inputs_of(batch, model, maps)["head"], "g": output_gradients(batch, model, maps)["head"]}

    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    together = vmap(one)(scales)
    for k, scale in enumerate(scales):
        alone = vmap(one)(scale[None])
        assert all(torch.equal(together[name][k], alone[name][0]) for name in together)
    module = task.network.module(Variant(train=False)).module
    assert not any(part._forward_hooks for part in module.modules())  # nothing keeps watching
