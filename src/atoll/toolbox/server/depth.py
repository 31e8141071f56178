"""How deep a network may be shared: how alike clients are, block by block, and where that ends.

    label_similarity     1 - JS(h_k, h_j) / ln 2, of the shares h of classes
    feature_similarity   exp(-d^2 / width), d the Frechet distance between what one block says about their samples
    affinity             u_l(k): the mean over the other clients, which never grows with l
    wanted               1 - (1 - e) l / L, e how even a client's classes are: what it can say of itself alone
    pays                 where a mean over all clients errs less than one's own: its bias against its variance
    cka                  how alike what two networks say about the same samples is, whatever the coordinates
    depth                how many of the first blocks are good enough

Pure functions of tensors. Of K clients, L blocks and one block of width d: `mean` and `deviation` are those of what the
block says about each client's samples, [K, d].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.kernel.params import Stack
from atoll.toolbox.client.blocks import Blocks


def divergence(counts: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence between the class shares of any two clients, [K, K]: from 0 to ln 2."""
    shares = counts / counts.sum(1, keepdim=True)
    middle = (shares[:, None] + shares) / 2
    doubt = torch.special.entr(shares).sum(1)
    apart: Tensor = torch.special.entr(middle).sum(2) - (doubt[:, None] + doubt) / 2
    return apart.clamp(0, math.log(2))


def label_similarity(counts: Tensor) -> Tensor:
    """Return 1 for clients whose classes are as frequent, 0 for those that have none in common, [K, K]."""
    return 1 - divergence(counts) / math.log(2)


def feature_similarity(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return exp(-d^2 / width), d^2 = sum_c [(m_k - m_j)^2 + (sd_k - sd_j)^2] / v_c, v the mean variance, [K, K]."""
    limits = torch.finfo(mean.dtype)
    # What does not vary has no scale: then rounding errors of the mean must not look like distances.
    variance = deviation.square().mean(0) + limits.eps * mean.square().mean(0)
    scale = variance.clamp(min=limits.tiny).rsqrt()
    points = torch.cat([mean * scale, deviation * scale], 1)
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(-apart.square() / mean.shape[1])


def affinity(features: Sequence[Tensor], labels: Tensor, weight: float) -> Tensor:
    """Return u_l(k), [K, L]: the mean of (1 - v_l) S^l_kj + v_l S^y_kj over all others, made to fall with l.

    v_l = (1 - weight) l / L: the first blocks see shapes that all classes have, the head sees classes. A client that is
    alone has nobody to share with: 0.
    """
    deep = [(1 - weight) * (number + 1) / len(features) for number in range(len(features))]
    likeness = torch.stack([(1 - v) * one + v * labels for v, one in zip(deep, features, strict=True)], 2)
    others = 1 - torch.eye(len(labels), dtype=labels.dtype, device=labels.device)
    mean = (likeness * others[..., None]).sum(1) / max(1, len(labels) - 1)
    return mean.cummin(1).values


def evenness(counts: Tensor) -> Tensor:
    """Return the entropy of every client's shares of classes over ln C, [K]: 0 for one class, 1 for all alike."""
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    entropy: Tensor = torch.special.entr(shares).sum(1)
    return entropy / math.log(max(2, counts.shape[1]))


def wanted(even: Tensor, blocks: int) -> Tensor:
    """Return 1 - (1 - e_k) l / L of every client and block, [K, L]: falls with l unless classes are even."""
    return 1 - (1 - even)[:, None] * torch.arange(1, blocks + 1, dtype=even.dtype, device=even.device) / blocks


def likeness(blocks: Blocks, counts: Tensor, found: Stack, weight: float) -> Tensor:
    """Return u_l(k), [K, L], from counts of classes, and mean and deviation of what all blocks say in one row."""
    parts = [blocks.split_by_block(found[name].double()) for name in ("mean", "deviation")]
    each = [feature_similarity(mean, deviation) for mean, deviation in zip(*parts, strict=True)]
    return affinity(each, label_similarity(counts.double()), weight)


def pays(mean: Tensor, deviation: Tensor, samples: Tensor) -> Tensor:
    """Return whether the variance between clients is at most that of one's own mean: V (1 / n_k - 1 / n).

    `samples` are n_k, [K]; the answers are flags, [K]. Then the mean over all clients errs less than the own one.
    """
    shares = samples / samples.sum()
    between = (shares[:, None] * (mean - shares @ mean).square()).sum()
    within = deviation.square().mean(0).sum()
    return between <= within * (1 / samples - 1 / samples.sum())


def cka(said: Tensor) -> Tensor:
    """Return the linear centred kernel alignment of K networks' outputs, [K, samples, width], pair by pair, [K, K].

    1 for what is equal up to a rotation and a factor; 0 for a network that says the same about all samples.
    Kornblith, Norouzi, Lee, Hinton. "Similarity of Neural Network Representations Revisited." ICML 2019.
    """
    centred = said - said.mean(1, keepdim=True)
    products = (centred @ centred.mT).flatten(1)
    return torch.nn.functional.normalize(products, dim=1) @ torch.nn.functional.normalize(products, dim=1).T


def mean_of_pairs(likeness: Tensor) -> Tensor:
    """Return the mean over all pairs of different ones of a symmetric [K, K]; 1 where there is only one."""
    count = len(likeness)
    return (likeness.sum() - likeness.diagonal().sum()) / (count * (count - 1)) if count > 1 else likeness.new_ones(())


def depth(good: Tensor) -> Tensor:
    """Return how many of the first blocks are good, in each row of flags [..., L]."""
    return good.long().cumprod(-1).sum(-1)
