"""Gradients of what a client loses after a step of its own: f_k(w - alpha grad f_k(w)).

A step sees two or three batches that are drawn independently: D' for the loss after the step (stream `main`), D for the
step (`step`), and D'' for the curvature (`curvature`).
"""

from __future__ import annotations

import functools
from typing import Literal

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.descent import Found
from atoll.toolbox.client.full import full_gradient
from atoll.toolbox.client.sgd import Gradient

Order = Literal["fo", "hf", "full"]
Batches = tuple[Batch, ...]
STREAMS: dict[Order, tuple[str, ...]] = {
    "fo": ("main", "step"),
    "hf": ("main", "step", "curvature"),
    "full": ("main", "step"),
}


def meta_gradient(order: Order, alpha: float, *, delta: float = 0.001, steps: int = 1) -> Gradient:
    """Return the meta-gradient of an order, for the streams `STREAMS[order]`."""
    match order:
        case "fo":
            return functools.partial(first_order, alpha=alpha, steps=steps)
        case "hf":
            return functools.partial(hessian_free, alpha=alpha, delta=delta)
        case "full":
            return functools.partial(second_order, alpha=alpha, steps=steps)


def first_order(w: Params, batches: Batches, *, alpha: float, steps: int = 1) -> Found:
    """Return g(w - alpha g(w; D); D'): the curvature is left out."""
    main, step = batches
    g, after, loss = main.gradient(_step(w, step, alpha, steps))
    return g, w | after.buffers, loss


def hessian_free(w: Params, batches: Batches, *, alpha: float, delta: float) -> Found:
    """Return (I - alpha H(w; D'')) g, with H g from the difference of two gradients; four gradients in all."""
    main, step, curvature = batches
    g, after, loss = main.gradient(_step(w, step, alpha))
    ahead, behind = (curvature.gradient(w.moved(g, size))[0] for size in (delta, -delta))
    return g.moved(ahead - behind, -alpha / (2 * delta)), w | after.buffers, loss


def second_order(w: Params, batches: Batches, *, alpha: float, steps: int = 1) -> Found:
    """Return the exact gradient: the steps are differentiated, too."""
    main, step = batches
    return main.gradient(w, through=lambda v: _step(v, step, alpha, steps))


def _step(w: Params, batch: Batch, alpha: float, steps: int = 1) -> Params:
    """Take steps of size alpha; statistics stay, because this model is never used to predict."""
    for _ in range(steps):
        w = w.moved(batch.gradient(w)[0], -alpha)
    return w


def adapt(cohort: Cohort, w: Params | Stack, *, alpha: float, steps: int) -> Stack:
    """Take `steps` full-gradient steps of size alpha from w, every client on its own training data."""
    v = cohort.stacked(w)
    for _ in range(steps):
        g, v = full_gradient(cohort, v, stream="adapt")
        v = v.moved(g, -alpha)
    return v
