"""Dealing the samples of one data set to clients: disjoint, and every sample is used once."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.errors import PartitionError, unknown

Labels = NDArray[np.integer[Any]]
Indices = NDArray[np.int64]


class Partition(Protocol):
    """A rule that deals samples to clients."""

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        ...


@dataclass(frozen=True)
class Iid:
    """Every client draws from the same distribution; sizes differ by at most one."""

    min_samples: int = 2

    def __post_init__(self) -> None:
        _require_min_samples(self)

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        _require_enough(self, labels, clients, self.min_samples)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: each class is dealt to the clients in proportions p ~ Dir(alpha, ..., alpha).

    The draw is repeated until every client has `min_samples`, at most `max_tries` times. With `balanced`, a
    client that already holds its fair share, samples / clients, takes nothing of the classes that follow: the
    rule of Li et al. (ICDE 2022) and of PFLlib, which brings sizes closer together.
    """

    alpha: float
    min_samples: int = 10
    balanced: bool = False
    max_tries: int = 100

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise PartitionError(
                f"`alpha` of Dirichlet must be a float in (0, inf). Got {self.alpha!r} instead.",
                hint="0.1 gives each client few classes, 100 is close to iid.",
            )
        _require_min_samples(self)
        if self.max_tries < 1:
            raise PartitionError(f"`max_tries` of Dirichlet must be at least 1. Got {self.max_tries!r} instead.")

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        _require_enough(self, labels, clients, self.min_samples)
        most = 0
        for _ in range(self.max_tries):
            parts = self._draw(labels, clients, rng)
            smallest = min(len(part) for part in parts)
            if smallest >= self.min_samples:
                return parts
            most = max(most, smallest)
        raise PartitionError(
            f"{self} must leave each of {clients} clients at least {self.min_samples} "
            f"of {len(labels)} samples. "
            f"In {self.max_tries} draws the smallest client never had more than {most}.",
            hint="raise `alpha`, ask for fewer clients, lower `min_samples`, or pass `balanced=True`.",
        )

    def _draw(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            p = rng.dirichlet(np.full(clients, self.alpha))
            if self.balanced:
                hungry = sizes < len(labels) / clients
                p = p * hungry
                # A tiny alpha can put all of its mass on clients that are full: deal evenly among the others.
                p = p / p.sum() if p.sum() > 0 else hungry / hungry.sum()
            cuts = np.rint(np.cumsum(p[:-1]) * len(members)).astype(np.int64)
            counts = np.diff(cuts, prepend=0, append=len(members))
            owner[members] = np.repeat(np.arange(clients), counts)
            sizes += counts
        return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def names() -> list[str]:
    """The partitions `parse` knows, as one writes them."""
    return ["iid", "dirichlet:ALPHA"]


def parse(text: str) -> Partition:
    """The partition written as `iid` or `dirichlet:ALPHA`.

    >>> parse("dirichlet:0.1")
    Dirichlet(alpha=0.1, min_samples=10, balanced=False, max_tries=100)
    """
    name, colon, argument = text.strip().partition(":")
    match name:
        case "iid":
            if colon:
                raise PartitionError(f"`iid` must be written without a value. Got {text!r} instead.")
            return Iid()
        case "dirichlet":
            try:
                alpha = float(argument)
            except ValueError:
                raise PartitionError(
                    f"`dirichlet` must be followed by its alpha, a float in (0, inf). Got {text!r} instead.",
                    hint="write for example dirichlet:0.1.",
                ) from None
            return Dirichlet(alpha)
        case _:
            raise unknown("partition", name, ["iid", "dirichlet"])


def _require_min_samples(partition: Iid | Dirichlet) -> None:
    if partition.min_samples < 0:
        name, given = type(partition).__name__, partition.min_samples
        raise PartitionError(f"`min_samples` of {name} must be at least 0. Got {given!r} instead.")


def _require_enough(partition: Partition, labels: Labels, clients: int, min_samples: int) -> None:
    if clients < 1:
        raise PartitionError(f"A partition needs at least 1 client. Got {clients} instead.")
    if clients * min_samples > len(labels):
        raise PartitionError(
            f"{partition} must leave each of {clients} clients at least {min_samples} samples, "
            f"{clients * min_samples} in all. Got {len(labels)}.",
            hint="ask for fewer clients or lower `min_samples`.",
        )
