"""Linear heads that the server trains on features, of which it has some or draws them."""

from __future__ import annotations

from functools import lru_cache, partial

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
    network = _network(len(center), task.classes, features.device, bench.network.dtype)
    x = ((features - center) / scale).to(bench.network.dtype)
    cohort = bench.cohort(x, classes, network=network, batch_size=rule.batch_size)
    start = network.initial.zeros()
    head = Head(start, zero_velocity(rule, start))
    end = cohort.scan(partial(_step, rule=rule), head, epochs=epochs, stream="head").w.client(0)
    weight, bias = end["head.weight"].double() / scale, end["head.bias"].double()
    return weight, bias - weight @ center.double()


@lru_cache(maxsize=8)
def _network(size: int, classes: int, device: torch.device, dtype: torch.dtype) -> Network:
    """Make a linear head; the same one in every round, so its step is traced once."""
    with default_generator(0):  # initial values do not matter: heads begin at 0
        return Network(Linear((size,), classes)).to(device, dtype)


def _step(head: Head, batch: Batch, given: None, *, rule: Training) -> Head:  # noqa: ARG001
    g, w, _ = batch.gradient(head.w)
    return Head(*descend(rule, w, g, head.velocity, rule.lr))
