"""One feature vector from those of several clients, and how much each of them has a say in it.

    size        F(x) = sum_k n_k f_k(x) / sum_j n_j
    uniform     F(x) = mean_k f_k(x)
    iffi        F(x) = sum_k s_k(x) f_k(x) / sum_j s_j(x),     s_k(x) = 1 - cos(f_k(x), f_k(noise))
    iffi_code   F(x) = mean_j s_j(x) * sum_k f_k(x)

A client is informative about x where x does not look like noise to it (FAFI's informativeness-aware fusion). The last
rule is what the released code computes: s is averaged before it could weigh anything, so its direction is that of
`uniform`. Features are as long as clients made them, so those with long ones dominate; unless they are normalised.

Features of different encoders need not mean the same. What does is an answer: `discernment` is how much each client has
a say about each class, where answers are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.errors import ModelError
from atoll.toolbox.server.simplex import to_shares

Fusion = Literal["size", "uniform", "iffi", "iffi_code"]
LEAST = 1e-6  # informativeness of what looks just like noise


def stack_features(features: Sequence[Tensor]) -> Tensor:
    """Stack the features of all clients in one tensor, [client, sample, d]."""
    sizes = sorted({one.shape[-1] for one in features})
    if len(sizes) > 1:
        raise ModelError(
            f"Features that are fused must be of one size for all clients. Got sizes {', '.join(map(str, sizes))}.",
            hint="give all clients networks with as many features.",
        )
    return torch.stack(list(features))


def informativeness(features: Tensor, noise: Tensor) -> Tensor:
    """Return s_k(x) of features [client, sample, d], where `noise` are each client's features of noise, [client, d].

    Noise may look different beside each sample: then [client, sample, d].
    """
    return (1 - F.cosine_similarity(features, noise if noise.ndim == 3 else noise[:, None], dim=-1)).clamp(min=LEAST)


def fuse(
    features: Tensor, rule: Fusion, *, shares: Tensor, noise: Tensor | None = None, normalise: bool = False
) -> Tensor:
    """Fuse features [client, sample, d] to one row per sample, [sample, d]; `shares` are n_k / n, [client]."""
    said = F.normalize(features, dim=-1) if normalise else features
    if rule == "size":
        return torch.einsum("k,ksd->sd", shares, said)
    if rule == "uniform":
        return said.mean(0)
    assert noise is not None, "informativeness is known against noise"
    s = informativeness(features, noise)
    if rule == "iffi_code":
        return s.mean(0)[:, None] * said.sum(0)
    return torch.einsum("ks,ksd->sd", s / s.sum(0), said)


def discernment(counts: Tensor) -> Tensor:
    """Return a_kc ~ sqrt(n_kc (n_k - n_kc) / n_k), of counts [client, class]; in each class all together 1.

    Who has samples of a class and of others can tell them apart; who has nothing else answers the same to everything.
    About a class that nobody can tell from others, all count alike.
    """
    samples = counts.sum(1, keepdim=True)
    return to_shares((counts * (samples - counts) / samples.clamp(min=1)).sqrt())
