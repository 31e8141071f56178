"""Rules that make one reply of many although some of them mean harm: `median`, `trimmed:2`, `nnm+krum:1`.

A rule sees a reply as one vector, all fields together, and every client counts the same: how many samples a client
says it has would be one more way to attack. `F` is how many replies of a round may be hostile; `auto` takes what a
round holds at most in 999 of 1,000 cases, of the attack under way or of one client in five. Rules that choose or weigh
whole replies work on the matrix of their inner products, so their cost is that of one pass over all replies.

References: Yin et al., ICML 2018 (median, trimmed mean); Blanchard et al., NeurIPS 2017 (Krum); Pillutla et al., IEEE
TSP 2022 (geometric median); Karimireddy et al., ICML 2021 (centred clipping), ICLR 2022 (buckets); Allouah et al.,
AISTATS 2023 (nearest-neighbour mixing); Cao et al., NDSS 2021 (FLTrust).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from scipy.stats import hypergeom
from torch import Tensor

from atoll.kernel.algorithm import Arrival
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import HyperparameterError, PayloadError, unknown
from atoll.kernel.params import Params, Stack
from atoll.kernel.replies import Rule
from atoll.protect.vectors import (
    Fields,
    floating_leaves,
    gram,
    mix_rows,
    reduce_leaves,
    sort_columns,
    squared_distances,
    stack_arrivals,
    take_median,
    weigh,
)
from atoll.toolbox.client import sgd

log = logging.getLogger("atoll.protect")

ASSUMED = 0.2  # the share of hostile clients that `auto` counts with where no attack is under way
AUTO = -1


class Context:
    """What a rule may look at beside the replies."""

    def __init__(self, arrivals: Sequence[Arrival], workbench: Workbench | None) -> None:
        self.arrivals, self.workbench = arrivals, workbench

    def server_delta(self) -> Params:
        """Return what the server's own training on public samples changes, from what clients were sent."""
        assert self.workbench is not None, "this rule needs a server"
        sent = self.arrivals[-1].broadcast
        if not isinstance(sent, Params):
            raise PayloadError(
                "For the rule fltrust, a method must send its clients one model. This one sends something else.",
                hint="take another rule, such as nnm+trimmed.",
            )
        trained = sgd(self.workbench.cohort(*self.workbench.public), start=sent, epochs=1)
        return (trained - sent).client(0)


@dataclass(frozen=True)
class ByCoordinate(ABC):
    """Base of rules that look at each coordinate by itself."""

    name: ClassVar[str]

    @abstractmethod
    def reduce(self, rows: Tensor) -> Tensor:
        """Return one row made of many."""


@dataclass(frozen=True)
class ByReply(ABC):
    """Base of rules that find a share for every reply."""

    name: ClassVar[str]
    centred: ClassVar[bool] = True  # whether only distances between replies matter

    @abstractmethod
    def shares(self, products: Tensor, context: Context) -> Tensor:
        """Return the share of each reply, from their inner products."""


@dataclass(frozen=True)
class Median(ByCoordinate):
    """The median of each coordinate."""

    name: ClassVar[str] = "median"

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the median of each coordinate."""
        return take_median(rows)


@dataclass(frozen=True)
class Trimmed(ByCoordinate):
    """The mean of each coordinate without the F largest and the F smallest values."""

    hostile: int = AUTO
    name: ClassVar[str] = "trimmed"

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the mean of what is left in the middle."""
        if not self.hostile:
            return rows.mean(0)
        return sort_columns(rows)[self.hostile : len(rows) - self.hostile].mean(0)


@dataclass(frozen=True)
class MeanAroundMedian(ByCoordinate):
    """The mean of the K - F values of each coordinate that are nearest to their median; ties count in part."""

    hostile: int = AUTO
    name: ClassVar[str] = "meamed"

    def reduce(self, rows: Tensor) -> Tensor:
        """Return the mean of the values nearest to the median; those that are equally far share the last places."""
        ordered, count = sort_columns(rows), len(rows) - self.hostile
        median = (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2
        # Those nearest to the median are neighbours in the order of values: of all such runs, the shortest reach.
        reach = torch.maximum(median - ordered[: self.hostile + 1], ordered[count - 1 :] - median).amin(0)
        apart = (ordered - median).abs()
        nearer, last = apart < reach, apart == reach
        places = (count - nearer.sum(0)).to(rows) / last.sum(0)  # whole numbers would divide in single precision
        return torch.where(nearer, ordered, 0).sum(0).add(torch.where(last, ordered, 0).sum(0) * places) / count


def krum_scores(products: Tensor, hostile: int) -> Tensor:
    """Return for each reply the sum of its squared distances to the K - F - 2 nearest others."""
    distances = squared_distances(products).fill_diagonal_(math.inf)
    return distances.sort(dim=1).values[:, : max(1, len(products) - hostile - 2)].sum(1)


@dataclass(frozen=True)
class Krum(ByReply):
    """The reply that is nearest to its K - F - 2 nearest others."""

    hostile: int = AUTO
    name: ClassVar[str] = "krum"

    def shares(self, products: Tensor, context: Context) -> Tensor:
        """Return all of the share to the reply with the lowest score."""
        scores = krum_scores(products, self.hostile)
        return torch.zeros_like(scores).index_fill_(0, scores.argmin(), 1.0)


@dataclass(frozen=True)
class MultiKrum(ByReply):
    """The mean of the K - F replies with the lowest scores of Krum."""

    hostile: int = AUTO
    name: ClassVar[str] = "multi-krum"

    def shares(self, products: Tensor, context: Context) -> Tensor:
        """Return equal shares to the replies with the lowest scores."""
        best = krum_scores(products, self.hostile).argsort(stable=True)[: len(products) - self.hostile]
        return torch.zeros(len(products), dtype=products.dtype, device=products.device).index_fill_(
            0, best, 1.0 / len(best)
        )


@dataclass(frozen=True)
class Geometric(ByReply):
    """The point with the least sum of distances to all replies, by Weiszfeld's steps."""

    name: ClassVar[str] = "geometric"
    steps: ClassVar[int] = 1000  # in as many dimensions as there are replies: cheap

    def shares(self, products: Tensor, context: Context) -> Tensor:
        """Return the shares of the replies in the geometric median."""
        count, own = len(products), products.diagonal()
        floor = 1e-6 * float(own.clamp(min=0).sqrt().median()) + 1e-300
        shares = products.new_full((count,), 1 / count)
        for _ in range(self.steps):
            away = (own - 2 * products @ shares + shares @ products @ shares).clamp(min=0).sqrt()
            new = 1 / away.clamp(min=floor)
            new = new / new.sum()
            moved, shares = (new - shares).abs().max(), new
            if moved < 1e-12:
                break
        return shares


@dataclass(frozen=True)
class CenteredClip(ByReply):
    """v + the mean of x_i - v cut to norm TAU, three times from v = 0; TAU is the median norm unless given."""

    radius: float = 0.0  # 0: the median norm of the replies
    steps: int = 3
    name: ClassVar[str] = "centered-clip"
    centred: ClassVar[bool] = False

    def shares(self, products: Tensor, context: Context) -> Tensor:
        """Return the shares of the replies in the last centre."""
        own = products.diagonal().clamp(min=0)
        radius = self.radius or float(take_median(own.sqrt()[:, None]))
        shares = torch.zeros_like(own)
        for _ in range(self.steps):
            away = (own - 2 * products @ shares + shares @ products @ shares).clamp(min=0).sqrt()
            cut = (radius / away.clamp(min=1e-300)).clamp(max=1.0) / len(own)
            shares = shares * (1 - cut.sum()) + cut
        return shares


@dataclass(frozen=True)
class NormBound(ByReply):
    """The mean of the replies, each cut to norm TAU; TAU is the median norm unless given."""

    radius: float = 0.0  # 0: the median norm of the replies
    name: ClassVar[str] = "norm-bound"
    centred: ClassVar[bool] = False

    def shares(self, products: Tensor, context: Context) -> Tensor:
        """Return what is left of each reply's share."""
        return CenteredClip(self.radius, steps=1).shares(products, context)


@dataclass(frozen=True)
class FLTrust(ByReply):
    """Replies count by their cosine with what the server learns from public samples, and get the server's norm."""

    name: ClassVar[str] = "fltrust"
    centred: ClassVar[bool] = False

    def shares(self, products: Tensor, context: Context) -> Tensor:
        """Return the shares of the replies; 0 for all if none points the server's way."""
        rows = stack_arrivals(context.arrivals)
        if "delta" not in rows:
            raise PayloadError(
                f"For the rule fltrust, clients must send a change of the model. They send {', '.join(rows)}.",
                hint="take another rule, such as nnm+trimmed.",
            )
        delta = rows["delta"].trained.floating
        own = context.server_delta().only(delta)
        return trust_shares(
            sum((leaf.flatten(1).double() @ own[name].flatten().double() for name, leaf in delta.items()), start=0.0),  # type: ignore[arg-type]
            delta.map(Tensor.double).norm(),
            own.map(Tensor.double).norm(),
        )


def trust_shares(products: Tensor, norms: Tensor, own: Tensor) -> Tensor:
    """Return FLTrust's shares, from inner products with the server's own change, the replies' norms and its own."""
    size = norms.clamp(min=1e-300)
    trust = (products / (size * own.clamp(min=1e-300))).clamp(min=0)
    return trust * own / size / trust.sum().clamp(min=1e-300)


@dataclass(frozen=True)
class NearestMixing:
    """Each reply becomes the mean of the K - F replies nearest to it, itself among them."""

    hostile: int = AUTO
    name: ClassVar[str] = "nnm"

    def matrix(self, products: Tensor, workbench: Workbench | None) -> Tensor:
        """Return the shares of all replies in each mixed one."""
        nearest = squared_distances(products).fill_diagonal_(-1.0).argsort(dim=1, stable=True)
        count = len(products) - self.hostile
        return torch.zeros_like(products).scatter_(1, nearest[:, :count], 1.0 / count)


@dataclass(frozen=True)
class Buckets:
    """Replies are dealt into random groups of S, and each group becomes its mean."""

    size: int = 2
    name: ClassVar[str] = "bucket"

    def matrix(self, products: Tensor, workbench: Workbench | None) -> Tensor:
        """Return the shares of all replies in each group."""
        count = len(products)
        order = torch.arange(count)
        if workbench is not None:
            order = torch.from_numpy(workbench.generator("buckets").permutation(count))
        groups = torch.split(order, self.size)
        made = products.new_zeros(len(groups), count)
        for row, group in enumerate(groups):
            made[row, group.to(made.device)] = 1.0 / len(group)
        return made


RULES: dict[str, type] = {
    one.name: one
    for one in (Median, Trimmed, MeanAroundMedian, Krum, MultiKrum, Geometric, CenteredClip, NormBound, FLTrust)
}
MIXINGS: dict[str, type] = {one.name: one for one in (NearestMixing, Buckets)}


def expect_hostile(cohort: int, clients: int, attackers: int) -> int:
    """Return how many hostile replies a round holds at most in 999 of 1,000 cases."""
    return int(hypergeom.ppf(0.999, clients, attackers, cohort)) if cohort < clients else attackers


@dataclass(frozen=True)
class Robust(Rule):
    """A rule, and how replies are mixed before it; see `atoll.kernel.replies.Rule`."""

    rule: ByCoordinate | ByReply
    mixing: NearestMixing | Buckets | None = None

    needs_replies: ClassVar[bool] = True

    @property
    def needs_public_data(self) -> bool:
        """Whether the server needs samples of its own."""
        return isinstance(self.rule, FLTrust)

    @property
    def hostile(self) -> int:
        """How many hostile replies a round may hold; 0 for rules that do not ask."""
        return max(getattr(self.rule, "hostile", 0), getattr(self.mixing, "hostile", 0))

    def resolve(self, cohort: int, clients: int, attackers: int | None) -> Robust:
        """Return the rule for rounds of so many clients: `auto` becomes a number; raise if the rule cannot bear it."""
        expected = math.ceil(ASSUMED * clients) if attackers is None else attackers
        most, parts = expect_hostile(cohort, clients, expected), {}
        for where in ("rule", "mixing"):
            part = getattr(self, where)
            if getattr(part, "hostile", 0) == AUTO:
                part = replace(part, hostile=most)
            parts[where] = part
        made = replace(self, **parts)
        limit = made.breakdown(cohort)
        if made.hostile > limit:
            fewer = f", or state fewer: `{self.rule.name}:{limit}`" if hasattr(self.rule, "hostile") else ""
            raise HyperparameterError(
                f"{self.word} bears at most {limit} hostile replies of {cohort} in a round. It must bear "
                f"{made.hostile}, of {expected} hostile clients among {clients}.",
                hint=f"ask more clients per round{fewer}.",
            )
        return made

    def warn_of_attackers(self, cohort: int, clients: int, attackers: int) -> None:
        """Warn where a round may hold more hostile replies than the rule bears."""
        if isinstance(self.rule, FLTrust):
            return  # it asks what the server's own samples say, not what most clients say
        limit, most = self.breakdown(cohort), expect_hostile(cohort, clients, attackers)
        bears = self.hostile if hasattr(self.rule, "hostile") else limit
        if most > bears:
            log.warning(
                "%s is set to bear %d hostile replies of %d in a round, and breaks down beyond %d; %d of %d clients "
                "attack, so a round may hold %d",
                self.word, bears, cohort, limit, attackers, clients, most,
            )  # fmt: skip

    def describe(self, replies: int) -> str:
        """Say in a sentence what the rule is, and what it bears in rounds of so many replies."""
        name = f"The server makes one reply of many by the rule {self.word}"
        if isinstance(self.rule, FLTrust):
            return f"{name}, which trusts replies as far as they agree with what it learns from public samples."
        counts = f" It is set to bear {self.hostile}." if hasattr(self.rule, "hostile") else ""
        return f"{name}, which bears at most {self.breakdown(replies)} hostile ones of {replies} in a round.{counts}"

    def breakdown(self, replies: int) -> int:
        """Return how many hostile ones of so many replies the rule bears at most."""
        if isinstance(self.mixing, Buckets):  # one hostile reply spoils its whole group
            return self._most_hostile(-(-replies // self.mixing.size))
        return self._most_hostile(replies)

    def _most_hostile(self, replies: int) -> int:
        """Return how many hostile ones of so many replies, or of their groups, the rule bears at most."""
        if isinstance(self.rule, Krum | MultiKrum):
            return max(0, (replies - 3) // 2)
        return max(0, (replies - 1) // 2)

    @property
    def word(self) -> str:
        """What the rule is called on the command line."""
        return f"{self.mixing.name}+{self.rule.name}" if self.mixing else self.rule.name

    def combine(self, arrivals: Sequence[Arrival], workbench: Workbench | None) -> dict[str, Params]:
        """Return one value for each field, made of all replies."""
        context = Context(arrivals, workbench)
        fields: Mapping[str, Stack] = stack_arrivals(arrivals)
        count = sum(len(one.clients) for one in arrivals)
        fitted = self._fit(count)
        shares: Tensor | None = None
        if fitted.mixing is not None:
            shares = fitted.mixing.matrix(gram(floating_leaves(fields), centred=True), workbench)
        if isinstance(fitted.rule, ByCoordinate):
            mixed: Fields = fields if shares is None else mix_rows(fields, shares)
            return reduce_leaves(mixed, fitted._fit(len(shares) if shares is not None else count).rule.reduce)  # type: ignore[union-attr]
        products = gram(floating_leaves(fields), centred=fitted.rule.centred)
        if shares is not None:
            products = shares @ products @ shares.T
            fitted = fitted._fit(len(shares))
        found = fitted.rule.shares(products, context)  # type: ignore[union-attr]
        return weigh(fields, found if shares is None else found @ shares)

    def _fit(self, replies: int) -> Robust:
        """Return the rule for a round in which so many replied: it bears no more hostile ones than it can."""
        limit = self._most_hostile(replies)
        if self.hostile <= limit:
            return self
        log.warning("only %d replies: %s bears %d hostile ones among them, not %d", replies, self.word, limit,
                    self.hostile)  # fmt: skip
        parts = {
            where: replace(part, hostile=min(part.hostile, limit))
            for where in ("rule", "mixing")
            if hasattr(part := getattr(self, where), "hostile")
        }
        return replace(self, **parts)

    def close(self, sums: Mapping[str, Params], total: Tensor) -> tuple[dict[str, Params], Tensor]:
        """Raise: this rule reads single replies."""
        raise PayloadError(f"The rule {self.word} reads single replies, not their sums.")


def parse_rule(words: str) -> Robust | None:
    """Parse a rule from words: `median`, `trimmed:2`, `nnm+krum`; None for `mean`."""
    if words == "mean":
        return None
    *before, last = words.split("+")
    if len(before) > 1:
        raise HyperparameterError(f"`aggregate` must name one rule, with at most one mixing before it. Got {words!r}.")
    rule: Any = _parse_part(last, RULES, "rule")
    mixing: Any = _parse_part(before[0], MIXINGS, "mixing") if before else None
    if mixing and isinstance(rule, FLTrust):
        raise HyperparameterError(
            f"fltrust looks at every reply by itself, so nothing is mixed before it. Got {words!r}."
        )
    return Robust(rule, mixing)


def _parse_part(words: str, known: Mapping[str, type], kind: str) -> object:
    name, colon, value = words.partition(":")
    if name not in known:
        raise unknown(f"aggregation {kind}", name, [*known, *(["mean"] if kind == "rule" else [])])
    made = known[name]()
    names = [one for one in ("hostile", "radius", "size") if hasattr(made, one)]
    if not colon or value in ("auto", ""):
        return made
    if not names:
        raise HyperparameterError(f"The {kind} {name} takes no value. Got {words!r}.")
    whole = names[0] != "radius"
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = -1
    low = 1 if names[0] == "size" else 0
    if number < low or not math.isfinite(number) or (names[0] == "radius" and number <= 0):
        what = {"hostile": "how many replies of a round may be hostile", "radius": "a norm above 0", "size": "a size"}
        raise HyperparameterError(
            f"`{name}` must be given with {what[names[0]]}, or auto. Got {value!r}.", hint=f"for example {name}:2."
        )
    return replace(made, **{names[0]: number})
