"""Dealing the samples of one data set to clients: every sample is used once, unless the partition says otherwise."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.data import shift
from atoll.data.shift import Shift
from atoll.data.words import Word, read
from atoll.errors import PartitionError

Labels = NDArray[Any]
Indices = NDArray[np.int64]
Reads = Literal["labels", "owners"]

MAX_TRIES = 100  # draws before a partition that needs a minimum gives up


class Partition(Protocol):
    """A rule that deals samples to clients."""

    @property
    def reads(self) -> Reads:
        """What `split` wants to know of every sample: its label, or the number of its owner."""
        ...

    @property
    def exact(self) -> bool:
        """Whether every sample is dealt, and to one client only."""
        ...

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        ...


class _OfLabels:
    """What most partitions say: they read labels, and deal every sample once."""

    reads: ClassVar[Reads] = "labels"
    exact: ClassVar[bool] = True


@dataclass(frozen=True)
class Iid(_OfLabels):
    """Every client draws from the same distribution; sizes differ by at most one."""

    min_samples: int = 2

    def __post_init__(self) -> None:
        _require_min_samples(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_enough(self, labels, clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


# -- label skew --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dirichlet(_OfLabels):
    """Label skew: each class is dealt to the clients in proportions p ~ Dir(alpha, ..., alpha).

    The draw is repeated until every client has `min_samples`, at most `max_tries` times. With `balanced`, a
    client that already holds its fair share, samples / clients, takes nothing of the classes that follow: the
    rule of Li et al. (ICDE 2022) and of PFLlib, which brings sizes closer together.
    """

    alpha: float
    min_samples: int = 10
    balanced: bool = False
    max_tries: int = MAX_TRIES

    def __post_init__(self) -> None:
        _require_alpha(self)
        _require_min_samples(self)
        _require(self, "max_tries", self.max_tries >= 1, "at least 1")

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_enough(self, labels, clients)
        hint = "raise `alpha`, ask for fewer clients, lower `min_samples`, or pass `balanced=True`."
        return _redraw(self, labels, clients, partial(self._draw, labels, clients, rng), hint, self.max_tries)

    def _draw(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for members in map(rng.permutation, _by_class(self, labels)):
            p = rng.dirichlet(np.full(clients, self.alpha))
            if self.balanced:
                hungry = sizes < len(labels) / clients
                p = p * hungry
                # A tiny alpha can put all of its mass on clients that are full: deal evenly among the others.
                p = p / p.sum() if p.sum() > 0 else hungry / hungry.sum()
            counts = _counts(p, len(members))
            owner[members] = np.repeat(np.arange(clients), counts)
            sizes += counts
        return _parts(owner, clients)


@dataclass(frozen=True)
class PFLlib(_OfLabels):
    """PFLlib's "dir", also NIID-Bench's "noniid-labeldir": Dirichlet with a cap, draw by draw as they do it.

    Class by class: shuffle its samples; p ~ Dir(alpha, ..., alpha); p = 0 for clients that hold samples / clients
    or more; rescale; cut at int(cumsum(p) * size), the last client takes the rest; everything again until each
    client has `min_samples`. It differs from `Dirichlet(balanced=True)` in how cuts are rounded and in NumPy's
    older generator, so that `seed` gives the samples that `np.random.seed(seed)` gives there: PFLlib's scripts say
    1. Without `seed`, the partition's generator draws one. Two things are ours: the number of draws is bounded, and
    one whose p is 0 everywhere counts as failed.
    """

    alpha: float
    min_samples: int = 40  # batch size / (1 - training share) = 10 / (1 - 0.75); NIID-Bench wants 10
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_alpha(self)
        _require_min_samples(self)
        _require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_enough(self, labels, clients)
        hint = "raise `alpha`, ask for fewer clients, or lower `min_samples`."
        draw = partial(self._draw, labels, clients, _legacy(self.seed, rng))
        return _redraw(self, labels, clients, draw, hint, tries=10 * MAX_TRIES)  # PFLlib tries forever

    def _draw(self, labels: Labels, clients: int, rng: "np.random.RandomState") -> list[Indices]:  # noqa: TID251
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for members in _by_class(self, labels):
            rng.shuffle(members)
            p = rng.dirichlet(np.repeat(self.alpha, clients)) * (sizes < len(labels) / clients)
            if p.sum() == 0:
                return []
            cuts = (np.cumsum(p / p.sum()) * len(members)).astype(int)[:-1]
            counts = np.diff(cuts, prepend=0, append=len(members))
            owner[members] = np.repeat(np.arange(clients), counts)
            sizes += counts
        return _parts(owner, clients)


@dataclass(frozen=True)
class Pathological(_OfLabels):
    """PFLlib's "pat": `classes` classes per client, the samples of a class dealt in unequal shares.

    Class by class, in order: the first ceil(clients * classes / all classes) clients that still lack a class share
    it. All but the last of them take randint(n / 10, n) samples, n being the even share, and the last takes the rest;
    with `equal` they take int(n). Neighbours so have the same classes (2 of 10, 20 clients: five groups of four), and
    the last clients may have fewer than `classes`. Samples are taken in the order of the data set. `seed` as in
    `PFLlib`.
    """

    classes: int
    equal: bool = False
    min_samples: int = 2
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self, "classes", self.classes >= 1, "at least 1")
        _require_min_samples(self)
        _require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_enough(self, labels, clients)
        hint = "ask for fewer clients, pass `equal=True`, or lower `min_samples`."
        return _redraw(self, labels, clients, partial(self._draw, labels, clients, _legacy(self.seed, rng)), hint)

    def _draw(self, labels: Labels, clients: int, rng: "np.random.RandomState") -> list[Indices]:  # noqa: TID251
        owner = np.empty(len(labels), dtype=np.int64)
        lacks = np.full(clients, self.classes)
        groups = _by_class(self, labels)
        most = math.ceil(clients / len(groups) * self.classes)
        for number, members in enumerate(groups):
            chosen = np.flatnonzero(lacks > 0)[:most]
            if not 1 <= len(chosen) <= len(members):
                raise PartitionError(
                    f"{self} must deal each of {len(groups)} classes to 1 client or more, each of which gets a sample. "
                    f"Got {clients} clients: class number {number}, of {len(members)} samples, falls to {len(chosen)}.",
                    hint=f"make clients x classes per client a multiple of {len(groups)}, "
                    f"or use labels:{self.classes}.",
                )
            share = len(members) / len(chosen)
            counts = np.full(len(chosen), int(share))
            if not self.equal:
                counts[:-1] = rng.randint(int(share / 10), int(share), len(chosen) - 1)
            counts[-1] = len(members) - counts[:-1].sum()
            owner[members] = np.repeat(chosen, counts)
            lacks[chosen] -= 1
        return _parts(owner, clients)


@dataclass(frozen=True)
class LabelsEach(_OfLabels):
    """NIID-Bench's "#C = s": `classes` classes per client, the samples of a class dealt evenly to those that have it.

    Client k has class k modulo the number of classes, the others are drawn without replacement. With fewer clients
    than classes a class may fall to nobody; NIID-Bench then drops its samples, here it is drawn again.
    """

    classes: int
    min_samples: int = 2

    def __post_init__(self) -> None:
        _require(self, "classes", self.classes >= 1, "at least 1")
        _require_min_samples(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_enough(self, labels, clients)
        there = len(_by_class(self, labels))
        if self.classes > there or self.classes * clients < there:
            raise PartitionError(
                f"{self} must have between 1 and all classes per client, and enough for each class to fall to one. "
                f"Got {there} classes and {clients} clients.",
                hint="change the number of classes per client, or ask for more clients.",
            )
        hint = "ask for fewer clients, more classes per client, or lower `min_samples`."
        return _redraw(self, labels, clients, partial(self._draw, labels, clients, rng), hint)

    def _draw(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        groups = _by_class(self, labels)
        has = np.zeros((clients, len(groups)), dtype=bool)
        for client, mine in enumerate(has):
            first = client % len(groups)
            others = np.delete(np.arange(len(groups)), first)
            mine[[first, *rng.choice(others, self.classes - 1, replace=False)]] = True
        if not has.any(axis=0).all():
            return []
        owner = np.empty(len(labels), dtype=np.int64)
        for members, wants in zip(groups, has.T, strict=True):
            takers = np.flatnonzero(wants)
            for taker, part in zip(takers, np.array_split(rng.permutation(members), len(takers)), strict=True):
                owner[part] = taker
        return _parts(owner, clients)


@dataclass(frozen=True)
class Shards(_OfLabels):
    """McMahan et al. (2017): sort by label, cut into clients * `shards` equal shards, deal `shards` to each client.

    Most clients have at most `shards` classes; a shard that spans two classes brings one more.
    """

    shards: int
    min_samples: int = 2

    def __post_init__(self) -> None:
        _require(self, "shards", self.shards >= 1, "at least 1")
        _require_min_samples(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_enough(self, labels, clients, max(self.min_samples, self.shards))
        ordered = np.concatenate([rng.permutation(members) for members in _by_class(self, labels)])
        pieces = np.array_split(ordered, clients * self.shards)
        hands = rng.permutation(len(pieces)).reshape(clients, self.shards)
        return [np.sort(np.concatenate([pieces[piece] for piece in hand])) for hand in hands]


# -- quantity skew -----------------------------------------------------------------------------------------------------


class _BySize(_OfLabels, ABC):
    """Samples drawn at random, sizes by a rule: what quantity skews have in common."""

    min_samples: int

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        number = _require_enough(self, labels, clients)

        def draw() -> list[Indices]:
            weights = self._weights(number, rng)
            counts = _counts(weights / weights.sum(), len(labels))
            return _parts(rng.permutation(np.repeat(np.arange(number), counts)), number)

        return _redraw(
            self, labels, number, draw, "make the sizes more even, ask for fewer clients, or lower `min_samples`."
        )

    @abstractmethod
    def _weights(self, clients: int, rng: np.random.Generator) -> NDArray[Any]:
        """What the sizes are proportional to."""


@dataclass(frozen=True)
class Quantity(_BySize):
    """NIID-Bench's quantity skew: sizes in proportions p ~ Dir(beta, ..., beta)."""

    beta: float
    min_samples: int = 10

    def __post_init__(self) -> None:
        _require_positive(self, "beta", "0.1 makes a few clients large, 100 makes sizes nearly equal.")
        _require_min_samples(self)

    def _weights(self, clients: int, rng: np.random.Generator) -> NDArray[Any]:
        return rng.dirichlet(np.full(clients, self.beta))


@dataclass(frozen=True)
class PowerLaw(_BySize):
    """Sizes follow Zipf's law: the client of rank r, drawn at random, gets a share proportional to r^-exponent."""

    exponent: float
    min_samples: int = 2

    def __post_init__(self) -> None:
        _require_positive(self, "exponent", "1 is Zipf's law; the larger, the more the first clients have.")
        _require_min_samples(self)

    def _weights(self, clients: int, rng: np.random.Generator) -> NDArray[Any]:
        return np.exp(-self.exponent * np.log1p(rng.permutation(clients)))


@dataclass(frozen=True)
class LogNormal(_BySize):
    """Sizes are proportional to exp(sigma * z) with z ~ N(0, 1) for each client."""

    sigma: float
    min_samples: int = 2

    def __post_init__(self) -> None:
        _require_positive(self, "sigma", "0.5 is mild; 2 leaves a few clients with most of the samples.")
        _require_min_samples(self)

    def _weights(self, clients: int, rng: np.random.Generator) -> NDArray[Any]:
        return np.exp(self.sigma * rng.standard_normal(clients))


# -- natural -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Natural:
    """A client is a person, role or user of the data set, in their order; those with few samples are left out.

    `split` gets the owner of every sample. With fewer `clients` than owners that qualify, some are drawn.
    """

    reads: ClassVar[Reads] = "owners"
    exact: ClassVar[bool] = False  # nothing is dealt twice, but owners may be left out

    min_samples: int = 2

    def __post_init__(self) -> None:
        _require(self, "min_samples", self.min_samples >= 1, "at least 1")

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending; `labels` are the owners, None clients are all of them."""
        if clients is not None:
            _require_clients(clients)
        owners, of_sample, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        fit = np.flatnonzero(sizes >= self.min_samples)
        if not len(fit) or (clients or 0) > len(fit):
            raise PartitionError(
                f"{self} must find {clients or 'some'} owners with at least {self.min_samples} samples. "
                f"Got {len(fit)} of {len(owners)}.",
                hint="ask for fewer clients or lower `min_samples`.",
            )
        parts = _parts(of_sample, len(owners))
        chosen = fit if clients is None else np.sort(rng.choice(fit, clients, replace=False))
        return [parts[owner] for owner in chosen]


# -- FAFI --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fafi(_OfLabels):
    """The overlapping Dirichlet of FAFI's and IntactOFL's official code, for reproduction only.

    Class by class p ~ Dir(alpha, ..., alpha), and client k takes min(size, round(10 * p_k * size of the first
    class)) samples at random: a client with p_k >= 0.1 has the whole class, samples are shared between clients,
    some may be nobody's, and a client may have none. Counts come from NumPy's older generator with `seed`, FAFI's
    is 1; which samples they are, from the partition's own.
    """

    exact: ClassVar[bool] = False

    alpha: float
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_alpha(self)
        _require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_clients(clients)
        legacy = _legacy(self.seed, rng)
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        groups = _by_class(self, labels)
        for members in groups:
            wanted = np.rint(10 * len(groups[0]) * legacy.dirichlet(np.full(clients, self.alpha))).astype(np.int64)
            for part, count in zip(parts, wanted, strict=True):
                part.append(rng.permutation(members)[:count])
        return [np.sort(np.concatenate(part)) for part in parts]


@dataclass(frozen=True)
class FafiDisjoint(_OfLabels):
    """The disjoint Dirichlet that a fork of FAFI replaced it by.

    Class by class p ~ Dir(alpha, ..., alpha); client k takes floor(p_k * size), and those that are left go one each
    to clients drawn at random. A client may have none. `seed` as in `Fafi`.
    """

    alpha: float
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_alpha(self)
        _require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        clients = _require_clients(clients)
        legacy = _legacy(self.seed, rng)
        owner = np.empty(len(labels), dtype=np.int64)
        for members in _by_class(self, labels):
            counts = np.floor(legacy.dirichlet(np.full(clients, self.alpha)) * len(members)).astype(np.int64)
            counts[legacy.choice(clients, len(members) - counts.sum(), replace=False)] += 1
            owner[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
        return _parts(owner, clients)


# -- with shifts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shifted:
    """A partition, and what each client's samples go through after dealing, in this order."""

    partition: Partition
    shifts: tuple[Shift, ...]

    @property
    def reads(self) -> Reads:
        """What `split` wants to know of every sample."""
        return self.partition.reads

    @property
    def exact(self) -> bool:
        """Whether every sample is dealt, and to one client only."""
        return self.partition.exact

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """The sample indices of each client, ascending."""
        return self.partition.split(labels, clients, rng)

    def apply(
        self, x: Tensor, y: Tensor, parts: list[Indices], rng: np.random.Generator
    ) -> tuple[Tensor, Tensor, list[Indices]]:
        """The dealt samples client by client after all shifts, and where each client's now stand."""
        sizes = [len(part) for part in parts]
        rows, owner = np.concatenate(parts), np.repeat(np.arange(len(parts)), sizes)
        x, y = x[rows], y[rows]
        for each in self.shifts:
            x, y = each.apply(x, y, owner, len(parts), rng)
        return x, y, np.split(np.arange(len(rows)), np.cumsum(sizes)[:-1])

    def groups(self, clients: int) -> Indices | None:
        """The planted group of each client: alike in all shifts. None where no shift has groups."""
        found = [groups for each in self.shifts if (groups := each.groups(clients)) is not None]
        return np.unique(np.stack(found), axis=1, return_inverse=True)[1].reshape(-1) if found else None


# -- in words ----------------------------------------------------------------------------------------------------------

_ALPHA = "its alpha, a float in (0, inf)"
_SEED = "and if wanted by the seed of its draws, an int"

WORDS: dict[str, Word[Partition]] = {
    "iid": Word("iid", "equal sizes, the same distribution everywhere", Iid),
    "dirichlet": Word(
        "dirichlet:ALPHA", "label skew: each class in Dirichlet shares", Dirichlet, _ALPHA, "dirichlet:0.1", (float,)
    ),
    "pfllib": Word(
        "pfllib:ALPHA[:SEED]",
        "PFLlib's Dirichlet with its cap on sizes, at least 40 samples; seed 1 is PFLlib's own",
        lambda alpha, seed=None: PFLlib(alpha, seed=seed),
        f"{_ALPHA}, {_SEED}",
        "pfllib:0.1",
        (float, int),
    ),
    "niid-bench": Word(
        "niid-bench:ALPHA[:SEED]",
        "NIID-Bench's Dirichlet: the same rule, at least 10 samples",
        lambda alpha, seed=None: PFLlib(alpha, min_samples=10, seed=seed),
        f"{_ALPHA}, {_SEED}",
        "niid-bench:0.5",
        (float, int),
    ),
    "pathological": Word(
        "pathological:S[:SEED]",
        "PFLlib's: S classes per client, unequal shares; seed 1 is PFLlib's own",
        lambda classes, seed=None: Pathological(classes, seed=seed),
        f"its classes per client, an int of at least 1, {_SEED}",
        "pathological:2",
        (int, int),
    ),
    "labels": Word(
        "labels:S",
        "NIID-Bench's #C = S: S classes per client, equal shares",
        LabelsEach,
        "its classes per client, an int of at least 1",
        "labels:2",
        (int,),
    ),
    "shards": Word(
        "shards:S",
        "McMahan's: sorted by label and cut, S shards per client",
        Shards,
        "its shards per client, an int of at least 1",
        "shards:2",
        (int,),
    ),
    "quantity": Word(
        "quantity:BETA",
        "quantity skew: sizes in Dirichlet shares (NIID-Bench)",
        Quantity,
        "its beta, a float in (0, inf)",
        "quantity:0.5",
        (float,),
    ),
    "powerlaw": Word(
        "powerlaw:A",
        "quantity skew: the client of rank r has a share as r^-A",
        PowerLaw,
        "its exponent, a float in (0, inf)",
        "powerlaw:1",
        (float,),
    ),
    "lognormal": Word(
        "lognormal:SIGMA",
        "quantity skew: log-normal sizes",
        LogNormal,
        "its sigma, a float in (0, inf)",
        "lognormal:1",
        (float,),
    ),
    "natural": Word(
        "natural[:MIN]",
        "a client is a person, role or user with MIN samples or more (2)",
        Natural,
        "the fewest samples of a client, an int of at least 1, or by nothing",
        "natural:20",
        (int,),
    ),
    "fafi": Word(
        "fafi:ALPHA[:SEED]",
        "FAFI's Dirichlet, in which clients share samples; seed 1 is FAFI's own",
        Fafi,
        f"{_ALPHA}, {_SEED}",
        "fafi:0.1",
        (float, int),
    ),
    "fafi-disjoint": Word(
        "fafi-disjoint:ALPHA[:SEED]",
        "the disjoint one of a fork of FAFI",
        FafiDisjoint,
        f"{_ALPHA}, {_SEED}",
        "fafi-disjoint:0.1",
        (float, int),
    ),
}


def names() -> list[str]:
    """The partitions `parse` knows, as one writes them."""
    return [word.written for word in WORDS.values()]


def meanings() -> dict[str, str]:
    """What may be written, partitions first and then shifts as one adds them, with what each means."""
    return {word.written: word.meaning for word in WORDS.values()} | {
        f"…+{word.written}": word.meaning for word in shift.WORDS.values()
    }


def parse(text: str) -> Partition:
    """The partition written as `iid` or `dirichlet:ALPHA`; shifts follow after a plus.

    >>> parse("dirichlet:0.1")
    Dirichlet(alpha=0.1, min_samples=10, balanced=False, max_tries=100)
    >>> parse("iid+rotation:4")
    Shifted(partition=Iid(min_samples=2), shifts=(Rotation(count=4),))
    """
    first, *others = re.split(r"\+(?=\s*[A-Za-z])", text)  # 1e+3 is a number
    name = first.strip().partition(":")[0]
    if name in shift.WORDS:
        raise PartitionError(
            f"A shift must follow a partition. Got {text!r} instead.", hint=f"write for example iid+{text.strip()}."
        )
    dealt = read("partition", first, WORDS)
    return Shifted(dealt, tuple(map(shift.parse, others))) if others else dealt


# -- what they have in common ------------------------------------------------------------------------------------------


def _by_class(partition: Partition, labels: Labels) -> list[Indices]:
    """The samples of each class, classes in order."""
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise PartitionError(
            f"{partition} must have one class per sample to deal by. "
            f"Got targets of type {labels.dtype} and shape {labels.shape}.",
            hint="use iid, quantity, powerlaw, lognormal or natural.",
        )
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def _parts(owner: Indices, clients: int) -> list[Indices]:
    """The samples of each client, ascending, from the client of each sample."""
    sizes = np.bincount(owner, minlength=clients)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])


def _counts(shares: NDArray[np.float64], total: int) -> Indices:
    """Whole numbers close to these shares of `total`, which they sum to."""
    cuts = np.rint(np.cumsum(shares[:-1]) * total).astype(np.int64)
    return np.diff(cuts, prepend=0, append=total)


def _legacy(seed: int | None, rng: np.random.Generator) -> "np.random.RandomState":  # noqa: TID251
    """NumPy's older generator, with which published partitions were drawn; a local one, not the global."""
    return np.random.RandomState(int(rng.integers(2**32)) if seed is None else seed)  # noqa: TID251


def _redraw(
    partition: Any, labels: Labels, clients: int, draw: Callable[[], list[Indices]], hint: str, tries: int = MAX_TRIES
) -> list[Indices]:
    """The first draw that leaves every client `min_samples`."""
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


def _require(partition: Any, field: str, holds: bool, expected: str, hint: str | None = None) -> None:
    if not holds:
        name, given = type(partition).__name__, getattr(partition, field)
        raise PartitionError(f"`{field}` of {name} must be {expected}. Got {given!r} instead.", hint=hint)


def _require_positive(partition: Any, field: str, hint: str) -> None:
    value = getattr(partition, field)
    _require(partition, field, math.isfinite(value) and value > 0, "a float in (0, inf)", hint)


def _require_alpha(partition: Any) -> None:
    _require_positive(partition, "alpha", "0.1 gives each client few classes, 100 is close to iid.")


def _require_min_samples(partition: Any) -> None:
    _require(partition, "min_samples", partition.min_samples >= 0, "at least 0")


def _require_seed(partition: Any) -> None:
    seed = partition.seed
    _require(partition, "seed", seed is None or 0 <= seed < 2**32, "an int in 0 .. 2^32 - 1, or None")


def _require_clients(clients: int | None) -> int:
    if clients is None or clients < 1:
        raise PartitionError(f"A partition needs at least 1 client. Got {clients} instead.")
    return clients


def _require_enough(partition: Any, labels: Labels, clients: int | None, least: int | None = None) -> int:
    clients = _require_clients(clients)
    least = partition.min_samples if least is None else least
    if clients * least > len(labels):
        raise PartitionError(
            f"{partition} must leave each of {clients} clients at least {least} samples, "
            f"{clients * least} in all. Got {len(labels)}.",
            hint="ask for fewer clients or lower `min_samples`.",
        )
    return clients
