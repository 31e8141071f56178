"""A job is data: which phase of which method, what is sent, to which clients, in which round.

Nothing in it is code of its own, so the same job runs in this process, on another machine, or from a file that is
carried there. An `Assignment` is the part of a job that travels to some of its clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Memory
from atoll.kernel.params import Tree, rows_of

T = TypeVar("T")
Clients = NDArray[np.int64]
LEARNING = frozenset({"train", "val"})
EVERYTHING = frozenset({"train", "val", "test"})


class Phase(Protocol):
    """One thing that clients do. A phase is a small frozen value: its fields say what differs from others."""

    splits: ClassVar[frozenset[str]]  # what the clients may read
    replies: ClassVar[bool]  # whether the server waits for what comes back, so a client may be too late

    @property
    def name(self) -> str:
        """What logs and checkpoints call it. Jobs of one name take the same kind of steps."""
        ...

    def broadcast(self, method: Algorithm, server: Tree) -> Tree:
        """Return what all clients are sent."""
        ...

    def unicast(self, method: Algorithm, server: Tree, clients: Clients) -> Tree:
        """Return what each of some clients is sent by itself, stacked."""
        ...

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Any:
        """Do the work of a cohort that received the broadcast."""
        ...


@dataclass(frozen=True)
class Local:
    """The clients' work of a round."""

    splits: ClassVar[frozenset[str]] = LEARNING
    replies: ClassVar[bool] = True
    name: ClassVar[str] = "local"

    def broadcast(self, method: Algorithm, server: Tree) -> Tree:
        """Return what the method sends to all."""
        return method.broadcast(server)

    def unicast(self, method: Algorithm, server: Tree, clients: Clients) -> Tree:
        """Return what the method sends to each."""
        return method.unicast(server, clients)

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Update:
        """Do a round's work, as far as each client's device gets."""
        return method.local(received, cohort.at_own_speed())


@dataclass(frozen=True)
class Prepare:
    """An exchange before a client's first round."""

    number: int  # from -n to -1

    splits: ClassVar[frozenset[str]] = LEARNING
    replies: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """What logs and checkpoints call it."""
        return f"prepare {self.number}"

    def broadcast(self, method: Algorithm, server: Tree) -> Tree:
        """Return what the method sends to all."""
        return method.broadcast(server)

    def unicast(self, method: Algorithm, server: Tree, clients: Clients) -> None:
        """Send nothing to single clients."""

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Update | None:
        """Do a client's part of the exchange."""
        return method.prepare(received, cohort)


class AtTheEnd:
    """Base of phases whose clients know the server's state."""

    splits: ClassVar[frozenset[str]] = LEARNING
    replies: ClassVar[bool] = False

    def broadcast(self, method: Algorithm, server: Tree) -> Tree:
        """Return the server's state."""
        return server

    def unicast(self, method: Algorithm, server: Tree, clients: Clients) -> None:
        """Send nothing to single clients."""


@dataclass(frozen=True)
class Finish(AtTheEnd):
    """The last local step, without upload."""

    name: ClassVar[str] = "finish"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Tree:
        """Return what the clients keep."""
        return method.finish(received, cohort)


@dataclass(frozen=True, eq=False)
class Assignment:
    """What travels to some clients: they need nothing else to do their part of a job."""

    phase: Phase
    method: Algorithm
    broadcast: Tree  # what all clients are sent
    unicast: Tree  # what each of these clients is sent by itself, stacked
    clients: Clients
    round: int

    def run(self, cohort: Cohort) -> Any:
        """Do the work."""
        return self.phase.run(self.method, self.broadcast, cohort)


@dataclass(frozen=True, eq=False)
class Job:
    """Work for some clients in one round, the same for all of them."""

    phase: Phase
    method: Algorithm
    server: Tree  # what it sends follows from its state
    clients: Clients
    round: int
    groups: NDArray[np.int64] | None = None  # of all clients: those of different groups are never in one cohort
    calls: int = 1  # how often such a job comes in a run; the same from beginning to end, so a resumed run agrees
    usual: int = 0  # how many clients such a job has when nobody drops out
    sums: bool = (
        False  # whether weighted sums of what clients send are enough: an engine may add them up where they are
    )
    # What clients do to a message before it leaves them: the stages of the channel. Clients that are elsewhere do it
    # there, and the engine hands on what arrives; for clients that are here the exchange does it.
    stages: tuple[Any, ...] = ()
    masked: bool = False  # whether messages must be added up under masks before the server reads them
    neighbours: int = 0  # with how many others a client has masks; 0: with all

    @cached_property
    def broadcast(self) -> Tree:
        """What all clients are sent."""
        return self.phase.broadcast(self.method, self.server)

    def assign(self, clients: Clients) -> Assignment:
        """Return what travels to some of the clients."""
        unicast = self.phase.unicast(self.method, self.server, clients)
        return Assignment(self.phase, self.method, self.broadcast, unicast, clients, self.round)


@dataclass(frozen=True, eq=False)
class AssignedJob(Job):
    """A job whose messages have arrived already: where it runs, there is no server."""

    given: Tree = field(kw_only=True, default=None)
    each: Tree = field(kw_only=True, default=None)

    @cached_property
    def broadcast(self) -> Tree:
        """What all clients were sent."""
        return self.given

    def assign(self, clients: Clients) -> Assignment:
        """Return what was sent to some of the clients."""
        order = np.argsort(self.clients)
        places = order[np.searchsorted(self.clients, clients, sorter=order)]
        each = rows_of(self.each, torch.from_numpy(places))
        return Assignment(self.phase, self.method, self.given, each, clients, self.round)


@dataclass(frozen=True, eq=False)
class Done(Generic[T]):
    """What came of some clients' work."""

    clients: Clients
    result: T
    memory: Memory  # where what they keep belongs
    unicast: Tree = None  # what each of them had been sent by itself, stacked
    notes: Mapping[str, Tensor] = field(default_factory=dict)  # what they observed, by name
    gradients: int = 0  # evaluations: one batch of one client each

    def only(self, rows: Tensor) -> Done[T]:
        """Return the part of the clients at these positions, without notes; the result must be an Update."""
        assert isinstance(self.result, Update)
        chosen = self.clients[rows.cpu().numpy()]
        return Done(chosen, self.result.rows(rows), self.memory, rows_of(self.unicast, rows))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Lost:
    """Clients whose reply did not arrive, and why."""

    clients: Clients
    reason: str
