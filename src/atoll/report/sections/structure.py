"""How clients are alike: who has what, clusters, who learns from whom, which layers are sensitive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.report import figures
from atoll.report.clusters import describe_clusters, order_clients
from atoll.report.drawing import NARROW, WIDTH
from atoll.report.names import name_methods
from atoll.report.partition import describe_picture, draw_partition
from atoll.report.parts import Block, Figure, Part, Row, Scrolled, Table, Widths
from atoll.report.view import View
from atoll.runtime.population import MANY_CLIENTS

if TYPE_CHECKING:
    from atoll.kernel.clusters import Clusters

MOST_CLUSTERS = 40
MOST_MEMBERS = 30  # of a cluster by name; clients.csv has them all

Groups = NDArray[np.int64] | None


def collect_partition(view: View) -> list[Part]:
    """Draw who has what."""
    statistics = view.comparison.example.statistics
    if statistics is None:
        return []
    seeds = view.comparison.seeds
    others = len(seeds) > 1 and not view.clients.together
    seed = f" Seed {seeds[0]}; other seeds have other partitions." if others else ""
    words = f"{statistics.sentence} {describe_picture(statistics)} Training data.{seed}"
    classes = view.comparison.example.class_names
    return [Figure(words, Scrolled(draw_partition(statistics, classes=classes)))]


def collect_clusters(view: View) -> list[Part]:
    """Draw and list the clusters of each method that finds some."""
    names = name_methods(view.comparison)
    parts: list[Part] = []
    for method, (one, *others) in view.comparison.outcomes.items():
        clusters, words = one.clusters, describe_clusters(view.comparison, method, names[method])
        if clusters is None or words is None:
            continue
        planted = None if one.statistics is None else one.statistics.groups
        tree = "" if clusters.merges is None else "the tree that clusters are cut from, "
        groups = "" if planted is None else ", planted groups"
        some = f" {figures.MOST_MARKS} of them are drawn." if view.comparison.clients > figures.MOST_MARKS else ""
        seed = f" Seed {one.seed}; other seeds have other clusters." if others else ""
        if view.comparison.clients > MANY_CLIENTS:
            parts.append(Block(view.place(method), [_list_members(view, clusters, planted)], method, words, "clusters"))
            continue
        caption = f"Each column is a client. From top to bottom: {tree}clusters{groups}.{some}{seed}"
        order = order_clients(clusters, planted)
        notes = [_describe_client(view, client, clusters, planted) for client in range(len(clusters.of_client))]
        title, names_of_all = f"Clusters of clients with {method}", _name_all(view)
        wide, narrow = (
            figures.draw_clusters(clusters, planted, order, names_of_all, notes, title, width=width)
            for width in (WIDTH, NARROW)
        )
        inner = [Figure(caption, Widths(wide, narrow)), _list_members(view, clusters, planted)]
        parts.append(Block(view.place(method), inner, method, words, "clusters"))
    return parts


def _describe_client(view: View, client: int, clusters: Clusters, planted: Groups) -> str:
    cluster = int(clusters.of_client[client])
    where = f"in cluster {cluster}" if cluster >= 0 else "in no cluster"
    group = "" if planted is None else f", of planted group {planted[client]}"
    return f"client {view.name(client)} is {where}{group}"


def _name_all(view: View) -> list[str]:
    """Name all clients, whether they were scored or not."""
    return [view.name(client) for client in range(view.comparison.clients)]


def _list_members(view: View, clusters: Clusters, planted: Groups) -> Table:
    """List the clients of each cluster."""
    rows = []
    for cluster in sorted({*clusters.of_client.tolist()}, key=lambda number: (number < 0, number)):
        members = np.flatnonzero(clusters.of_client == cluster)
        names = ", ".join(view.name(client) for client in members[:MOST_MEMBERS].tolist())
        more = f" and {len(members) - MOST_MEMBERS} more" if len(members) > MOST_MEMBERS else ""
        cells = [str(len(members)), f"{names}{more}"]
        if planted is not None:
            groups, counts = np.unique(planted[members], return_counts=True)
            mixed = (f"{count} of group {group}" for group, count in zip(groups, counts, strict=True))
            cells.insert(1, ", ".join(mixed))
        rows.append(Row(str(cluster) if cluster >= 0 else "none", cells))
    heads = ["Cluster", "Clients", *([] if planted is None else ["Planted"]), "Who"]
    if len(rows) > MOST_CLUSTERS:
        rest = Row(f"{len(rows) - MOST_CLUSTERS} more in clients.csv", [""] * (len(heads) - 1))
        rows = [*rows[:MOST_CLUSTERS], rest]
    return Table(heads, rows, kind="words")


def collect_mixing(view: View) -> list[Part]:
    """Draw who takes how much from whom, for each method that says so."""
    parts: list[Part] = []
    for method, (one, *_) in view.comparison.outcomes.items():
        matrix = one.mixing
        if matrix is None:
            continue
        notes = [_describe_mixing(view, client, row) for client, row in enumerate(matrix)]
        title = f"Who learns from whom with {method}: row by row what a client takes from each client"
        some = f" The first {figures.MOST_MIXING} clients." if len(matrix) > figures.MOST_MIXING else ""
        words = (
            f"{method}, seed {one.seed}. Each row is a client, each column a client that it learns from; the strongest "
            f"shade is {np.nanmax(matrix):.3g}.{some}"
        )
        drawing = figures.draw_heatmap(matrix, _name_all(view), notes, title)
        parts.append(Block(view.place(method), [Figure(words, Scrolled(drawing))]))
    return parts


def _describe_mixing(view: View, client: int, row: NDArray[np.float64]) -> str:
    most = np.argsort(-row, kind="stable")[:3]
    takes = ", ".join(f"{row[other]:.2g} from {view.name(other)}" for other in most.tolist() if row[other] > 0)
    return f"client {view.name(client)} takes {takes or 'nothing'}"


def collect_sensitivity(view: View) -> list[Part]:
    """Draw how sensitive clients are to their layers, for each method that measures it."""
    parts: list[Part] = []
    for method, (one, *_) in view.comparison.outcomes.items():
        if one.sensitivity is None:
            continue
        layers, values = one.sensitivity
        shares = values / np.fmax(np.nanmax(values, axis=1, keepdims=True, initial=0), np.finfo(np.float64).tiny)
        notes = [
            f"client {name}: " + ", ".join(f"{layer} {value:.2g}" for layer, value in zip(layers, row, strict=True))
            for name, row in zip(view.names, values, strict=True)
        ]
        title = f"Sensitivity of layers with {method}: row by row a client, column by column a layer"
        words = (
            f"{method}, seed {one.seed}. Each row is a client when it last trained, each column a layer; the "
            "strongest shade is the client's most sensitive layer."
        )
        drawing = figures.draw_heatmap(shares, view.names, notes, title, layers, view.ids)
        parts.append(Block(view.place(method), [Figure(words, Scrolled(drawing))]))
    return parts
