"""What clients reply to the server: `Replies` of a round, which arrive some at a time, and their sums and means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import PayloadError
from atoll.kernel.params import Layout, Params, Stack, Tree, rows_of

if TYPE_CHECKING:
    from atoll.kernel.engine import Workbench


class Arrival(NamedTuple):
    """Replies that arrived together: one row per client, with what these clients had been sent.

    A reply may be late; what its client was sent is then older than the server's state.
    """

    clients: NDArray[np.int64]
    fields: Mapping[str, Stack]
    weight: Tensor  # as the clients sent it
    late: int = 0  # rounds between being asked and arriving
    broadcast: Tree = None  # what all of these clients were sent
    unicast: Tree = None  # what each of them was sent by itself, stacked
    summed: bool = False  # whether fields and weight have one row: weighted sums over these clients

    @property
    def counted(self) -> Tensor:
        """How much these replies count in a mean: their weight, and less of it the later they are."""
        return self.discount(self.weight)

    def discount(self, weight: Tensor) -> Tensor:
        """Return what a weight counts in a mean: less, the later these replies are."""
        return weight / (1 + self.late) ** 0.5 if self.late else weight

    def only(self, chosen: NDArray[np.bool_]) -> Arrival:
        """Return the replies of some of these clients."""
        if chosen.all():
            return self
        rows = torch.from_numpy(np.flatnonzero(chosen)).to(self.weight.device)
        fields = {name: value.rows(rows) for name, value in self.fields.items()}
        unicast = rows_of(self.unicast, rows)
        return self._replace(clients=self.clients[chosen], fields=fields, weight=self.weight[rows], unicast=unicast)


class Rule(Protocol):
    """How the replies of a round become one. Where there is no rule, it is their weighted mean.

    A rule either reads all replies side by side (`needs_replies`) and combines them, or it only sees their sums, and
    says what the server may see of these. Under a rule that combines replies, each of them counts the same.
    """

    always: ClassVar[bool] = False  # whether there is a release in every round, also where nobody replied

    @property
    def needs_replies(self) -> bool:
        """Whether the rule reads single replies; otherwise it closes their sums."""
        ...

    def in_round(self, round: int, asked: NDArray[np.int64]) -> Rule:
        """Return the rule of a round, for the clients that were asked: one that draws has draws of its own in each."""
        return self

    def overhead(self, clients: int) -> dict[Literal["down", "up"], int]:
        """Return the bytes that each of so many clients sends and receives beside its messages."""
        return {}

    def save(self) -> Tree:
        """Return what the rule remembers from round to round, for a checkpoint."""
        return None

    def load(self, state: Tree) -> None:
        """Go on with what was saved."""
        return

    def combine(self, arrivals: Sequence[Arrival], workbench: Workbench | None) -> dict[str, Params]:
        """Return one value for each field, made of all replies."""
        ...

    def close(self, sums: Mapping[str, Params], total: Tensor) -> tuple[dict[str, Params], Tensor]:
        """Return the sums of the fields, and the sum of weights to divide them by, as the server may see them."""
        ...


class Replies:
    """What the clients sent in a round.

    If sums suffice, replies are added up as they arrive and never held together, so memory does not grow with
    the cohort; they can be read once, and `stack` raises. Otherwise they are kept, and every question has an answer.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        *,
        keep: bool,
        workbench: Workbench | None = None,
        rule: Rule | None = None,
    ) -> None:
        self._workbench = workbench
        self._rule = rule
        keep = keep or (rule is not None and rule.needs_replies)
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._kept: list[Arrival] | None = list(self._arrivals) if keep else None
        self._was_read = False
        self._means: dict[str, Stack | Params] | None = None
        self._sums: dict[str, Params] = {}
        self._total = torch.zeros(())
        self._members: list[tuple[Tensor, Tensor, Tensor]] = []

    def mean(self, name: str, weight: str | None = None) -> Params:
        """Return the weighted mean of a field over clients; integer leaves take the maximum.

        `weight` names a field that holds weights of its own for each client, for example class counts for class
        prototypes: either one leaf for all or one per leaf. Where all weights are 0 the mean is 0.
        """
        if weight is not None:
            self._require_no_rule("a mean with weights of its own")
            return self._reduce(name, lambda arrival, leaf: arrival.discount(_leaf(arrival, weight, leaf)))
        if self._kept is not None and self._rule is None:
            return self._reduce(name, lambda arrival, _: arrival.counted)
        if self._means is None:
            self._means = self._stream()
        if name not in self._means:
            raise _no_field(name, self._means)
        return self._means[name]  # type: ignore[return-value]

    def has(self, name: str) -> bool:
        """Return whether there is a mean of a field that clients send in some rounds only.

        Late replies may lack it: they count as zeros in its mean. A rule needs it from everybody.
        """
        if self._kept is not None and self._rule is None:
            return any(name in arrival.fields for arrival in self._kept)
        if self._means is None:
            self._means = self._stream()
        return name in self._means

    def sum(self, name: str) -> Params:
        """Return the weighted sum of a field over clients; a late reply counts whole.

        For what the server adds up over rounds and must not lose a part of, such as changes of control variates.
        """
        if self._kept is not None and self._rule is None:
            sums, _, layout = self._collect(name, lambda arrival, _: arrival.weight)
            return Params({leaf: part.total for leaf, part in sums.items()}, layout)
        if self._means is None:
            self._means = self._stream()
        if name not in self._sums:
            raise _no_field(name, self._sums)
        return self._sums[name]

    def models(self, start: Callable[[Tree, Tree], Params | Stack], change: str = "delta") -> Stack:
        """Return what each client trained: what it had been sent, plus the change that it replied.

        `start(broadcast, unicast)` finds the model, or the part of it that is asked for, in what was sent. For a late
        reply that is older than the server's state.
        """
        parts = []
        for arrival in self._held():
            model = start(arrival.broadcast, arrival.unicast)
            parts.append(model + _field(arrival, change).only(model))
        return Stack({leaf: torch.cat([part[leaf] for part in parts]) for leaf in parts[0]}, parts[0].layout)

    def where(self, wanted: Callable[[Arrival], bool]) -> Replies:
        """Return the arrivals for which `wanted` holds."""
        return Replies(filter(wanted, self._held()), keep=True, workbench=self._workbench, rule=self._rule)

    def map(self, function: Callable[[Arrival], Arrival]) -> Replies:
        """Return the same replies with `function` of each arrival, for a method that passes them on to another one."""
        arrivals = self._kept if self._kept is not None else self._read()
        keep = self._kept is not None
        return Replies(map(function, arrivals), keep=keep, workbench=self._workbench, rule=self._rule)

    def mean_rows(self, name: str, like: Params, *, over_all: bool = False, least: int = 1) -> Params:
        """Return the mean of each row of some tables over the clients that sent it; 0 for rows that nobody sent.

        Each client sends rows of its own choice. The field's leaf `row` has their numbers, its leaf `count` how much
        each of them counts, and its other leaves are named as the tables in `like`. What fills up a message has a
        number past the last row. With `over_all`, sums are divided by how many clients replied instead. Rows that fewer
        than `least` clients sent count as if nobody had.
        """
        self._require_no_rule("means of rows")
        sums: dict[str, Tensor] = {}
        total, replied = torch.zeros(()), torch.zeros(())
        size = len(next(iter(like.values()))) + 1
        senders = torch.zeros(size, dtype=torch.long, device=next(iter(like.values())).device)
        for arrival in self._read_rows():
            field = _field(arrival, name)
            rows, late = field["row"].long().flatten(), arrival.counted / arrival.weight
            _require_rows(field, like)
            count = (field["count"] * late[:, None]).flatten()
            for leaf, table in like.items():
                if leaf not in sums:
                    sums[leaf] = table.new_zeros((size, *table.shape[1:]))
                    total, replied = total.to(table), replied.to(table)
                    total = total.new_zeros(size) if total.ndim == 0 else total
                values = field[leaf].flatten(0, 1)
                sums[leaf].index_add_(0, rows, values * _append_axes(count, values.ndim))
            total.index_add_(0, rows, count)
            senders.index_add_(0, rows, (count > 0).long())
            replied = replied + late.sum()
        weight = (replied.expand(len(total)) if over_all else total).clamp(min=1e-12)
        few = senders < least
        means = {
            leaf: (value / _append_axes(weight, value.ndim)).masked_fill(_append_axes(few, value.ndim), 0)[:-1]
            for leaf, value in sums.items()
        }
        return Params(means, like.layout)

    def list_rows(self, name: str, like: Params) -> tuple[Tensor, Params]:
        """Return who replied, sorted, and every row that a client sent, in the order of rows and then of clients.

        Leaves are those of the field, with an entry for each row: `row` is its number, `count` how much it counts, and
        `owner` whose it is, as a place among those who replied. What fills up messages is left out.
        """
        parts: list[dict[str, Tensor]] = []
        for arrival in self._held():
            field = _field(arrival, name)
            _require_rows(field, like)
            count = field["count"] * (arrival.counted / arrival.weight)[:, None]
            owner = torch.from_numpy(arrival.clients).to(count.device)[:, None].expand(count.shape)
            real = (count > 0) & (field["row"] < len(next(iter(like.values()))))
            leaves = {**field, "row": field["row"].long(), "count": count, "owner": owner}
            parts.append({leaf: value[real] for leaf, value in leaves.items()})
        clients = torch.from_numpy(np.sort(self.clients)).to(parts[0]["owner"].device)
        joined = {leaf: torch.cat([part[leaf] for part in parts]) for leaf in parts[0]}
        joined["owner"] = torch.searchsorted(clients, joined["owner"])
        order = torch.argsort(joined["row"] * len(clients) + joined["owner"])
        return clients, Params({leaf: value[order] for leaf, value in joined.items()}, like.layout)

    @property
    def total(self) -> Tensor:
        """The sum of all weights: how many replied, where every reply weighs 1 and none is late."""
        if self._kept is not None and self._rule is None:
            return self.weights.sum()
        if self._means is None:
            self._means = self._stream()
        return self._total

    def segment_mean(self, name: str, by: str | Tensor, default: Stack) -> Stack:
        """Return the weighted mean of a field within each segment.

        `by` names the field with each client's segment number, or is the table of these numbers that the server has.
        Row j of the result is the mean of segment j, or row j of `default` where no client is in it. `members` then
        says who was where.
        """
        if self._rule is not None:
            return self._combine_segments(name, by, default)
        segments = default.clients
        sums: dict[str, _Sum] = {}
        total: Tensor | None = None
        self._members = []
        for arrival in self._read_rows():
            clients = torch.from_numpy(arrival.clients).to(arrival.weight.device)
            segment = by[clients] if isinstance(by, Tensor) else _leaf(arrival, by, None).long()
            weight = arrival.counted
            self._members.append((clients, segment, weight))
            one_hot = torch.nn.functional.one_hot(segment, segments).to(weight.dtype)
            shares = one_hot * weight[:, None]
            total = _add_weights(total, shares)
            for leaf_name, leaf in _field(arrival, name).items():
                sums.setdefault(leaf_name, _Sum(segmented=True)).add(leaf, shares)
        if total is None:
            return default
        found = {leaf: part.divide(total) for leaf, part in sums.items()}
        return Stack(
            {
                leaf: torch.where((total > 0).reshape(-1, *[1] * (value.ndim - 1)), value, default[leaf])
                for leaf, value in found.items()
            },
            default.layout,
        )

    @property
    def members(self) -> tuple[Tensor, Tensor, Tensor]:
        """Who replied, in which segment of the last `segment_mean`, and with which weight."""
        clients, segments, weights = (torch.cat(parts) for parts in zip(*self._members, strict=True))
        return clients, segments, weights

    @property
    def workbench(self) -> Workbench:
        """Where a server that has data of its own works with them."""
        assert self._workbench is not None, "these replies were made without a server"
        return self._workbench

    def stack(self, name: str) -> Stack:
        """Return a field of all replies together, one row per client, in the order of `clients`."""
        parts = [_field(arrival, name) for arrival in self._held()]
        return Stack({leaf: torch.cat([part[leaf] for part in parts]) for leaf in parts[0]}, parts[0].layout)

    @property
    def clients(self) -> NDArray[np.int64]:
        """Who replied."""
        return np.concatenate([np.empty(0, np.int64), *(arrival.clients for arrival in self._held())])

    @property
    def weights(self) -> Tensor:
        """How much each reply counts, in the order of `clients`."""
        return torch.cat([arrival.counted for arrival in self._held()])

    def of(self, chosen: NDArray[np.bool_]) -> Replies:
        """Return the replies of some clients, chosen in the order of `clients`."""
        parts, start = [], 0
        for arrival in self._held():
            here = chosen[start : start + len(arrival.clients)]
            start += len(arrival.clients)
            if here.any():
                parts.append(arrival.only(here))
        return Replies(parts, keep=True, workbench=self._workbench, rule=self._rule)

    def by_architecture(self) -> Iterator[tuple[int, Replies]]:
        """Yield the number and the replies of each architecture that replied."""
        architecture = self.workbench.task.architecture
        if architecture is None:
            yield 0, self
            return
        parts: dict[int, list[Arrival]] = {}  # held: a late reply may come before or after others of its architecture
        for arrival in self._read():
            parts.setdefault(int(architecture[arrival.clients[0]]), []).append(arrival)
        for number, arrivals in parts.items():
            bench = self.workbench.of_architecture(number)
            yield number, Replies(arrivals, keep=self._kept is not None, workbench=bench, rule=self._rule)

    def _held(self) -> list[Arrival]:
        """Return the arrivals that are kept; raise if they were only added up."""
        if self._kept is None:
            raise PayloadError(
                "This method says that sums suffice, so its replies are added up and not held.",
                hint="set `sums_suffice: ClassVar[bool] = False` on the algorithm to ask for single replies.",
            )
        return self._kept

    def _read_rows(self) -> Iterator[Arrival]:
        """Yield all arrivals; raise for those whose clients cannot be told apart."""
        for arrival in self._read():
            if arrival.summed:
                raise PayloadError("Replies that were added up by their clients' workers answer for plain means only.")
            yield arrival

    def _read(self) -> Iterable[Arrival]:
        """Return all arrivals; those that are not kept can be read once."""
        if self._kept is not None:
            return self._kept
        if self._was_read:
            raise PayloadError(
                "This method says that sums suffice, so its replies can be read once; they have been read.",
                hint="ask for all plain means at once, or set `sums_suffice: ClassVar[bool] = False`.",
            )
        self._was_read = True
        return self._arrivals

    def _require_no_rule(self, what: str) -> None:
        if self._rule is not None:
            raise PayloadError(
                f"A method whose replies are combined by a rule must ask for plain means. This one asks for {what}.",
                hint="run it without a rule, that is with the mean.",
            )

    def _combine_segments(self, name: str, by: str | Tensor, default: Stack) -> Stack:
        """Combine the replies of each segment by the rule."""
        assert self._rule is not None
        if not self._rule.needs_replies:
            self._require_no_rule("means of segments, which say who is in which")
        self._members, parts = [], [list[Arrival]() for _ in range(default.clients)]
        for arrival in self._held():
            clients = torch.from_numpy(arrival.clients).to(arrival.weight.device)
            segment = by[clients] if isinstance(by, Tensor) else _leaf(arrival, by, None).long()
            self._members.append((clients, segment, arrival.counted))
            for number, some in enumerate(parts):
                if (chosen := (segment == number).cpu().numpy()).any():
                    some.append(arrival.only(chosen))
        rows = [
            self._rule.combine(some, self._workbench)[name] if some else default.client(number)
            for number, some in enumerate(parts)
        ]
        return Stack({leaf: torch.stack([row[leaf] for row in rows]) for leaf in default}, default.layout)

    def _apply_rule(self) -> dict[str, Any]:
        """Combine all replies by the rule that needs them; each counts the same."""
        assert self._rule is not None
        held = self._held()
        if not held:
            return {}
        means = self._rule.combine(held, self._workbench)
        self._total = held[0].weight.new_full((), float(sum(len(one.clients) for one in held)))
        self._sums = {name: value * self._total for name, value in means.items()}
        return dict(means)

    def _stream(self) -> dict[str, Any]:
        """Compute the means of all fields in one pass."""
        if self._rule is not None and self._rule.needs_replies:
            return self._apply_rule()
        sums: dict[str, dict[str, _Sum]] = {}
        layouts: dict[str, Any] = {}
        total: Tensor | None = None
        for arrival in self._read():
            counted = arrival.counted
            total = _add_weights(total, counted)
            counted = torch.ones_like(counted) if arrival.summed else counted
            for name, value in arrival.fields.items():
                layouts[name] = value.layout
                parts = sums.setdefault(name, {})  # there even for a field without leaves
                for leaf_name, leaf in value.items():
                    part = parts.setdefault(leaf_name, _Sum())
                    part.add(leaf, counted)
                    if arrival.late:
                        part.withhold(leaf, arrival.weight - counted)
        if total is None:
            return {}
        self._total = total
        self._sums = {
            name: Params({leaf: part.total for leaf, part in leaves.items()}, layouts[name])
            for name, leaves in sums.items()
        }
        if self._rule is not None:
            self._sums, self._total = self._rule.close(self._sums, total)
            return {name: value / self._total for name, value in self._sums.items()}
        return {
            name: Params({leaf: part.divide(total) for leaf, part in leaves.items()}, layouts[name])
            for name, leaves in sums.items()
        }

    def _reduce(self, name: str, weigh: Callable[[Arrival, str], Tensor]) -> Params:
        sums, totals, layout = self._collect(name, weigh)
        return Params({leaf: part.divide(totals[leaf]) for leaf, part in sums.items()}, layout)

    def _collect(
        self, name: str, weigh: Callable[[Arrival, str], Tensor]
    ) -> tuple[dict[str, _Sum], dict[str, Tensor], Layout | None]:
        """Compute the weighted sums of a field's leaves, and the sums of their weights."""
        sums: dict[str, _Sum] = {}
        totals: dict[str, Tensor] = {}
        layout = None
        for arrival in self._read_rows():
            layout = _field(arrival, name).layout
            for leaf_name, leaf in _field(arrival, name).items():
                weight = weigh(arrival, leaf_name)
                sums.setdefault(leaf_name, _Sum()).add(leaf, weight)
                totals[leaf_name] = _add_weights(totals.get(leaf_name), weight)
        return sums, totals, layout


def _field(arrival: Arrival, name: str) -> Stack:
    if name not in arrival.fields:
        raise _no_field(name, arrival.fields)
    return arrival.fields[name]


def _require_rows(field: Stack, like: Params) -> None:
    """Raise unless a message has values and a count for each row that it numbers, and these rows exist."""
    size, sent = len(next(iter(like.values()))), tuple(field["row"].shape)
    shapes = {name: (*sent, *table.shape[1:]) for name, table in like.items()} | {"count": sent}
    if any(name not in field or tuple(field[name].shape) != shape for name, shape in shapes.items()):
        raise PayloadError(f"A message of rows must have a count and values for each of them. Got {field!r}.")
    numbers = field["row"]
    if numbers.numel() and not (int(numbers.min()) >= 0 and int(numbers.max()) <= size):
        raise PayloadError(
            f"Numbers of rows must be from 0 to {size}, which stands for none. "
            f"Got {int(numbers.min())} to {int(numbers.max())}."
        )


def _no_field(name: str, fields: Iterable[str]) -> PayloadError:
    return PayloadError(f"No reply has a field {name!r}. There are: {', '.join(fields) or 'none'}.")


def _leaf(arrival: Arrival, name: str, leaf: str | None) -> Tensor:
    """Return a leaf of a field of weights or segments: the one of that name, or the only one there is."""
    value = _field(arrival, name)
    return value[leaf] if leaf in value else next(iter(value.values()))  # type: ignore[index]


def _add_weights(total: Tensor | None, weight: Tensor) -> Tensor:
    """Add weights of clients to their total; row by row in float64, so chunks of any size give the same bits."""
    if weight.dtype == torch.float64:
        for row in weight:
            total = row if total is None else total + row
        assert total is not None
        return total
    return weight.sum(0) if total is None else total + weight.sum(0)


class _Sum:
    """A weighted sum over clients of one leaf, or one such sum per segment.

    Weights are (client,), or shaped like the first axes of the leaf; for segments they are (client, segment).
    """

    def __init__(self, *, segmented: bool = False) -> None:
        self.value: Tensor | None = None
        self.withheld: _Sum | None = None  # what late replies would have counted in time
        self.segmented = segmented

    def add(self, leaf: Tensor, weight: Tensor) -> None:
        if not leaf.is_floating_point():
            largest = self._largest(leaf, weight)
            self.value = largest if self.value is None else torch.maximum(self.value, largest)
            return
        weight = weight.to(leaf.dtype)
        if leaf.dtype == torch.float64:  # row by row: the same bits however the cohort is cut into chunks
            for row, share in zip(leaf, weight, strict=True):
                self._accumulate(_append_axes(share, share.ndim + row.ndim if self.segmented else row.ndim) * row)
        elif len(leaf) == 1 and weight.ndim == 1 and self.value is not None:
            self.value.addcmul_(leaf[0], weight[0])  # in one pass: the sum is nobody else's yet
        elif self.segmented or weight.ndim == 1:
            self._accumulate(torch.tensordot(weight.t(), leaf, dims=1))
        else:
            self._accumulate((_append_axes(weight, leaf.ndim) * leaf).sum(0))

    def _largest(self, leaf: Tensor, weight: Tensor) -> Tensor:
        if not self.segmented:
            return leaf.amax(0)
        inside = _append_axes(weight.t() > 0, leaf.ndim + 1)  # (segment, client, ...)
        lowest = False if leaf.dtype == torch.bool else torch.iinfo(leaf.dtype).min
        return torch.where(inside, leaf, lowest).amax(1)

    def _accumulate(self, term: Tensor) -> None:
        self.value = term if self.value is None else self.value.add_(term)

    def withhold(self, leaf: Tensor, weight: Tensor) -> None:
        """Add what a sum counts of late replies and a mean leaves out."""
        if self.withheld is None:
            self.withheld = _Sum()
        self.withheld.add(leaf, weight)

    @property
    def total(self) -> Tensor:
        """The sum in which late replies count whole."""
        assert self.value is not None
        if self.withheld is None or self.withheld.value is None or not self.value.is_floating_point():
            return self.value
        return self.value + self.withheld.value

    def divide(self, total: Tensor) -> Tensor:
        """Return the mean: the sum by the total weight; 0 where that is 0."""
        assert self.value is not None
        if not self.value.is_floating_point():
            return self.value
        total = _append_axes(total.to(self.value.dtype), self.value.ndim)
        return torch.where(total > 0, self.value / total.clamp(min=torch.finfo(total.dtype).tiny), 0)


def _append_axes(value: Tensor, ndim: int) -> Tensor:
    """Append axes of length 1 to `value`, up to `ndim`."""
    return value.reshape(value.shape + (1,) * (ndim - value.ndim))
