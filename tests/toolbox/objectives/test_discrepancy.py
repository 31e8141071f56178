"""The discrepancy of two samples, against its definition."""

import math

import pytest
import torch

from atoll.kernel.randomness import default_generator
from atoll.toolbox.objectives.discrepancy import mean_discrepancy


def pair(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    with default_generator(0):
        return torch.randn(rows, 3, dtype=torch.float64), 1 + torch.randn(rows, 3, dtype=torch.float64)


def test_it_is_the_mean_over_pairs_of_gaussian_kernels() -> None:
    x, y = pair()
    both = [*x, *y]
    width = sum(float((a - b).square().sum()) for a in both for b in both) / (10 * 9)

    def kernel(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(math.exp(-float((a - b).square().sum()) / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))

    def mean(many: torch.Tensor, others: torch.Tensor) -> float:
        return sum(kernel(a, b) for a in many for b in others) / 25

    assert mean_discrepancy(x, y).item() == pytest.approx(mean(x, x) + mean(y, y) - 2 * mean(x, y))


def test_rows_that_do_not_count_change_nothing() -> None:
    x, y = pair()
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(mean_discrepancy(x, y, mask), mean_discrepancy(x[:3], y[:3]))


def test_the_same_rows_are_not_apart() -> None:
    x, _ = pair()
    assert mean_discrepancy(x, x).item() == pytest.approx(0, abs=1e-12)
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(mean_discrepancy(x, x.detach()), x)
    torch.testing.assert_close(slope, torch.zeros_like(slope))


def test_one_row_and_rows_all_alike_stay_finite() -> None:
    for rows in (1, 3):
        x = torch.zeros(rows, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(mean_discrepancy(x, torch.zeros(rows, 2)), x)
        assert torch.isfinite(slope).all()


def test_no_gradient_flows_through_the_width() -> None:
    # Stretching both samples changes nothing if the width stretches with them; a width that stays sees it.
    x, y = pair()
    stretch = torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(mean_discrepancy(stretch * x, stretch * y), stretch)
    torch.testing.assert_close(mean_discrepancy(2 * x, 2 * y), mean_discrepancy(x, y))
    assert abs(slope.item()) > 1e-3
