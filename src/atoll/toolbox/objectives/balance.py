"""Losses of clients that have few samples of some classes, and none of others.

    log_prior, balanced_softmax     cross-entropy of outputs + log(n_c + 1): what is frequent has to be earned
    class_mean                      a mean over classes of the means over their samples
    class_weights, resample         as if sample i were drawn with probability in proportion to n_{y_i}^-q

Which samples are in a batch is the engine's: each once per epoch. A sampler that prefers rare classes is therefore
given to the step in one of two ways. Weighted, `batch.mean(class_weights(counts, q)[batch.y] * losses)` has on average
the gradient that the sampler would have. Resampled, where what counts is which samples meet in a batch::

    batch = batch.rows(resample(batch.uniform("rows", len(batch.y)), class_weights(counts, q)[batch.y], batch.mask))

draws from the samples that the batch has, so a class of few samples is often repeated and sometimes missing; the
whole training set would have to lie in one batch for the sampler's frequencies to hold exactly.

`counts` are the client's training samples of each class, from `toolbox.client.labels.label_counts`, given to the scan.

Reference: Ren et al. "Balanced Meta-Softmax for Long-Tailed Visual Recognition." NeurIPS 2020.
https://arxiv.org/abs/2007.10740
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RESTRICTED = 0.5  # what is left of the outputs for classes that a client has no samples of


def log_prior(counts: Tensor) -> Tensor:
    """Return log(n_c + 1) of every class; 0 for those that are absent."""
    return counts.log1p()


def balanced_softmax(outputs: Tensor, y: Tensor, counts: Tensor, *, restricted: bool = False) -> Tensor:
    """Return every sample's cross-entropy of outputs + log prior; `restricted` halves outputs for absent classes."""
    if restricted:
        outputs = outputs * torch.where(counts > 0, 1, RESTRICTED)
    return F.cross_entropy(outputs + log_prior(counts), y, reduction="none")


def class_mean(per_sample: Tensor, y: Tensor, mask: Tensor | None, classes: int) -> Tensor:
    """Return the mean over the classes that are present of the mean over their samples; 0 if there are no samples."""
    member = (y[:, None] == torch.arange(classes, device=y.device)).to(per_sample.dtype)
    if mask is not None:
        member = member * mask[:, None]
    count = member.sum(0)
    means = per_sample @ member / count.clamp(min=1)
    return means.sum() / (count > 0).sum().clamp(min=1)


def class_weights(counts: Tensor, q: float) -> Tensor:
    """Return n_c^-q for every class, scaled to a mean of 1 over the client's samples; 0 for absent classes."""
    rarity = torch.where(counts > 0, counts.clamp(min=1) ** -q, 0)
    return rarity * counts.sum() / (rarity * counts).sum().clamp(min=torch.finfo(counts.dtype).tiny)


def resample(uniform: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Choose for every draw a place in the batch, in proportion to the weights; padding is never drawn."""
    likely = (weights if mask is None else weights * mask).cumsum(0)
    return torch.searchsorted(likely, (1 - uniform) * likely[-1])  # of (0, all]: never a place of weight 0
