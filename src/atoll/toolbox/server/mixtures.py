"""Gaussian mixtures with diagonal covariances, one per class, of one client's rows: fitted by EM, and drawn from.

Each class c has `weight` [class, component], `mean` and `variance` [class, component, feature]. EM maximises

    sum_i log sum_j weight_cj N(row_i; mean_cj, variance_cj) - nu / 2 sum_cj (log variance_cj + s / variance_cj)

with c the class of row i and s the client's variance within classes: as if each component had nu more samples, which
vary as much as that. A class with few rows has few components, of which there is always one.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.params import Params, Stack

ROWS_PER_COMPONENT = 10  # a class gets another component for as many more rows
SMALLEST = 1e-9  # variance: constant features have none
NO_SHARE = 1e-30


def fit(rows: Tensor, same: Tensor, draws: Tensor, *, iterations: int, nu: float) -> Params:
    """Fit the mixtures of rows [n, feature], where same [n, class] is 1; `draws` [component, class] give the start."""
    count = same.sum(0)
    components = torch.arange(len(draws), device=rows.device)
    live = components < (count / ROWS_PER_COMPONENT).floor().clamp(min=1)[:, None]
    pooled = variance_within(rows, same)
    weight = live / live.sum(1, keepdim=True).to(rows.dtype)
    mean = choose_spread(rows, same, draws)
    mixture = Params.of(weight=weight, mean=mean, variance=pooled.clamp(min=SMALLEST).expand_as(mean))
    for _ in range(iterations):
        share = log_densities(mixture, live, rows).softmax(2) * same[..., None]
        mixture = maximise(rows, share, pooled, nu)
    return mixture


def log_densities(mixture: Params, live: Tensor, rows: Tensor) -> Tensor:
    """Return log (weight_cj N(row_i; mean_cj, variance_cj)), [row, class, component]; -inf for those not live."""
    mean, precision = mixture["mean"].flatten(0, 1), 1 / mixture["variance"].flatten(0, 1)
    apart = rows.square() @ precision.T - 2 * rows @ (mean * precision).T + (mean.square() * precision).sum(1)
    sizes = (precision / (2 * math.pi)).log().sum(1)
    weight = mixture["weight"].clamp(min=NO_SHARE).log().masked_fill(~live, -torch.inf)
    return (0.5 * (sizes - apart)).reshape(-1, *live.shape) + weight


def maximise(rows: Tensor, share: Tensor, pooled: Tensor, nu: float) -> Params:
    """Return the mixture that is most likely if rows belong to components by these shares, [row, class, component]."""
    mass = share.sum(0)
    mine, there = share.flatten(1), mass[..., None].clamp(min=NO_SHARE)
    mean = (mine.T @ rows).reshape(*mass.shape, -1) / there
    scatter = (mine.T @ rows.square()).reshape(*mass.shape, -1) - there * mean.square()
    variance = (scatter.clamp(min=0) + nu * pooled) / (there + nu)
    return Params.of(
        weight=mass / mass.sum(1, keepdim=True).clamp(min=NO_SHARE),
        mean=mean,
        variance=variance.clamp(min=SMALLEST),
    )


def variance_within(rows: Tensor, same: Tensor) -> Tensor:
    """Return the variance of every feature around the means of classes."""
    count = same.sum(0)
    mean = same.T @ rows / count.clamp(min=1)[:, None]
    return (same.sum(1, keepdim=True) * (rows - same @ mean).square()).sum(0) / count.sum().clamp(min=1)


def choose_spread(rows: Tensor, same: Tensor, draws: Tensor) -> Tensor:
    """Choose rows of each class to begin with, [class, component, feature]: far from those before (k-means++)."""
    chosen, likely, nearest = list[Tensor](), same, None
    for draw in draws:
        chances = likely.cumsum(0)
        center = rows[(chances <= draw * chances[-1]).sum(0).clamp(max=len(rows) - 1)]
        apart = (rows - same @ center).square().sum(1)
        nearest = apart if nearest is None else torch.minimum(nearest, apart)
        likely = same * nearest[:, None]
        chosen.append(center)
    return torch.stack(chosen, 1)


def draw_from(mixtures: Stack, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw as many rows, with their classes, as all clients' mixtures were made from: `count` [client, class].

    Counts, weights and variances that noise or an attacker made negative count as 0.
    """
    like = mixtures["mean"]
    mixtures = mixtures | mixtures.only(("count", "weight", "variance")).map(lambda leaf: leaf.clamp(min=0))
    counts = mixtures["count"].round().long()
    each = torch.arange(counts.numel(), device=like.device).repeat_interleave(counts.flatten())
    reached = mixtures["weight"].flatten(0, 1).cumsum(1)[each]
    level = torch.from_numpy(draw.random(len(each))).to(reached)
    component = (reached < level[:, None] * reached[:, -1:]).sum(1)
    noise = torch.from_numpy(draw.normal(size=(len(each), like.shape[-1]))).to(like)
    mean, deviation = (mixtures[name].flatten(0, 1)[each, component] for name in ("mean", "variance"))
    return mean + deviation.sqrt() * noise, each % counts.shape[1]
