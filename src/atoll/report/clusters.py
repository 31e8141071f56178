"""The clusters that a method has found: in a sentence, and in the order in which they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from atoll.federation.results import Results
    from atoll.kernel.clusters import Clusters

Numbers = NDArray[np.int64]


def describe_clusters(comparison: Results, method: str, name: str) -> str | None:
    """Say how many clusters there are and how far they agree with the planted groups; None without clusters."""
    outcomes = comparison.outcomes[method]
    found = [clusters for clusters in (one.clusters for one in outcomes) if clusters is not None]
    if len(found) < len(outcomes):
        return None
    numbers, outside = [one.number for one in found], sum(int((one.of_client < 0).sum()) for one in found)
    low, high = min(numbers), max(numbers)
    many = f"{low} cluster{'' if high == 1 else 's'}" if low == high else f"{low} to {high} clusters"
    seeds = f" with {'each of ' * (low == high)}{len(numbers)} seeds" if len(numbers) > 1 else ""
    rest = f" {outside:,} client{' is' if outside == 1 else 's are'} in no cluster." if outside else ""
    return f"{name} found {many}{seeds}{_describe_agreement([one.agreement for one in outcomes])}.{rest}"


def _describe_agreement(found: list[float | None]) -> str:
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return ""
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    if min(known) == 1:
        return f", in exact agreement with the planted groups (adjusted Rand {low})"
    index = low if low == high else f"{np.mean(known):.2f} on average, {low} to {high}"
    return f"; agreement with the planted groups is adjusted Rand {index} (1 is full agreement, 0 chance)"


def order_clients(clusters: Clusters, planted: Numbers | None) -> Numbers:
    """Order clients by the tree, so no branches cross; without a tree, by cluster and planted group."""
    clients, merges = len(clusters.of_client), clusters.merges
    below = {client: [client] for client in range(clients)}
    for row, (one, other) in enumerate([] if merges is None else merges[:, :2].astype(int).tolist()):
        below[clients + row] = below.pop(one) + below.pop(other)

    def rank(branch: list[int]) -> tuple[int, ...]:
        first = branch[0]
        cluster = int(clusters.of_client[first])
        return -len(branch), cluster < 0, cluster, 0 if planted is None else int(planted[first]), first

    return np.array([client for branch in sorted(below.values(), key=rank) for client in branch], dtype=np.int64)
