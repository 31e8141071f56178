"""The gradient over all of a client's training data."""

from __future__ import annotations

from typing import Any

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.sgd import Gradient


@record
class Sums:
    """What is added up over all samples, and the model with the buffers so far."""

    w: Each
    gradient: Each
    loss: Each = 0.0
    samples: Each = 0.0


def loss_gradient(w: Params, batch: Batch) -> Found:
    """Return the gradient of the loss."""
    return batch.gradient(w)


def full_gradient(
    cohort: Cohort, w: Params | Stack, *, gradient: Gradient = loss_gradient, stream: str | tuple[str, ...] = "main"
) -> tuple[Stack, Stack]:
    """Return every client's mean gradient at w over all its samples, and w with the buffers of the passes."""

    def step(carry: Sums, batch: Any, given: None) -> Sums:  # noqa: ARG001
        count = (batch if isinstance(batch, Batch) else batch[0]).count
        g, after, loss = gradient(carry.w, batch)
        return Sums(after, carry.gradient + g * count, carry.loss + loss * count, carry.samples + count)

    end = cohort.scan(step, Sums(w, w.zeros()), stream=stream)
    name = stream if isinstance(stream, str) else stream[0]
    cohort.observe(**{f"loss/{name}": end.loss / end.samples})
    return end.gradient / end.samples, end.w
