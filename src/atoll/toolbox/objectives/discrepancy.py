"""How far apart the features of two models are, as distributions over the same samples."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of Gaussian kernels, as multiples of the mean squared distance


def mean_discrepancy(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the squared maximum mean discrepancy between rows of x and of y; `mask` is 0 for rows not to count.

    The kernel is a sum of Gaussians around the mean squared distance, through which no gradient flows.
    """
    real = x.new_ones(len(x)) if mask is None else mask
    both, counts = torch.cat([x, y]), torch.cat([real, real])
    apart = (both[:, None] - both).square().sum(2)
    pairs = (counts[:, None] * counts).sum() - counts.sum()
    width = (apart.detach() * counts[:, None] * counts).sum() / pairs.clamp(min=1)
    width = width.clamp(min=torch.finfo(width.dtype).eps)
    kernel = torch.stack([torch.exp(-apart / (width * factor)) for factor in WIDTHS]).sum(0)
    sign = torch.cat([real, -real])
    return sign @ kernel @ sign / real.sum().clamp(min=1) ** 2
