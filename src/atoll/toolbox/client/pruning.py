"""Pruning: masks of 0 and 1 over the weights of layers; biases and norm layers are never pruned."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record

P = TypeVar("P", Params, Stack)


@record
class Decision:
    """Whether each client prunes."""

    ready: Each


def layer_weights(model: Params) -> Params:
    """Return the weights of layers: what has more than one axis."""
    return Params({name: leaf for name, leaf in model.trained.items() if leaf.ndim > 1}, model.layout)


def masked(w: P, mask: P) -> P:
    """Return w with 0 where its mask has 0."""
    return w | w.only(mask)._like({name: w[name] * kept for name, kept in mask.items()})


def prune_least(mask: Params, worth: Params, decision: Decision, *, share: float) -> Params:
    """Prune a share of what one client keeps of every layer, what is worth least first, if it is to."""
    pruned = {}
    for name, kept in mask.items():
        size = torch.where(kept > 0, worth[name], torch.inf).flatten()
        order = size.argsort(stable=True)
        stays = (torch.arange(len(size), device=size.device) >= (share * kept.sum()).floor()).to(kept)
        stays = torch.zeros_like(size).scatter(0, order, stays).reshape(kept.shape)
        pruned[name] = torch.where(decision.ready, kept * stays, kept)
    return Params(pruned, mask.layout)


def pruned_share(mask: Stack) -> Tensor:
    """Return the share of the weights that each client has pruned."""
    kept = torch.stack([leaf.flatten(1).sum(1) for leaf in mask.values()]).sum(0)
    return 1 - kept / sum(leaf[0].numel() for leaf in mask.values())
