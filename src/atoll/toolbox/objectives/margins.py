"""What every client can tell apart in its own features, on one scale for all: such answers can be added.

    m_kc(x) = w_kc . (z_k(x) - r_kc) / w_kc . (mu_kc - r_kc),        w_kc = S_k^-1 (mu_kc - r_kc)

z_k(x) are the features of client k, of unit length; mu_kc is their mean over its samples of class c, r_kc that over all
its other samples, and S_k their covariance within classes, shrunk to a multiple of I. So w_kc is Fisher's discriminant
of the class and the rest, and m_kc is 1 on average for samples of the class and 0 for all others, whoever is asked: of
clients whose features have nothing in common,

    l_c(x) = sum_k a_kc m_kc(x),        a_kc ~ sqrt(n_kc (n_k - n_kc) / n_k),        sum_k a_kc = 1.

Who lacks a class, or has no other, has no say about it. Of a client only sums of features and of their products are
needed.

Reference: Fisher. "The Use of Multiple Measurements in Taxonomic Problems." Annals of Eugenics 1936, for w.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.features import one_sample
from atoll.toolbox.server.frozen import moments
from atoll.toolbox.server.fusion import discernment
from atoll.toolbox.server.simplex import to_shares
from atoll.toolbox.server.triangles import shrink, symmetric

Voting = Literal["discernment", "classes", "uniform"]
SHRINKAGE = 0.25  # share of S that is its mean variance times I
SCALE = 16.0  # a margin of 1 as logits
BETWEEN = 0.5  # what is said about a class that somebody has and nobody can tell from others
NEVER = -100.0  # and about one that nobody has
NEAREST = 1e-6  # squared distance in standard deviations at which a class is somewhere else than the others


def unit_features(batch: Batch, w: Params) -> Tensor:
    """Return the directions of features, in float64: sums of many squares are to be exact."""
    return F.normalize(batch.features(w).double(), dim=1)


def own_moments(cohort: Cohort, w: Stack) -> Stack:
    """Return each client's `count`, `sum` and `square` under its own model, as `frozen.moments` does."""
    task = cohort.task
    return moments(cohort, w, unit_features, one_sample(task).features(task.network.initial).shape[1])


def margins(
    seen: Stack, shrinkage: float = SHRINKAGE, *, common: bool = True, voting: Voting = "discernment"
) -> Params:
    """Return `weight` [client, class, feature] and `bias` [class], so l_c = sum_k weight_kc . z_k + bias_c.

    Without the `common` scale, margins are not divided by w_kc . (mu_kc - r_kc): what the discriminants themselves say
    is added. `voting` is how much a client counts about each class that it can tell from others: by `discernment`, by
    its samples of the class, or as all others.
    """
    count, total = seen["count"], seen["sum"]
    samples = count.sum(1, keepdim=True)
    others = samples - count
    mean = total / count.clamp(min=1)[..., None]
    rest = (total.sum(1, keepdim=True) - total) / others.clamp(min=1)[..., None]
    between = torch.einsum("kc,kcd,kce->kde", count, mean, mean)
    s = shrink((symmetric(seen["square"]) - between) / samples.clamp(min=1)[..., None], shrinkage)
    apart = mean - rest
    w = torch.linalg.solve(s, apart.mT).mT
    length = (w * apart).sum(-1)
    tells = (count > 0) & (others > 0) & (length > NEAREST)
    shares = {"discernment": discernment, "classes": to_shares, "uniform": torch.ones_like}[voting](count)
    votes = torch.where(tells, shares, 0)
    votes = votes / votes.sum(0).clamp(min=torch.finfo(votes.dtype).tiny)
    weight = (votes / torch.where(tells & common, length, 1))[..., None] * w
    nobody = torch.where(count.sum(0) > 0, BETWEEN, NEVER).to(count)
    bias = torch.where(tells.any(0), -(weight * rest).sum((0, 2)), nobody)
    return Params.of(weight=weight, bias=bias)


def margin_logits(features: Tensor, margins: Params) -> Tensor:
    """Return l_c of every sample, [sample, class], from the features of all clients, [client, sample, d]."""
    z = F.normalize(features, dim=-1).to(margins["weight"])
    return (torch.einsum("ksd,kcd->sc", z, margins["weight"]) + margins["bias"]).to(features)
