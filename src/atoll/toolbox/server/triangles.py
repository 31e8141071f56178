"""Symmetric matrices by their upper triangle, row after row: half the numbers to send; and covariances, shrunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-12  # variance of what is all the same


def triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix [..., size, size]."""
    rows, columns = torch.triu_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., rows, columns]


def symmetric(upper: Tensor) -> Tensor:
    """Return the symmetric matrix of which this is the upper triangle."""
    size = (math.isqrt(8 * upper.shape[-1] + 1) - 1) // 2
    rows, columns = torch.triu_indices(size, size, device=upper.device)
    matrix = upper.new_zeros(*upper.shape[:-1], size, size)
    matrix[..., rows, columns] = upper
    matrix[..., columns, rows] = upper
    return matrix


def shrink(covariance: Tensor, share: float) -> Tensor:
    """Replace a share of a covariance [..., size, size] by its mean variance times I, so it can be inverted."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=TINY)[..., None, None]
    return (1 - share) * covariance + share * variance * torch.eye(covariance.shape[-1]).to(covariance)
