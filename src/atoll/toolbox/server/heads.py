"""Linear heads that the server trains on features, of which it has some or draws them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.engine import Workbench
from atoll.kernel.network import Network
from atoll.kernel.randomness import default_generator
from atoll.kernel.record import Each, record
from atoll.kernel.task import Training
from atoll.models.linear import Linear
from atoll.toolbox.client import descend, zero_velocity


@record
class Head:
    """A head on its way."""

    w: Each
    velocity: Each


def train_head(
    features: Tensor, classes: Tensor, bench: Workbench, rule: Training, *, epochs: int
) -> tuple[Tensor, Tensor]:
    """Train a linear head from 0; return weight [class, feature] and bias [class].

    Features are standardised before, whatever their scale.
    """
    center, scale = features.mean(0), features.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1)
    task = bench.task
    assert task.classes is not None
    with default_generator(0):  # its initial values do not matter: it begins at 0
        network = Network(Linear((len(center),), task.classes)).to(features.device, bench.network.dtype)
    x = ((features - center) / scale).to(bench.network.dtype)
    cohort = bench.cohort(x, classes, network=network, batch_size=rule.batch_size)
    start = network.initial.zeros()
    head = Head(start, zero_velocity(rule, start))
    end = cohort.scan(partial(_step, rule=rule), head, epochs=epochs, stream="head").w.client(0)
    weight, bias = end["head.weight"].double() / scale, end["head.bias"].double()
    return weight, bias - weight @ center


def _step(head: Head, batch: Batch, given: None, *, rule: Training) -> Head:  # noqa: ARG001
    g, w, _ = batch.gradient(head.w)
    return Head(*descend(rule, w, g, head.velocity, rule.lr))
