"""What the servers of one-shot methods do with uploads: read them, weigh clients, average models."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Replies
from atoll.kernel.errors import name_in_messages
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.server.simplex import to_shares

Votes = Literal["samples", "sqrt", "uniform"]  # how much a client counts: by its samples, their square root, or alike
ClassVotes = Literal["samples", "sqrt", "uniform", "classes"]  # or, in each class, by its samples of that class
BatchNorm = Literal["pooled", "mean"]  # of models that are averaged: statistics of all their samples, or plain means
MEAN, VARIANCE = "running_mean", "running_var"  # what BatchNorm calls its statistics


def require_public(method: object, task: Facts) -> None:
    """Raise unless there are public samples: for methods that need them with some of their options only."""
    task.require_public(f"{name_in_messages(method)} with these options")


def uploads(replies: Replies, name: str) -> Stack:
    """Return a field of all replies, a row per client, in the order of their numbers: whoever was faster."""
    order = torch.from_numpy(np.argsort(replies.clients, kind="stable"))
    sent = replies.stack(name)
    return sent.map(lambda leaf: leaf[order.to(leaf.device)])


def count_labels(replies: Replies) -> Tensor:
    """Return how many samples of each class every client says it has, [client, class]; in the order of `uploads`.

    Whatever a client says, it is at least 0.
    """
    return uploads(replies, "labels").value.clamp(min=0)


def shares(counts: Tensor, votes: Votes) -> Tensor:
    """Return how much each client counts in a mean, [client], by its samples of all classes; all together 1."""
    samples = counts.sum(1)
    return to_shares({"samples": samples, "sqrt": samples.sqrt(), "uniform": torch.ones_like(samples)}[votes])


def class_shares(counts: Tensor, votes: ClassVotes) -> Tensor:
    """Return how much each client counts in each class, [client, class]; in each class all together 1."""
    return to_shares(counts) if votes == "classes" else shares(counts, votes)[:, None].expand_as(counts)


def average_models(models: Stack, share: Tensor, batchnorm: BatchNorm = "pooled") -> Params:
    """Return sum_k p_k w_k; of integers, such as counters, the largest.

    With `pooled` statistics of BatchNorm, a variance is that of all samples together: E[x^2] - E[x]^2.
    """
    mean = Params({name: _mean(leaf, share) for name, leaf in models.items()}, models.layout)
    if batchnorm == "mean":
        return mean
    pooled = dict(mean)
    for name in (name for name in models if name.endswith(VARIANCE)):
        center = name.removesuffix(VARIANCE) + MEAN
        pooled[name] = mean[name] + _mean((models[center] - mean[center]).square(), share)
    return Params(pooled, models.layout)


def _mean(leaf: Tensor, share: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        return leaf.amax(0)
    mean: Tensor = torch.tensordot(share.to(leaf.dtype), leaf, dims=1)
    return mean
