"""Generators: what they make has the shape and range of samples, and fresh ones are drawn from the given generator."""

import numpy as np
import pytest
import torch

from atoll.kernel.batch import Batch
from atoll.kernel.network import Variant
from atoll.kernel.params import Params
from atoll.models.synthesis import SPREAD, draw_values, generator_of


def made(shape: tuple[int, ...], *, seed: int = 0, scale: float = 1.0, train: bool = True) -> torch.Tensor:
    network = generator_of(torch.zeros(*shape, dtype=torch.float64), 6, 4)
    values = draw_values(network, np.random.default_rng(seed)) * scale
    z = torch.from_numpy(np.random.default_rng(9).normal(size=(10, 6)))
    return Batch(z, z[:, :0], None, None, network, Variant(train=train)).outputs(values)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 7, 10), (5,), (2, 3), (2, 3, 1)], ids=str)
def test_samples_have_the_shape_and_type_of_the_task(shape: tuple[int, ...]) -> None:
    x = made(shape)
    assert x.shape == (10, *shape)
    assert x.dtype == torch.float64
    assert (x[0] != x[1]).any()


def test_images_reach_all_of_their_range_and_nothing_else() -> None:
    x = made((1, 8, 8), scale=200.0)
    assert x.min() >= -1
    assert x.max() <= 1
    assert x.max() - x.min() > 1.9


def test_other_samples_have_no_range() -> None:
    assert made((5,), scale=200.0).abs().max() > 2


def test_they_make_the_same_in_training_and_out_of_it() -> None:
    torch.testing.assert_close(made((1, 8, 8), train=True), made((1, 8, 8), train=False), rtol=0, atol=1e-12)


def test_fresh_values_are_drawn_from_what_is_given_and_from_nothing_else() -> None:
    state = torch.random.get_rng_state()
    network = generator_of(torch.zeros(5), 300, 40)
    one, same, other = (draw_values(network, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    weights = one["0.weight"]
    assert weights.std().item() == pytest.approx(SPREAD, rel=0.05)
    assert abs(weights.mean()) < 1e-3
    assert (one["1.weight"] - 1).abs().max() < 5 * SPREAD  # of the norm layer
    assert not one["0.bias"].any()
    assert (one["0.weight"] != other["0.weight"]).any()
    assert isinstance(one, Params)
    assert set(one) == set(network.initial)
