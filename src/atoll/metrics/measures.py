"""What clients are judged by: one figure per client, by name, with its direction.

Some measures are means over samples (accuracy, log loss), and add up batch by batch. Others are figures of all samples
of a client together (F1, AUROC, R2): what they need of each sample is kept until the client is done. A figure that does
not exist is NaN, never 0: AUROC where all samples have one class, R2 where all targets are equal.

Figures take rows of weights, 1 or 0 for every sample, and return a value for each row, so the same function also tells
how much a figure depends on single samples: `jackknife` leaves them out in turn.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.ranking import RANKINGS
from atoll.kernel.errors import TaskError, unknown
from atoll.kernel.network import Network
from atoll.kernel.objective import PerSample, absolute_error, accuracy, cross_entropy, squared_error
from atoll.kernel.task import Facts

Values = NDArray[np.float64]
Figure = Callable[
    [Values, Values, Values], Values
]  # (kept [n, width], targets [n, width], weights [rows, n]) -> [rows]
Needs = Literal["anything", "classes", "one class", "numbers"]

OWN = "auto"  # the name of the score that a task has by itself
GROUPS = 100  # of samples that are left out in turn: with fewer samples, one by one


@dataclass(frozen=True)
class Measure:
    """A figure of merit of one client, and how to read it.

    It is the mean of `per_sample`; or, with `figure`, a function of what `keep` takes from the outputs of all samples.
    """

    name: str  # in tables and sentences
    higher_is_better: bool = True
    share: bool = False  # between 0 and 1, shown in percent
    needs: Needs = "anything"
    per_sample: PerSample | None = None
    keep: Callable[[Tensor, Tensor], Tensor] | None = None  # (outputs, targets) -> numbers of each sample, [n, width]
    figure: Figure | None = None
    least: int = 2  # classes that there must be

    @property
    def mean(self) -> bool:
        """Whether it is a mean over samples."""
        return self.figure is None

    @property
    def facts(self) -> dict[str, str | bool]:
        """What a report must know of it, as JSON."""
        return {
            "name": self.name, "higher_is_better": self.higher_is_better, "share": self.share, "mean": self.mean
        }  # fmt: skip

    def check(self, facts: Facts) -> None:
        """Raise TaskError where a task has no such figure."""
        kinds = {"anything": True, "classes": facts.classes is not None, "one class": facts.one_class_each}
        if kinds.get(self.needs, facts.classes is None):
            if facts.classes is not None and facts.classes < self.least:
                raise TaskError(
                    f"The metric {self.name} must leave something to tell apart. {facts.name} has {facts.classes} "
                    f"classes, and every answer would be right.",
                    hint="lower K of top-K.",
                )
            return
        predicts = "numbers" if facts.classes is None else "classes" if facts.one_class_each else "several classes each"
        wanted = {"classes": "classes", "one class": "one class per sample", "numbers": "numbers"}[self.needs]
        fitting = [name for name, one in MEASURES.items() if kinds.get(one.needs, facts.classes is None)]
        raise TaskError(
            f"The metric {self.name} is for tasks that predict {wanted}. {facts.name} predicts {predicts}.",
            hint=f"choose {', '.join(fitting[:-1])} or {fitting[-1]}.",
        )


def measure_of(name: str, network: Network) -> Measure:
    """Return a measure by its name; `auto` is the score that the network has by itself."""
    if name == OWN:
        own = network.score
        return Measure(own.name, own.higher_is_better, own.share, per_sample=own)
    return find_measure(name)


@functools.cache
def find_measure(name: str) -> Measure:
    """Return a measure by its name, as `f1` or `top-5`; raise UnknownName with the nearest one if there is none."""
    written = name.lower().replace("_", "-")
    found = re.fullmatch(r"top-([1-9]\d{0,5})", written)
    if found:
        return Measure(
            f"top-{found[1]} accuracy", share=True, needs="classes",
            per_sample=functools.partial(_is_among_first, int(found[1])), least=int(found[1]) + 1,
        )  # fmt: skip
    written = ALIASES.get(written, written)
    if written not in MEASURES:
        raise unknown("metric", name, [OWN, *MEASURES, "top-5"])
    return MEASURES[written]


# -- what is kept of each sample ---------------------------------------------------------------------------------------


def _is_among_first(k: int, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 where fewer than k classes have a larger output than the right one, else 0; tokens are averaged."""
    right = outputs.gather(1, targets[:, None])
    found = ((outputs > right).sum(1) < k).to(outputs.dtype)
    return found if found.ndim == 1 else found.flatten(1).mean(1)


def take_answers(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    """Return the class with the largest output."""
    return outputs.argmax(1)[:, None]


def take_odds(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    """Return the log-odds of each class, of two classes those of the second.

    They order samples as probabilities do, and are not all equal to 1 where a model is very sure.
    """
    if outputs.shape[1] == 2:
        return outputs[:, 1:] - outputs[:, :1]
    classes = range(outputs.shape[1])
    others = [torch.cat([outputs[:, :c], outputs[:, c + 1 :]], 1).logsumexp(1) for c in classes]
    return outputs - torch.stack(others, 1)


def take_values(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what is predicted, in the order of the targets."""
    return outputs.reshape(len(targets), -1)


# -- figures -----------------------------------------------------------------------------------------------------------


def _count_by_class(kept: Values, targets: Values, weights: Values) -> tuple[Values, Values, Values]:
    """Count samples by class, as [rows, classes]: right answers, samples of the class, answers with the class."""
    said, true = kept[:, 0], targets[:, 0]
    labels = np.unique(np.concatenate([said, true]))
    is_true, is_said = (true[:, None] == labels).astype(np.float64), (said[:, None] == labels).astype(np.float64)
    return weights @ (is_true * is_said), weights @ is_true, weights @ is_said


def _balanced_accuracy(kept: Values, targets: Values, weights: Values) -> Values:
    """Return the mean recall of the classes that there are samples of."""
    right, true, _ = _count_by_class(kept, targets, weights)
    return _mean_known(_divide(right, true))


def _macro_f1(kept: Values, targets: Values, weights: Values) -> Values:
    """Return the mean F1 of the classes that there are samples of or that were answered."""
    right, true, said = _count_by_class(kept, targets, weights)
    return _mean_known(_divide(2 * right, true + said))


def _auroc(kept: Values, targets: Values, weights: Values) -> Values:
    """Return the area under the ROC curve; of several classes the mean, each against the rest, of those there are."""
    return _mean_known(np.stack([_area(*one) for one in _each_class(kept, targets, weights)], axis=1))


def _area(odds: Values, positive: Values, weights: Values) -> Values:
    """Return the share of pairs of a positive and a negative sample that are in order; equal odds count half."""
    order, starts = _sort(odds)
    up, down = (np.add.reduceat((weights * of)[:, order], starts, axis=1) for of in (positive, 1 - positive))
    below = np.cumsum(down, axis=1) - down
    return _divide((up * (below + down / 2)).sum(axis=1), up.sum(axis=1) * down.sum(axis=1))


def _average_precision(kept: Values, targets: Values, weights: Values) -> Values:
    """Return the average precision of the second class; of several the mean, each against the rest."""
    return _mean_known(np.stack([_precision(*one) for one in _each_class(kept, targets, weights)], axis=1))


def _precision(odds: Values, positive: Values, weights: Values) -> Values:
    """Return sum (R_t - R_{t-1}) P_t over thresholds t, from the highest odds down."""
    order, starts = _sort(-odds)
    up, every = (np.add.reduceat((weights * of)[:, order], starts, axis=1) for of in (positive, np.ones_like(positive)))
    precision = np.nan_to_num(_divide(np.cumsum(up, axis=1), np.cumsum(every, axis=1)))
    found, all_up = (up * precision).sum(axis=1), up.sum(axis=1)
    return _divide(found, np.where(all_up < every.sum(axis=1), all_up, 0))  # undefined with one class


def _each_class(kept: Values, targets: Values, weights: Values) -> list[tuple[Values, Values, Values]]:
    """List for each class its odds, which samples are of it, and the weights; of two classes only the second."""
    label = targets[:, 0]
    if kept.shape[1] == 1:
        return [(kept[:, 0], (label == 1).astype(np.float64), weights)]
    there = np.unique(label).astype(int)
    return [(kept[:, c], (label == c).astype(np.float64), weights) for c in there]


def _sort(odds: Values) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order of samples, and where in it another value begins."""
    order = np.argsort(odds, kind="stable")
    sorted_odds = odds[order]  # of what is no candidate they are minus infinity, and equal
    return order, np.flatnonzero(np.concatenate([[True], sorted_odds[1:] != sorted_odds[:-1]]))


def _rmse(kept: Values, targets: Values, weights: Values) -> Values:
    """Return the root of the mean squared error; of several targets the mean of their roots."""
    squares = weights @ (kept - targets) ** 2
    return _mean_known(np.sqrt(_divide(squares, weights.sum(axis=1, keepdims=True))))


def _r2(kept: Values, targets: Values, weights: Values) -> Values:
    """Return 1 - (squared errors) / (squared distances from the mean target); of several targets the mean."""
    centred = targets - targets.mean(axis=0)  # before squaring, so large means leave digits
    centred[:, np.ptp(targets, axis=0) == 0] = 0.0
    count = weights.sum(axis=1, keepdims=True)
    total = weights @ centred**2 - _divide((weights @ centred) ** 2, count)
    scale = (centred**2).sum(axis=0)
    total = np.where(total > 1e-12 * scale, total, 0.0)  # equal up to rounding
    return _mean_known(1 - _divide(weights @ (kept - targets) ** 2, total))


def _divide(above: Values, below: Values) -> Values:
    """Divide; NaN by 0."""
    above, below = np.broadcast_arrays(above, below)
    return np.asarray(np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0))


def _mean_known(values: Values) -> Values:
    """Return the mean over the last axis of what is not NaN; NaN where nothing is."""
    known = ~np.isnan(values)
    return _divide(np.where(known, values, 0.0).sum(axis=1), known.sum(axis=1).astype(np.float64))


# -- of a client -------------------------------------------------------------------------------------------------------


def take_figure(figure: Figure, kept: Values, targets: Values) -> float:
    """Return a figure of all samples; NaN without samples."""
    return float(figure(kept, targets, np.ones((1, len(kept))))[0]) if len(kept) else float("nan")


def jackknife(figure: Figure, kept: Values, targets: Values) -> float:
    """Return the variance of a figure that one sample stands for: divided by n it is that of the figure.

        n (G - 1) / G  sum_g (f_g - mean f)^2,        f_g without the samples of group g

    It is what the variance of single samples is to a mean. Groups are single samples, or of very many every G-th. A
    group without which the figure does not exist is left out; NaN if fewer than two are left.
    """
    n = len(kept)
    groups = min(n, GROUPS)
    left_out = (np.arange(n) % max(groups, 1) == np.arange(groups)[:, None]).astype(np.float64)
    values = figure(kept, targets, 1 - left_out) if n > 1 else np.empty(0)
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return float("nan")
    return float(n * (len(known) - 1) * known.var())


MEASURES: dict[str, Measure] = {
    "accuracy": Measure("accuracy", share=True, needs="classes", per_sample=accuracy.per_sample),
    "balanced-accuracy": Measure(
        "balanced accuracy", share=True, needs="one class", keep=take_answers, figure=_balanced_accuracy
    ),
    "f1": Measure("macro F1", share=True, needs="one class", keep=take_answers, figure=_macro_f1),
    "auroc": Measure("AUROC", share=True, needs="one class", keep=take_odds, figure=_auroc),
    "average-precision": Measure(
        "average precision", share=True, needs="one class", keep=take_odds, figure=_average_precision
    ),
    "log-loss": Measure("log loss", higher_is_better=False, needs="classes", per_sample=cross_entropy),
    "mae": Measure(
        "mean absolute error", higher_is_better=False, needs="numbers", per_sample=absolute_error.per_sample
    ),
    "mse": Measure("mean squared error", higher_is_better=False, needs="numbers", per_sample=squared_error),
    "rmse": Measure("root mean squared error", higher_is_better=False, needs="numbers", keep=take_values, figure=_rmse),
    "r2": Measure("R2", needs="numbers", keep=take_values, figure=_r2),
}
MEASURES |= {
    name: Measure(one.name, share=True, needs="one class", per_sample=one.per_sample) for name, one in RANKINGS.items()
}
ALIASES = {
    "macro-f1": "f1", "f1-score": "f1", "roc-auc": "auroc", "auc": "auroc", "ap": "average-precision",
    "auprc": "average-precision", "logloss": "log-loss", "cross-entropy": "log-loss", "r-squared": "r2", "r-2": "r2",
}  # fmt: skip
