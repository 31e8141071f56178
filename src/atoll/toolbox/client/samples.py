"""All training samples of each client at once, as rows of numbers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.toolbox.client.features import one_sample


def rows_of(cohort: Cohort, *, encoded: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Return each client's samples [n, p] and targets [n, t], classes as one-hot rows; without labels t is 0.

    Samples are flattened; with `encoded`, they are what enters the head of the initial model.
    """
    task = cohort.task
    look = partial(_look, task.classes, cohort.labelled, encoded)
    x, y = look(one_sample(task), task.network.initial)
    largest = task.largest["train"]  # one batch holds a whole client
    start = Params.of(x=torch.zeros(largest, x.shape[1]), y=torch.zeros(largest, y.shape[1]), real=torch.zeros(largest))
    seen = cohort.scan(
        partial(_collect, look), start, given=cohort.initial, batch_size=largest, shuffle=False, train=False,
        labels=cohort.labelled, exact=True,
    )  # fmt: skip
    return [(x[real > 0], y[real > 0]) for x, y, real in zip(seen["x"], seen["y"], seen["real"], strict=True)]


def _look(classes: int | None, labelled: bool, encoded: bool, batch: Batch, w: Params) -> tuple[Tensor, Tensor]:
    seen = batch.features(w) if encoded else batch.x
    x = seen.flatten(1).to(batch.network.dtype)
    if not labelled:
        return x, x[:, :0]
    y = batch.y.reshape(len(batch.y), -1)
    if classes is None:
        return x, y.to(x.dtype)
    return x, (y[..., None] == torch.arange(classes, device=y.device)).to(x.dtype).mean(1)


def _collect(look: partial[tuple[Tensor, Tensor]], seen: Params, batch: Batch, w: Params) -> Params:
    x, y = look(batch, w)
    real = torch.ones_like(seen["real"]) if batch.mask is None else batch.mask
    return Params.of(x=x, y=y, real=real)
