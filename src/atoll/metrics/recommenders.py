"""Recommenders that see everybody's interactions, as references: what federation has to reach.

    popularity   how often an item occurs in training data
    neighbours   C_ij = n_ij / (sqrt(n_i n_j) + shrink), the k largest of each column; scores X C     (Deshpande, 2004)
    ease         G = X'X + lam I, P = G^-1, B_ij = -P_ij / P_jj, B_ii = 0; scores X B                  (Steck, 2019)

X is users by items, 1 where an item is in a user's training data. None of these is federated: a server that computes
them reads all training data.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.kernel.errors import TaskError, unknown
from atoll.metrics.measures import find_measure

Values = NDArray[np.float64]
USERS_AT_A_TIME = 64


def list_interactions(task: Task, split: str = "train") -> Values:
    """Return users by items: 1 where an item is in a split of the user's data."""
    if not task.recommends or task.classes is None:
        raise TaskError(f"Only a task that recommends has users and items. {task.name} is none.")
    part = task.splits[split]
    found = np.zeros((task.clients, task.classes))
    owner = np.repeat(np.arange(task.clients), np.diff(part.offsets))
    found[owner, task.y[part.order].cpu().numpy()] = 1
    return found


def popularity(x: Values) -> Values:
    """Return scores of all items, the same for all users: how many users have the item."""
    return np.broadcast_to(x.sum(axis=0), x.shape)


def neighbours(x: Values, k: int = 200, shrink: float = 10.0) -> Values:
    """Return scores by the items most like those that a user has; of equals at the k-th place, all count."""
    together = x.T @ x
    counts = np.sqrt(np.diag(together))
    likeness = together / (np.outer(counts, counts) + shrink)
    np.fill_diagonal(likeness, 0)
    if k < len(likeness):
        least = np.partition(likeness, -k, axis=0)[-k]
        likeness = np.where(likeness >= least, likeness, 0)
    return x @ likeness


def ease(x: Values, lam: float = 500.0) -> Values:
    """Return scores by the linear model that predicts each item from all others, in closed form."""
    inverse = np.linalg.inv(x.T @ x + lam * np.eye(x.shape[1]))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return x @ weights


REFERENCES: dict[str, Callable[[Values], Values]] = {
    "popularity": popularity, "neighbours": neighbours, "ease": ease
}  # fmt: skip


def find_reference(name: str) -> Callable[[Values], Values]:
    """Return a reference by its name."""
    if name not in REFERENCES:
        raise unknown("reference", name, REFERENCES)
    return REFERENCES[name]


def score_reference(task: Task, scores: Values, metric: str = "hr@10", split: str = "test") -> Values:
    """Return each user's figure of merit on its item of a split: among all items that it does not know yet."""
    measure = find_measure(metric)
    assert measure.per_sample is not None
    known = list_interactions(task) + (list_interactions(task, "val") if split == "test" else 0) > 0
    asked = task.y[task.splits[split].order].cpu()
    found = []
    for start in range(0, task.clients, USERS_AT_A_TIME):
        some = slice(start, start + USERS_AT_A_TIME)
        outputs = torch.from_numpy(np.where(known[some], -np.inf, scores[some]))
        found.append(measure.per_sample(outputs, asked[some]).double().numpy())
    return np.concatenate(found)
