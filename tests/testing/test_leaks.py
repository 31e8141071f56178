"""Samples in what a client sends."""

import pytest
import torch
from torch import Tensor

from atoll.kernel.randomness import generator
from atoll.testing.leaks import copy_in, likeness_in, signs_in

draw = generator(0, "leaks")
SAMPLES = torch.from_numpy(draw.normal(size=(9, 12)))
NOISE = {"a": torch.from_numpy(draw.normal(size=(30, 12))), "b": torch.from_numpy(draw.normal(size=(50,)))}


def test_noise_is_no_sample() -> None:
    assert copy_in(NOISE, SAMPLES) is None
    assert likeness_in(NOISE, SAMPLES) is None
    assert likeness_in({"a": torch.zeros(40, dtype=torch.float64), "b": torch.full((40,), 1e9)}, SAMPLES) is None
    assert likeness_in({"counts": torch.arange(20)}, SAMPLES) is None
    assert likeness_in({"short": torch.zeros(3)}, SAMPLES) is None


@pytest.mark.parametrize("factor", [1, -1, 2, 0.5])
def test_a_single_number_is_found(factor: float) -> None:
    assert copy_in({**NOISE, "weight": factor * SAMPLES[3, 4]}, SAMPLES) == "weight"


def test_numbers_that_tell_nothing_are_not_found() -> None:
    plain = torch.tensor([[0.0, 1.0, -1.0, 0.3]], dtype=torch.float64)
    assert copy_in({"counts": torch.tensor([0.0, 1.0], dtype=torch.float64)}, plain) is None


def permuted(x: Tensor) -> Tensor:
    return x[torch.from_numpy(generator(1, "order").permutation(len(x)))]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: 3 * x - 7,
        lambda x: -1e-6 * x,
        lambda x: x.float().half(),
        lambda x: torch.stack([x, torch.ones_like(x)], 1),
        lambda x: torch.stack([x, x**2, x**3], 0).T,
        lambda x: 5 * permuted(x),
        lambda x: -5 * permuted(x),
        lambda x: 0.3 * x.diff(),
        lambda x: 0.3 * x.cumsum(0),
        lambda x: 10 * x + 0.1 * NOISE["b"][:12],
    ],
)
def test_a_changed_sample_is_found(change) -> None:
    assert likeness_in({"before": NOISE["a"], "here": change(SAMPLES[5]), "after": NOISE["b"]}, SAMPLES) == "here"


def test_a_sample_across_two_leaves_is_found_where_it_begins() -> None:
    first, second = (2 * SAMPLES[0]).split(6)
    assert likeness_in({"noise": NOISE["b"], "first": first, "second": second}, SAMPLES) == "first"


@pytest.mark.parametrize("level", [0.0, 1.0])
@pytest.mark.parametrize("turn", [1, -1])
def test_the_signs_of_a_sample_are_found_where_they_stand(level: float, turn: int) -> None:
    bits = turn * torch.where(SAMPLES[4] > level * SAMPLES[4].mean(), 1.0, -1.0)
    here = torch.cat([NOISE["b"], bits * NOISE["a"][0].abs()])
    assert signs_in({"here": here, "counts": torch.arange(9)}, SAMPLES)[50]
    assert signs_in({"here": here}, SAMPLES).sum() <= 3  # others are chance
    assert not signs_in({"here": bits * 0}, SAMPLES).any()


def test_signs_that_are_all_the_same_tell_nothing() -> None:
    even = torch.cat([SAMPLES.abs(), SAMPLES.abs().cumsum(1)])
    assert not signs_in({"here": torch.ones(40)}, even).any()
    assert len(signs_in({"counts": torch.arange(20)}, SAMPLES)) == len(signs_in({}, SAMPLES))
