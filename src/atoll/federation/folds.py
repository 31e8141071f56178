"""Runs of all folds of a repeat as one outcome, in which every sample of a client was tested once.

A client's score is that of all its samples together, and not a mean of the scores of folds: where it has few samples,
a fold tests it on one or two. Time and gradients are means over folds, because one of them is what a user would train;
messages, clusters and what clients observed are those of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.federation.report import Report
from atoll.kernel.errors import RunError
from atoll.metrics.evaluation import Arrays, ClientScores
from atoll.metrics.measures import find_measure, jackknife, take_figure
from atoll.records.rounds import Central, Evaluation, Figures, Round

Values = NDArray[np.float64]


def pool_folds(reports: Sequence[Report]) -> list[Report]:
    """Return one report for every repeat of all folds; reports of runs without folds as they are.

    A repeat of which folds are missing is left out, unless there is no other: then only the first is there, in part.
    """
    folds = reports[0].config.task.more.get("folds")
    if not folds:
        return [*reports]
    repeats: dict[int, list[Report]] = {}
    for report in reports:
        repeats.setdefault(report.config.task.more["cut"] // folds, []).append(report)
    whole = [some for some in repeats.values() if len(some) == folds]
    return [_pool(some) for some in whole or [next(iter(repeats.values()))]]


def list_pooled(reports: Sequence[Report]) -> list[int]:
    """Return the seeds of all runs that these reports stand for: each fold has one of its own."""
    return [seed for report in reports for seed in report.config.task.more.get("pooled", [report.seed])]


def _pool(reports: Sequence[Report]) -> Report:
    """Return the report of all folds of a repeat."""
    if any(report.share is not None for report in reports):
        raise RunError("Folds need the scores of all clients. Some runs scored a sample.", hint="evaluation='all'.")
    higher = reports[0].metric.higher_is_better
    lines = [{line.round: line for line in report.history} for report in reports]
    common = [number for number in lines[0] if all(number in one for one in lines)]
    history = [_pool_round([one[number] for one in lines], higher) for number in common]
    outcomes, first = _join_samples(reports), reports[0].without_live()
    more = {**first.config.task.more, "pooled": [report.seed for report in reports]}
    config = replace(first.config, task=replace(first.config.task, more=more))
    pooled = replace(first, written=config, history=history, outcomes=outcomes)
    if "kept" in outcomes:  # the metric is no mean over samples, and is taken over all of them now
        pooled = replace(pooled, history=[*history[:-1], _take_figures(pooled, outcomes)])
    return pooled


def _pool_round(lines: Sequence[Round], higher: bool) -> Round:
    """Return a round of all folds; scores by epoch are left out, because each fold has its own."""
    evaluations = [line.evaluation for line in lines if line.evaluation is not None]
    return replace(
        lines[0],
        curve=None,
        gradients=round(_mean(line.gradients for line in lines)),
        bytes={name: round(_mean(line.bytes.get(name, 0) for line in lines)) for name in lines[0].bytes},
        seconds={name: _mean(line.seconds.get(name, 0.0) for line in lines) for name in lines[0].seconds},
        memory=max(line.memory for line in lines),
        evaluation=_pool_evaluation(evaluations, higher) if len(evaluations) == len(lines) else None,
    )


def _pool_evaluation(found: Sequence[Evaluation], higher: bool) -> Evaluation:
    """Return what was found after a round of all folds; clusters and what is observed are those of the first.

    Scores of newcomers are left out: they have folds of their own.
    """

    def pool(several: Sequence[dict[str, Figures] | None]) -> dict[str, Figures] | None:
        known = [one for one in several if one is not None]
        names = known[0] if len(known) == len(several) else {}
        return {name: _pool_figures([one[name] for one in known], higher) for name in names} or None

    central = [one.central for one in found if one.central is not None]
    alone = [one.inductive for one in central if one.inductive is not None]
    attacks = [one.attack for one in found if one.attack is not None]
    return replace(
        found[0],
        personal=pool([one.personal for one in found]),
        shared=pool([one.shared for one in found]),
        central=Central(
            score=_mean(one.score for one in central),
            loss=_mean(one.loss for one in central),
            inductive=_mean(alone) if alone else None,
        )
        if central
        else None,
        newcomers=None,
        attack=_mean(attacks) if attacks else None,
    )


def _pool_figures(found: Sequence[Figures], higher: bool) -> Figures:
    """Return the figures of clients over the samples of all folds, as means over samples."""
    samples = np.array([one.samples for one in found], dtype=np.int64)

    def average(listed: Sequence[Sequence[float] | None]) -> Values | None:
        if any(values is None for values in listed):
            return None
        values = np.array(listed, dtype=np.float64)
        weight = np.where(np.isnan(values), 0, samples)
        above = (np.where(weight > 0, values, 0.0) * weight).sum(axis=0)
        below = weight.sum(axis=0)
        return np.asarray(np.divide(above, below, out=np.full(len(above), math.nan), where=below > 0))

    score, loss = average([one.clients for one in found]), average([one.losses for one in found])
    assert score is not None
    assert loss is not None
    squares = [
        None if one.variances is None else np.add(one.variances, np.square(one.clients)).tolist()  # type: ignore[arg-type]
        for one in found
    ]
    second, eces = average(squares), average([one.eces for one in found])
    variance = None if second is None else np.maximum(second - score**2, 0)
    errors = [one.ece for one in found if one.ece is not None]
    diverged = sorted({client for one in found for client in one.diverged or ()})
    whole = ClientScores(score, loss, samples.sum(axis=0), higher, variance)
    return replace(
        Figures.of_json(whole.as_json()),
        diverged=diverged or None,
        ece=_mean(errors) if errors else None,
        eces=None if eces is None else eces.tolist(),
    )


def _join_samples(reports: Sequence[Report]) -> Arrays:
    """Return what is known of single test samples, client after client, each client's folds one after the other."""
    several = [report.outcomes or {} for report in reports]
    found: Arrays = {}
    for name in [name for name in several[0] if all(name in one for one in several) and name != "cluster"]:
        pieces = [
            np.split(one[name], np.cumsum(report.samples())[:-1]) for one, report in zip(several, reports, strict=True)
        ]
        found[name] = np.concatenate([piece for of_client in zip(*pieces, strict=True) for piece in of_client])
    return found


def _take_figures(pooled: Report, outcomes: Arrays) -> Round:
    """Return the last round with the metric of each client taken over its test samples of all folds together."""
    line, figures = pooled.history[-1], pooled.figures()
    figure = find_measure(pooled.settings.metric).figure
    assert figure is not None
    assert line.evaluation is not None
    ends = np.cumsum(pooled.samples())[:-1]
    clients = [*zip(*(np.split(outcomes[name], ends) for name in ("kept", "target")), strict=True)]
    score = np.array([take_figure(figure, *mine) for mine in clients])
    variance = np.array([jackknife(figure, *mine) for mine in clients])
    pool = take_figure(figure, outcomes["kept"], outcomes["target"])
    loss, higher = np.array(figures.losses, dtype=np.float64), pooled.metric.higher_is_better
    whole = ClientScores(score, loss, pooled.samples(), higher, variance, pooled=pool)
    test = replace(Figures.of_json(whole.as_json()), ece=figures.ece, eces=figures.eces, diverged=figures.diverged)
    return replace(line, evaluation=replace(line.evaluation, personal={**(line.personal or {}), "test": test}))


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))
