"""Test samples that a training sample gives away: windows that share raw values, rows that nearly repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.data.preprocessing import measure
from atoll.data.schema import Schema
from atoll.data.tables import Values
from atoll.kernel.randomness import generator

Rows = NDArray[np.int64]

NEAR = 0.01  # standard deviations: the root mean square by which samples may differ and still count as repeated
SHORTEST = 16  # steps of a window that is looked into
RUN = 8  # steps that windows must share; of one or two channels, twice as many
MOST_TESTED = 20_000  # test samples that are looked at
DIRECTIONS = 16  # to which samples are projected to find their neighbours
NEIGHBOURS = 4
RARE = 0.01  # probability by chance, below which repeats are reported
MOST_TRIES, MANY = 20, 100_000  # how often chance is tried, and with how many points in all
LEAST_DISTINCT = 0.5  # of all rows; where fewer differ, repeating says nothing about cases


@dataclass(frozen=True)
class Leaks:
    """How many test samples were looked at, how many overlap with a training window, and how many nearly repeat."""

    tested: int
    overlapping: int = 0
    repeated: int = 0

    def __bool__(self) -> bool:
        return bool(self.overlapping or self.repeated)

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        found = []
        if self.overlapping:
            found.append(
                f"{self.overlapping:,} of {self.tested:,} test windows share raw values with a training window"
            )
        if self.repeated:
            found.append(f"{self.repeated:,} of {self.tested:,} test samples nearly repeat a training sample")
        return "; ".join(found) + "." if found else ""


def find_leaks(schema: Schema, x: Values, train: Rows, test: Rows) -> Leaks:
    """Look for test samples that overlap with training windows or nearly repeat a training sample, of any client.

    Tokens are not looked into: texts repeat by themselves.
    """
    tokens = schema.array is not None and schema.array.holds == "tokens"
    if tokens or not len(train) or not len(test):
        return Leaks(len(test))
    if len(test) > MOST_TESTED:
        test = np.sort(generator(0, "leaks").permutation(test)[:MOST_TESTED])
    overlapping = find_overlaps(schema, x, train, test)
    repeated = find_repeats(schema, x, train, test) & ~overlapping
    return Leaks(len(test), int(overlapping.sum()), int(repeated.sum()))


# -- windows -----------------------------------------------------------------------------------------------------------


def find_overlaps(schema: Schema, x: Values, train: Rows, test: Rows) -> NDArray[np.bool_]:
    """Return which test windows share a run of raw values with a training window.

    Of two windows that overlap, one begins or ends inside the other. So the first and the last run of each training
    window are looked for among all runs of the test windows.
    """
    windows = _as_windows(schema, x)
    if windows is None:
        return np.zeros(len(test), dtype=bool)
    return _contain_ends(windows[test], windows[train])


def find_overlaps_within(schema: Schema, x: Values) -> NDArray[np.bool_]:
    """Return which windows share a run of raw values with another one; an exact copy is none of these."""
    windows = _as_windows(schema, x)
    return np.zeros(len(x), dtype=bool) if windows is None else _contain_ends(windows, windows, inside=True)


def _contain_ends(windows: Values, others: Values, *, inside: bool = False) -> NDArray[np.bool_]:
    """Return which windows contain the first or last run of another; with `inside`, not at their own ends."""
    run = RUN if windows.shape[2] > 2 else 2 * RUN
    last = windows.shape[1] - run
    firsts, lasts = (_hash_runs(others[:, start : start + run], run) for start in (0, last))
    found = np.zeros(len(windows), dtype=bool)
    for start in range(0, len(windows), 2048):  # all runs of all windows at once might not fit
        runs = _hash_runs(windows[start : start + 2048], run)
        later, earlier = (runs[:, 1:], runs[:, :-1]) if inside else (runs, runs)
        here = np.isin(later, firsts[firsts != 0]).any(axis=1) | np.isin(earlier, lasts[lasts != 0]).any(axis=1)
        found[start : start + 2048] = here
    return found


def _as_windows(schema: Schema, x: Values) -> Values | None:
    """Return samples as [sample, step, channel]; None where they are no windows."""
    array = schema.array
    if array is None or array.holds == "pixels" or len(array.shape) > 2:
        return None
    if len(array.shape) == 1:
        windows = x[:, :, None]
    elif array.channel_axis is None:
        return None
    else:
        windows = np.moveaxis(x, array.channel_axis + 1, -1)
    return windows if windows.shape[1] >= SHORTEST else None


def _hash_runs(windows: Values, run: int) -> NDArray[np.uint64]:
    """Return a hash of every run of steps [window, place]; 0 for one that hardly changes, which many windows have."""
    bits = np.ascontiguousarray(windows.astype(np.float64) + 0.0).view(np.uint64)
    odd = generator(0, "run hashes").integers(1, 2**63, size=bits.shape[2] + run).astype(np.uint64) * 2 + 1
    with np.errstate(over="ignore"):
        steps = (bits * odd[: bits.shape[2]]).sum(axis=2, dtype=np.uint64)
        steps = (steps ^ (steps >> np.uint64(29))) * odd[0]
        places = steps.shape[1] - run + 1
        hashes = np.zeros((len(steps), places), dtype=np.uint64)
        for step in range(run):
            hashes += steps[:, step : step + places] * odd[bits.shape[2] + step]
    changes = np.pad(np.cumsum(steps[:, 1:] != steps[:, :-1], axis=1), ((0, 0), (1, 0)))
    varied = changes[:, run - 1 :] - changes[:, :places] >= run // 2
    return np.where(varied, hashes, np.uint64(0))


# -- repeats -----------------------------------------------------------------------------------------------------------


def find_repeats(schema: Schema, x: Values, train: Rows, test: Rows) -> NDArray[np.bool_]:
    """Return which test samples nearly repeat a training sample."""
    both = np.concatenate([train, test])
    points = spread_points(schema, x[both])
    if points is None:
        return np.zeros(len(test), dtype=bool)
    found = nearest(points[: len(train)], points[len(train) :])[0] >= 0
    widths = [len(feature.columns) for feature in schema.features] if schema.array is None else [1] * points.shape[1]
    parts = np.split(np.arange(points.shape[1]), np.cumsum(widths)[:-1])  # categories of a feature belong together
    likely = found.any() and exceeds_chance(int(found.sum()), points, parts, len(train))
    return found if likely else np.zeros_like(found)


def exceeds_chance(found: int, points: NDArray[np.float64], parts: Sequence[Rows], known: int | None = None) -> bool:
    """Return whether more points are near another than by chance, as rows of one or two numbers often are.

    Each part of the coordinates is dealt anew by itself: who is then near another is so by chance. The first `known`
    points are looked among for the others; without it, all for all.
    """
    from scipy.stats import poisson

    draw, tries = generator(0, "mix columns"), max(1, min(MOST_TRIES, MANY // len(points)))
    total = 0
    for _ in range(tries):
        mixed = np.empty_like(points)
        for columns in parts:
            mixed[:, columns] = points[:, columns][draw.permutation(len(points))]
        near, _ = nearest(mixed, mixed, apart=True) if known is None else nearest(mixed[:known], mixed[known:])
        total += int((near >= 0).sum())
    return bool(poisson.sf(found - 1, (total + 0.5) / tries) < RARE)


def spread_points(schema: Schema, x: Values) -> NDArray[np.float64] | None:
    """Return samples in standard deviations, one row each; None where too few differ to tell cases apart."""
    mean, std = measure(schema, x)
    if schema.array is None:
        points = x.astype(np.float64)
        points[:, schema.scaled] = (points[:, schema.scaled] - mean) / std
    else:
        shape = [1] * x.ndim
        if schema.array.channel_axis is not None:
            shape[schema.array.channel_axis + 1] = -1
        points = ((x - mean.reshape(shape)) / std.reshape(shape)).reshape(len(x), -1)
    distinct = len(np.unique(np.round(points[:, :DIRECTIONS] / NEAR), axis=0))
    return points if distinct >= LEAST_DISTINCT * len(points) else None


def nearest(
    known: NDArray[np.float64], asked: NDArray[np.float64], *, apart: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return for each point asked about the near known one, or -1, and its distance per dimension.

    With `apart`, both are the same points, and none is its own neighbour. Points are projected before they are looked
    up: what is near stays near, and what seems near is measured.
    """
    from scipy.spatial import cKDTree

    width = known.shape[1]
    if width > DIRECTIONS:
        basis, _ = np.linalg.qr(generator(0, "directions").normal(size=(width, DIRECTIONS)))
    else:
        basis = np.eye(width)
    reach = NEAR * np.sqrt(width)
    count = min(NEIGHBOURS, len(known))
    _, found = cKDTree(known @ basis).query(asked @ basis, k=[*range(1, count + 1)], distance_upper_bound=reach)
    near, distance = np.full(len(asked), -1), np.full(len(asked), np.inf)
    for column in found.T:
        there = np.flatnonzero((column < len(known)) & ~(apart & (column == np.arange(len(asked)))))
        gap = np.sqrt(((known[column[there]] - asked[there]) ** 2).mean(axis=1))
        better = (gap <= NEAR) & (gap < distance[there])
        near[there[better]], distance[there[better]] = column[there[better]], gap[better]
    return near, distance
