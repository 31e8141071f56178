"""FL+HC: some rounds of federated averaging, one clustering of the clients' updates, then averaging within clusters.

    after `rounds_before` rounds of FedAvg:    clusters c by cutting a tree of merges of the updates delta_k = w_k - w
    from w_c = w on:                           w_c <- w_c + sum_{k in c} p_k (w_k - w_c)

With ``clusters = 1`` and all clients in every round this is FedAvg. Clients that miss the round of the clustering join
later, by one update from w. A survey describes another form under this name: clients are compared by what the shared
body makes of their samples (``signature = "embedding"``), and there are models on several `levels` of the tree, from
common to personal, each of which begins at its parent.

Reference: Briggs, Fan, Andras. "Federated Learning with Hierarchical Clustering of Local Updates to Improve Training
on Non-IID Data." IJCNN 2020, Algorithm 1. https://arxiv.org/abs/2004.11791
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import (
    Algorithm,
    Count,
    Epochs,
    Limits,
    NonNegative,
    Replies,
    Rounds,
    Update,
    Weighting,
    WithEverybody,
)
from atoll.kernel.clusters import Clusters
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Params, Stack, spread, stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.client.features import moments
from atoll.toolbox.server.clustering import (
    Linkage,
    Metric,
    center,
    cut,
    distances,
    merges,
    mixing_within,
    nearest,
    tree_of_some,
)
from atoll.toolbox.server.mixing import require_memory, rows_for


@record
class Tree:
    """What the clusters are cut from."""

    merges: Tensor  # as scipy writes it
    clients: Tensor  # those who were there when it was grown
    signatures: Stack | None  # theirs; None after the last cut, when they have served


@record
class State:
    """A model per cluster, who is in which and with which weight, and the tree once it is grown."""

    models: Stack
    cluster: Tensor  # -1 for a client that is in none
    weight: Tensor
    round: int
    level: int  # how often the tree was cut
    w: Params  # the model that was common last
    centers: Stack | None  # the mean signature of each cluster
    tree: Tree | None


@record
class Sent:
    """What each client receives."""

    w: Each
    number: Each  # of that model: what packing cuts off from a change of one is not added to that of another


@dataclass(frozen=True, kw_only=True)
class FLHC(Algorithm):
    """A model per cluster of clients that are alike, by a tree that is grown once."""

    rounds_before: Rounds = 10  # n: rounds on each level before the next: FedAvg before the clustering
    clusters: Count | None = None  # how many clusters to form
    threshold: NonNegative | None = None  # otherwise: the height at which to cut the tree; None: below its largest jump
    metric: Metric = "l2"  # distance between signatures
    linkage: Linkage = "complete"  # linkage between clusters
    signature: Literal["update", "embedding"] = "update"  # δ_k, or mean and deviation of the inputs of the head
    levels: Count = 1  # cuts of the tree, each into more clusters than the one before; the last is as asked
    epochs: Epochs = 1  # local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all; shares of the cluster

    sends: ClassVar[dict[str, str]] = {"delta": "model", "embedding": "statistic"}
    sums_suffice: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"fedavg": WithEverybody(clusters=1)}
    finds_clusters: ClassVar[bool] = True
    cites: ClassVar[str] = "briggs2020federated"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linkage == "ward" and self.metric != "l2":
            raise HyperparameterError(f"`metric` of FLHC must be 'l2' with ward linkage. Got {self.metric!r} instead.")
        if self.clusters is not None and self.threshold is not None:
            raise HyperparameterError("`threshold` of FLHC must be None if there are `clusters`. Got both.")

    def start(self, task: Facts) -> State:
        """Begin with one cluster of all clients."""
        if self.clusters is not None and self.clusters > task.clients:
            raise HyperparameterError(
                f"`clusters` of FLHC must be at most the number of clients, {task.clients}. Got {self.clusters}."
            )
        require_memory(task, copies=2 if self.levels == 1 else 3)  # the updates: as they arrive, together, and kept
        w, nobody = task.network.initial, torch.zeros(task.clients, device=task.sample.device)
        return State(spread(w, 1), nobody.long(), nobody, round=0, level=0, w=w, centers=None, tree=None)

    def broadcast(self, server: State) -> None:
        """Send nothing: nothing is the same for all."""

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Sent:
        """Send each client the model of its cluster; one that is in none (-1) gets the one that was common last."""
        models, cluster = server.models, server.cluster[torch.from_numpy(ids)]
        choices = stack([*(models.client(c) for c in range(models.clients)), server.w])
        on_this_level = cluster + server.level * len(server.cluster)
        return Sent(choices.rows(cluster), torch.where(cluster < 0, cluster, on_this_level))

    def local(self, _: None, cohort: Cohort) -> Update:
        """Train the cluster's model and send what changed."""
        w = cohort.received.w
        send = {"delta": sgd(cohort, start=w, epochs=self.epochs) - w}
        if self.signature == "embedding":
            send["embedding"] = moments(cohort, w)
        return Update(send=send, weight=cohort.weights(self.weighting), of_model=cohort.received.number)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Average within each cluster, after a step down the tree if one is due."""
        signatures = replies.stack("delta" if self.signature == "update" else "embedding")
        clients = torch.from_numpy(replies.clients).to(server.cluster.device)
        if server.level < self.levels and server.round >= self.rounds_before * (server.level + 1):
            server = self.descend(server, clients, signatures)
        models, cluster = server.models, server.cluster
        number, joining = models.clients, cluster[clients] < 0
        # What newcomers send is an update of w, not of a cluster's model: they are left out of the means.
        segments, zeros = torch.where(cluster < 0, number, cluster), spread(models.client(0), number + 1)
        mean = replies.segment_mean("delta", segments, default=zeros.map(torch.zeros_like)).rows(slice(number))
        if bool(joining.any()):
            assert server.centers is not None  # until there are some, everybody is in the first
            joined = nearest(signatures.rows(joining), server.centers, self.metric)
            cluster = cluster.index_put((clients[joining],), joined)
        weight = server.weight.index_put((clients,), replies.weights.to(server.weight.dtype))
        return replace(server, models=models + mean, cluster=cluster, weight=weight, round=server.round + 1)

    def descend(self, server: State, clients: Tensor, signatures: Stack) -> State:
        """Go one level down the tree, which is grown first; models of clusters begin at their parents'."""
        tree, w = server.tree, server.w
        if tree is None:
            order = clients.argsort()  # the order of arrival must not matter
            clients, signatures = clients[order], signatures.rows(order)
            grown = torch.from_numpy(merges(distances(signatures, self.metric), self.linkage))
            tree, w = Tree(grown, clients, signatures), server.models.client(0)
        assert tree.signatures is not None
        level, table = server.level + 1, tree.merges.cpu().numpy()
        found = cut(table, clusters=self.clusters, threshold=self.threshold)
        if level < self.levels:
            found = cut(table, clusters=round((found.max() + 1) ** (level / self.levels)))
        number, first = np.unique(found, return_index=True)
        parents = server.cluster[tree.clients[torch.from_numpy(first)]]
        groups = [torch.from_numpy(np.flatnonzero(found == c)) for c in number]
        where = torch.from_numpy(found).to(clients.device)
        return replace(
            server,
            models=server.models.rows(parents),
            cluster=torch.full_like(server.cluster, -1).index_put((tree.clients,), where),
            level=level,
            w=w,
            centers=stack([center(tree.signatures.rows(group)) for group in groups]),
            tree=tree if level < self.levels else replace(tree, signatures=None),
        )

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return no model but those of these clients' clusters; a client that is in none needs all to find its own."""
        own = torch.unique(server.cluster[torch.from_numpy(ids)])
        if bool((own < 0).any()):
            return server
        models = rows_for(server.models, own.cpu().numpy(), server.models.rows(own))
        return replace(server, models=models, weight=torch.zeros_like(server.weight), centers=None, tree=None)

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the model of the client's cluster; a client that is in none would join the nearest."""
        cluster = server.cluster[cohort.ids]
        if bool((cluster < 0).any()):
            cluster = torch.where(cluster < 0, self.joined(server, cohort), cluster)
        return server.models.rows(cluster)

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Return the model of the cluster that a new client would join."""
        return server.models.rows(self.joined(server, cohort))

    def joined(self, server: State, cohort: Cohort) -> Tensor:
        """Find the nearest cluster by the signature of w on each client's data; the first before there are others."""
        if server.centers is None:
            return torch.zeros_like(cohort.ids)
        w = server.w
        update = self.signature == "update"
        signature = sgd(cohort, start=w, epochs=self.epochs) - w if update else moments(cohort, w)
        return nearest(signature, server.centers, self.metric)

    def mixing(self, server: State) -> Tensor:
        """Return who learns from whom: clients of a cluster from each other."""
        return mixing_within(server.cluster, server.weight)

    def found_clusters(self, server: State) -> Clusters:
        """Return who is in which cluster, and the tree."""
        cluster, tree = server.cluster.cpu().numpy(), server.tree
        if tree is None:
            return Clusters(cluster)
        height = f"{self.metric} distance of {self.signature}s, {self.linkage} linkage"
        return Clusters(
            cluster, tree_of_some(tree.merges.cpu().numpy(), tree.clients.cpu().numpy(), len(cluster)), height
        )
