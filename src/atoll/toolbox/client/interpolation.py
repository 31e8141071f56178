"""Between two models: which mixture of them serves a client best."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record

SHARES = tuple(tenths / 10 for tenths in range(11))


@record
class Both:
    """Two models, of which mixtures are tried."""

    w: Params
    v: Each


def best_share(cohort: Cohort, w: Params, v: Stack, *, otherwise: float) -> Tensor:
    """Find each client's share a of v, of 0, 0.1, ..., 1, with the smallest validation loss of (1 - a) w + a v.

    The smallest of several equally good ones; `otherwise` for clients without validation samples.
    """
    start = Params.of(loss=cohort.lr.new_zeros(len(SHARES)), samples=0.0)
    seen = cohort.scan(_probe, start, given=Both(w, v), split="val", shuffle=False, train=False)
    best = cohort.lr.new_tensor(SHARES)[seen["loss"].argmin(1)]
    return torch.where(seen["samples"] > 0, best, otherwise)


def _probe(seen: Params, batch: Batch, given: Both) -> Params:
    """Add up one client's validation loss at every share."""
    models = [given.w.lerp(given.v, share) for share in SHARES]
    losses = [batch.total(batch.network.loss(batch.outputs(model), batch.y)) for model in models]
    return Params.of(loss=seen["loss"] + torch.stack(losses), samples=seen["samples"] + batch.count)
