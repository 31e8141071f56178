"""The gradient over all of a client's training data."""

from __future__ import annotations

from typing import Any

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.sgd import Gradient


def plain(w: Params, batch: Batch) -> Found:
    """The gradient of the loss."""
    return batch.gradient(w)


def full_gradient(
    cohort: Cohort, w: Params | Stack, *, gradient: Gradient = plain, stream: str | tuple[str, ...] = "main"
) -> tuple[Stack, Stack]:
    """Every client's mean gradient at w, each of its samples counted once; and w with the buffers of the passes."""

    def step(carry: dict[str, Params], batch: Any, given: None) -> dict[str, Params]:  # noqa: ARG001
        count = (batch if isinstance(batch, Batch) else batch[0]).count
        g, after, loss = gradient(carry["w"], batch)
        seen = carry["seen"]
        seen = Params.of(loss=seen["loss"] + loss * count, samples=seen["samples"] + count)
        return {"sum": carry["sum"] + g * count, "w": after, "seen": seen}

    start = {"sum": w.zeros(), "w": w, "seen": Params.of(loss=0.0, samples=0.0)}
    end = cohort.scan(step, start, stream=stream)
    name = stream if isinstance(stream, str) else stream[0]
    cohort.observe(**{f"loss/{name}": end["seen"]["loss"] / end["seen"]["samples"]})
    return end["sum"] / end["seen"]["samples"], end["w"]
