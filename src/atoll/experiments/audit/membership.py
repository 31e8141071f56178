"""Membership inference: whoever has a model guesses which samples of a client it was trained on.

Members are training samples of a client, non-members as many of its own test samples, classes matched. With
phi = ln p_y - ln sum of the other p, what the model says about the true class:

- `loss`: the score is ln p_y;
- `calibrated`: less the mean of ln p_y over reference models that did not see the sample;
- `rmia`: p / p_bar, p_bar = (1 + a) / 2 mean_out + (1 - a) / 2, a = 0.3;
- `lira`: ln N(phi; in) - ln N(phi; out) from references that saw the sample and that did not, medians and one pooled
  standard deviation each.

A score becomes the share of population samples, which nobody trained on, that score lower: then clients can be pooled.
LiRA is a likelihood ratio, and pooled as it is. Reference models are those of shadow federations, or, without any, the
personal models, or the uploads, of other clients that have the class.

References: Yeom et al., CSF 2018 (loss); Watson et al., ICLR 2022 (calibrated); Zarifzadeh, Liu, Shokri, ICML 2024
(RMIA); Carlini et al., IEEE S&P 2022 (LiRA).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit
from scipy.stats import norm

from atoll.experiments.audit.measures import Interval, auc, bootstrap
from atoll.experiments.audit.subject import Models, Subject, confidences, each_client
from atoll.kernel.network import Network
from atoll.kernel.predictor import Predictor

Values = NDArray[np.float64]
Inside = NDArray[np.bool_]
A = 0.3  # of RMIA
LEAST_STD = 1e-3
FEWEST_SHADOWS = 4  # of LiRA: two that saw a sample, and two that did not


@dataclass(frozen=True)
class Attacked:
    """What one attack found of one kind of model, over all clients."""

    model: str
    attack: str
    auc: Interval
    tpr: Interval  # at 1 % FPR
    mean: float  # AUC over clients
    most: float
    client: str  # whose AUC is `most`
    members: int
    each: dict[str, float]  # AUC by client


@dataclass(frozen=True)
class Seen:
    """What target and references say of some samples: a row per reference, and whether it saw the sample."""

    phi: Values  # of the target
    references: Values  # [reference, sample]
    inside: Inside

    def out_mean(self, values: Values) -> Values:
        """Return the mean over the references that did not see a sample; NaN where all did."""
        outside = ~self.inside
        count = outside.sum(0)
        total = np.where(outside, values, 0.0).sum(0)
        return np.asarray(np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0))


def score_loss(seen: Seen) -> Values:
    """Return ln p_y."""
    return np.asarray(log_expit(seen.phi))


def score_calibrated(seen: Seen) -> Values:
    """Return ln p_y less its mean over references."""
    return np.asarray(log_expit(seen.phi) - seen.out_mean(log_expit(seen.references)))


def score_rmia(seen: Seen) -> Values:
    """Return how much more probable the class is than references lead to expect."""
    expected = (1 + A) / 2 * seen.out_mean(expit(seen.references)) + (1 - A) / 2
    return np.asarray(expit(seen.phi) / expected)


def score_lira(seen: Seen) -> Values:
    """Return the likelihood ratio of having been in; references of both kinds are needed."""
    sides = []
    for inside in (seen.inside, ~seen.inside):
        values = np.where(inside, seen.references, np.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a sample without references of a kind stays NaN
            center = np.nanmedian(values, axis=0)
        several = inside & (inside.sum(0) > 1)
        spread = float((values - center)[several].std()) if several.any() else 0.0
        sides.append(norm.logpdf(seen.phi, center, max(spread, LEAST_STD)))
    return np.asarray(sides[0] - sides[1])


SCORES = {"rmia": score_rmia, "calibrated": score_calibrated, "loss": score_loss}


def infer_membership(subject: Subject, kind: str, references: Sequence[tuple[Models, Inside]]) -> list[Attacked]:
    """Attack the models of a kind, `shared`, `personal` or `uploaded`, of every audited client."""
    collected: dict[str, dict[int, tuple[Values, Values]]] = {}
    models = subject.with_uploads if kind == "uploaded" else subject.models
    for client, sides in each_client(subject, kind, models):
        rows = np.concatenate([*sides, subject.population])
        there = [one for one in references if kind != "uploaded" or client in one[0].uploaded]
        seen, halves = _look(subject, kind, models, client, rows, there), len(sides.members)
        scores = {name: _place(score(seen), 2 * halves) for name, score in SCORES.items() if name == "loss" or len(
            seen.references
        )}  # fmt: skip
        if len(there) >= FEWEST_SHADOWS:
            audited = Seen(seen.phi[: 2 * halves], seen.references[:, : 2 * halves], seen.inside[:, : 2 * halves])
            scores["lira"] = score_lira(audited)
        for name, values in scores.items():
            mine = np.nan_to_num(values, nan=0.0 if name == "lira" else 0.5)  # no reference can tell
            collected.setdefault(name, {})[client] = mine[:halves], mine[halves:]
    return [_summarise(subject, kind, name, found) for name, found in collected.items()]


def _look(
    subject: Subject, kind: str, models: Models, client: int, rows: NDArray[np.int64],
    references: Sequence[tuple[Models, Inside]],
) -> Seen:  # fmt: skip
    phi = confidences(models.of_client(kind, client), subject, rows)
    others = [(one.of_client(kind, client), inside[rows]) for one, inside in references]
    if not references:
        others = _borrow(subject, models.uploaded if kind == "uploaded" else models.personal, client, rows)
    seen = [confidences(model, subject, rows) for model, _ in others]
    inside = [where for _, where in others]
    empty = np.empty((0, len(rows)))
    return Seen(phi, np.stack(seen) if seen else empty, np.stack(inside) if inside else empty.astype(bool))


def _borrow(
    subject: Subject, models: Mapping[int, tuple[Predictor, Network]], client: int, rows: NDArray[np.int64]
) -> list[tuple[tuple[Predictor, Network], Inside]]:
    """Return the models of others; of a class that they do not have, they count as if they had seen it."""
    found = []
    wanted = subject.labels(rows)
    for other, model in models.items():
        if other != client:
            mine = subject.rows("train", other)
            known = np.isin(wanted, np.unique(subject.labels(mine)))
            found.append((model, ~known | np.isin(rows, mine)))
    return found


def _place(scores: Values, audited: int) -> Values:
    """Return the share of population samples that score lower than each audited one; ties count half."""
    population = np.sort(scores[audited:][np.isfinite(scores[audited:])])
    if not len(population):
        return scores[:audited]
    left = np.searchsorted(population, scores[:audited], side="left")
    right = np.searchsorted(population, scores[:audited], side="right")
    # Above all of the population, or below, the scores themselves decide.
    return np.asarray((left + right) / (2 * len(population)) + 1e-6 * expit(scores[:audited]))


def _summarise(subject: Subject, kind: str, attack: str, found: dict[int, tuple[Values, Values]]) -> Attacked:
    members = np.concatenate([pair[0] for pair in found.values()])
    others = np.concatenate([pair[1] for pair in found.values()])
    area, hits = bootstrap(members, others, subject.seed)
    each = {subject.task.client_name(client): auc(*pair) for client, pair in found.items()}
    worst = max(each, key=lambda name: each[name])
    return Attacked(kind, attack, area, hits, float(np.mean([*each.values()])), each[worst], worst, len(members), each)
