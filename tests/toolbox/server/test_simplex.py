"""Weights that sum to 1: projection and quadratic programmes, against closed forms and brute force."""

import pytest
import torch

from atoll.kernel.randomness import default_generator
from atoll.toolbox.server.simplex import minimise, nearest, to_shares


def numbers(*shape: int) -> torch.Tensor:
    with default_generator(0):
        return torch.randn(*shape, dtype=torch.float64)


def grid(steps: int) -> torch.Tensor:
    """All weights of three clients that are multiples of 1 / steps."""
    i, j = torch.meshgrid(torch.arange(steps + 1), torch.arange(steps + 1), indexing="ij")
    i, j = i[i + j <= steps], j[i + j <= steps]
    return torch.stack([i, j, steps - i - j], 1).double() / steps


def test_nearest_weights_of_some_points() -> None:
    points = torch.tensor([[0.2, 0.3, 0.5], [1.0, 1.0, 1.0], [5.0, 0.0, 0.0], [0.0, -9.0, 0.6]], dtype=torch.float64)
    expected = torch.tensor([[0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3], [1.0, 0.0, 0.0], [0.2, 0.0, 0.8]])
    torch.testing.assert_close(nearest(points), expected.double())


def test_no_weights_are_nearer() -> None:
    points = numbers(8, 3)
    found = nearest(points)
    torch.testing.assert_close(found.sum(1), torch.ones(8).double())
    assert found.min() >= 0
    everywhere = torch.cdist(points, grid(200)).amin(1)
    assert ((points - found).norm(dim=1) <= everywhere + 1e-12).all()


def test_a_diagonal_form_is_minimised_by_inverse_weights() -> None:
    v = torch.tensor([0.1, 0.4, 2.0, 1e-4], dtype=torch.float64)
    found = minimise(torch.diag(v), torch.zeros(1, 4).double())
    torch.testing.assert_close(found[0], (1 / v) / (1 / v).sum(), rtol=1e-5, atol=1e-7)


def test_inside_the_simplex_the_minimum_is_that_of_lagrange() -> None:
    # With sum a = 1 only: a = Q^-1 (b + mu 1), mu such that it sums to 1.
    root = numbers(4, 4)
    q = root @ root.T + torch.eye(4).double()
    a = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    found = minimise(q, (q @ a + 0.7)[None])  # b = Q a + a constant: a is the minimum
    torch.testing.assert_close(found[0], a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3])
def test_three_weights_against_brute_force(rank: int) -> None:
    root, b = numbers(3, rank), numbers(5, 3)
    q = root @ root.T

    def value(a: torch.Tensor) -> torch.Tensor:  # [row of b, weights]
        return (a @ q * a).sum(-1) - 2 * b @ a.T

    found = minimise(q, b)
    best = value(grid(400)).amin(1)
    assert (value(found).diagonal() <= best + 1e-9).all()
    torch.testing.assert_close(found.sum(1), torch.ones(5).double())
    assert (found == 0).any()  # the simplex matters


def test_nothing_to_minimise_is_an_equal_share_for_all() -> None:
    zero = torch.zeros(3, 3, dtype=torch.float64)
    torch.testing.assert_close(minimise(zero, zero), torch.full((3, 3), 1 / 3).double())


def test_an_ill_conditioned_form_is_solved() -> None:
    # Curvatures from 1 to 1e-4: without acceleration this would take more than ten times as many steps.
    v = torch.logspace(-4, 0, 7, dtype=torch.float64)
    found = minimise(torch.diag(v), torch.zeros(1, 7).double())
    torch.testing.assert_close(found[0], (1 / v) / (1 / v).sum(), rtol=0, atol=1e-6)


def test_votes_are_shared_out_and_where_nobody_votes_all_count_alike() -> None:
    votes = torch.tensor([[3.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert to_shares(votes).tolist() == [[0.75, 0.5], [0.25, 0.5]]
