"""Frozen features, and statistics of them: what heads are made of where clients train nothing.

    phi(x) = z(x; w)   or, with a `width`,   relu(R z(x; w)),        R drawn once from the seed, which everybody has

z is what enters the head of the network: of the initial one (random, or trained before by somebody), which everybody
has as well, or of one that the server trained on public samples and sends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import ModelError, name_in_messages
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import record
from atoll.toolbox.client.features import membership, one_sample
from atoll.toolbox.client.passes import many_at_once
from atoll.toolbox.client.private import cut_rows
from atoll.toolbox.server.triangles import triangle

MOMENT_POWERS = {"count": 0, "sum": 1, "square": 2}  # of the norm of a sample's features: how far it moves each leaf


@record
class Phi:
    """What makes features."""

    w: Params
    directions: Tensor | None = None  # R, with a `width`


def head_leaves(method: object, w: Params, shape: tuple[int, ...]) -> tuple[str, str]:
    """Return the names of weight and bias of a linear head of this shape, [class, feature]; raise if it is another."""
    head = w.part("head")
    weights = [name for name, leaf in head.items() if leaf.shape == shape]
    biases = [name for name, leaf in head.items() if leaf.shape == shape[:1]]
    if len(head) != 2 or not weights or not biases:
        raise ModelError(
            f"{name_in_messages(method)} must be given a network whose head is one linear layer with a bias, from "
            f"{shape[1]} features to {shape[0]} classes. Got {head}.",
            hint="with `width`, it makes a head of its own.",
        )
    return weights[0], biases[0]


def frozen_features(batch: Batch, phi: Phi) -> Tensor:
    """Return the features of a batch, in float64: sums of many squares are to be exact."""
    return expand(batch.features(phi.w).double(), phi)


def expand(z: Tensor, phi: Phi) -> Tensor:
    """Return random features of z, if they are asked for."""
    return z if phi.directions is None else torch.relu(z @ phi.directions)


def answer(model: Params, beside: Params, batch: Batch) -> Tensor:
    """Return what a head on random features answers."""
    features = frozen_features(batch, Phi(model, beside["directions"]))
    return (features @ beside["weight"].T + beside["bias"]).to(batch.network.dtype)


def moments(
    cohort: Cohort, phi: Any, features: Callable[[Batch, Any], Tensor] = frozen_features, size: int | None = None
) -> Stack:
    """Sum up each client's samples by class: `count` [class], `sum` of features [class, feature]; and `square`.

    The latter is sum phi phi^T over all samples; only its upper triangle, row after row. `features(batch, phi)` are
    taken of what is the same for all clients, or, if their `size` is told, of what is each client's own. Under
    sample-level privacy features are cut to its norm; `MOMENT_POWERS` says what one sample then moves.
    """
    task = cohort.task
    assert task.classes is not None, "the task has no classes"
    size = features(one_sample(task), phi).shape[1] if size is None else size

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(len(cohort), *shape, dtype=torch.float64, device=cohort.device)

    start = Stack.of(count=zeros(task.classes), sum=zeros(task.classes, size), square=zeros(size * (size + 1) // 2))
    sums: Stack = cohort.scan(
        partial(_add, features, cut_rows(cohort)), start, given=phi, batch_size=many_at_once(cohort), shuffle=False,
        train=False, exact=True,
    )  # fmt: skip
    return sums


def _add(
    features: Callable[[Batch, Any], Tensor], cut: Callable[[Tensor], Tensor], seen: Params, batch: Batch, phi: Any
) -> Params:
    z, same = cut(features(batch, phi)), membership(batch, len(seen["count"])).double()
    squares = (z * same.sum(1, keepdim=True)).T @ z  # padding is of no class
    return Params.of(
        count=seen["count"] + same.sum(0),
        sum=seen["sum"] + same.T @ z,
        square=seen["square"] + triangle(squares),
    )
