"""Which of two models serves a client better, by its validation data."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params
from atoll.kernel.predictor import Answer, Deployed, Predictor, answer_samples, predictor_of
from atoll.toolbox.client.passes import many_at_once

Judge = Literal["score", "loss"]


def lead(cohort: Cohort, one: Deployed, other: Deployed, judge: Judge) -> Tensor:
    """Return by how many standard errors `one` is better than `other` on each client's validation samples.

        sum_i d_i / sqrt(sum_i d_i^2),        d_i: how much better it does on sample i

    The error is that of a difference which is 0 in truth, so n samples never count for more than sqrt(n) of
    them. For right and wrong answers this is McNemar's statistic. 0 without samples and without any difference.
    """
    models = [predictor_of(deployed) for deployed in (one, other)]
    seen = cohort.scan(
        partial(_compare, judge, [model.answer for model in models]),
        Params.of(sum=0.0, square=0.0),
        given=[(model.model, model.beside) for model in models],
        split="val",
        batch_size=many_at_once(cohort, "val"),
        shuffle=False,
        train=False,
        exact=any(isinstance(deployed, Predictor) for deployed in (one, other)),
    )
    error: Tensor = seen["square"].sqrt()
    better: Tensor = seen["sum"] / error.where(error > 0, 1.0)
    return better


def _compare(
    judge: Judge, answers: list[Answer], seen: Params, batch: Batch, given: list[tuple[Params, Params]]
) -> Params:
    """Add up what sets the two apart on one batch, and its square."""
    network = batch.network
    rule, higher = (network.score, network.score.higher_is_better) if judge == "score" else (network.loss, False)
    each = (answer_samples(answer, *mine, batch) for answer, mine in zip(answers, given, strict=True))
    ours, theirs = (rule(outputs, batch.y) for outputs in each)
    apart = ours - theirs if higher else theirs - ours
    return Params.of(sum=seen["sum"] + batch.total(apart), square=seen["square"] + batch.total(apart.square()))
