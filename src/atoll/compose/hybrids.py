"""Hybrids: a method inside clusters, written with an at: `ditto@ifca:clusters=4,cluster_rounds=10`.

First the clustering method (ifca, cfl or flhc) works for `cluster_rounds` rounds. Then its clusters are fixed, and the
other method goes on in each of them by itself, as if its clients were the whole federation, from the cluster's model.
A hybrid wraps both, and has the hyperparameters of both: those of the same name (`epochs`, `weighting`) have one value.
A client that was in no cluster by then joins the largest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.algorithms import name_of
from atoll.kernel.algorithm import Algorithm, Count, Deployed, Lasts, Limits, Replies, Update, hyperparameters
from atoll.kernel.clusters import Clusters
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import HyperparameterError, UnknownName
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import Predictor
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.kernel.wrapper import Wrapper, fact, values_of
from atoll.toolbox.references import bibtex
from atoll.toolbox.server.mixing import mark_seen

if TYPE_CHECKING:
    from atoll.kernel.engine import Workbench


@record
class Fixed:
    """The clusters once they are fixed, and the servers inside them."""

    cluster: Tensor  # of each client
    inside: list[Tree]  # the state of each cluster's server
    starts: list[Params]  # what each cluster had learned
    told: Tensor  # which clients have been sent what their cluster had learned
    numbers: Tensor  # what the clustering calls each cluster


@record
class Server:
    """The clustering's state, and the clusters once it is over."""

    clustering: Tree
    rounds: int = 0  # of clustering
    fixed: Fixed | None = None


START = "start of the cluster"  # where clients keep the model that their cluster's server began with
INSIDE = -2  # the number of the model of a cluster once clusters are fixed; clusterings number theirs from -1 on


@dataclass(frozen=True, kw_only=True)
class InClusters(Wrapper):
    """The method `inner` inside the clusters of `finder`: clustering first, then a server of the method for each.

    No cohort then has clients of two clusters, so the method works as in a federation of its cluster alone.
    """

    cluster_rounds: Annotated[Count, Lasts(enough=1)] = 10  # of the clustering, before its clusters are fixed
    finder: Algorithm
    inner: Algorithm

    sums_suffice: ClassVar[bool] = False
    needs_unicast: ClassVar[bool] = True
    closed_form: ClassVar[bool] = False
    limits: ClassVar[Limits] = {}
    mixes_architectures: ClassVar[bool] = False
    finds_clusters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        called, by = name_of(self.inner), name_of(self.finder)
        if not self.finder.finds_clusters:
            raise UnknownName(
                f"After @ must come a method that finds clusters. {by} does not.", hint="for example ditto@ifca."
            )
        if self.inner.one_shot:
            raise UnknownName(f"Finding clusters takes rounds. {called} uploads once, so it cannot be inside clusters.")
        for hook in ("unicast", "prepare"):
            if self.inner.defines(hook):
                raise UnknownName(
                    f"Inside clusters a method must send the same to all of its clients. {called} does not (`{hook}`)."
                )
        self._require_one_meaning(called, by)

    def _require_one_meaning(self, called: str, by: str) -> None:
        """Raise unless hyperparameters that both methods have mean the same, and have the same value."""
        mine, theirs = ({one.name: one for one in hyperparameters(part)} for part in (self.inner, self.finder))
        both = sorted(mine.keys() & theirs.keys())
        differ = [name for name in both if not mine[name].means_the_same_as(theirs[name])]
        if differ:
            raise UnknownName(
                f"Inside clusters, hyperparameters of one name have one value. {called} and {by} mean different things "
                f"by {', '.join(differ)}.",
                hint="take another method that finds clusters.",
            )
        values = [values_of(part) for part in (self.inner, self.finder)]
        unequal = [name for name in both if values[0][name] != values[1][name]]
        if unequal:
            raise HyperparameterError(
                f"Inside clusters, hyperparameters of one name must have one value. {called} and {by} have different "
                f"values of {', '.join(unequal)}.",
            )

    # -- what it is made of ------------------------------------------------------------------------------------------
    @fact
    def added(self) -> str:
        """What the method is put together with, and what finds the clusters."""
        return f"{self.inner.added}@{name_of(self.finder)}"

    @fact
    def sends(self) -> Mapping[str, str]:
        """What leaves a client by either method."""
        return {**self.inner.sends, **self.finder.sends}

    @fact
    def needs_public_data(self) -> bool:
        """Whether one of both does."""
        return self.inner.needs_public_data or self.finder.needs_public_data

    @fact
    def reads_validation(self) -> bool:
        """Whether one of both does."""
        return self.inner.reads_validation or self.finder.reads_validation

    @fact
    def cites(self) -> str:
        """The entries of both."""
        return "\n\n".join(filter(None, map(bibtex, (self.inner.cites, self.finder.cites))))

    @property
    def least_rounds(self) -> int:
        """As many as the clustering takes, and those of the method."""
        return self.cluster_rounds + self.inner.least_rounds

    @property
    def exchanges(self) -> int:
        """As many as the clustering has."""
        return self.finder.exchanges

    def networks(self, task: Facts) -> tuple[Network, ...]:
        """Return those of both methods: the finder's messages come first."""
        return (*self.finder.networks(task), *self.inner.networks(task))

    def pulls(self, lr: float) -> dict[str, float]:
        """Say how far steps of both methods go towards what pulls them."""
        return {**self.finder.pulls(lr), **self.inner.pulls(lr)}

    # -- the server --------------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> Server:
        """Begin with the clustering; let the method raise now if it could not begin."""
        self.inner.start(task)
        return Server(self.finder.start(task))

    def equip(self, server: Server, workbench: Workbench) -> Server:
        """Do what the clustering's server does alone."""
        return replace(server, clustering=self.finder.equip(server.clustering, workbench))

    def broadcast(self, server: Server) -> Tree:
        """Return what the clustering sends; once the clusters are fixed, nothing is the same for all."""
        clustering = self.finder.broadcast(server.clustering) if server.fixed is None else None
        return {"clustering": clustering, "inside": server.fixed is not None}

    def groups(self, server: Server) -> NDArray[np.int64] | None:
        """Return the clusters, once they are fixed, each in two groups: with and without their start."""
        if server.fixed is None:
            return None
        numbers: NDArray[np.int64] = (2 * server.fixed.cluster + server.fixed.told).cpu().numpy()
        return numbers

    def unicast(self, server: Server, ids: NDArray[np.int64]) -> Tree:
        """Return what the server of these clients' cluster sends to all of them; at first also what they start from."""
        if server.fixed is None:
            return self.finder.unicast(server.clustering, ids)
        fixed = server.fixed
        number = int(fixed.cluster[ids[0]])
        start = None if fixed.told[ids[0]] else fixed.starts[number]
        return {"sent": self.inner.broadcast(fixed.inside[number]), "start": start}

    def absorb(self, server: Server, replies: Replies) -> Server:
        """Return the state after the clustering's exchange; once the clusters are fixed, it changes nothing."""
        if server.fixed is not None:
            return server
        return replace(server, clustering=self.finder.absorb(server.clustering, replies))

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Return the clustering's next state; once the clusters are fixed, the next state of each cluster's server."""
        if server.fixed is not None:
            return replace(server, fixed=self._aggregate_inside(server.fixed, replies))
        found = self.finder.aggregate(server.clustering, replies)
        server = replace(server, clustering=found, rounds=server.rounds + 1)
        if server.rounds < self.cluster_rounds:
            return server
        cluster, task = found.cluster, replies.workbench.task
        largest = torch.bincount(cluster[cluster >= 0]).argmax()
        there, cluster = torch.unique(torch.where(cluster < 0, largest, cluster), return_inverse=True)  # no empty ones
        members, starts = cluster.cpu().numpy(), [found.models.client(int(old)) for old in there]
        inside = [
            self.inner.equip(self.inner.start(task.of(int((members == number).sum()), start)), replies.workbench)
            for number, start in enumerate(starts)
        ]
        told = torch.zeros_like(cluster, dtype=torch.bool)
        return replace(server, fixed=Fixed(cluster, inside, starts, told, there))

    def _aggregate_inside(self, fixed: Fixed, replies: Replies) -> Fixed:
        """Return the next state of each cluster's server, without late replies from the time of the clustering."""
        replies = replies.where(lambda one: one.broadcast["inside"])
        if not len(replies.clients):
            return fixed
        inside = list(fixed.inside)
        where = fixed.cluster.cpu().numpy()[replies.clients]
        for number in np.unique(where).tolist():
            own = replies.of(where == number).map(lambda one: one._replace(broadcast=one.unicast["sent"], unicast=None))
            inside[number] = self.inner.aggregate(inside[number], own)
        return replace(fixed, inside=inside, told=mark_seen(fixed.told, replies.clients))

    # -- the clients -------------------------------------------------------------------------------------------------
    def prepare(self, broadcast: Tree, cohort: Cohort) -> Update | None:
        """Do the clustering's exchange; once the clusters are fixed, a client has nothing to exchange."""
        return None if broadcast["inside"] else self.finder.prepare(broadcast["clustering"], cohort)

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Do the clustering's work; once the clusters are fixed, the method's, with what the cluster's server sent."""
        if not broadcast["inside"]:
            return self.finder.local(broadcast["clustering"], cohort)
        received, new = cohort.received["sent"], cohort.received["start"]
        # A client keeps the start of its cluster; a cohort is of one cluster, so one client's start is everybody's.
        start = cohort.beside(START).recall(default=cohort.initial).client(0) if new is None else new
        update = self.inner.local(received, replace(cohort, received=None).starting_from(start))
        update = replace(update, of_model=torch.full_like(cohort.ids, INSIDE))
        return update if new is None else replace(update, beside={**update.beside, START: cohort.stacked(start)})

    def last_broadcast(self, server: Server) -> None:
        """Send nothing to all."""

    def state_for(self, server: Server, ids: NDArray[np.int64]) -> Server:
        """Return the clustering's state for these clients; once the clusters are fixed, those of their clusters."""
        if server.fixed is None:
            return replace(server, clustering=self.finder.state_for(server.clustering, ids))
        own = set(server.fixed.cluster[torch.from_numpy(ids)].tolist())

        def leave_out(some: Sequence[Any]) -> list[Any]:
            return [one if number in own else None for number, one in enumerate(some)]

        inside, starts = leave_out(server.fixed.inside), leave_out(server.fixed.starts)
        return replace(server, clustering=None, fixed=replace(server.fixed, inside=inside, starts=starts))

    def finish(self, server: Server, cohort: Cohort) -> Tree:
        """Do the method's last step, inside the clusters."""
        if server.fixed is None:
            return self.finder.finish(server.clustering, cohort)
        number = int(server.fixed.cluster[cohort.clients[0]])
        return self.inner.finish(server.fixed.inside[number], cohort.starting_from(server.fixed.starts[number]))

    # -- the models that come out ------------------------------------------------------------------------------------
    def personalize(self, server: Server, cohort: Cohort) -> Deployed:
        """Return the clustering's model; once the clusters are fixed, the method's in the clients' cluster."""
        if server.fixed is None:
            return self.finder.personalize(server.clustering, cohort)
        number = int(server.fixed.cluster[cohort.clients[0]])
        return self.inner.personalize(server.fixed.inside[number], cohort.starting_from(server.fixed.starts[number]))

    def welcome(self, server: Server, cohort: Cohort) -> Deployed:
        """Return what the method gives new clients in the cluster that they would join, or else in the largest."""
        if server.fixed is None:
            return self.finder.welcome(server.clustering, cohort)
        same = self.finder.joined(server.clustering, cohort)[:, None] == server.fixed.numbers
        largest = torch.bincount(server.fixed.cluster).argmax()
        cluster = torch.where(same.any(1), same.int().argmax(1), largest).cpu().numpy()
        order, offers = [], []
        for number in np.unique(cluster).tolist():
            order.append(np.flatnonzero(cluster == number))
            some = cohort.only(order[-1]).starting_from(server.fixed.starts[number])
            offers.append(_spread(self.inner.welcome(server.fixed.inside[number], some), some))
        place = torch.from_numpy(np.argsort(np.concatenate(order))).to(cohort.ids.device)
        if not isinstance(offers[0], Predictor):
            return _join(offers, place)
        model, beside = (_join([getattr(one, part) for one in offers], place) for part in ("model", "beside"))
        return replace(offers[0], model=model, beside=beside)

    def tune_newcomer(self, given: Stack, model: Stack, cohort: Cohort, *, epochs: int, stream: str) -> Stack | None:
        """Tune as the method inside the clusters does."""
        return self.inner.tune_newcomer(given, model, cohort, epochs=epochs, stream=stream)

    def shared(self, server: Server) -> None:
        """Return None: there is no model for everybody."""

    def mixing(self, server: Server) -> Tensor | None:
        """Return who learns from whom in the clustering: clients of a cluster learn from each other."""
        return self.finder.mixing(server.clustering)

    def found_clusters(self, server: Server) -> Clusters | None:
        """Return the clusters of the clustering, with the clients that joined when they were fixed."""
        found, fixed = self.finder.found_clusters(server.clustering), server.fixed
        return found if found is None or fixed is None else replace(found, of_client=fixed.cluster.cpu().numpy())


def _spread(offered: Deployed, cohort: Cohort) -> Any:
    """Give every client its own copy of what is offered to some clients."""
    if not isinstance(offered, Predictor):
        return cohort.stacked(offered)
    return replace(offered, model=cohort.stacked(offered.model), beside=cohort.stacked(offered.beside))


def _join(parts: Sequence[Stack], place: Tensor) -> Stack:
    """Join the rows of several stacks, each at its place."""
    first = parts[0]
    return Stack({name: torch.cat([part[name] for part in parts])[place] for name in first}, first.layout)
