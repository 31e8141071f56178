"""Partitions as published code draws them, so tables can be compared."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.data.dealing import (
    MAX_TRIES,
    Indices,
    Labels,
    OfLabels,
    group_by_class,
    group_by_owner,
    older_generator,
    redraw,
    require,
    require_alpha,
    require_clients,
    require_enough,
    require_min_samples,
    require_seed,
)
from atoll.kernel.errors import PartitionError


@dataclass(frozen=True)
class PFLlib(OfLabels):
    """PFLlib's "dir", also NIID-Bench's "noniid-labeldir": Dirichlet with a cap, draw by draw as they do it.

    Class by class: shuffle its samples; p ~ Dir(alpha, ..., alpha); p = 0 for clients that hold samples / clients
    or more; rescale; cut at int(cumsum(p) * size), the last client takes the rest; everything again until each
    client has `min_samples`. It differs from `Dirichlet(balanced=True)` in how cuts are rounded and in NumPy's
    older generator, so `seed` gives the samples that `np.random.seed(seed)` gives there: PFLlib's scripts say
    1. Without `seed`, the partition's generator draws one. Two things are ours: the number of draws is bounded, and
    one whose p is 0 everywhere counts as failed.
    """

    alpha: float
    min_samples: int = 40  # batch size / (1 - training share) = 10 / (1 - 0.75); NIID-Bench wants 10
    seed: int | None = None

    def __post_init__(self) -> None:
        require_alpha(self)
        require_min_samples(self)
        require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_enough(self, labels, clients)
        hint = "raise `alpha`, ask for fewer clients, or lower `min_samples`."
        draw = partial(self._draw, labels, clients, older_generator(self.seed, rng))
        return redraw(self, labels, clients, draw, hint, tries=10 * MAX_TRIES)  # PFLlib tries forever

    def _draw(self, labels: Labels, clients: int, rng: "np.random.RandomState") -> list[Indices]:
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = np.zeros(clients, dtype=np.int64)
        for members in group_by_class(self, labels):
            rng.shuffle(members)
            p = rng.dirichlet(np.repeat(self.alpha, clients)) * (sizes < len(labels) / clients)
            if p.sum() == 0:
                return []
            cuts = (np.cumsum(p / p.sum()) * len(members)).astype(int)[:-1]
            counts = np.diff(cuts, prepend=0, append=len(members))
            owner[members] = np.repeat(np.arange(clients), counts)
            sizes += counts
        return group_by_owner(owner, clients)


@dataclass(frozen=True)
class Pathological(OfLabels):
    """PFLlib's "pat": `classes` classes per client, the samples of a class dealt in unequal shares.

    Class by class, in order: the first ceil(clients * classes / all classes) clients that still lack a class share
    it. All but the last of them take randint(n / 10, n) samples, n being the even share, and the last takes the rest;
    with `equal` they take int(n). So neighbours have the same classes (2 of 10, 20 clients: five groups of four), and
    the last clients may have fewer than `classes`. Samples are taken in the order of the data set. `seed` means the
    same as in `PFLlib`.
    """

    classes: int
    equal: bool = False
    min_samples: int = 2
    seed: int | None = None

    def __post_init__(self) -> None:
        require(self, "classes", self.classes >= 1, "at least 1")
        require_min_samples(self)
        require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_enough(self, labels, clients)
        hint = "ask for fewer clients, pass `equal=True`, or lower `min_samples`."
        return redraw(
            self, labels, clients, partial(self._draw, labels, clients, older_generator(self.seed, rng)), hint
        )

    def _draw(self, labels: Labels, clients: int, rng: "np.random.RandomState") -> list[Indices]:
        owner = np.empty(len(labels), dtype=np.int64)
        lacks = np.full(clients, self.classes)
        groups = group_by_class(self, labels)
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
        return group_by_owner(owner, clients)


@dataclass(frozen=True)
class LabelsEach(OfLabels):
    """NIID-Bench's "#C = s": `classes` classes per client, the samples of a class dealt evenly to those that have it.

    Client k has class k modulo the number of classes, the others are drawn without replacement. With fewer clients
    than classes a class may fall to nobody; NIID-Bench then drops its samples, here it is drawn again. If that does not
    help, such a class takes the place of one that several clients have.
    """

    classes: int
    min_samples: int = 2

    def __post_init__(self) -> None:
        require(self, "classes", self.classes >= 1, "at least 1")
        require_min_samples(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_enough(self, labels, clients)
        there = len(group_by_class(self, labels))
        if self.classes > there or self.classes * clients < there:
            raise PartitionError(
                f"{self} must have between 1 and all classes per client, and enough for each class to fall to one. "
                f"Got {there} classes and {clients} clients.",
                hint="change the number of classes per client, or ask for more clients.",
            )
        hint = "ask for fewer clients, more classes per client, or lower `min_samples`."
        return redraw(self, labels, clients, partial(self._draw, labels, clients, rng), hint)

    def _draw(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
        groups = group_by_class(self, labels)
        for _ in range(MAX_TRIES):
            has = self._choose(len(groups), clients, rng)
            if has.any(axis=0).all():
                break
        give_to_somebody(has, rng)
        owner = np.empty(len(labels), dtype=np.int64)
        for members, wants in zip(groups, has.T, strict=True):
            takers = np.flatnonzero(wants)
            for taker, part in zip(takers, np.array_split(rng.permutation(members), len(takers)), strict=True):
                owner[part] = taker
        return group_by_owner(owner, clients)

    def _choose(self, classes: int, clients: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        has = np.zeros((clients, classes), dtype=bool)
        for client, mine in enumerate(has):
            first = client % classes
            others = np.delete(np.arange(classes), first)
            mine[[first, *rng.choice(others, self.classes - 1, replace=False)]] = True
        return has


def give_to_somebody(has: NDArray[np.bool_], rng: np.random.Generator) -> None:
    """Give each class [client, class] that nobody has to a client, in place of one that others have, too."""
    for missing in np.flatnonzero(~has.any(axis=0)):
        common = int(has.sum(axis=0).argmax())
        owners = np.flatnonzero(has[:, common])
        taker = rng.choice(owners[owners != common])  # whose first class it is keeps it
        has[taker, common], has[taker, missing] = False, True


@dataclass(frozen=True)
class Fafi(OfLabels):
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
        require_alpha(self)
        require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_clients(clients)
        legacy = older_generator(self.seed, rng)
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        groups = group_by_class(self, labels)
        for members in groups:
            wanted = np.rint(10 * len(groups[0]) * legacy.dirichlet(np.full(clients, self.alpha))).astype(np.int64)
            for part, count in zip(parts, wanted, strict=True):
                part.append(rng.permutation(members)[:count])
        return [np.sort(np.concatenate(part)) for part in parts]


@dataclass(frozen=True)
class FafiDisjoint(OfLabels):
    """The disjoint Dirichlet that a fork of FAFI replaced it by.

    Class by class p ~ Dir(alpha, ..., alpha); client k takes floor(p_k * size), and those that are left go one each
    to clients drawn at random. A client may have none. `seed` means the same as in `Fafi`.
    """

    alpha: float
    seed: int | None = None

    def __post_init__(self) -> None:
        require_alpha(self)
        require_seed(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_clients(clients)
        legacy = older_generator(self.seed, rng)
        owner = np.empty(len(labels), dtype=np.int64)
        for members in group_by_class(self, labels):
            counts = np.floor(legacy.dirichlet(np.full(clients, self.alpha)) * len(members)).astype(np.int64)
            counts[legacy.choice(clients, len(members) - counts.sum(), replace=False)] += 1
            owner[rng.permutation(members)] = np.repeat(np.arange(clients), counts)
        return group_by_owner(owner, clients)


@dataclass(frozen=True)
class Priors(OfLabels):
    """Equal sizes, and classes by a prior p ~ Dir(alpha, ..., alpha) of each client's own, as in the code of FedFSA.

    Places are filled one by one, those of all clients in random order: the client draws a class from its prior among
    the classes that have samples left, or any of these where its prior has no mass on them.
    """

    alpha: float
    min_samples: int = 2

    def __post_init__(self) -> None:
        require_alpha(self)
        require_min_samples(self)

    def split(self, labels: Labels, clients: int | None, rng: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, ascending."""
        clients = require_enough(self, labels, clients)
        groups = [rng.permutation(members) for members in group_by_class(self, labels)]
        priors = rng.dirichlet(np.full(len(groups), self.alpha), clients)
        left = np.array([len(members) for members in groups])
        owner = np.empty(len(labels), dtype=np.int64)
        sizes = [len(part) for part in np.array_split(labels, clients)]
        takers, draws = rng.permutation(np.repeat(np.arange(clients), sizes)), rng.random(len(labels))
        reach = np.cumsum(priors, axis=1)  # of the classes that have samples left
        for taker, draw in zip(takers, draws, strict=True):
            mine = reach[taker]
            if mine[-1] <= 0:
                mine = np.cumsum(left > 0)
            chosen = int(np.searchsorted(mine, draw * mine[-1], side="right"))
            left[chosen] -= 1
            owner[groups[chosen][left[chosen]]] = taker
            if left[chosen] == 0:
                reach = np.cumsum(np.where(left > 0, priors, 0), axis=1)
        return group_by_owner(owner, clients)
