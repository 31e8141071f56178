"""Local training by Adam, whose moments may come from elsewhere and be handed on."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.toolbox.client.descent import MeanLoss
from atoll.toolbox.server.adam import Past, adam


@record
class Carry:
    """A model on its way, and what Adam remembers of it."""

    w: Each
    past: Past
    loss: MeanLoss


def train_by_adam(
    cohort: Cohort, start: Params | Stack, past: Past, *, epochs: int, lr: float, stream: str = "main"
) -> tuple[Stack, Past]:
    """Train every client's model by Adam from `start` and what it remembers; return both afterwards.

    The task's weight decay is added to gradients; its momentum, clipping and step size are SGD's and do not count.
    """
    step = partial(_step, cohort.training.weight_decay)
    size = cohort.lr.new_tensor(lr * cohort.training.lr_decay**cohort.round)
    end = cohort.scan(step, Carry(start, past, MeanLoss()), given=size, epochs=epochs, stream=stream)
    cohort.observe(**{f"loss/{stream}": end.loss.value})
    return end.w, end.past


def _step(weight_decay: float, carry: Carry, batch: Batch, lr: Tensor) -> Carry:
    g, w, loss = batch.gradient(carry.w)
    w, past = adam(w, g, carry.past, lr, weight_decay)
    return Carry(w, past, carry.loss.add(loss))
