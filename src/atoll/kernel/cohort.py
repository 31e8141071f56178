"""A `Cohort` is some clients that train together: their ids, their data, their memory, and three verbs.

    scan     fold a pure step over every client's batches
    map      apply a pure function to every client's values
    recall   what the clients kept last time

The author of a method writes a step for ONE client and ONE batch. Whether the cohort is one vectorised batch, a
chunk of one, or a single client on its own device is decided outside; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import CohortError, LabelsNeeded
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack, Tree, flatten, rows_of, spread, stacked_leaves
from atoll.kernel.task import Task, Training

if TYPE_CHECKING:
    from atoll.kernel.engine import Memory, Scanner

Step = Callable[[Any, Any, Any], Any]  # (carry, Batch or a tuple of them, given) -> carry


class Population(Protocol):
    """All clients, as a runtime holds them: the task on its device, what clients keep, and the seed."""

    @property
    def task(self) -> Task:
        """The task, where it is computed."""
        ...

    @property
    def memory(self) -> Memory:
        """What clients keep."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all draws."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the data live."""
        ...

    def with_memory(self, memory: Memory) -> Population:
        """Return the same clients with another memory."""
        ...

    def with_network(self, network: Network) -> Population:
        """Return the same clients with another network of the same leaves."""
        ...


@dataclass(frozen=True, eq=False)
class Cohort:
    """The clients `ids` of a population in one round, with access to the named splits only."""

    population: Population
    clients: NDArray[np.int64]
    round: int
    scanner: Scanner
    received: Tree = None  # what `Algorithm.unicast` sent to each of these clients, stacked
    splits: frozenset[str] = frozenset({"train", "val"})
    changes: tuple[Any, ...] = ()  # what pieces change in every call of `sgd`
    labelled: bool = True  # whether targets may be read: new clients may have samples only
    begun: Params | None = None  # the model that stands for the initial one, if not the network's
    exact: bool = False  # whether all that is not training is computed in fp32, whatever the precision
    notes: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def ids(self) -> Tensor:
        """The clients' numbers in the population."""
        return torch.from_numpy(self.clients).to(self.population.device)

    @property
    def samples(self) -> Tensor:
        """How many training samples each client has."""
        sizes = self.population.task.splits["train"].sizes(self.clients)
        return torch.from_numpy(sizes).to(self.population.device, self.initial_dtype)

    def weights(self, weighting: str = "samples") -> Tensor:
        """How much each client counts in a mean: its training samples, or 1."""
        return torch.ones_like(self.samples) if weighting == "uniform" else self.samples

    def steps(self, epochs: int) -> Tensor:
        """How many batches each client sees in so many passes over its training data."""
        return (self.samples / self.training.batch_size).ceil() * epochs

    @property
    def passes(self) -> int:
        """How often these clients have gone over their training data to train so far, at one gradient per batch."""
        return self.scanner.tally.passes

    @property
    def initial(self) -> Params:
        """The model's initial parameters, which every client can make itself from the seed."""
        return self.population.task.network.initial if self.begun is None else self.begun

    def with_network(self, network: Network) -> Cohort:
        """Return the same clients with another network of the same leaves."""
        return replace(self, population=self.population.with_network(network))

    def starting_from(self, model: Params) -> Cohort:
        """The same clients, to whom another model is the initial one: what a cluster has learned, for example."""
        return replace(self, begun=model)

    def only(self, positions: NDArray[np.int64]) -> Cohort:
        """The clients at these positions, with notes of their own."""
        received = rows_of(self.received, torch.from_numpy(positions).to(self.population.device))
        return replace(self, clients=self.clients[positions], received=received, notes={})

    @property
    def initial_dtype(self) -> torch.dtype:
        """The floating point type of the model and the data."""
        leaves = [self.population.task.x, *self.initial.values()]
        return next((leaf.dtype for leaf in leaves if leaf.is_floating_point()), torch.get_default_dtype())

    @property
    def training(self) -> Training:
        """Step size, batch size and the like."""
        return self.population.task.training

    @property
    def lr(self) -> Tensor:
        """The step size of this round."""
        return torch.tensor(self.training.lr_in(self.round), dtype=self.initial_dtype, device=self.population.device)

    def scan(
        self,
        step: Step,
        carry: Tree,
        *,
        given: Tree = None,
        epochs: int = 1,
        split: str = "train",
        stream: str | tuple[str, ...] = "main",
        batch_size: int | None = None,
        shuffle: bool = True,
        train: bool = True,
        draws: bool = False,
        labels: bool = True,
        exact: bool = False,
    ) -> Tree:
        """Fold `step(carry, batch, given) -> carry` over each client's batches; returns the carry, stacked.

        `step` is a pure function of one client and one batch: it sees a Stack as this client's Params. What
        differs between clients is passed in `carry` or `given`, never captured from outside. The order of the
        batches depends on (seed, client, round, stream, epoch) only. With several streams, `step` gets a tuple: one
        batch of each, drawn independently. `train=False` evaluates: BatchNorm uses its running statistics and
        dropout is off. With `draws`, a step may draw: `batch.normal("noise", 10)`. A step that reads no targets says
        so by `labels=False`: then it works for clients without labels, too. What equations are made of and answers
        are computed from, such as sums of features, is scanned `exact`: in fp32, whatever the precision of training.
        """
        if labels and not self.labelled and split != "test":
            raise LabelsNeeded("This step reads targets. These clients have samples without them.")
        if split not in self.splits:
            raise CohortError(
                f"Only {', '.join(sorted(self.splits))} may be read here. Got split={split!r}.",
                hint="test data are for evaluation; select on `val`.",
            )
        if epochs < 0:
            raise CohortError(f"`epochs` must be at least 0. Got {epochs!r}.")
        return self.scanner.scan(
            self,
            step,
            self.stacked(carry),
            self._mine(given),
            epochs=epochs,
            split=split,
            stream=stream,
            batch_size=batch_size or self.training.batch_size,
            shuffle=shuffle,
            train=train,
            draws=draws,
            exact=exact or (self.exact and not train),
        )

    def map(self, function: Callable[..., Any], *values: Tree) -> Tree:
        """`function` of every client's values: a Stack in `values` is this client's Params inside.

        Params that the function returns come back as a Stack, tensors with a leading client axis.
        """
        return self.scanner.map(self, function, self._mine(values))

    @overload
    def recall(self, default: Params | Stack) -> Stack: ...
    @overload
    def recall(self, default: dict[str, Any]) -> dict[str, Any]: ...
    def recall(self, default: Tree) -> Tree:
        """What the clients kept last time, stacked; `default` for clients that have kept nothing yet."""
        return self.population.memory.recall(self.clients, self.stacked(default), before=self.round)

    @property
    def has_kept(self) -> Tensor:
        """Whether each client has kept anything yet, in an earlier round."""
        return torch.from_numpy(self.population.memory.holds(self.clients, before=self.round)).to(
            self.population.device
        )

    def beside(self, name: str) -> Cohort:
        """The same clients with another memory, for what a piece returns in `Update(beside={name: ...})`."""
        memory = self.population.memory.beside(name)
        return replace(self, population=self.population.with_memory(memory))

    def observe(self, **values: Tensor) -> None:
        """Record one number per client, such as its training loss, for the log of the simulation.

        A name that is used again is numbered: `loss/main`, `loss/main-2`. Names that begin with `loss/` are averaged
        over clients; all others are written client by client.
        """
        for name, value in values.items():
            times = 1 + sum(one == name or one.startswith(f"{name}-") for one in self.notes)
            self.notes[name if times == 1 else f"{name}-{times}"] = value

    def _mine(self, tree: Tree) -> Tree:
        """The same tree, if every Stack in it belongs to this cohort."""
        leaves, structure = flatten(tree)
        for leaf, row in zip(leaves, stacked_leaves(structure), strict=True):
            if row and len(leaf) != len(self):
                raise CohortError(f"A Stack must have one row per client, {len(self)}. Got {len(leaf)}.")
        return tree

    def _placed(self, loose: Params) -> Params:
        """Values that belong to no model, such as `Params.of(loss=0.0)`, where the data are and of their type."""
        device, dtype = self.population.device, self.initial_dtype
        return loose.map(lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else None))

    @overload
    def stacked(self, tree: Params | Stack) -> Stack: ...
    @overload
    def stacked(self, tree: Tree) -> Tree: ...
    def stacked(self, tree: Tree) -> Tree:
        """The same tree with every Params spread to one per client."""
        match tree:
            case Params():
                return spread(tree if tree.layout is not None else self._placed(tree), len(self))
            case Stack() if tree.clients != len(self) and len(tree):
                raise CohortError(f"A Stack must have one row per client, {len(self)}. Got {tree.clients}.")
            case Stack() | None:
                return tree
            case Mapping():
                return {name: self.stacked(part) for name, part in tree.items()}
            case list() | tuple():
                return type(tree)(self.stacked(part) for part in tree)
            case Tensor() | int() | float():
                raise CohortError(
                    "A value that every client has its own of must be Params or Stack. Got a bare "
                    f"{type(tree).__name__}.",
                    hint="name it: Params.of(loss=0.0).",
                )
        flatten(tree)  # raises with what is allowed
        return tree
