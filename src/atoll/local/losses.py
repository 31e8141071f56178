"""How well several models fit each client."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.batch import Batch
from atoll.cohort import Cohort
from atoll.params import Params, Stack


def losses(models: Stack, cohort: Cohort) -> Tensor:
    """The mean loss of every model on each client's training data, [clients, models]."""
    choices = [models.client(row) for row in range(models.clients)]
    start = Params.of(loss=torch.zeros(len(choices)))
    seen = cohort.scan(_measure, start, given=choices, shuffle=False, train=False)
    loss: Tensor = seen["loss"]
    return loss / cohort.samples[:, None]


def _measure(seen: Params, batch: Batch, choices: list[Params]) -> Params:
    """Add up one client's loss with every model."""
    each = [batch.total(batch.network.loss(batch.outputs(w), batch.y)) for w in choices]
    return Params.of(loss=seen["loss"] + torch.stack(each))
