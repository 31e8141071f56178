"""Hybrids: a method inside clusters, written with an at: `ditto@ifca:clusters=4,cluster_rounds=10`.

First the clustering method (ifca, cfl or flhc) works for `cluster_rounds` rounds. Then its clusters are fixed, and the
other method goes on in each of them by itself, as if its clients were the whole federation, from the cluster's model.
`within_clusters` makes a class of both, with the hyperparameters of both: those of the same name (`epochs`,
`weighting`) have one value. A client that was in no cluster by then joins the largest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any, ClassVar, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.algorithm import Algorithm, Count, Deployed, Lasts, Replies, Update
from atoll.algorithms import name_of
from atoll.clustering import Clusters
from atoll.cohort import Cohort
from atoll.data.task import Task
from atoll.errors import CohortError, UnknownName
from atoll.params import Params, Tree, stack
from atoll.references import bibtex

Server = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class InClusters(Algorithm):
    """What a hybrid adds: the clustering first, then as many servers of the method as there are clusters."""

    cluster_rounds: Annotated[Count, Lasts(enough=1)] = 10  # of the clustering, before its clusters are fixed

    clusterer: ClassVar[type[Algorithm]]
    member: ClassVar[type[Algorithm]]
    sums_suffice: ClassVar[bool] = False

    @property
    def clustering(self) -> Algorithm:
        """The clustering method, with its share of the hyperparameters."""
        return self.clusterer(**{one.name: getattr(self, one.name) for one in fields(self.clusterer)})

    @property
    def method(self) -> Algorithm:
        """The method inside the clusters, with its share of the hyperparameters."""
        return self.member(**{one.name: getattr(self, one.name) for one in fields(self.member)})

    def start(self, task: Task) -> Server:
        """Clustering begins."""
        begun = {"clustering": self.clustering.start(task), "rounds": 0}
        return begun | {"cluster": None, "inside": None, "numbers": None}

    def broadcast(self, server: Server) -> Tree:
        """What the clustering sends; afterwards nothing is the same for all."""
        clustering = self.clustering.broadcast(server["clustering"]) if server["inside"] is None else None
        return {"clustering": clustering, "inside": server["inside"] is not None}

    def unicast(self, server: Server, ids: NDArray[np.int64]) -> Tree:
        """What the server of each client's cluster sends."""
        if server["inside"] is None:
            return self.clustering.unicast(server["clustering"], ids)
        sent = [self.method.broadcast(one) for one in server["inside"]]
        return _of_clusters(sent, server["cluster"][torch.from_numpy(ids).to(server["cluster"].device)])

    def prepare(self, broadcast: Tree, cohort: Cohort) -> Update | None:
        """The clustering's exchange before the first round."""
        return self.clustering.prepare(broadcast["clustering"], cohort)

    def absorb(self, server: Server, replies: Replies) -> Server:
        """The clustering's state after it."""
        return server | {"clustering": self.clustering.absorb(server["clustering"], replies)}

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """The clustering's work, then the method's, with what its cluster's server sent."""
        if broadcast["inside"]:
            return self.method.local(cohort.received, cohort)
        return self.clustering.local(broadcast["clustering"], cohort)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """The clustering's next state, then the next state of each cluster's server."""
        if server["inside"] is not None:
            return server | {"inside": [*self._each(server, replies)]}
        found: Server = self.clustering.aggregate(server["clustering"], replies)
        server = server | {"clustering": found, "rounds": server["rounds"] + 1}
        if server["rounds"] < self.cluster_rounds:
            return server
        cluster = found["cluster"]
        largest = torch.bincount(cluster[cluster >= 0]).argmax()
        there, cluster = torch.unique(torch.where(cluster < 0, largest, cluster), return_inverse=True)  # no empty ones
        task, members = replies.workbench.population.task, cluster.cpu().numpy()
        tasks = [
            task.of(np.flatnonzero(members == number), found["models"].client(int(old)))
            for number, old in enumerate(there)
        ]
        return server | {"cluster": cluster, "inside": [self.method.start(one) for one in tasks], "numbers": there}

    def _each(self, server: Server, replies: Replies) -> list[Tree]:
        where = server["cluster"].cpu().numpy()[replies.clients]
        return [
            self.method.aggregate(one, replies.of(where == number)) if (where == number).any() else one
            for number, one in enumerate(server["inside"])
        ]

    def finish(self, server: Server, cohort: Cohort) -> Tree:
        """The method's last step, inside the clusters."""
        if server["inside"] is None:
            return self.clustering.finish(server["clustering"], cohort)
        return self.method.finish(_of_clusters(server["inside"], server["cluster"][cohort.ids]), cohort)

    def personalize(self, server: Server, cohort: Cohort) -> Deployed:
        """The clustering's model, then what the method makes of the server of the client's cluster."""
        if server["inside"] is None:
            return self.clustering.personalize(server["clustering"], cohort)
        return self.method.personalize(_of_clusters(server["inside"], server["cluster"][cohort.ids]), cohort)

    def welcome(self, server: Server, cohort: Cohort) -> Deployed:
        """What the method gives a new client of the cluster that it would join; of the largest, if that is empty."""
        if server["inside"] is None:
            return self.clustering.welcome(server["clustering"], cohort)
        same = self.clustering.joined(server["clustering"], cohort)[:, None] == server["numbers"]
        largest = torch.bincount(server["cluster"]).argmax()
        cluster = torch.where(same.any(1), same.int().argmax(1), largest)
        return self.method.welcome(_of_clusters(server["inside"], cluster), cohort)

    def shared(self, server: Server) -> None:
        """There is no model for everybody."""

    def mixing(self, server: Server) -> Tensor | None:
        """Clients of a cluster learn from each other."""
        return self.clustering.mixing(server["clustering"])

    def found_clusters(self, server: Server) -> Clusters | None:
        """The clustering's, with the clients that joined when they were fixed."""
        found, fixed = self.clustering.found_clusters(server["clustering"]), server["cluster"]
        return found if found is None or fixed is None else replace(found, of_client=fixed.cpu().numpy())


def _of_clusters(trees: Sequence[Tree], cluster: Tensor) -> Tree:
    """One tree for some clients: each has the models of its cluster's tree; what is no model is alike in all trees."""
    first = trees[0]
    if isinstance(first, Params):
        return stack(trees).rows(cluster)
    if isinstance(first, dict):
        return {name: _of_clusters([tree[name] for tree in trees], cluster) for name in first}
    if first is None or isinstance(first, int | float | str):
        return first
    raise CohortError(
        f"Inside clusters a server's state must be made of models. Got {type(first).__name__}.",
        hint="use this method without clusters.",
    )


_MADE: dict[tuple[type[Algorithm], type[Algorithm]], type[Algorithm]] = {}  # the same class for the same question


def within_clusters(method: type[Algorithm], clusterer: type[Algorithm]) -> type[Algorithm]:
    """The method inside the clusters that another one finds."""
    if (method, clusterer) not in _MADE:
        _MADE[method, clusterer] = _combine(method, clusterer)
    return _MADE[method, clusterer]


def _combine(method: type[Algorithm], clusterer: type[Algorithm]) -> type[Algorithm]:
    called, by = name_of(method), name_of(clusterer)
    if not clusterer.finds_clusters:
        raise UnknownName(
            f"After an @ must stand a method that finds clusters. {by} does not.", hint="for example ditto@ifca."
        )
    if method.one_shot:
        raise UnknownName(f"To find clusters takes rounds. {called} uploads once, and so cannot be inside clusters.")
    for hook in ("unicast", "prepare"):
        if getattr(method, hook) is not getattr(Algorithm, hook):
            raise UnknownName(
                f"Inside clusters a method must send the same to all of its clients. {called} does not (`{hook}`)."
            )
    both = {one.name: (one.name, hints[one.name], field(default=one.default))
            for part in (clusterer, method)
            for hints in [get_type_hints(part, include_extras=True)]
            for one in fields(part)}  # fmt: skip
    facts = {
        "clusterer": clusterer,
        "member": method,
        "added": f"{method.added}@{by}",
        "sends": {**method.sends, **clusterer.sends},
        "sums_suffice": False,
        "limits": {},
        "reads_validation": method.reads_validation or clusterer.reads_validation,
        "cites": "\n\n".join(filter(None, map(bibtex, (method.cites, clusterer.cites)))),
        "__module__": method.__module__,
        "__doc__": f"{(method.__doc__ or '').strip()}\n\nInside clusters: {(clusterer.__doc__ or '').strip()}",
    }
    title = f"{method.__name__}In{clusterer.__name__}"
    return make_dataclass(title, [*both.values()], bases=(InClusters,), namespace=facts, frozen=True, kw_only=True)
