"""Dealing the samples of one data set to clients: every sample is used once, unless the partition says otherwise."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.data import shift
from atoll.data.dealing import (
    LEAST,
    MAX_TRIES,
    Indices,
    Labels,
    OfLabels,
    Partition,
    Reads,
    group_by_class,
    group_by_owner,
    redraw,
    require,
    require_alpha,
    require_clients,
    require_enough,
    require_min_samples,
    require_positive,
    whole_counts,
)
from atoll.data.published import Fafi, FafiDisjoint, LabelsEach, Pathological, PFLlib, Priors
from atoll.data.shift import Shift
from atoll.data.words import Word, parse_word
from atoll.kernel.errors import PartitionError

__all__ = [
    "Dirichlet", "Fafi", "FafiDisjoint", "Iid", "Indices", "LabelsEach", "LogNormal", "Natural", "PFLlib", "Partition",
    "Pathological", "PowerLaw", "Priors", "Quantity", "Shards", "Shifted", "meanings", "names", "parse",
]  # fmt: skip


@dataclass(frozen=True)
class Iid(OfLabels):
    """Every client draws from the same distribution; sizes differ by at most one."""

    min_samples: int = 2

    def __post_init__(self) -> None:
        require_min_samples(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_enough(self, labels, clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


# -- label skew --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dirichlet(OfLabels):
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
        require_alpha(self)
        require_min_samples(self)
        require(self, "max_tries", self.max_tries >= 1, "at least 1")

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_enough(self, labels, clients)
        hint = "raise `alpha`, ask for fewer clients, lower `min_samples`, or pass `balanced=True`."
        return redraw(self, labels, clients, partial(self._draw, labels, clients, rng), hint, self.max_tries)

    def _draw(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for members in map(rng.permutation, group_by_class(self, labels)):
            p = rng.dirichlet(np.full(clients, self.alpha))
            if self.balanced:
                hungry = sizes < len(labels) / clients
                p = p * hungry
                # A tiny alpha can put all of its mass on clients that are full: deal evenly among the others.
                p = p / p.sum() if p.sum() > 0 else hungry / hungry.sum()
            counts = whole_counts(p, len(members))
            owner[members] = np.repeat(np.arange(clients), counts)
            sizes += counts
        return group_by_owner(owner, clients)


@dataclass(frozen=True)
class Shards(OfLabels):
    """McMahan et al. (2017): sort by label, cut into clients * `shards` equal shards, deal `shards` to each client.

    Most clients have at most `shards` classes; a shard that spans two classes brings one more.
    """

    shards: int
    min_samples: int = 2

    def __post_init__(self) -> None:
        require(self, "shards", self.shards >= 1, "at least 1")
        require_min_samples(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_enough(self, labels, clients, max(self.min_samples, self.shards))
        ordered = np.concatenate([rng.permutation(members) for members in group_by_class(self, labels)])
        pieces = np.array_split(ordered, clients * self.shards)
        hands = rng.permutation(len(pieces)).reshape(clients, self.shards)
        return [np.sort(np.concatenate([pieces[piece] for piece in hand])) for hand in hands]


# -- quantity skew -----------------------------------------------------------------------------------------------------


class _BySize(OfLabels, ABC):
    """The base of quantity skews: samples drawn at random, sizes by a rule."""

    min_samples: int

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        number = require_enough(self, labels, clients)

        def draw() -> list[Indices]:
            weights = self._weights(number, rng)
            counts = whole_counts(weights / weights.sum(), len(labels))
            return group_by_owner(rng.permutation(np.repeat(np.arange(number), counts)), number)

        return redraw(
            self, labels, number, draw, "make the sizes more even, ask for fewer clients, or lower `min_samples`."
        )

    @abstractmethod
    def _weights(self, clients: int, rng: np.random.Generator) -> NDArray[Any]:
        """Draw weights that the sizes are proportional to."""


@dataclass(frozen=True)
class Quantity(_BySize):
    """NIID-Bench's quantity skew: sizes in proportions p ~ Dir(beta, ..., beta)."""

    beta: float
    min_samples: int = 10

    def __post_init__(self) -> None:
        require_positive(self, "beta", "0.1 makes a few clients large, 100 makes sizes nearly equal.")
        require_min_samples(self)

    def _weights(self, clients: int, rng: np.random.Generator) -> NDArray[Any]:
        return rng.dirichlet(np.full(clients, self.beta))


@dataclass(frozen=True)
class PowerLaw(_BySize):
    """Sizes follow Zipf's law: the client of rank r, drawn at random, gets a share proportional to r^-exponent."""

    exponent: float
    min_samples: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "exponent", "1 is Zipf's law; the larger, the more the first clients have.")
        require_min_samples(self)

    def _weights(self, clients: int, rng: np.random.Generator) -> NDArray[Any]:
        return np.exp(-self.exponent * np.log1p(rng.permutation(clients)))


@dataclass(frozen=True)
class LogNormal(_BySize):
    """Sizes are proportional to exp(sigma * z) with z ~ N(0, 1) for each client."""

    sigma: float
    min_samples: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "sigma", "0.5 is mild; 2 leaves a few clients with most of the samples.")
        require_min_samples(self)

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

    min_samples: int | None = None  # None: what the data set says, which is 2 unless it was read with another

    def __post_init__(self) -> None:
        require(self, "min_samples", self.min_samples is None or self.min_samples >= 1, "at least 1, or None")

    def of(self, least: int) -> "Natural":
        """Return the rule for a data set whose owners must have `least` samples, unless the rule has its own number."""
        return self if self.min_samples is not None else replace(self, min_samples=least)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client; `labels` are the owners, and None clients means all of them."""
        if clients is not None:
            require_clients(clients)
        owners, of_sample, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        if self.min_samples is None:
            return self.of(LEAST).split(labels, clients, rng)
        fit = np.flatnonzero(sizes >= self.min_samples)
        if not len(fit) or (clients or 0) > len(fit):
            raise PartitionError(
                f"{self} must find {clients or 'some'} owners with at least {self.min_samples} samples. "
                f"Got {len(fit)} of {len(owners)}.",
                hint="ask for fewer clients or lower `min_samples`.",
            )
        parts = group_by_owner(of_sample, len(owners))
        chosen = fit if clients is None else np.sort(rng.choice(fit, clients, replace=False))
        return [parts[owner] for owner in chosen]


# -- with shifts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shifted:
    """A partition, and what each client's samples go through after dealing, in this order."""

    partition: Partition
    shifts: tuple[Shift, ...]

    @property
    def reads(self) -> Reads:
        """The fact of every sample that `split` reads."""
        return self.partition.reads

    @property
    def exact(self) -> bool:
        """Whether every sample is dealt, and to one client only."""
        return self.partition.exact

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        return self.partition.split(labels, clients, rng)

    def apply(
        self, x: Tensor, y: Tensor, parts: list[Indices], rng: np.random.Generator
    ) -> tuple[Tensor, Tensor, list[Indices]]:
        """Return the dealt samples after all shifts, client by client, and where the samples of each client are now."""
        sizes = [len(part) for part in parts]
        rows, owner = np.concatenate(parts), np.repeat(np.arange(len(parts)), sizes)
        x, y = x[rows], y[rows]
        for each in self.shifts:
            if not each.spares_tests:
                x, y = each.apply(x, y, owner, len(parts), rng)
        return x, y, np.split(np.arange(len(rows)), np.cumsum(sizes)[:-1])

    def spoil(
        self, x: Tensor, y: Tensor, parts: list[Indices], tests: Tensor, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return samples and targets after the shifts that spare tests, which are known once clients are split."""
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        true = x, y
        for each in self.shifts:
            if each.spares_tests:
                x, y = each.apply(x, y, owner, len(parts), rng)
        if x is not true[0]:
            x = x.index_copy(0, tests, true[0][tests])
        return x, y if y is true[1] else y.index_copy(0, tests, true[1][tests])

    def groups(self, clients: int) -> Indices | None:
        """Return the planted group of each client, alike in all shifts; None where no shift has groups."""
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
    "prior": Word(
        "prior:ALPHA",
        "FedFSA's Dirichlet: equal sizes, each client's classes drawn from a prior of its own",
        Priors,
        _ALPHA,
        "prior:0.5",
        (float,),
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
    """Return the partitions that `parse` knows, as they are written."""
    return [word.written for word in WORDS.values()]


def meanings() -> dict[str, str]:
    """Return all that can be written, partitions first and then shifts, with their meanings."""
    return {word.written: word.meaning for word in WORDS.values()} | {
        f"…+{word.written}": word.meaning for word in shift.WORDS.values()
    }


def parse(text: str) -> Partition:
    """Parse a partition written as `iid` or `dirichlet:ALPHA`; shifts follow after a plus.

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
    dealt = parse_word("partition", first, WORDS)
    return Shifted(dealt, tuple(map(shift.parse, others))) if others else dealt
