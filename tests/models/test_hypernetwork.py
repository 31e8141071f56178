"""The hypernetwork on Params computes what a module of torch does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.kernel.network import Network
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP, BodyAndHead
from atoll.models.hypernetwork import (
    Spectral,
    generate_leaves,
    hypernetwork,
    largest_singular_value,
    normalise_spectrum,
    size_of,
)


class Module(nn.Module):
    """A perceptron with one head per leaf, in layers of torch."""

    def __init__(self, target: Params, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        linear = [nn.Linear(inputs, hidden), *(nn.Linear(hidden, hidden) for _ in range(layers))]
        self.hidden = nn.ModuleList(linear)
        self.heads = nn.ModuleList(nn.Linear(hidden, leaf.numel()) for leaf in target.values())
        self.shapes = {name: leaf.shape for name, leaf in target.items()}
        self.double()

    def load(self, phi: Params, which: Spectral) -> None:
        layers = {f"hidden.{i}": layer for i, layer in enumerate(self.hidden)}
        layers |= {f"head.{name}": head for name, head in zip(self.shapes, self.heads, strict=True)}
        for name, layer in layers.items():
            weight = phi[f"{name}.weight"]
            scaled = which == "all" or (which == "hidden" and name.startswith("hidden"))
            layer.weight.data = weight / torch.linalg.matrix_norm(weight, ord=2) if scaled else weight
            layer.bias.data = phi[f"{name}.bias"].flatten()

    def forward(self, e: Tensor) -> dict[str, Tensor]:
        f = self.hidden[0](e)
        for layer in self.hidden[1:]:
            f = layer(F.relu(f))
        return {
            name: head(f).reshape(shape) for (name, shape), head in zip(self.shapes.items(), self.heads, strict=True)
        }


def small_cnn() -> nn.Module:
    """Two convolutions of 16 and 32 kernels under three linear layers, for 3x32x32."""
    convolutions = [nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    linear = [nn.Flatten(), nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
    return BodyAndHead(nn.Sequential(*convolutions, *linear), nn.Linear(84, 10))


def normalising() -> nn.Module:
    return BodyAndHead(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2))


@pytest.fixture(scope="module", params=["cnn", "mlp", "normalised"])
def target(request: pytest.FixtureRequest) -> Params:
    with default_generator(0):
        networks = {"cnn": small_cnn, "mlp": lambda: MLP((8,), 3), "normalised": normalising}
        return Network(networks[request.param]().double()).initial.trained


@pytest.mark.parametrize("which", ["none", "hidden", "all"])
@pytest.mark.parametrize("layers", [0, 2])
def test_as_in_torch(target: Params, which: Spectral, layers: int) -> None:
    phi = hypernetwork(target, 4, 6, layers, draw=generator(1, "test"))
    module = Module(target, 4, 6, layers)
    module.load(phi, which)
    e = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    scaled = normalise_spectrum(phi, which)
    together = generate_leaves(scaled, e)
    for row, one in enumerate(e):
        made, expected = generate_leaves(scaled, one), module(one)
        assert list(made) == list(target)
        for name, leaf in expected.items():
            torch.testing.assert_close(made[name], leaf, rtol=0, atol=1e-12)
            torch.testing.assert_close(together[name][row], leaf, rtol=0, atol=1e-12)


def test_size(target: Params) -> None:
    phi = hypernetwork(target, 4, 6, 2, draw=generator(1, "test"))
    assert sum(leaf.numel() for leaf in phi.values()) == size_of(target, 4, 6, 2)


@pytest.mark.parametrize(("model", "numbers"), [(MLP((784,), 10, (128, 128)), 118_282), (small_cnn(), 121_182)])
def test_size_for_well_known_networks(model: nn.Module, numbers: int) -> None:
    # Each number of the network needs a row of 100 weights and a bias.
    assert size_of(Network(model).initial, 13, 100, 3) == 101 * numbers + 100 * 14 + 3 * 100 * 101


def test_what_is_generated_begins_around_the_target(target: Params) -> None:
    phi = hypernetwork(target, 4, 6, 2, draw=generator(1, "test"))
    assert all(torch.equal(phi[f"head.{name}.bias"], leaf) for name, leaf in target.items())


@pytest.mark.parametrize("shape", [(7, 3), (3, 7), (4, 4)])
def test_largest_singular_value(shape: tuple[int, int]) -> None:
    with default_generator(0):
        matrix = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(largest_singular_value(matrix), torch.linalg.svdvals(matrix)[0], rtol=0, atol=1e-12)
