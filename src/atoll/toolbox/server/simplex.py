"""Weights that are not negative and sum to 1: shares of votes, the nearest ones, and those of least quadratic cost."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-12  # how far from the minimum, as a share of the largest curvature
MOST_STEPS = 5_000


def to_shares(votes: Tensor) -> Tensor:
    """Turn votes, [voter, ...], into shares of all voters; where nobody has one, all count alike."""
    votes = torch.where(votes.sum(0) > 0, votes, 1.0)
    return votes / votes.sum(0)


def nearest(points: Tensor) -> Tensor:
    """Find the weights nearest to each row: all of its numbers lowered alike, and cut at 0, so they sum to 1."""
    falling = points.sort(dim=-1, descending=True).values
    surplus = falling.cumsum(-1) - 1
    counts = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    positive = (falling * counts > surplus).sum(-1, keepdim=True)  # how many weights are not cut; the first never is
    return (points - surplus.gather(-1, positive - 1) / positive).clamp(min=0)


def minimise(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Find, for each row b of `linear`, the weights a that minimise a^T Q a - 2 b^T a; Q has no negative eigenvalue.

    Accelerated projected gradient steps, whose momentum starts anew where it leads uphill. They end when the gap
    slope . (a - best vertex), which bounds the distance from the minimum, is closed.
    """
    largest = torch.linalg.eigvalsh(quadratic)[-1].clamp(min=torch.finfo(quadratic.dtype).tiny)
    a = ahead = torch.full_like(linear, 1 / linear.shape[-1])
    pace = linear.new_ones(len(linear), 1)
    for _ in range(MOST_STEPS):
        slope = a @ quadratic - linear
        if ((a * slope).sum(1) - slope.amin(1)).max() <= TOLERANCE * largest:
            break
        before, a = a, nearest(ahead - (ahead @ quadratic - linear) / largest)
        uphill = ((ahead - a) * (a - before)).sum(1, keepdim=True) > 0
        pace, last = torch.where(uphill, 1, (1 + (1 + 4 * pace**2).sqrt()) / 2), pace
        ahead = torch.where(uphill, a, a + (last - 1) / pace * (a - before))
    return a
