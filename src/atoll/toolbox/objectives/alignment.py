"""How far a client's features are from a reference that all clients were sent before training.

    mmd(x, r, a, b)                    squared maximum mean discrepancy, unbiased, a sum of Gaussian kernels
    coral(moments(x, a), (mu, S))      distance of means and covariances; the reference may be moments alone
    sliced_distance(x, r, rows, a, b)  squared sliced Wasserstein distance
    off_direction(z, anchors[y])       1 - cosine to the anchor of the sample's class: lengths stay free

x [n, d] are features of the client, r [m, d] of the reference, and `a`, `b` how much their rows count: None for all the
same, a mask for padding, or any weights. A client whose classes differ from those of the reference must not be drawn
to all of it. Either the reference is weighted as the client's own classes are::

    mmd(z, r, batch.mask, weigh_as_client(labels, counts))

or class by class, over the classes in the batch, for any of the distances, moments included::

    by_class(mmd, z, r, membership(batch, classes), membership_of_reference)
    by_class(lambda x, r, a, b: coral(moments(x, a), moments(r, b)), ...)
    by_class(lambda x, r, a, b: sliced_distance(x, r, batch.normal("slices", 64, d), a, b), ...)

`direction_loss` is the anchor loss, `fading_share` its weight over all of local training. All of it runs under `vmap`.

Reference: Gretton et al. "A Kernel Two-Sample Test." JMLR 2012 (MMD). Sun, Saenko. "Deep CORAL." ECCV 2016 workshops.
Bonneel, Rabin, Peyré, Pfister. "Sliced and Radon Wasserstein Barycenters of Measures." JMIV 2015.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.toolbox.client.features import squared_distances
from atoll.toolbox.objectives.discrepancy import WIDTHS

Moments = tuple[Tensor, Tensor]  # mean [d] and covariance [d, d]
Distance = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of two samples, with the weights of their rows


# -- distances of distributions --------------------------------------------------------------------------------------
def mmd(x: Tensor, r: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """Return the unbiased squared maximum mean discrepancy; it can be negative, and needs two rows on both sides.

    The kernel is a sum of Gaussians exp(-|u - v|^2 / w) with w = median * {1/4, ..., 4}, the median of the squared
    distances between all rows that count, through which no gradient flows.
    """
    both = torch.cat([x, r])
    weight = torch.cat([_normalise(x, a), _normalise(r, b)])
    apart = squared_distances(both, both)
    pairs = (weight[:, None] * weight) * (1 - torch.eye(len(both), dtype=x.dtype, device=x.device))
    width = _median(apart.detach(), pairs > 0).clamp(min=torch.finfo(x.dtype).tiny)
    kernel = torch.stack([torch.exp(-apart / (width * factor)) for factor in WIDTHS]).sum(0)
    similar, n = pairs * kernel, len(x)
    mine = similar[:n, :n].sum() / _positive(pairs[:n, :n].sum())
    theirs = similar[n:, n:].sum() / _positive(pairs[n:, n:].sum())
    return mine + theirs - 2 * similar[:n, n:].sum()  # the weights of either side add up to 1


def moments(x: Tensor, a: Tensor | None = None) -> Moments:
    """Return the mean and unbiased covariance of rows."""
    share = _normalise(x, a)
    mean = share @ x
    away = x - mean
    return mean, away.T @ (share[:, None] * away) / _positive(1 - share.square().sum())


def coral(own: Moments, reference: Moments) -> Tensor:
    """Return |S - S_r|_F^2 / (4 d^2) + |mu - mu_r|^2 / d."""
    (mean, covariance), (wanted, spread) = own, reference
    return (covariance - spread).square().mean() / 4 + (mean - wanted).square().mean()


def sliced_distance(
    x: Tensor, r: Tensor, directions: Tensor, a: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    """Return the mean over directions [L, d], of any length, of the squared Wasserstein distance of the projections.

    On a line it is the integral of (Q(t) - Q_r(t))^2 over t from 0 to 1, where Q are the quantile functions: steps, so
    that the integral is a sum; for as many rows on both sides, the mean squared difference of the sorted projections.
    """
    along = F.normalize(directions, dim=1)
    (mine, reached), (theirs, reached_there) = (
        _sort(along @ x.T, _normalise(x, a)),
        _sort(along @ r.T, _normalise(r, b)),
    )
    ends = torch.cat([reached, reached_there], 1).sort(1).values
    lengths = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    middles = ends - lengths / 2
    apart = _quantiles(mine, reached, middles) - _quantiles(theirs, reached_there, middles)
    return (lengths * apart.square()).sum(1).mean()


# -- label skew ------------------------------------------------------------------------------------------------------
def weigh_as_client(labels: Tensor, counts: Tensor) -> Tensor:
    """Weigh a reference's rows, so its classes have the shares that they have for a client with these counts."""
    member = (labels[:, None] == torch.arange(len(counts), device=labels.device)).to(counts.dtype)
    return member @ (counts / member.sum(0).clamp(min=1)) / _positive(counts.sum())


def by_class(distance: Distance, x: Tensor, r: Tensor, own: Tensor, theirs: Tensor) -> Tensor:
    """Return the mean distance over the classes that both have two rows of; 0 if there are none.

    `own` [n, C] and `theirs` [m, C] are 1 where a row is of a class.
    """
    each = torch.stack([distance(x, r, one, other) for one, other in zip(own.T, theirs.T, strict=True)])
    here = ((own > 0).sum(0) > 1) & ((theirs > 0).sum(0) > 1)
    return torch.where(here, each, 0).sum() / here.sum().clamp(min=1)


# -- anchors ---------------------------------------------------------------------------------------------------------
def off_direction(rows: Tensor, wanted: Tensor) -> Tensor:
    """Return 1 - cosine of each row with the one it should point along; half their squared distance as unit vectors."""
    return 1 - (F.normalize(rows, dim=1) * F.normalize(wanted, dim=1)).sum(1)


def direction_loss(
    z: Tensor, y: Tensor, mask: Tensor | None, prototypes: Tensor, anchors: Tensor, counts: Tensor
) -> Tensor:
    """Return the mean 1 - cos(p_c, a_c) over the client's classes plus the mean 1 - cos(z_i, a_{y_i}) over samples."""
    own, real = (counts > 0).to(z.dtype), torch.ones_like(z[:, 0]) if mask is None else mask
    of_classes = (own * off_direction(prototypes, anchors)).sum() / own.sum().clamp(min=1)
    return of_classes + (real * off_direction(z, anchors[y])).sum() / real.sum().clamp(min=1)


def fading_share(steps: Tensor, total: Tensor | int, shape: Literal["linear", "cosine"] = "linear") -> Tensor:
    """Return the share of a weight that is left after so many of `total` local steps: from 1 to 0."""
    done = steps / total
    return 1 - done if shape == "linear" else 0.5 * (1 + torch.cos(math.pi * done))


# -- helpers ---------------------------------------------------------------------------------------------------------
def _normalise(rows: Tensor, weight: Tensor | None) -> Tensor:
    """Scale the weights of rows to sum to 1."""
    weight = torch.ones_like(rows[:, 0]) if weight is None else weight.to(rows.dtype)
    return weight / _positive(weight.sum())


def _positive(value: Tensor) -> Tensor:
    """Return a divisor in place of one that may be 0 where nothing counts."""
    return torch.where(value > 0, value, 1)


def _median(values: Tensor, counted: Tensor) -> Tensor:
    """Return the (lower) median of the values that are counted; 0 if there are none."""
    ordered = torch.where(counted, values, torch.inf).flatten().sort().values
    middle = ordered.gather(0, ((counted.sum() - 1) // 2).clamp(min=0)[None])[0]
    return torch.where(counted.any(), middle, 0)


def _sort(projected: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Sort every row of projections; return it with the share of all that lies up to each of them."""
    values, order = projected.sort(1)
    reached = share[order].cumsum(1)
    return values, reached / _positive(reached[:, -1:])  # so that both sides end at exactly 1


def _quantiles(values: Tensor, reached: Tensor, levels: Tensor) -> Tensor:
    """Return the quantiles at these levels."""
    return values.gather(1, torch.searchsorted(reached, levels).clamp(max=values.shape[1] - 1))
