"""A conditional_perceptron perceptron is torch's, of noise beside a one-hot class."""

import torch
import torch.nn.functional as F
from torch import nn

from atoll.kernel.randomness import generator
from atoll.models.generator import conditional_perceptron, generate

LIKE = torch.zeros((), dtype=torch.float64)


def test_it_is_a_perceptron_of_numbers_and_class() -> None:
    values = conditional_perceptron(2, 3, 5, 4, draw=generator(1, "test"), like=LIKE)
    module = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    module.load_state_dict(dict(zip(module.state_dict(), values.values(), strict=True)))
    numbers, y = torch.rand(6, 2, dtype=torch.float64), torch.arange(6) % 3
    expected = module(torch.cat([numbers, F.one_hot(y, 3).double()], 1))
    torch.testing.assert_close(generate(values, numbers, y), expected)


def test_its_values_depend_on_the_draws_alone() -> None:
    one, same, other = (
        conditional_perceptron(2, 3, 5, 4, draw=generator(seed, "test"), like=LIKE) for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["out.weight"], other["out.weight"])
    assert all(leaf.dtype == torch.float64 for leaf in one.values())


def test_its_values_are_spread_as_torch_spreads_them() -> None:
    values = conditional_perceptron(70, 30, 64, 50, draw=generator(0, "test"), like=LIKE)
    for name, columns in (("hidden", 100), ("out", 64)):
        weight = values[f"{name}.weight"]
        torch_weight = nn.Linear(columns, len(weight)).weight
        assert 0.97 < weight.abs().max() * columns**0.5 <= 1
        assert abs(float(weight.std()) / float(torch_weight.detach().std()) - 1) < 0.1
        assert float(values[f"{name}.bias"].abs().max()) * columns**0.5 <= 1
