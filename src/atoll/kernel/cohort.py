"""A `Cohort` is some clients that train together: their ids, their data, their memory, and three verbs.

    scan     fold a pure step over every client's batches
    map      apply a pure function to every client's values
    recall   return what the clients kept last time

The author of a method writes a step for ONE client and ONE batch. Whether the cohort is one vectorised batch, a
chunk of one, or a single client on its own device is decided outside; the numbers are the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import CohortError, LabelsNeeded, UncoveredRead
from atoll.kernel.network import Network
from atoll.kernel.params import Params, Stack, Tree, flatten, rows_of, spread, stacked_leaves
from atoll.kernel.record import is_record, parts_of
from atoll.kernel.task import Facts, Training

if TYPE_CHECKING:
    from atoll.kernel.engine import Host

log = logging.getLogger("atoll.clients")

T = TypeVar("T")  # a record, or a dict of trees
Step = Callable[[Any, Any, Any], Any]  # (carry, Batch or a tuple of them, given) -> carry


NARROWEST = 4  # samples


def width_for(samples: int) -> int:
    """Return the next power of two: messages of about one length, and few lengths in all."""
    return max(NARROWEST, 1 << max(samples - 1, 0).bit_length())


def even_batch(samples: int, most: int) -> int:
    """Return the size of batches, at most so large, that so many samples fill evenly: the last is not half empty."""
    batches = -(-samples // most)
    return max(1, -(-samples // max(1, batches)))


@dataclass(frozen=True, eq=False)
class Cohort:
    """Some clients in one round, with what they have: their samples, what they kept, and what they received.

    What can be read of them is decided where they run. Nothing leads from here to other clients.
    """

    task: Facts
    clients: NDArray[np.int64]
    round: int
    _host: Host  # where they run
    received: Tree = None  # what `Algorithm.unicast` sent to each of these clients, stacked
    changes: tuple[Any, ...] = ()  # what pieces change in every call of `sgd`
    begun: Params | None = None  # the model that stands for the initial one, if not the network's
    work: NDArray[np.float64] | None = (
        None  # the share of its steps that each client takes in every training; None: all
    )
    exact: bool = False  # whether all that is not training is computed in fp32, whatever the precision
    guarded: bool = False  # whether samples may be read only where their privacy is covered
    notes: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def ids(self) -> Tensor:
        """The clients' numbers."""
        return torch.from_numpy(self.clients).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the clients' values live."""
        return self.task.sample.device

    @property
    def splits(self) -> frozenset[str]:
        """The splits that can be read."""
        return self._host.readable - {"labels"}

    @property
    def labelled(self) -> bool:
        """Whether targets can be read: new clients may have samples only."""
        return "labels" in self._host.readable

    @property
    def covered(self) -> Cohort:
        """The same clients for work that bounds and hides what one sample changes: private steps and releases."""
        return replace(self, guarded=False)

    def without(self, *parts: str) -> Cohort:
        """Return the same clients with less to read: without a split, or without `labels`."""
        return replace(self, _host=self._host.without(frozenset(parts)))

    @property
    def samples(self) -> Tensor:
        """How many training samples each client has."""
        sizes = self._host.sizes(self.clients, "train")
        return torch.from_numpy(sizes).to(self.device, self.initial_dtype)

    @property
    def width(self) -> int:
        """Room for the training samples of any of these clients: a power of two."""
        return width_for(int(self._host.sizes(self.clients, "train").max(initial=0)))

    def has_samples(self, split: str) -> Tensor:
        """Return whether each client has any samples in a split."""
        return torch.from_numpy(self._host.sizes(self.clients, split) > 0).to(self.device)

    def weights(self, weighting: str = "samples") -> Tensor:
        """Return how much each client counts in a mean: its training samples, its batches in an epoch, or 1."""
        if weighting == "batches":
            return (self.samples / self.training.batch_size).ceil()
        return torch.ones_like(self.samples) if weighting == "uniform" else self.samples

    def steps(self, epochs: int) -> Tensor:
        """Count the batches that each client sees in so many passes over its training data, as far as it gets."""
        steps = (self.samples / self.training.batch_size).ceil() * epochs
        return steps if self.work is None else torch.from_numpy(cut_short(steps.cpu().numpy(), self.work)).to(steps)

    @property
    def passes(self) -> int:
        """How often these clients have gone over their training data to train so far, at one gradient per batch."""
        return self._host.passes

    @property
    def initial(self) -> Params:
        """The model's initial parameters, which every client can make itself from the seed."""
        return self.task.network.initial if self.begun is None else self.begun

    def with_network(self, network: Network) -> Cohort:
        """Return the same clients with another network of the same leaves."""
        return replace(self, task=self.task.with_network(network))

    def starting_from(self, model: Params) -> Cohort:
        """Return the same clients with another initial model, for example what a cluster has learned."""
        return replace(self, begun=model)

    def at_own_speed(self) -> Cohort:
        """Return the same clients, each of which takes as many steps as its device can."""
        return self if self.task.speed is None else replace(self, work=self.task.speed[self.clients])

    def only(self, positions: NDArray[np.int64]) -> Cohort:
        """Return the clients at these positions, with notes of their own."""
        received = rows_of(self.received, torch.from_numpy(positions).to(self.device))
        work = None if self.work is None else self.work[positions]
        return replace(self, clients=self.clients[positions], received=received, work=work, notes={})

    @property
    def initial_dtype(self) -> torch.dtype:
        """The floating point type of the model and the data."""
        leaves = [self.task.sample, *self.initial.values()]
        return next((leaf.dtype for leaf in leaves if leaf.is_floating_point()), torch.get_default_dtype())

    @property
    def training(self) -> Training:
        """Step size, batch size and the like."""
        return self.task.training

    @property
    def lr(self) -> Tensor:
        """The step size of this round."""
        return torch.tensor(self.training.lr_in(self.round), dtype=self.initial_dtype, device=self.device)

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
        so by `labels=False`: then it works for clients without labels, too. Sums that equations or answers are
        computed from, such as sums of features, are scanned `exact`: in fp32, whatever the precision of training.
        Under sample-level privacy only `sgd` and `release` may scan.
        """
        if labels and not self.labelled:
            raise LabelsNeeded("This step reads targets. These clients have samples without them.")
        if self.guarded:
            raise UncoveredRead(split)
        if epochs < 0:
            raise CohortError(f"`epochs` must be at least 0. Got {epochs!r}.")
        return self._host.scan(
            self,
            step if labels else functools.partial(_hide_targets, step),
            self.stacked(carry),
            self._check_rows(given),
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
        """Apply `function` to every client's values: a Stack in `values` is this client's Params inside.

        Params that the function returns come back as a Stack, tensors with a leading client axis.
        """
        return self._host.map(self, function, self._check_rows(values))

    @overload
    def recall(self, default: Params | Stack) -> Stack: ...
    @overload
    def recall(self, default: T) -> T: ...
    def recall(self, default: Tree) -> Tree:
        """Return what the clients kept last time, stacked; `default` for clients that have kept nothing yet."""
        return self._host.recall(self.clients, self.stacked(default), before=self.round)

    @property
    def has_kept(self) -> Tensor:
        """Whether each client has kept anything yet, in an earlier round."""
        return torch.from_numpy(self._host.holds(self.clients, before=self.round)).to(self.device)

    def beside(self, name: str) -> Cohort:
        """Return the same clients with another memory, for what a piece returns in `Update(beside={name: ...})`."""
        return replace(self, _host=self._host.beside(name))

    def observe(self, **values: Tensor) -> None:
        """Record one number per client, such as its training loss, for the log of the simulation.

        A name that is used again is numbered: `loss/main`, `loss/main-2`. Names that begin with `loss/` are averaged
        over clients; all others are written client by client.
        """
        for name, value in values.items():
            times = 1 + sum(one == name or one.startswith(f"{name}-") for one in self.notes)
            self.notes[name if times == 1 else f"{name}-{times}"] = value

    def warn(self, message: str) -> None:
        """Write a warning to the log."""
        if not self._host.measures:  # work that is only tried would warn twice
            log.warning(message)

    def _check_rows(self, tree: Tree) -> Tree:
        """Return the tree; raise unless every Stack in it belongs to this cohort."""
        leaves, structure = flatten(tree)
        for leaf, row in zip(leaves, stacked_leaves(structure), strict=True):
            if row and (leaf.ndim == 0 or len(leaf) != len(self)):
                rows = len(leaf) if leaf.ndim else "a single number"
                raise CohortError(f"A Stack must have one row per client, {len(self)}. Got {rows}.")
        return tree

    def _place(self, loose: Params) -> Params:
        """Move values that belong to no model, such as `Params.of(loss=0.0)`, to the device and type of the data."""
        device, dtype = self.device, self.initial_dtype
        return loose.map(lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else None))

    @overload
    def stacked(self, tree: Params | Stack) -> Stack: ...
    @overload
    def stacked(self, tree: Tree) -> Tree: ...
    def stacked(self, tree: Tree) -> Tree:
        """Return the same tree with every Params spread to one per client."""
        match tree:
            case Params():
                return spread(tree if tree.layout is not None else self._place(tree), len(self))
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
                    "A value that differs from client to client must be Params or Stack. Got a bare "
                    f"{type(tree).__name__}.",
                    hint="name it: Params.of(loss=0.0), or make it a field of a record: `loss: Each`.",
                )
            case _ if is_record(tree):
                parts = parts_of(tree).items()
                return replace(tree, **{
                    name: self.each(part) if name in tree.__rows__ and isinstance(part, Tensor | int | float)
                    else self.stacked(part) for name, part in parts
                })  # fmt: skip
        flatten(tree)  # raises with what is allowed
        return tree

    def each(self, value: Tensor | float) -> Tensor:
        """Return one row per client: a single number for all of them, or rows as they are."""
        if not isinstance(value, Tensor):
            dtype = self.initial_dtype if isinstance(value, float) else None
            return torch.tensor(value, dtype=dtype, device=self.device).expand(len(self))
        if value.ndim == 0:
            placed = value.to(self.device, self.initial_dtype if value.is_floating_point() else None)
            return placed.expand(len(self))
        if len(value) != len(self):
            raise CohortError(f"A field that is `Each` must have one row per client, {len(self)}. Got {len(value)}.")
        return value


def _hide_targets(step: Step, carry: Any, batch: Any, given: Any) -> Any:
    """Do a step that says that it reads no targets."""
    return step(carry, tuple(one.unlabelled for one in batch) if isinstance(batch, tuple) else batch.unlabelled, given)


def cut_short(steps: NDArray[Any], work: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many steps a client takes that does a share of its work; a part of a step is a whole one."""
    taken: NDArray[np.int64] = np.ceil(steps * work - 1e-9).astype(np.int64)
    return taken
