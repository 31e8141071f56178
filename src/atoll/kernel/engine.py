"""What a runtime must offer, as protocols: an engine, a host of clients, their memory, a place for the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.errors import EngineError, describe_given
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.task import Facts

if TYPE_CHECKING:
    from atoll.kernel.cohort import Cohort, Step
    from atoll.kernel.job import Done, Job, Lost


class Host(Protocol):
    """Where some clients run: their samples, what they keep, and the scans and maps of a cohort.

    A cohort holds it for its own verbs; methods have no use for it.
    """

    @property
    def passes(self) -> int:
        """How often clients have gone over their training data to train: epochs times the gradients of a step."""
        ...

    @property
    def measures(self) -> bool:
        """Whether this work is only tried, to measure how long it takes."""
        ...

    @property
    def readable(self) -> frozenset[str]:
        """The splits that can be read, and `labels` if targets can: the job decides."""
        ...

    def without(self, parts: frozenset[str]) -> Host:
        """Return the same place with less to read."""
        ...

    def sizes(self, clients: NDArray[np.int64], split: str) -> NDArray[np.int64]:
        """Return how many samples these clients have in a split that can be read."""
        ...

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Return what these clients kept before a round, stacked; see `Memory.recall`."""
        ...

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Return whether each of these clients kept anything before a round."""
        ...

    def beside(self, name: str) -> Host:
        """Return the same place with another memory: that of a piece."""
        ...

    def scan(
        self,
        cohort: Cohort,
        step: Step,
        carry: Tree,
        given: Tree,
        *,
        epochs: int,
        split: str,
        stream: str | tuple[str, ...],
        batch_size: int,
        shuffle: bool,
        train: bool,
        draws: bool = False,
        exact: bool = False,
    ) -> Tree:
        """Fold a step over each client's batches; see `Cohort.scan`."""
        ...

    def map(self, cohort: Cohort, function: Callable[..., Any], values: tuple[Tree, ...]) -> Tree:
        """Apply a function to each client's values; see `Cohort.map`."""
        ...


class Memory(Protocol):
    """Keeps one tree per client."""

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Return what these clients kept before a round, stacked; rows of `default` for those that kept nothing."""
        ...

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Return whether each of these clients kept anything before a round."""
        ...

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Remember the rows of a stacked tree, one per client."""
        ...

    def save(self, *, round: int, changes: bool = False) -> Tree:
        """Return what a checkpoint after `round` rounds must hold; None for a memory that is on disk already.

        With `changes` it is what clients kept since changes were last saved, None if nobody did. Once most of what was
        saved so is superseded, it is everything, and says so: `saved["whole"]`.
        """
        ...

    def load(self, saved: Sequence[Tree], *, round: int) -> None:
        """Return to the state after `round` rounds: what was saved then, or changes, the oldest first."""
        ...

    def holders(self, *, before: int) -> int | None:
        """Count the clients that hold something on disk from before a round; None where checkpoints hold the memory."""
        ...

    def prune(self, *, round: int) -> None:
        """Forget what no checkpoint at or after `round` rounds can need."""
        ...

    def beside(self, name: str) -> Memory:
        """Return a second memory, that of a piece, which is saved, loaded and pruned with this one."""
        ...


class Workbench(Protocol):
    """The server's place to work in one round; methods find it in `replies.workbench`."""

    @property
    def task(self) -> Facts:
        """What everybody may know of the task."""
        ...

    @property
    def round(self) -> int:
        """The round that this is for."""
        ...

    @property
    def network(self) -> Network:
        """The clients' network."""
        ...

    @property
    def public(self) -> tuple[Tensor, Tensor]:
        """Samples that everybody may see, with targets that a method need not look at."""
        ...

    @property
    def variant(self) -> Variant:
        """How a network runs that answers here."""
        ...

    def of_architecture(self, number: int) -> Workbench:
        """Return the same with the network of one architecture."""
        ...

    def with_network(self, network: Network) -> Workbench:
        """Return the same where models are those of another network."""
        ...

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's draws for a purpose, in this round."""
        ...

    def answers(self, models: Params | Stack, x: Tensor, *, features: bool = False) -> Tensor:
        """Return what a model answers to samples, [n, ...], or what each of several answers, [model, n, ...]."""
        ...

    def batch(self, x: Tensor) -> Batch:
        """Return samples without targets as a batch, for the rule by which a predictor answers."""
        ...

    def score(self, model: Params, x: Tensor, y: Tensor) -> float:
        """Return how good a model is on samples of the server, more being better."""
        ...

    def cohort(
        self,
        x: Tensor,
        y: Tensor,
        *,
        network: Network | None = None,
        batch_size: int | None = None,
        first: int | None = None,
        augmented: bool = True,
    ) -> Cohort:
        """Return a cohort of one that holds these samples, for `sgd` and `scan`."""
        ...


class Population(Protocol):
    """All clients of a federation, as a runtime holds them; a method never sees it."""

    @property
    def facts(self) -> Facts:
        """What everybody may know of the task."""
        ...

    @property
    def memory(self) -> Memory:
        """What clients keep."""
        ...


class Engine(Protocol):
    """Runs jobs on the clients of a population: in this process, on a cluster, on devices."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What was asked for, as it is written into a run's configuration."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the server's tensors live."""
        ...

    @property
    def secret(self) -> bytes | None:
        """What noise is drawn from that protects real clients; None in a simulation: it follows from the seed."""
        ...

    @property
    def is_dear(self) -> bool:
        """Whether every round is worth a checkpoint, because it cannot be played again as one likes."""
        ...

    def run(self, job: Job, population: Any) -> Iterator[Done[Any] | Lost]:
        """Do a job; yield what becomes of every client, some at a time, in an order that clients alone decide."""
        ...

    def clock(self) -> float:
        """Return seconds, to time a round: those of one run, where several share the engine."""
        ...

    def place(self, task: Any) -> Any:
        """Return a task with its tensors where this engine computes."""
        ...

    def bench(self, population: Any, round: int) -> Workbench:
        """Return the server's place to work in a round."""
        ...

    def export_plans(self, method: Hashable, facts: Facts) -> list[Tree]:
        """Return how a method's jobs run here: a run that is resumed must go on so to get the same bits."""
        ...

    def import_plans(self, plans: list[Tree], method: Hashable, facts: Facts) -> None:
        """Take over what `export_plans` gave, unless something else is forced now."""
        ...


@runtime_checkable
class Spreading(Protocol):
    """An engine with workers, each of which can have a whole run of its own."""

    def spread(
        self, errand: Callable[..., Iterator[Any]], items: Sequence[Any], stop: threading.Event
    ) -> Iterator[tuple[int, Any]]:
        """Send workers on an errand with each of some items; yield what it yields, with the item's number."""
        ...


def require_engine(given: Engine | None) -> None:
    """Raise EngineError for what is no engine, such as the name of a strategy."""
    if given is not None and not hasattr(given, "place"):
        hint = f"LocalEngine(strategy={given!r})" if isinstance(given, str) else "leave it out for LocalEngine()"
        raise EngineError(f"`engine` must be an engine. Got {describe_given(given)}.", hint=f"{hint}.")
