"""Adam is torch's, as a pure function."""

import math
from dataclasses import replace

import pytest
import torch

from atoll.kernel.params import Params, spread
from atoll.toolbox.client import adam, annealed_share, no_past


@pytest.mark.parametrize(("weight_decay", "decay"), [(0.0, 0.9), (0.01, 0.9), (0.0, 0.5)])
def test_steps_are_those_of_torch(weight_decay: float, decay: float) -> None:
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    optimiser = torch.optim.Adam([theirs], lr=0.1, weight_decay=weight_decay, betas=(decay, 0.999))
    mine = Params.of(w=start)
    past = replace(no_past(mine), steps=torch.zeros((), dtype=torch.float64))
    for step in range(5):
        gradient = torch.sin(theirs.detach() * (step + 1))
        mine, past = adam(mine, Params.of(w=gradient), past, 0.1, weight_decay, decay)
        theirs.grad = gradient
        optimiser.step()
    torch.testing.assert_close(mine["w"], theirs.detach(), rtol=1e-12, atol=0)


def test_it_moves_only_what_has_a_gradient() -> None:
    w = Params.of(a=torch.ones(2), b=torch.ones(2))
    past = no_past(w.only(["a"]))
    moved, past = adam(w, Params.of(a=torch.ones(2)), past, 0.5)
    assert moved["a"].tolist() == pytest.approx([0.5, 0.5])
    assert moved["b"] is w["b"]
    assert list(past.mean) == ["a"]


def test_the_past_of_a_stack_has_a_row_per_client() -> None:
    assert no_past(spread(Params.of(w=torch.ones(3)), 2)).square["w"].shape == (2, 3)


def test_annealing_is_half_a_cosine() -> None:
    shares = annealed_share(torch.tensor([0.0, 1.0, 2.0, 3.0]), 4)
    assert shares.tolist() == pytest.approx([0.5 * (1 + math.cos(math.pi * t / 4)) for t in range(4)])
    assert shares[0] == 1
