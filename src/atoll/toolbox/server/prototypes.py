"""Directions of classes that several clients found, and the one direction per class that a server makes of them.

    weights      how much client k counts for class c: by volume, reliability and confidence
    fuse         the direction of each class: the weighted mean, or the geometric median, which few clients cannot move
    shrink       the same, drawn to fixed anchors where there are few samples
    personal     a client's own directions, drawn to the shared ones where it has few samples
    agreement    how alike the clients' directions are: where they are not, features of clients must not be mixed

Pure functions of tensors. Of K clients and C classes with features of size d: `counts` are samples n_kc, [K, C]; `sums`
are the sums of unit features, [K, C, d]; `directions` are prototypes of any length, [K, C, d], of which only the
direction counts: a sum of features does as well as their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.kernel.errors import CohortError

PRIOR_SAMPLES = 20.0  # pseudo-samples of accuracy one half, in `reliability`
CAP = 0.9  # the quantile at which concentrations are cut: a handful of samples can look infinitely concentrated
TIGHTEST = 1 - 1e-6  # the largest length of a mean of unit features that is believed
MEDIAN_STEPS = 100


def unit(rows: Tensor) -> Tensor:
    """Scale rows to length 1; a row of zeros stays one."""
    return torch.nn.functional.normalize(rows, dim=-1)


# -- what a client is worth --------------------------------------------------------------------------------------------
def reliability(correct: Tensor, tested: Tensor) -> Tensor:
    """Return r_k: the mean of the accuracies within classes on held-out samples, drawn to 1/2 as by 20 more samples.

    `correct` of the `tested` samples of each class, [K, C]. Where nothing was held out, r_k = 1/2.
    """
    seen = tested > 0
    accuracy = (correct / tested.clamp(min=1)).sum(-1) / seen.sum(-1).clamp(min=1)
    samples = tested.sum(-1)
    return (samples * accuracy + PRIOR_SAMPLES / 2) / (samples + PRIOR_SAMPLES)


def concentration(length: Tensor, size: int) -> Tensor:
    """Return kappa of a von Mises-Fisher distribution whose samples' mean has this length R: R (d - R^2) / (1 - R^2).

    Banerjee, Dhillon, Ghosh, Sra. "Clustering on the Unit Hypersphere using von Mises-Fisher Distributions." JMLR 2005.
    """
    length = length.clamp(max=TIGHTEST)
    return length * (size - length**2) / (1 - length**2)


def confidence(sums: Tensor, counts: Tensor, *, least: int = 5) -> Tensor:
    """Return q_kc = kappa R, of unit features whose mean has length R: n q times the unit mean is most likely.

    Kappa is cut at its 90th percentile over the (k, c) with at least `least` samples; without samples it is 0.
    """
    length: Tensor = sums.norm(dim=-1) / counts.clamp(min=1)
    kappa = concentration(length, sums.shape[-1])
    owned = kappa[owners(counts, least)]
    if len(owned):
        kappa = torch.minimum(kappa, torch.quantile(owned, CAP))
    return kappa * length


def owners(counts: Tensor, least: int = 5) -> Tensor:
    """Return who has enough samples of a class to speak for it, [K, C]."""
    return counts >= max(least, 1)


def weights(
    counts: Tensor,
    reliability: Tensor | None = None,
    confidence: Tensor | None = None,
    *,
    powers: tuple[float, float, float] = (1.0, 1.0, 1.0),
    least: int = 5,
) -> Tensor:
    """Return omega_kc ~ n_kc^a r_k^b q_kc^g over clients with at least `least` samples of c; columns sum to 1 or 0.

    `powers` are a, b, g; what is None counts the same for everybody. Owners that all weigh 0 count the same.
    """
    a, b, g = powers
    mass = counts**a
    if reliability is not None:
        mass = mass * reliability[:, None] ** b
    if confidence is not None:
        mass = mass * confidence**g
    owned = owners(counts, least)
    mass = torch.where(owned, mass, 0)
    mass = torch.where(mass.sum(0) > 0, mass, owned.to(mass.dtype))
    return mass / mass.sum(0).clamp(min=torch.finfo(mass.dtype).tiny)


# -- one direction per class -------------------------------------------------------------------------------------------
def fuse(directions: Tensor, weights: Tensor, *, robust: bool = False) -> Tensor:
    """Fuse directions by class, [C, d]: unit(sum_k omega_kc unit(p_kc)), or the geometric median of the p_kc.

    A class that nobody owns is a row of zeros.
    """
    points = unit(directions)
    mean = unit(torch.einsum("kc,kcd->cd", weights, points))
    return median(points, weights, start=mean) if robust else mean


def median(points: Tensor, weights: Tensor, *, start: Tensor) -> Tensor:
    """Find the unit p_c that minimise sum_k omega_kc |p_c - p_kc|, by Weiszfeld's steps from `start`, on the sphere.

    A direction that more than half of the weight shares is the median, wherever the others point.
    """
    p = start
    tiny = torch.finfo(points.dtype).eps
    for _ in range(MEDIAN_STEPS):
        pull = weights / (p - points).norm(dim=-1).clamp(min=tiny)
        p = unit(torch.einsum("kc,kcd->cd", pull, points))
    return p


def shrink(shared: Tensor, anchors: Tensor, samples: Tensor, *, strength: float = 20.0) -> Tensor:
    """Return unit((1 - rho_c) p_c + rho_c a_c), rho_c = m / (m + n_c): anchors win where samples are few.

    `samples` are n_c, [C], and m is the `strength`. A class without a direction (a row of zeros) gets its anchor.
    """
    if anchors.shape != shared.shape:
        raise CohortError(
            f"Anchors must be a row of the features' size per class, {tuple(shared.shape)}. Got {tuple(anchors.shape)}."
        )
    rho = strength / (strength + samples).clamp(min=torch.finfo(shared.dtype).tiny)
    known = shared.norm(dim=-1) > 0
    rho = torch.where(known, rho, 1)[:, None]
    return unit((1 - rho) * shared + rho * unit(anchors))


def personal(own: Tensor, shared: Tensor, counts: Tensor, *, strength: float = 50.0) -> Tensor:
    """Return unit(eta p_kc + (1 - eta) p_c), eta = n_kc / (n_kc + m), of one client, [C, d], or several, [K, C, d]."""
    eta = (counts / (counts + strength).clamp(min=torch.finfo(counts.dtype).tiny))[..., None]
    return unit(eta * unit(own) + (1 - eta) * unit(shared))


def agreement(directions: Tensor, counts: Tensor, *, least: int = 5) -> Tensor:
    """Return the mean cosine between two owners' directions of one class, over all such pairs; 1 without any.

    Below about 0.3 the clients' features have no common coordinates: then fuse what they answer, and not features.
    """
    points = unit(directions) * owners(counts, least)[..., None]
    cosines = torch.einsum("kcd,jcd->ckj", points, points)
    there = points.norm(dim=-1).T
    pairs = there[:, :, None] * there[:, None, :]
    apart = 1 - torch.eye(len(points), dtype=points.dtype, device=points.device)
    count = (pairs * apart).sum()
    return torch.where(count > 0, (cosines * apart).sum() / count.clamp(min=1), 1)
