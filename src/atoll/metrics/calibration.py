"""The expected calibration error, ECE: a model that is 80 % sure should be right in 80 % of the cases.

It needs no more than three sums per bin of confidence. `bins` gives those of a batch, where the batch is; they add up
over batches, and `ece` reads the total.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

BINS = 15


def bins(confidence: Tensor, right: Tensor, number: int = BINS, weight: Tensor | None = None) -> Tensor:
    """Sum per bin, as [3, number]: samples, their confidence, how many are right.

    One value per sample each; a `weight` of 0 leaves a sample out. Bin i holds confidences in (i/number, (i+1)/number].
    """
    edges = torch.arange(1, number, dtype=confidence.dtype, device=confidence.device) / number
    # Counting the edges below puts 0 into the first bin, and a softmax of 1.0000001 into the last.
    index = (confidence[:, None] > edges).sum(1)
    inside = (index[:, None] == torch.arange(number, device=confidence.device)).to(confidence.dtype)
    if weight is not None:
        inside = inside * weight[:, None]
    summed = torch.stack([torch.ones_like(confidence), confidence, right.to(confidence.dtype)])
    # Not a matrix product, which the GPU would round to TF32.
    return (summed[:, :, None] * inside).sum(1)


def ece(counts: ArrayLike, confidence: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Return the expected calibration error from sums per bin on the last axis, one for each entry of the other axes.

        sum_b n_b / n |right_b / n_b - confidence_b / n_b| = sum_b |right_b - confidence_b| / n

    NaN without samples.
    """
    gaps = np.abs(np.asarray(right, dtype=np.float64) - np.asarray(confidence, dtype=np.float64)).sum(-1)
    total = np.asarray(counts, dtype=np.float64).sum(-1)
    return np.asarray(gaps / np.where(total > 0, total, np.nan))
