"""How well several models fit each client, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import LabelsNeeded
from atoll.kernel.params import Params, Stack
from atoll.toolbox.client.passes import many_at_once


def losses(models: Stack, cohort: Cohort) -> Tensor:
    """Return the mean loss of every model on each client's training data, [clients, models]."""
    return losses_of([models.client(row) for row in range(models.clients)], cohort)


def losses_of(models: Sequence[Params | Stack], cohort: Cohort, split: str = "train") -> Tensor:
    """Return the mean losses on any split, of models that clients may have each; 0 for a client without samples."""
    start = Params.of(loss=torch.zeros(len(models)), samples=0.0)
    seen = cohort.scan(
        _measure, start, given=list(models), split=split, batch_size=many_at_once(cohort, split), shuffle=False,
        train=False,
    )  # fmt: skip
    loss: Tensor = seen["loss"]
    samples: Tensor = seen["samples"]
    return loss / samples.clamp(min=1)[:, None]


def scores_of(model: Params | Stack, cohort: Cohort, split: str) -> Tensor:
    """Return the mean score of a model on each client's samples of a split; NaN for a client without any."""
    seen = cohort.scan(
        _score, Params.of(score=0.0, samples=0.0), given=model, split=split, batch_size=many_at_once(cohort, split),
        shuffle=False, train=False,
    )  # fmt: skip
    score: Tensor = seen["score"]
    samples: Tensor = seen["samples"]
    return score / samples


def entropies(models: Stack, cohort: Cohort) -> Tensor:
    """Return the mean entropy of every model's answers to each client's samples, [clients, models]: no labels."""
    if cohort.task.classes is None:
        raise LabelsNeeded("Models are compared by the entropy of their answers. These do not answer with classes.")
    start = Params.of(entropy=torch.zeros(models.clients))
    each = [models.client(row) for row in range(models.clients)]
    seen = cohort.scan(
        _doubt, start, given=each, batch_size=many_at_once(cohort), shuffle=False, train=False, labels=False
    )
    entropy: Tensor = seen["entropy"]
    return entropy / cohort.samples[:, None]


def _doubt(seen: Params, batch: Batch, models: list[Params]) -> Params:
    """Add up the entropies of every model's answers to one client's samples; those of several answers are averaged."""
    each = [torch.special.entr(batch.outputs(w).softmax(1)).sum(1) for w in models]
    return Params.of(
        entropy=seen["entropy"] + torch.stack([batch.total(one.reshape(len(one), -1).mean(1)) for one in each])
    )


def _score(seen: Params, batch: Batch, w: Params) -> Params:
    """Add up one client's score."""
    score = batch.total(batch.network.score(batch.outputs(w), batch.y))
    return Params.of(score=seen["score"] + score, samples=seen["samples"] + batch.count)


def _measure(seen: Params, batch: Batch, models: list[Params]) -> Params:
    """Add up one client's loss with every model."""
    each = [batch.total(batch.network.loss(batch.outputs(w), batch.y)) for w in models]
    return Params.of(loss=seen["loss"] + torch.stack(each), samples=seen["samples"] + batch.count)
