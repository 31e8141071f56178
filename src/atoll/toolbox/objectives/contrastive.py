"""One supervised contrastive loss for all that a client may contrast its samples with.

For an anchor i of a batch, with s the cosine and t the temperature,

    L_i = - 1/|Pos(i)| sum_{p in Pos(i)} [s_ip / t - log D_i],
    D_i = sum_{a in batch, a != i} exp(s_ia / t)  +  sum_{sets} scale_i sum_{j in set} w_ij exp(s_ij / t).

Pos(i) are all others of the anchor's label: views of the same sample, other samples, and those of extra sets that say
`same="positives"`, where a positive of weight w counts w times. Padding is neither anchor nor contrast. ::

    both = batch.views(2)
    losses = supervised_contrast(both.features(w), both.y, both.mask, temperature=0.07)       # FAFI's: one per anchor
    loss = both.mean(losses)                       # an anchor without positives has loss 0, and counts, as published

    extra = [queue_set(queue), ContrastSet(bank, same="negatives")]    # see `negatives` for what there is
    losses = supervised_contrast(z, y, mask, extra=extra, hardness=1.0)
    losses = supervised_contrast(z, y, mask, extra=[prototypes_of(p)], classes=10)    # balanced, completed by class
    loss = class_mean(losses, y, mask, 10)                                            # `balance`

Features of any length may be given, anchors and extra ones: cosines are taken here. Gradients flow into all of them;
detach what shall stay. All of it is plain tensor arithmetic that runs under `vmap`, in time and memory of one matrix
[anchors, anchors + extra items].

Reference: Khosla et al. "Supervised Contrastive Learning." NeurIPS 2020. https://arxiv.org/abs/2004.11362
Hardness: Robinson, Chuang, Sra, Jegelka. "Contrastive Learning with Hard Negative Samples." ICLR 2021.
https://arxiv.org/abs/2010.04592
Balance: Zhu, Wang, Chen, Chen, Jiang. "Balanced Contrastive Learning for Long-Tailed Visual Recognition." CVPR 2022.
https://arxiv.org/abs/2207.09052
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.params import Scalar

SameLabel = Literal["ignored", "positives", "negatives"]
UNLABELLED = -1


@dataclass(frozen=True)
class ContrastSet:
    """Items beyond the batch that its anchors are contrasted with; those of weight 0 might as well not be there."""

    features: Tensor  # [items, d], or [anchors, items, d] where each anchor has its own
    labels: Tensor | None = None  # [items]; None, or -1 for single ones: not known, so of no anchor's label
    weight: Tensor | float = 1.0  # how often an item counts: one number, [items], or [anchors, items]
    same: SameLabel = "ignored"  # what items of the anchor's own label are; "negatives" is to be blind to labels
    mass: float | None = None  # if given, the set weighs as much as so many batches, however many items it has

    def labels_like(self, y: Tensor) -> Tensor:
        """Return the labels, -1 where they are not known, in the type of y."""
        unknown = torch.full_like(y[:1], UNLABELLED).expand(self.features.shape[-2])
        return unknown if self.labels is None else self.labels

    def weight_like(self, s: Tensor) -> Tensor:
        """Return the weights, in the type and shape of the cosines s, [anchors, items]."""
        if isinstance(self.weight, Tensor):
            return self.weight.to(s.dtype).expand(s.shape)
        return torch.full_like(s, self.weight)  # made where s is: a copy from the host would break a CUDA graph


def prototypes_of(prototypes: Tensor) -> ContrastSet:
    """Return one item per class, positive for the anchors of that class: no class of a balanced contrast is missing."""
    return ContrastSet(prototypes, torch.arange(len(prototypes), device=prototypes.device), same="positives")


def supervised_contrast(
    z: Tensor,
    y: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: Scalar = 0.07,
    extra: Sequence[ContrastSet] = (),
    hardness: float = 0.0,
    classes: int | None = None,
    count_anchor: bool = False,
) -> Tensor:
    """Return the loss of every anchor, [samples]; it is 0 for padding and for anchors without positives.

    A set with a `mass` has scale_i = mass * (number of the batch's items in D_i) / (number of its own): of all items,
    not of negatives alone, because batches of a client with one class have none, and it needs the set most.
    `hardness` b > 0 multiplies the weights of negatives by exp(b s), normalised so that their sum stays.
    With `classes`, the loss is balanced: the items of every class in D_i are averaged, not added up, and so are those
    without label, as if they were one class more; the anchor itself is no item of its class unless `count_anchor`.
    """
    z = F.normalize(z, dim=1)
    real = torch.ones_like(z[:, 0]) if mask is None else mask.to(z.dtype)
    others = real * (1 - torch.eye(len(z), dtype=z.dtype, device=z.device))
    columns = [_Columns(z @ z.T, y, others, others * (y[:, None] == y))]
    columns += [_columns(z, y, one, others.sum(1, keepdim=True)) for one in extra]
    s, weight, positive = (
        torch.cat([getattr(one, name) for one in columns], 1) for name in ("s", "weight", "positive")
    )
    if classes is not None:
        labels = torch.cat([one.labels for one in columns])
        weight = weight / _class_mass(weight, labels, classes, y if count_anchor else None)
    if hardness:
        weight = torch.where(positive > 0, weight, weigh_by_hardness(weight * (positive == 0), s, hardness))
    return real * weighted_contrast(s / temperature, weight, positive)


def weighted_contrast(logits: Tensor, weight: Tensor, positive: Tensor) -> Tensor:
    """Return -sum_p positive_p [logits_p - log sum_a weight_a exp(logits_a)] / sum_p positive_p, row by row.

    An item may be positive only where its weight is not 0; a row without positives gives 0.
    """
    there = weight > 0
    top = torch.where(there, logits, -torch.inf).amax(1, keepdim=True).detach()
    shifted = torch.where(there, logits - top, 0)  # so that what does not count can neither overflow nor be the top
    total = (weight * shifted.exp()).sum(1, keepdim=True)
    apart = torch.where(total > 0, total, 1).log() - shifted
    count = positive.sum(1)
    return (positive * apart).sum(1) / torch.where(count > 0, count, 1)


def weigh_by_hardness(weight: Tensor, s: Tensor, hardness: float) -> Tensor:
    """Multiply the weights by exp(hardness * s), each row with the sum it had; no gradient flows through them."""
    tilted = weight * (hardness * s.detach()).exp()
    total = tilted.sum(1, keepdim=True)
    return tilted * weight.sum(1, keepdim=True) / torch.where(total > 0, total, 1)


def between_prototypes(prototypes: Tensor, temperature: Scalar = 1.0) -> Tensor:
    """Return -log softmax_c'(<p_c, p_c'> / t) at c, for every class: small where prototypes are long or far apart."""
    return -(prototypes @ prototypes.T / temperature).log_softmax(1).diagonal()


@dataclass(frozen=True)
class _Columns:
    """What one set of items is to all anchors: cosines, weights in D, and how much each is a positive."""

    s: Tensor
    labels: Tensor
    weight: Tensor
    positive: Tensor


def _columns(z: Tensor, y: Tensor, items: ContrastSet, in_batch: Tensor) -> _Columns:
    features = F.normalize(items.features, dim=-1)
    s = z @ features.T if features.ndim == 2 else (features @ z[:, :, None]).squeeze(2)
    labels = items.labels_like(y)
    same = labels == y[:, None]
    weight = items.weight_like(s)
    if items.same == "ignored":
        weight = weight * ~same
    positive = weight * same if items.same == "positives" else torch.zeros_like(weight)
    if items.mass is not None:
        weight = weight * items.mass * in_batch / (weight > 0).sum(1, keepdim=True).clamp(min=1)
    return _Columns(s, labels, weight, positive * (weight > 0))


def _class_mass(weight: Tensor, labels: Tensor, classes: int, anchors: Tensor | None) -> Tensor:
    """Return what all items of an item's class weigh, [anchors, items]; those without label are one class more."""
    every = torch.arange(classes + 1, device=labels.device)
    member = (torch.where(labels == UNLABELLED, classes, labels)[:, None] == every).to(weight.dtype)
    mass = weight @ member
    if anchors is not None:
        mass = mass + (anchors[:, None] == every).to(weight.dtype)
    of_item = mass @ member.T
    return torch.where(of_item > 0, of_item, 1)
