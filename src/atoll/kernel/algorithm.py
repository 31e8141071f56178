"""What a federated method is: an `Algorithm` says what clients do, what they send, and what the server makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.clusters import Clusters
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import NamesChecked
from atoll.kernel.hyperparameters import (
    Count,
    Epochs,
    Lasts,
    Natural,
    NonNegative,
    Positive,
    Range,
    Rounds,
    Search,
    Share,
    Steps,
    Weighting,
    among,
    hyperparameters,
)
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack, Tree, rows_of
from atoll.kernel.predictor import Deployed, Predictor
from atoll.kernel.replies import Arrival, Replies
from atoll.kernel.task import Facts

if TYPE_CHECKING:
    from atoll.kernel.engine import Workbench

# The file of an algorithm can import what it needs from here.
__all__ = [
    "Algorithm", "Arrival", "Count", "Deployed", "Epochs", "Lasts", "Limits", "Natural", "NonNegative", "Positive",
    "Predictor", "Range", "Replies", "Rounds", "Search", "Share", "Steps", "Update", "Weighting",
    "WithEverybody", "among", "hyperparameters",
]  # fmt: skip

Limits = Mapping[str, Mapping[str, Any]]


class WithEverybody(dict[str, Any]):
    """The values of a limit that holds where every client takes part in every round: `WithEverybody(lam=0.0)`.

    For methods whose clients begin with the shared model of the round in which they first take part: only in the
    first round is that the initial model.
    """


def describe_values(values: Mapping[str, Any]) -> str:
    """Say with which values, and under which condition, a limit holds."""
    pairs = ", ".join(f"{name}={value!r}" for name, value in values.items()) or "any values"
    return f"{pairs} and all clients in every round" if isinstance(values, WithEverybody) else pairs


@dataclass(frozen=True)
class Update:
    """What a cohort returns from local work.

    `send` leaves the clients and reaches the server, `weight` with it: the importance of each reply in a mean.
    `keep` stays with the clients and comes back from `cohort.recall`; it never passes the channel. What pieces keep
    stands in `beside`, under their names. Where the server has several models, `of_model` says which of them each
    client's changes are of: what packing cuts off from one is never added to another. An engine that was told that sums
    are enough may have added up what clients send: then `send` and `weight` have a single row, their weighted sums.
    """

    send: Mapping[str, Stack] = field(default_factory=dict)
    weight: Tensor | None = None
    keep: Tree = None
    beside: Mapping[str, Tree] = field(default_factory=dict)
    of_model: Tensor | None = None
    summed: bool = False

    def rows(self, index: Tensor) -> Update:
        """Return the part of the clients at these positions."""
        return Update(
            send={name: value.rows(index) for name, value in self.send.items()},
            weight=None if self.weight is None else self.weight[index],
            keep=rows_of(self.keep, index),
            beside={name: rows_of(tree, index) for name, tree in self.beside.items()},
            of_model=None if self.of_model is None else self.of_model[index],
        )


@dataclass(frozen=True, kw_only=True)
class Algorithm(NamesChecked):
    """Base of all methods. Override what differs from federated averaging; most methods need two or three.

    Hyperparameters are fields, with their ranges in the annotation; a bad value raises when the object is made.
    """

    one_shot: ClassVar[bool] = False  # uploads once: rounds must be 1
    needs_public_data: ClassVar[bool] = False
    solved: ClassVar[bool] = False  # the model comes from equations: it answers in fp32, whatever the precision
    closed_form: ClassVar[bool] = False  # the result is computed, not trained: the order of batches does not change it
    reads_validation: ClassVar[bool] = False  # validation samples change the result, not only which round is selected
    sums_suffice: ClassVar[bool] = True  # the server needs sums over clients only: secure aggregation is possible
    reads_total: ClassVar[bool] = False  # the server reads how much all replies weigh, and not only means
    needs_unicast: ClassVar[bool] = True  # replies hold what each client was sent by itself; False: that is let go of
    # What leaves a client, by field, and its form: "model", a change of a model, which may be packed, what is cut off
    # being added to the next one; "state", numbers that stand for themselves, such as moments; "statistic", sums over
    # samples; "labels", "choice", "rows", "mask", "answers". All but changes travel whole.
    sends: ClassVar[Mapping[str, str]] = {"delta": "model"}
    # fields that are made by `atoll.toolbox.client.private.release`, which knows how far one sample moves them
    releases: ClassVar[frozenset[str]] = frozenset()
    sent_and_kept: ClassVar[frozenset[str]] = frozenset()  # fields that leave although clients keep them, too: masks
    items_by: ClassVar[str] = ""  # the model by which it scores items for users; empty: it does not recommend
    cites: ClassVar[str] = ""  # a key of references.bib, or BibTeX
    limits: ClassVar[Limits] = {}  # {"fedavg": {"mu": 0.0}}: equals that method with these values
    added: ClassVar[str] = ""  # what it was put together with: "+prox", "@ifca"
    mixes_architectures: ClassVar[bool] = False  # clients may have different networks
    finds_clusters: ClassVar[bool] = False  # its server holds `models`, one per cluster, and each client's `cluster`;
    # and `joined` says which cluster new clients would be in

    def __post_init__(self) -> None:
        for hyperparameter in hyperparameters(type(self)):
            hyperparameter.check(type(self).__name__, getattr(self, hyperparameter.name))

    def defines(self, hook: str) -> bool:
        """Return whether the method has a hook of its own, such as `prepare`; what wraps a method answers for it."""
        return getattr(type(self), hook) is not getattr(Algorithm, hook)

    @property
    def least_rounds(self) -> int:
        """How many rounds there must be for every part of the method to run."""
        return 1

    @property
    def trains_by_sgd(self) -> bool:
        """Whether clients train by `atoll.toolbox.client.sgd`, where pieces can change it."""
        return True

    @property
    def follows_samples(self) -> bool:
        """Whether `sgd` goes along the mean gradient of samples' own losses, as sample-level privacy needs it."""
        return True

    @property
    def deploys_a_model(self) -> bool:
        """Whether what a client deploys is a model of the task's network, and no `Predictor`."""
        return True

    @property
    def transductive(self) -> bool:
        """Whether the answer to a sample depends on the others of its batch; it is scored one at a time as well."""
        return False

    @property
    def step_size(self) -> float | None:
        """The step size of its clients, where the method brings one of its own; None: the task's."""
        return None

    def pulls(self, lr: float) -> dict[str, float]:
        """Say how far steps go towards what pulls them, by name: beyond 2, they end further from it than before."""
        return {}

    def networks(self, task: Facts) -> tuple[Network, ...]:
        """Return the networks that the models it sends are of, one after the other: the clients' own by default."""
        return (task.network,)

    # -- the server ----------------------------------------------------------------------------------------------
    def start(self, task: Facts) -> Tree:
        """Return the server's state before the first round."""
        return task.network.initial

    def equip(self, server: Tree, workbench: Workbench) -> Tree:
        """Do what the server does alone before any client is asked, such as training on public data."""
        return server

    def broadcast(self, server: Tree) -> Tree:
        """Return what every client of a cohort receives."""
        return server

    def unicast(self, server: Tree, ids: NDArray[np.int64]) -> Tree:
        """Return what each of these clients receives by itself, stacked; clients find it in `cohort.received`."""
        return None

    def groups(self, server: Tree) -> NDArray[np.int64] | None:
        """Return the group of every client, if `unicast` sends the same to a whole group and something else to others.

        No cohort then has clients of two groups.
        """
        return None

    def aggregate(self, server: Tree, replies: Replies) -> Tree:
        """Return the server's next state."""
        return server + replies.mean("delta")

    def fuse(self, servers: Sequence[Tree], replies: Replies) -> list[Tree]:
        """Return the next states where clients have different architectures: one state for each of these."""
        after = list(servers)
        for number, some in replies.by_architecture():
            after[number] = self.aggregate(after[number], some)
        return after

    # -- the clients ---------------------------------------------------------------------------------------------
    @property
    def exchanges(self) -> int:
        """How often `prepare` and `absorb` take turns before a client's first round, if there is a `prepare`."""
        return 1

    def prepare(self, broadcast: Tree, cohort: Cohort) -> Update | None:
        """Do a light exchange with each client before its first round; None if there is none."""
        return None

    def absorb(self, server: Tree, replies: Replies) -> Tree:
        """Return the state after some clients' `prepare`: those of the first round, then those who come later."""
        return server

    def local(self, broadcast: Tree, cohort: Cohort) -> Update:
        """Do the work of a cohort's clients in a round."""
        raise NotImplementedError(f"{type(self).__name__} must define local().")

    def last_broadcast(self, server: Tree) -> Tree:
        """Return what every client receives after the last round for `finish`; None if it needs nothing more."""
        return None

    def state_for(self, server: Tree, ids: NDArray[np.int64]) -> Tree:
        """Return the state that is sent where these clients are, to finish and to make their models from.

        By default it is the whole state. Where that holds something of each client, leave out what is others': zeros
        may stand for it, and clients keep their numbers.
        """
        return server

    def finish(self, server: Tree, cohort: Cohort) -> Tree:
        """Do a last local step, without upload, after the last round; return what the clients keep."""
        return None

    # -- the models that come out --------------------------------------------------------------------------------
    def personalize(self, server: Tree, cohort: Cohort) -> Deployed:
        """Return what each client would deploy: by default the model for everybody, or the server's state itself."""
        shared = self.shared(server)
        model: Deployed = server if shared is None else shared
        return model

    def shared(self, server: Tree) -> Params | Predictor | None:
        """Return the model for everybody, if the method has one: the server's state where that is a whole model."""
        whole = isinstance(server, Params) and server.layout is not None and len(server) == len(server.layout.kinds)
        return server if whole else None

    def mixing(self, server: Tree) -> Tensor | None:
        """Return who learns from whom: row k has every client's weight in client k's mix; None if nobody has one."""
        return None

    def found_clusters(self, server: Tree) -> Clusters | None:
        """Return the clusters of clients, if the method finds some."""
        return None

    def joined(self, server: Tree, cohort: Cohort) -> Tensor:
        """Return the number of the cluster that each of these new clients would join, if the method finds clusters."""
        raise NotImplementedError(f"{type(self).__name__} must define joined(), because it finds clusters.")

    def welcome(self, server: Tree, cohort: Cohort) -> Deployed:
        """Return the model of clients that the server has never seen before."""
        return self.personalize(server, cohort)

    def tune_newcomer(self, given: Stack, model: Stack, cohort: Cohort, *, epochs: int, stream: str) -> Stack | None:
        """Train new clients' `model` for more epochs on their own samples; `given` is what `welcome` returned.

        Return None for plain SGD on the batches of `stream`.
        """
        return None
