"""The parts of a model: what it declares, and what lies on either side of a boundary by count or by name."""

from collections.abc import Iterable

import pytest
from torch import Tensor, nn

from atoll.algorithms.fedper import FedPer
from atoll.compose import create
from atoll.kernel.errors import HyperparameterError, ModelError
from atoll.kernel.network import layout_of
from atoll.models import build


class Odd(nn.Module):
    """Layers of every kind, with names that mislead."""

    head_modules = ("out",)

    def __init__(self) -> None:
        super().__init__()
        self.subnet = nn.Linear(2, 2)  # has "bn" in its name
        self.plain = nn.BatchNorm1d(2, affine=False)  # holds buffers only
        self.block = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2))
        self.out = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.plain(self.subnet(x))))


LAYOUT = layout_of(Odd())


def layers_of(leaves: Iterable[str]) -> list[str]:
    """The layers that these leaves lie in, which they must fill."""
    found = {name.rpartition(".")[0] for name in leaves}
    assert set(leaves) == {name for name in LAYOUT.kinds if name.rpartition(".")[0] in found}
    return [layer for layer in LAYOUT.layers if layer in found]


def test_layers_are_in_the_order_in_which_the_model_declares_them() -> None:
    assert LAYOUT.layers == ("subnet", "plain", "block.0", "block.1", "block.2", "out")


@pytest.mark.parametrize(
    ("part", "layers"),
    [
        ("batchnorm", ["plain", "block.2"]),
        ("norm", ["plain", "block.1", "block.2"]),
        ("first:1", ["subnet"]),
        ("first:3", ["subnet", "plain", "block.0"]),
        ("last:2", ["block.2", "out"]),
        ("last:6", ["subnet", "plain", "block.0", "block.1", "block.2", "out"]),
        ("from:out", ["out"]),
        ("from:block.1", ["block.1", "block.2", "out"]),
        ("from:block", ["block.0", "block.1", "block.2", "out"]),
        ("before:block", ["subnet", "plain"]),
        ("before:subnet", []),
    ],
)
def test_a_part_is_made_of_whole_layers(part: str, layers: list[str]) -> None:
    # catches: FedBN by the substring "bn" of a name, which takes `subnet` for batch norm and misses `plain`.
    assert layers_of(LAYOUT.part(part)) == layers


@pytest.mark.parametrize(("lower", "upper"), [("first:2", "last:4"), ("before:block.1", "from:block.1")])
def test_both_sides_of_a_boundary_are_the_whole_model(lower: str, upper: str) -> None:
    assert LAYOUT.part(lower) | LAYOUT.part(upper) == set(LAYOUT.kinds)
    assert not LAYOUT.part(lower) & LAYOUT.part(upper)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet"])
def test_the_declared_head_of_a_reference_network_is_its_last_layer(name: str) -> None:
    layout = layout_of(build(name, (1, 28, 28), 10))
    assert layout.part("head") == layout.part("last:1") == layout.part("from:head")
    assert layout.part("body") == layout.part("before:head")


def test_a_boundary_that_is_not_in_the_model_is_an_error() -> None:
    with pytest.raises(
        ModelError, match=r"'from:fc' must name a layer of the model\. It has none called 'fc'"
    ) as error:
        LAYOUT.part("from:fc")
    assert error.value.hint == "its layers are: subnet, plain, block.0, block.1, block.2, out."
    with pytest.raises(ModelError, match=r"'last:7' must count at most all layers of the model, 6"):
        LAYOUT.part("last:7")
    with pytest.raises(ModelError, match="none called 'bloc'"):  # a part of a name is no name
        LAYOUT.part("before:bloc")


@pytest.mark.parametrize("given", ["first", "first:", "first:0", "last:-1", "last:two", "from:", "fc", "head:1", ""])
def test_a_word_that_names_no_part_is_refused(given: str) -> None:
    with pytest.raises(HyperparameterError, match=r"`private` of FedPer must be one of 'all', .*'last:N', .* Got"):
        FedPer(private=given)


def test_a_boundary_can_be_written_on_the_command_line() -> None:
    assert create("fedper:private=last:2,epochs=3") == FedPer(private="last:2", epochs=3)
    assert create("fedper:private=from:body.3") == FedPer(private="from:body.3")
