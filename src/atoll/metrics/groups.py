"""Groups of similar clients, so a mean cannot hide whom a method fails.

Groups are made from training data only: what a client is tested on must not decide whom it is compared with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atoll.metrics.fairness import drop_nan, worst

SIZES = ("small", "medium", "large")
LEVELS = ("low", "medium", "high")
SPEEDS = ("slow", "medium", "fast")


class Grouping(NamedTuple):
    """The names of the groups, and for each client the index of its own; -1 for a client that is in none."""

    names: tuple[str, ...]
    member: NDArray[np.int64]


class GroupScore(NamedTuple):
    """The scores of the clients of a group that have one."""

    mean: float
    worst: float
    clients: int


def terciles(values: ArrayLike) -> NDArray[np.int64]:
    """Return 0, 1 or 2 for each client: the lower, middle or upper third by rank; -1 where the value is NaN.

    Equal values share their mean rank and so their third: if all are equal, all are in the middle.
    """
    from scipy.stats import rankdata

    array = np.asarray(values, dtype=np.float64)
    there = ~np.isnan(array)
    thirds = np.full(len(array), -1, dtype=np.int64)
    thirds[there] = 3 * (rankdata(array[there]) - 0.5) // max(1, there.sum())
    return thirds


def groups_of(
    sizes: ArrayLike,
    entropy: ArrayLike | None = None,
    divergence: ArrayLike | None = None,
    planted: ArrayLike | None = None,
    speed: ArrayLike | None = None,
) -> dict[str, Grouping]:
    """Group clients by size, label entropy, divergence from the labels of all, planted truth, and speed.

    Each argument has one value per client, of its training data. None leaves a grouping out.
    """
    groups = {"size": Grouping(SIZES, terciles(sizes))}
    for name, values in {"label entropy": entropy, "label divergence": divergence}.items():
        if values is not None:
            groups[name] = Grouping(LEVELS, terciles(values))
    if planted is not None:
        truths, member = np.unique(np.asarray(planted), return_inverse=True)
        groups["planted"] = Grouping(tuple(f"group {truth}" for truth in truths), member.astype(np.int64))
    if speed is not None:
        groups["speed"] = Grouping(SPEEDS, terciles(speed))
    return groups


def adjusted_rand(one: ArrayLike, other: ArrayLike) -> float:
    """Return how far two partitions of the clients agree: 1 if they are the same, 0 on average by chance.

    The adjusted Rand index (Hubert and Arabie, 1985). Clients that are in no part (-1) of one of them are left out.
    """
    from sklearn.metrics import adjusted_rand_score

    parts = np.stack([np.asarray(one), np.asarray(other)])
    return float(adjusted_rand_score(*parts[:, (parts >= 0).all(axis=0)]))


def by_group(scores: ArrayLike, grouping: Grouping, *, higher_is_better: bool = True) -> dict[str, GroupScore]:
    """Return mean, worst and number of clients per group, in the order of names; groups without scores are left out."""
    scores = np.asarray(scores, dtype=np.float64)
    of_group = {name: drop_nan(scores[grouping.member == index]) for index, name in enumerate(grouping.names)}
    return {
        name: GroupScore(float(some.mean()), worst(some, higher_is_better=higher_is_better), len(some))
        for name, some in of_group.items()
        if len(some)
    }
