"""Clients in clusters: how far apart their updates are, trees of merges and where to cut them, starting points.

A cluster is a number for each client; clients that are in none yet have -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.clusters import Numbers, Table
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator

Metric = Literal["l1", "l2", "cosine"]
Linkage = Literal["ward", "average", "complete", "single"]


def distance_to(updates: Stack, center: Params, metric: Metric) -> Tensor:
    """Return how far each client's update is from a center, over the trained leaves."""
    if metric == "cosine":
        lengths = updates.norm() * center.norm()
        return 1 - updates.dot(center) / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
    difference = (updates - center).trained.floating
    if metric == "l2":
        return difference.norm()
    return torch.stack([leaf.abs().reshape(len(leaf), -1).sum(1) for leaf in difference.values()]).sum(0)


def center(updates: Stack) -> Params:
    """Return the mean update of some clients, over the trained leaves."""
    return Params({name: leaf.mean(0) for name, leaf in updates.trained.floating.items()}, updates.layout)


def nearest(updates: Stack, centers: Stack, metric: Metric) -> Tensor:
    """Return the number of the center that is nearest to each client's update; the lowest of several."""
    return torch.stack([distance_to(updates, centers.client(row), metric) for row in range(centers.clients)]).argmin(0)


def distances(updates: Stack, metric: Metric) -> Table:
    """Return how far every two clients' updates are apart."""
    rows = torch.stack([distance_to(updates, updates.client(row), metric) for row in range(updates.clients)])
    table: Table = rows.double().cpu().numpy().clip(min=0)
    np.fill_diagonal(table, 0)
    return (table + table.T) / 2


def merges(table: Table, linkage: Linkage) -> Table:
    """Grow the tree that joins the nearest clusters again and again, as scipy writes it: one row per merge."""
    from scipy.cluster.hierarchy import linkage as link
    from scipy.spatial.distance import squareform

    tree: Table = link(squareform(table, checks=False), linkage) if len(table) > 1 else np.zeros((0, 4))
    return tree


def tree_of_some(tree: Table, leaves: Numbers, clients: int) -> Table:
    """Return a tree of some of so many clients, with their numbers instead of their places."""
    nodes = np.concatenate([leaves, clients + np.arange(len(tree))])
    return np.column_stack([nodes[tree[:, :2].astype(np.int64)], tree[:, 2:]])


def tree_of_splits(cluster: Numbers, splits: Sequence[int]) -> Table:
    """Return the tree of clusters that came from splits: cluster i + 1 was split from cluster splits[i].

    Clients of a cluster merge at height 0; then the last split is undone at height 1, the one before at height 2.
    """
    rows: list[tuple[int, int, float, int]] = []

    def merged(one: tuple[int, int], other: tuple[int, int], height: float = 0) -> tuple[int, int]:
        rows.append((one[0], other[0], height, one[1] + other[1]))
        return len(cluster) + len(rows) - 1, one[1] + other[1]

    tops = [
        reduce(merged, [(int(client), 1) for client in np.flatnonzero(cluster == c)]) for c in range(len(splits) + 1)
    ]
    for height, (into, of) in enumerate(reversed([*enumerate(splits, start=1)]), start=1):
        tops[of] = merged(tops[of], tops[into], height)
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def cut(tree: Table, *, clusters: int | None = None, threshold: float | None = None) -> Numbers:
    """Return the cluster of each client: so many clusters, or those below a height, or below the largest jump.

    So many clusters are what is left when the last merges are undone; of equal heights the later row is the later one.
    """
    from scipy.cluster.hierarchy import fcluster

    heights = tree[:, 2]
    if len(tree) == 0:
        return np.zeros(1, np.int64)
    if clusters is None and threshold is None:
        jump = int(np.diff(heights).argmax()) if len(heights) > 1 else 0
        threshold = float(heights[jump : jump + 2].mean())
    if clusters is not None:  # by rank: heights alone do not say which of two equal merges to undo
        ranked = np.column_stack([tree[:, :2], np.arange(1.0, len(tree) + 1), tree[:, 3]])
        found = fcluster(ranked, clusters, "maxclust")
    else:
        found = fcluster(tree, threshold, "distance")
    _, first, number = np.unique(found, return_index=True, return_inverse=True)
    ranks: Numbers = first.argsort().argsort()  # numbered in the order of their first client
    return ranks[number]


def choose_far_apart(table: Table, number: int, tries: int, draw: np.random.Generator) -> Numbers:
    """Choose so many clients that are far apart (k-means++): the best of several tries by squared distances left."""
    squared, sets = table**2, []
    for _ in range(tries):
        chosen = [int(draw.integers(len(table)))]
        while len(chosen) < number:
            left = squared[chosen].min(0)
            odds = left / left.sum() if left.sum() > 0 else np.full(len(left), 1 / len(left))
            chosen.append(int(draw.choice(len(left), p=odds)))
        sets.append(np.array(chosen))
    return min(sets, key=lambda chosen: float(squared[chosen].min(0).sum()))


def reshuffle(initial: Params, number: int) -> Params:
    """Make another initial model: the values of each leaf in another order, which is as likely to be drawn."""

    def shuffle(leaf: Tensor) -> Tensor:
        order = torch.from_numpy(draw.permutation(leaf.numel())).to(leaf.device)
        return leaf.flatten()[order].reshape(leaf.shape)

    draw = generator(0, "start", number)
    return initial | initial.trained.map(shuffle)


def mixing_within(cluster: Tensor, weight: Tensor) -> Tensor:
    """Return who learns from whom: members of a cluster from each other by weight, clients in none from all."""
    same = (cluster[:, None] == cluster) & (cluster[:, None] >= 0)
    rows = torch.where(same.any(1, keepdim=True), same * weight, weight)
    total = rows.sum(1, keepdim=True)
    return torch.where(total > 0, rows / total, torch.full_like(rows, 1 / len(rows)))
