"""What a runtime must offer, as protocols: where scans run, what clients keep, and where a server works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, Stack, Tree

if TYPE_CHECKING:
    from atoll.kernel.cohort import Cohort, Population, Step


class Tally(Protocol):
    """What a scanner has done."""

    gradients: int  # of one batch of one client each
    passes: int  # over each client's training data, to train: epochs times the gradients of a step


class Scanner(Protocol):
    """Runs the scans and maps of a cohort."""

    limit: int | None  # steps after which every scan is cut short, to measure a plan

    @property
    def tally(self) -> Tally:
        """What has been done so far."""
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
        """What these clients kept before a round, stacked; rows of `default` for those that kept nothing."""
        ...

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Whether each of these clients kept anything before a round."""
        ...

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Remember the rows of a stacked tree, one per client."""
        ...

    def save(self, *, round: int) -> Tree:
        """What a checkpoint after `round` rounds must hold; a memory that is on disk already returns None."""
        ...

    def load(self, saved: Tree, *, round: int) -> None:
        """Return to the state after `round` rounds."""
        ...

    def holders(self, *, before: int) -> int | None:
        """How many clients hold something on disk from before a round; None for a memory that checkpoints hold."""
        ...

    def prune(self, *, round: int) -> None:
        """Forget what no checkpoint at or after `round` rounds can need."""
        ...

    def beside(self, name: str) -> Memory:
        """A memory apart, which is saved, loaded and pruned with this one: that of a piece."""
        ...


class Workbench(Protocol):
    """The server's place to work in one round; methods find it in `replies.workbench`."""

    @property
    def population(self) -> Population:
        """All clients, as the runtime holds them."""
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
