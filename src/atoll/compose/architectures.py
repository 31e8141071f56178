"""Clients with different architectures: a method works inside each of them, with a state of its server for each.

`federate` runs methods `within_architectures`. A client receives what the server of its
architecture sends; replies are aggregated per architecture unless the method defines `fuse`, as FedDF does, whose
models learn from those of other architectures. There is no model for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.algorithms import list_methods, name_of
from atoll.kernel.algorithm import Algorithm, Arrival, Deployed, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Tree
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.kernel.wrapper import Wrapper, title_of


@record
class Server:
    """A state for each architecture, and who has which."""

    states: list[Tree]
    architecture: Tensor


@record
class Sent:
    """What clients of one architecture receive: the same for all of them, and what is for each alone."""

    all: Tree
    each: Tree


@dataclass(frozen=True, kw_only=True)
class InArchitectures(Wrapper):
    """The method `inner` for several architectures; it keeps its name and its hyperparameters."""

    inner: Algorithm

    needs_unicast: ClassVar[bool] = True  # what is sent to an architecture is sent to its clients one by one

    def __post_init__(self) -> None:
        super().__post_init__()
        for hook in ("prepare", "last_broadcast"):
            if self.inner.defines(hook):
                raise TaskError(
                    f"With several architectures a method must not define `{hook}`. {name_of(self.inner)} does."
                )

    def start(self, task: Facts) -> Server:
        """Return a state for each architecture, and which one each client has."""
        states = [self.inner.start(one) for one in task.by_architecture]
        return Server(states, torch.from_numpy(task.architecture))

    def equip(self, server: Server, workbench: Workbench) -> Server:
        """Do what the server of each architecture does alone; return their states."""
        states = [self.inner.equip(one, workbench.of_architecture(n)) for n, one in enumerate(server.states)]
        return replace(server, states=states)

    def broadcast(self, server: Server) -> None:
        """Send nothing to all: each client receives what its architecture does."""

    def unicast(self, server: Server, ids: NDArray[np.int64]) -> Tree:
        """Return what the server of these clients' architecture sends to all of them, and what it sends to each."""
        state = server.states[int(server.architecture[ids[0]])]
        sent = self.inner.broadcast(state)
        return Sent(sent, self.inner.unicast(state, ids)) if self.inner.defines("unicast") else sent

    def local(self, nothing: None, cohort: Cohort) -> Update:
        """Do the method's work, with what was received."""
        received = _apart(cohort.received)
        return self.inner.local(received.all, replace(cohort, received=received.each))

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Return the next state of each architecture."""

        def as_sent(one: Arrival) -> Arrival:
            sent = _apart(one.unicast)
            return one._replace(broadcast=sent.all, unicast=sent.each)

        own = replies.map(as_sent)
        return replace(server, states=self.inner.fuse(server.states, own))

    def state_for(self, server: Server, ids: NDArray[np.int64]) -> Server:
        """Return the whole state."""
        return server

    def finish(self, server: Server, cohort: Cohort) -> Tree:
        """Do the method's last step."""
        return self.inner.finish(_state(server, cohort), cohort)

    def personalize(self, server: Server, cohort: Cohort) -> Deployed:
        """Return what the method makes of the state of the clients' architecture."""
        return self.inner.personalize(_state(server, cohort), cohort)

    def welcome(self, server: Server, cohort: Cohort) -> Deployed:
        """Return what the method gives new clients of this architecture."""
        return self.inner.welcome(_state(server, cohort), cohort)

    def shared(self, server: Server) -> None:
        """Return None: there is no model for everybody."""

    def mixing(self, server: Server) -> None:
        """Return None: nothing is known across architectures."""

    def found_clusters(self, server: Server) -> None:
        """Return None: nothing is known across architectures."""


def _apart(sent: Tree) -> Sent:
    return sent if isinstance(sent, Sent) else Sent(sent, None)


def _state(server: Server, cohort: Cohort) -> Tree:
    return server.states[cohort.task.own_architecture]


def within_architectures(algorithm: Algorithm, task: Facts) -> Algorithm:
    """Return the method, wrapped where the task has several architectures."""
    return algorithm if task.architecture is None else InArchitectures(inner=algorithm)


def check_mixes(algorithm: Algorithm, task: Facts) -> None:
    """Raise for a method that needs one architecture on a task that has several."""
    if task.architecture is not None and not algorithm.mixes_architectures:
        raise TaskError(
            f"{title_of(algorithm)} needs clients that all have one architecture. {task.name} has "
            f"{len(task.networks)}.",
            hint=f"choose a single `model`, or a method that takes several: {', '.join(_that_mix())}.",
        )


def _that_mix() -> list[str]:
    return [name for name, method in list_methods().items() if method.mixes_architectures is True]
