"""The parts of all partitions: the protocol, and small functions on labels, owners and sizes."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.errors import PartitionError

Labels = NDArray[Any]
Indices = NDArray[np.int64]
Reads = Literal["labels", "owners"]

MAX_TRIES = 100  # draws before a partition that needs a minimum gives up
LEAST = 2  # samples of an owner who is a client: one to train on, one to test


class Partition(Protocol):
    """A rule that deals samples to clients."""

    @property
    def reads(self) -> Reads:
        """The fact of every sample that `split` reads: its label, or the number of its owner."""
        ...

    @property
    def exact(self) -> bool:
        """Whether every sample is dealt, and to one client only."""
        ...

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        ...


class OfLabels:
    """Facts of most partitions: they read labels, and deal every sample once."""

    reads: ClassVar[Reads] = "labels"
    exact: ClassVar[bool] = True


def group_by_class(partition: Partition, labels: Labels) -> list[Indices]:
    """Return the samples of each class, classes in order."""
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise PartitionError(
            f"{partition} must have one class per sample to deal by. "
            f"Got targets of type {labels.dtype} and shape {labels.shape}.",
            hint="use iid, quantity, powerlaw, lognormal or natural.",
        )
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def group_by_owner(owner: Indices, clients: int) -> list[Indices]:
    """Return the samples of each client, ascending, from the client of each sample."""
    sizes = np.bincount(owner, minlength=clients)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def whole_counts(shares: NDArray[np.float64], total: int) -> Indices:
    """Return whole numbers close to these shares of `total`, which they sum to."""
    cuts = np.rint(np.cumsum(shares[:-1]) * total).astype(np.int64)
    return np.diff(cuts, prepend=0, append=total)


def older_generator(seed: int | None, rng: np.random.Generator) -> "np.random.RandomState":
    """Return NumPy's older generator, which drew published partitions; a local one, not the global."""
    return np.random.RandomState(int(rng.integers(2**32)) if seed is None else seed)


def redraw(
    partition: Any, labels: Labels, clients: int, draw: Callable[[], list[Indices]], hint: str, tries: int = MAX_TRIES
) -> list[Indices]:
    """Return the first draw that leaves every client `min_samples`."""
    most = 0
    for _ in range(tries):
        parts = draw()
        smallest = min((len(part) for part in parts), default=-1)  # no parts: a draw that cannot be used
        if smallest >= partition.min_samples:
            return parts
        most = max(most, smallest)
    raise PartitionError(
        f"{partition} must leave each of {clients} clients at least {partition.min_samples} "
        f"of {len(labels)} samples. In {tries} draws the smallest client never had more than {most}.",
        hint=hint,
    )


def require(partition: Any, field: str, holds: bool, expected: str, hint: str | None = None) -> None:
    """Raise unless the field holds what is expected."""
    if not holds:
        name, given = type(partition).__name__, getattr(partition, field)
        raise PartitionError(f"`{field}` of {name} must be {expected}. Got {given!r} instead.", hint=hint)


def require_positive(partition: Any, field: str, hint: str) -> None:
    """Raise unless the field is a positive number."""
    value = getattr(partition, field)
    require(partition, field, math.isfinite(value) and value > 0, "a float in (0, inf)", hint)


def require_alpha(partition: Any) -> None:
    """Raise unless `alpha` is a positive number."""
    require_positive(partition, "alpha", "0.1 gives each client few classes, 100 is close to iid.")


def require_min_samples(partition: Any) -> None:
    """Raise unless `min_samples` is not negative."""
    require(partition, "min_samples", partition.min_samples >= 0, "at least 0")


def require_seed(partition: Any) -> None:
    """Raise unless `seed` is one of NumPy's older generator, or None."""
    seed = partition.seed
    require(partition, "seed", seed is None or 0 <= seed < 2**32, "an int in 0 .. 2^32 - 1, or None")


def require_clients(clients: int | None) -> int:
    """Return the number of clients; raise unless there is at least one."""
    if clients is None or clients < 1:
        raise PartitionError(f"A partition needs at least 1 client. Got {clients} instead.")
    return clients


def require_enough(partition: Any, labels: Labels, clients: int | None, least: int | None = None) -> int:
    """Return the number of clients; raise unless there are enough samples for so many."""
    clients = require_clients(clients)
    least = partition.min_samples if least is None else least
    if clients * least > len(labels):
        raise PartitionError(
            f"{partition} must leave each of {clients} clients at least {least} samples, "
            f"{clients * least} in all. Got {len(labels)}.",
            hint="ask for fewer clients or lower `min_samples`.",
        )
    return clients
