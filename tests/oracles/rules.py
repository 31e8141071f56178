"""Byzantine-robust rules in plain loops, from their papers: `combine("krum:1", rows)` makes one row of many.

Rows are replies as vectors, all of one importance. F is how many of K may be hostile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from oracles.tools import Federation, Outcome, oracle, sgd

Rows = np.ndarray


def mean(rows: Rows, f: int = 0) -> Rows:
    total = np.zeros(rows.shape[1])
    for row in rows:
        total = total + row
    return total / len(rows)


def median(rows: Rows, f: int = 0) -> Rows:
    """Yin et al. 2018: the median of each coordinate, the mean of the middle two if K is even."""
    out = []
    for column in rows.T:
        values = sorted(column.tolist())
        k = len(values)
        out.append(values[k // 2] if k % 2 else (values[k // 2 - 1] + values[k // 2]) / 2)
    return np.array(out)


def trimmed(rows: Rows, f: int) -> Rows:
    """Yin et al. 2018: the mean of each coordinate without the f largest and the f smallest values."""
    out = []
    for column in rows.T:
        values = sorted(column.tolist())
        kept = values[f : len(values) - f]
        out.append(sum(kept) / len(kept))
    return np.array(out)


def meamed(rows: Rows, f: int) -> Rows:
    """Xie et al. 2018: the mean of the K - f values that are nearest to the median of a coordinate.

    Where several sets are as near, the values at the same distance share the places that are left.
    """
    centre, out = median(rows), []
    for column, middle in zip(rows.T, centre, strict=True):
        distances = [abs(value - middle) for value in column]
        reach = sorted(distances)[len(column) - f - 1]
        inside = [value for value, away in zip(column, distances, strict=True) if away < reach]
        edge = [value for value, away in zip(column, distances, strict=True) if away == reach]
        left = len(column) - f - len(inside)
        out.append((sum(inside) + left * sum(edge) / len(edge)) / (len(column) - f))
    return np.array(out)


def squared(a: Rows, b: Rows) -> float:
    return float(sum((x - y) ** 2 for x, y in zip(a.tolist(), b.tolist(), strict=True)))


def krum_scores(rows: Rows, f: int) -> list[float]:
    """Blanchard et al. 2017: the sum of squared distances to the K - f - 2 nearest others."""
    scores = []
    for i, row in enumerate(rows):
        others = sorted(squared(row, other) for j, other in enumerate(rows) if j != i)
        scores.append(sum(others[: len(rows) - f - 2]))
    return scores


def krum(rows: Rows, f: int) -> Rows:
    scores = krum_scores(rows, f)
    return rows[scores.index(min(scores))]


def multi_krum(rows: Rows, f: int) -> Rows:
    scores = krum_scores(rows, f)
    order = sorted(range(len(rows)), key=lambda i: scores[i])
    return mean(rows[order[: len(rows) - f]])


def geometric(rows: Rows, f: int = 0) -> Rows:
    """Pillutla et al. 2022: the point with the least sum of distances, by many smoothed steps of Weiszfeld."""
    norms = sorted(math.sqrt(squared(row, 0 * row)) for row in rows)
    nu = 1e-6 * norms[(len(norms) - 1) // 2]
    z = mean(rows)
    for _ in range(20_000):
        beta = [1 / max(nu, math.sqrt(squared(z, row))) for row in rows]
        new = sum(b * row for b, row in zip(beta, rows, strict=True)) / sum(beta)
        if math.sqrt(squared(new, z)) < 1e-14 * max(1.0, math.sqrt(squared(z, 0 * z))):
            return new
        z = new
    return z


def centered_clip(rows: Rows, f: int = 0, radius: float = 0.0, steps: int = 3) -> Rows:
    """Karimireddy et al. 2021: v + mean of (x_i - v) cut to norm tau, from v = 0; tau is the median norm."""
    tau = radius or float(median(np.array([[math.sqrt(squared(row, 0 * row))] for row in rows]))[0])
    v = np.zeros(rows.shape[1])
    for _ in range(steps):
        step = np.zeros(rows.shape[1])
        for row in rows:
            away = math.sqrt(squared(row, v))
            step = step + (row - v) * min(1.0, tau / away if away else 1.0)
        v = v + step / len(rows)
    return v


def norm_bound(rows: Rows, f: int = 0, radius: float = 0.0) -> Rows:
    """The mean of all rows, each cut to norm tau; tau is the median norm."""
    return centered_clip(rows, f, radius, steps=1)


def nearest_mixing(rows: Rows, f: int) -> Rows:
    """Allouah et al. 2023: each row becomes the mean of the K - f rows nearest to it, itself among them."""
    mixed = []
    for row in rows:
        order = sorted(range(len(rows)), key=lambda j: squared(row, rows[j]))
        mixed.append(mean(rows[order[: len(rows) - f]]))
    return np.stack(mixed)


RULES: dict[str, Callable[..., Rows]] = {
    "mean": mean, "median": median, "trimmed": trimmed, "meamed": meamed, "krum": krum, "multi-krum": multi_krum,
    "geometric": geometric, "centered-clip": centered_clip, "norm-bound": norm_bound,
}  # fmt: skip


def combine(words: str, rows: Rows) -> Rows:
    """Combine rows by a rule in words: `median`, `krum:1`, `nnm:1+trimmed:1`."""
    *before, last = words.split("+")
    for mixing in before:
        name, _, value = mixing.partition(":")
        if name != "nnm":
            raise ValueError(f"no oracle for {name}")
        rows = nearest_mixing(rows, int(value))
    name, _, value = last.partition(":")
    if name in ("norm-bound", "centered-clip") and value:
        return RULES[name](rows, radius=float(value))
    return RULES[name](rows, int(value or 0))


def under_a_rule(words: str) -> Callable[[Federation], Outcome]:
    """Return federated averaging whose server combines changes by a rule, all of one importance, late or not."""

    def fedavg(fed: Federation) -> Outcome:
        w = fed.w0
        for t in fed.rounds:
            for k in t.asked:
                t.send(k, delta=(sgd(w, t.batches(k), t.lr) - w).numpy())
            if t.replies:
                w = w + torch.from_numpy(combine(words, np.stack([one.delta for one in t.replies])))
        return Outcome(models=[w] * len(fed.clients), shared=w)

    return fedavg


for rule in (
    "median", "trimmed:1", "meamed:1", "krum:1", "multi-krum:1", "geometric", "centered-clip", "norm-bound",
    "norm-bound:0.3", "nnm:1+trimmed:1", "nnm:1+krum:1",
):  # fmt: skip
    oracle("fedavg", cases=("everybody",), aggregate=rule, note=f"aggregate={rule}")(under_a_rule(rule))
