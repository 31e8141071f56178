"""Networks that can say "unknown": one more output beside those of the classes, and what it learns from.

    o(x) = (z_1(x), ..., z_C(x), a . f(x) + b)

f(x) is what enters the head; a and b are `unknown.weight` and `unknown.bias`, one more row of a linear head. They begin
at 0, so nobody need be sent them.

Reference: Diao, Li, He. "Towards Addressing Label Skews in One-Shot Federated Learning." ICLR 2023; Zhou, Ye, Zhan.
"Learning Placeholders for Open-Set Recognition." CVPR 2021, for `placeholder_losses`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.params import Layout, Params, Stack
from atoll.toolbox.client.features import features_and_outputs

WEIGHT, BIAS = "unknown.weight", "unknown.bias"


def with_unknown(w: Params, size: int) -> Params:
    """Return a model with the output for unknown samples, which is 0 for all of `size` features."""
    like, layout = next(iter(w.floating.values())), w.layout
    assert layout is not None, "this is no model"
    kinds = {**layout.kinds, WEIGHT: "trained", BIAS: "trained"}
    longer = Layout(kinds, layout.head | {WEIGHT, BIAS}, layout.norm, layout.batchnorm, (*layout.layers, "unknown"))
    return Params({**w, WEIGHT: like.new_zeros(size), BIAS: like.new_zeros(())}, longer)


def split_unknown(w: Stack, layout: Layout) -> tuple[Stack, Stack]:
    """Return the models by themselves, of this layout, and the `weight` and `bias` of their unknown."""
    models = Stack({name: leaf for name, leaf in w.items() if name in layout.kinds}, layout)
    return models, Stack.of(weight=w[WEIGHT], bias=w[BIAS])


def open_logits(batch: Batch, w: Params) -> tuple[Tensor, Params]:
    """Return what a model with its unknown answers, [sample, class + 1], and w with the buffers of the pass."""
    features, outputs, after = features_and_outputs(batch, w.without((WEIGHT, BIAS)))
    return join_unknown(features, outputs, w[WEIGHT], w[BIAS]), w | after.buffers


def join_unknown(features: Tensor, outputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the outputs of all classes with the one for unknown samples behind them."""
    return torch.cat([outputs, (features @ weight + bias)[:, None]], 1)


def disguise(batch: Batch, w: Params, steps: int, size: float) -> Batch:
    """Move unknown samples to where w is less sure that they are unknown: x + size sign(grad CE), some steps long."""
    for _ in range(steps):
        g, _ = batch.differentiate(partial(_loss_at, batch, w), Params.of(x=batch.x))
        batch = replace(batch, x=batch.x + size * g["x"].sign())
    return batch


def _loss_at(batch: Batch, w: Params, at: Params) -> tuple[Tensor, tuple[()]]:
    logits, _ = open_logits(replace(batch, x=at["x"]), w)
    return batch.total(F.cross_entropy(logits, batch.y, reduction="none")), ()


def placeholder_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return how far "unknown" is from being a sample's second answer: its cross-entropy without the sample's class."""
    own = y[:, None] == torch.arange(logits.shape[1], device=y.device)
    others = logits.masked_fill(own, -torch.inf)
    return others.logsumexp(1) - logits[:, -1]


def open_votes(logits: Tensor, heard: int = 0) -> Tensor:
    """Return log sum_k p_kc(x), normalised over classes, from [client, sample, class + 1]; p_k has the unknown in it.

    With `heard`, the sum is over so many clients whose unknown is least likely.
    """
    votes = logits.log_softmax(2)
    if 0 < heard < len(votes):
        least = votes[..., -1].topk(heard, dim=0, largest=False).indices
        votes = votes.gather(0, least[..., None].expand(-1, -1, votes.shape[2]))
    return votes[..., :-1].logsumexp(0).log_softmax(1)
