"""CFL: federated averaging that splits a cluster of clients in two where averaging has come to rest but they have not.

    w_c <- w_c + sum_{k in c} p_k delta_k,        split c when ||sum_k p_k delta_k|| < eps1 and max_k ||delta_k|| > eps2

At a joint optimum the updates cancel; those of clients that want different models then point in opposite directions,
and the split separates them by the cosine between their updates. With ``eps1 = 0`` nothing is split: this is FedAvg.

Reference: Sattler, Müller, Samek. "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
Under Privacy Constraints." IEEE TNNLS 2021. https://arxiv.org/abs/1910.01991
"""

import logging
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Epochs, Limits, NonNegative, Replies, Rounds, Update, Weighting
from atoll.kernel.clusters import Clusters
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, spread
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.toolbox.client import sgd
from atoll.toolbox.server.clustering import center, cut, distance_to, distances, merges, mixing_within, tree_of_splits
from atoll.toolbox.server.mixing import require_memory, rows_for

log = logging.getLogger("atoll.cfl")
NO_ANGLE = 1e-6  # 1 - cos of updates that differ by rounding in single precision


@record
class Split:
    """Where a cluster was divided: new clients go to the half whose updates theirs are more like."""

    of: int  # the cluster
    w: Params  # its model
    stay: Params  # the mean update of those who stayed in it
    leave: Params  # and of those who left it for a new one


@record
class State:
    """A model per cluster, who is in which and with which weight, and how they were divided."""

    models: Stack
    cluster: Tensor
    weight: Tensor
    round: int
    splits: list[Split]


@dataclass(frozen=True, kw_only=True)
class CFL(Algorithm):
    """A tree of clusters that grows by splits; every client has the model of its leaf."""

    eps1: NonNegative = 0.4  # ε₁: a cluster has converged when its mean update is shorter than this
    eps2: NonNegative = 1.6  # ε₂: and its clients have not when the longest update is longer than this
    rounds_before: Rounds = 20  # rounds before the first split
    linkage: Literal["complete", "single"] = "complete"  # how a cluster is split: as in the authors' code, or paper
    epochs: Epochs = 1  # local epochs per round
    weighting: Weighting = "samples"  # p_k: by training samples, or the same for all; shares of the cluster

    sums_suffice: ClassVar[bool] = False
    limits: ClassVar[Limits] = {"fedavg": {"eps1": 0.0}}
    finds_clusters: ClassVar[bool] = True
    cites: ClassVar[str] = "sattler2021clustered"

    def start(self, task: Facts) -> State:
        """Begin with one cluster of all clients."""
        require_memory(task, copies=2)  # the updates as they arrive and together
        nobody = torch.zeros(task.clients, device=task.sample.device)
        models = spread(task.network.initial, 1)
        return State(models, nobody.long(), nobody, round=0, splits=[])

    def broadcast(self, server: State) -> None:
        """Send nothing: nothing is the same for all."""

    def unicast(self, server: State, ids: NDArray[np.int64]) -> Stack:
        """Send each client the model of its cluster."""
        return server.models.rows(server.cluster[torch.from_numpy(ids)])

    def local(self, _: None, cohort: Cohort) -> Update:
        """Train the cluster's model and send what changed."""
        w = cohort.received
        return Update(
            send={"delta": sgd(cohort, start=w, epochs=self.epochs) - w}, weight=cohort.weights(self.weighting)
        )

    def aggregate(self, server: State, replies: Replies) -> State:
        """Split the clusters that have come to rest, then average within each."""
        if server.round >= self.rounds_before:
            server = self.split(server, replies)
        models = server.models
        models = models + replies.segment_mean("delta", server.cluster, default=models.map(torch.zeros_like))
        clients, _, weight = replies.members
        weight = server.weight.index_put((clients,), weight.to(server.weight.dtype))
        return replace(server, models=models, weight=weight, round=server.round + 1)

    def split(self, server: State, replies: Replies) -> State:
        """Divide each cluster at rest by the directions of its updates; both halves begin at its model."""
        models, cluster, splits = server.models, server.cluster, list(server.splits)
        mean = replies.segment_mean("delta", cluster, default=models.map(torch.zeros_like))
        clients, where, _ = replies.members
        delta = replies.stack("delta")
        for c in range(models.clients):
            members = (where == c).nonzero()[:, 0]
            members = members[clients[members].argsort()]  # the order of arrival must not matter
            updates = delta.rows(members)
            if len(members) <= 2 or mean.client(c).norm() >= self.eps1 or updates.norm().max() <= self.eps2:
                continue
            if len(members) < int((cluster == c).sum()):
                log.info("cluster %d is not split, because not all of its clients have replied", c)
                continue
            angles = distances(updates, "cosine")
            if angles.max() < NO_ANGLE:
                log.info("cluster %d is not split, because all of its updates point the same way", c)
                continue
            halves = torch.from_numpy(cut(merges(angles, self.linkage), clusters=2))
            stay, leave = ((halves == half).nonzero()[:, 0].to(cluster.device) for half in (0, 1))
            splits.append(Split(c, models.client(c), center(updates.rows(stay)), center(updates.rows(leave))))
            cluster = cluster.index_fill(0, clients[members[leave]], len(splits))
        parents = [*range(models.clients), *(split.of for split in splits[len(server.splits) :])]
        return replace(server, models=models.rows(torch.tensor(parents)), cluster=cluster, splits=splits)

    def state_for(self, server: State, ids: NDArray[np.int64]) -> State:
        """Return no model but those of these clients' clusters."""
        own = torch.unique(server.cluster[torch.from_numpy(ids)])
        models = rows_for(server.models, own.cpu().numpy(), server.models.rows(own))
        return replace(server, models=models, weight=torch.zeros_like(server.weight), splits=[])

    def personalize(self, server: State, cohort: Cohort) -> Stack:
        """Return the model of the client's cluster."""
        return self.unicast(server, cohort.clients)

    def welcome(self, server: State, cohort: Cohort) -> Stack:
        """Return the model of the cluster that a new client would join."""
        return server.models.rows(self.joined(server, cohort))

    def joined(self, server: State, cohort: Cohort) -> Tensor:
        """Send a new client down the tree: at each split to the half whose updates its own is more like."""
        cluster = torch.zeros_like(cohort.ids)
        for into, split in enumerate(server.splits, start=1):
            update = sgd(cohort, start=split.w, epochs=self.epochs) - split.w
            stay, leave = (distance_to(update, half, "cosine") for half in (split.stay, split.leave))
            cluster = torch.where((cluster == split.of) & (leave < stay), into, cluster)
        return cluster

    def mixing(self, server: State) -> Tensor:
        """Return who learns from whom: clients of a cluster from each other."""
        return mixing_within(server.cluster, server.weight)

    def found_clusters(self, server: State) -> Clusters:
        """Return the leaves of the tree, and its splits."""
        cluster, splits = server.cluster.cpu().numpy(), [split.of for split in server.splits]
        return Clusters(cluster, tree_of_splits(cluster, splits) if splits else None, "splits: the first on top")
