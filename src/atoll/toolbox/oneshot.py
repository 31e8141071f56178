"""What one-shot methods have in common: clients train alone, upload once, and the server makes the best of that.

    w_k = the broadcast model after `epochs` local epochs of cross-entropy;   once up: w_k and the label counts n_k

Until somebody replied, the server's state is {"model": w}: the initial model, which is sent and which everybody would
deploy. Afterwards `models` and `labels` are beside it, a row per client that replied; or `model` is what a method made
of them. Because training is the same plain `sgd` for all, methods that differ only on the server share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Predictor, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import name_in_messages
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.labels import label_counts, require_classes
from atoll.toolbox.server.simplex import to_shares

Server = dict[str, Any]
Votes = Literal["samples", "sqrt", "uniform"]  # how much a client counts: by its samples, their square root, or alike
ClassVotes = Literal["samples", "sqrt", "uniform", "classes"]  # or, in each class, by its samples of that class
BatchNorm = Literal["pooled", "mean"]  # of models that are averaged: statistics of all their samples, or plain means
MEAN, VARIANCE = "running_mean", "running_var"  # what BatchNorm calls its statistics


@dataclass(frozen=True, kw_only=True)
class OneShot(Algorithm):
    """Base of one-shot methods: a subclass says how uploads `combine`, or makes one model in `aggregate`."""

    epochs: Epochs = 10  # E: local epochs

    one_shot: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = False
    sends: ClassVar[dict[str, str]] = {"model": "model", "labels": "statistic"}

    def start(self, task: Facts) -> Server:
        """Return the initial model, of a task with classes."""
        require_classes(self, task)
        return {"model": task.network.initial}

    def broadcast(self, server: Server) -> Params:
        """Return the model that all clients begin with."""
        model: Params = server["model"]
        return model

    def local(self, w: Params, cohort: Cohort) -> Update:
        """Train alone; send the model, and how many samples of each class it saw."""
        return Update(send={"model": self.train(w, cohort), "labels": label_counts(cohort)})

    def train(self, w: Params, cohort: Cohort) -> Stack:
        """Train alone; return each client's model."""
        return sgd(cohort, start=w, epochs=self.epochs)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Hold the uploads beside the model."""
        return {**server, "models": uploads(replies, "model"), "labels": uploads(replies, "labels")}

    def combine(self, server: Server) -> Params | Predictor:
        """Return what the uploads answer together."""
        raise NotImplementedError(f"{type(self).__name__} must define combine(), or aggregate() to one model.")

    def shared(self, server: Server) -> Params | Predictor:
        """Return what everybody deploys, new clients as well: the initial model if nobody replied."""
        model: Params = server["model"]
        return self.combine(server) if "models" in server else model


def require_public(method: object, task: Facts) -> None:
    """Raise unless there are public samples: for methods that need them with some of their options only."""
    task.require_public(f"{name_in_messages(method)} with these options")


def uploads(replies: Replies, name: str) -> Stack:
    """Return a field of all replies, a row per client, in the order of their numbers: whoever was faster."""
    order = torch.from_numpy(np.argsort(replies.clients, kind="stable"))
    sent = replies.stack(name)
    return sent.map(lambda leaf: leaf[order.to(leaf.device)])


def shares(labels: Stack, votes: Votes) -> Tensor:
    """Return how much each client counts in a mean, [client]; all together 1."""
    samples = labels["counts"].sum(1)
    return to_shares({"samples": samples, "sqrt": samples.sqrt(), "uniform": torch.ones_like(samples)}[votes])


def class_shares(labels: Stack, votes: ClassVotes) -> Tensor:
    """Return how much each client counts in each class, [client, class]; in each class all together 1."""
    counts = labels["counts"]
    return to_shares(counts) if votes == "classes" else shares(labels, votes)[:, None].expand_as(counts)


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
