"""Symmetric matrices by their upper triangle, row after row: half the numbers to send; and covariances, shrunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-12  # variance of what is all the same
LEAST = 1e-9  # variance over the largest, where noise made one negative


def triangle(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix [..., size, size]."""
    size = matrix.shape[-1]
    rows, columns = torch.triu_indices(size, size, device=matrix.device)
    return matrix.flatten(-2).index_select(-1, rows * size + columns)  # a third of the time of `[..., rows, columns]`


def symmetric(upper: Tensor) -> Tensor:
    """Return the symmetric matrix of which this is the upper triangle."""
    size = (math.isqrt(8 * upper.shape[-1] + 1) - 1) // 2
    number = torch.arange(size, device=upper.device)
    row, column = torch.minimum(number[:, None], number), torch.maximum(number[:, None], number)
    place = row * size - row * (row + 1) // 2 + column  # before row i there are i * size - i * (i - 1) / 2
    return upper.index_select(-1, place.flatten()).reshape(*upper.shape[:-1], size, size)


def shrink(covariance: Tensor, share: float) -> Tensor:
    """Replace a share of a covariance [..., size, size] by its mean variance times I, so it can be inverted."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=TINY)
    mixed = (1 - share) * covariance
    mixed.diagonal(dim1=-2, dim2=-1).add_(share * variance[..., None])
    return mixed


def without_negative_variances(matrices: Tensor) -> Tensor:
    """Return symmetric matrices [..., size, size] that have a Cholesky factor: as they are, or the nearest such ones.

    Of true sums of products no variance is negative; noise, attackers and rules that look at numbers make them so.
    """
    failed = torch.linalg.cholesky_ex(matrices).info > 0
    if not failed.any():
        return matrices
    values, vectors = torch.linalg.eigh(matrices[failed])
    least = LEAST * values[..., -1:].clamp(min=TINY)
    repaired = vectors * torch.maximum(values, least)[..., None, :] @ vectors.mT
    return matrices.masked_scatter(failed[..., None, None], (repaired + repaired.mT) / 2)
