"""Training on the rows of an item table that a user touches: the items it knows, and some that it does not.

A client never holds the whole table. It takes the rows of its training items and of this round's negatives, trains
these, and sends how they changed with their numbers. Negatives are drawn uniformly from the items that the client has
not trained on, and from nothing else: items for validation and testing are among them, as any unknown item.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from atoll.kernel.algorithm import Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import ModelError
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import Predictor
from atoll.kernel.randomness import Keys
from atoll.kernel.task import Facts

VECTOR, BIAS = "body.vector", "body.bias"  # leaves of an item table
TABLE = (VECTOR, BIAS)
OWN = "own.vector"  # vectors that a client adds to those of the table


def list_items(cohort: Cohort) -> tuple[Tensor, Tensor]:
    """Return each client's training items in time order [client, width], and those that it must not draw beside.

    Places that are left over hold the number of items, which is no item's.
    """
    items, width = count_items(cohort), cohort.width
    facts = cohort.task
    room = 0 if facts.sample.is_floating_point() else facts.sample.numel()
    start = Params({"item": torch.full((width,), items), "avoid": torch.full((room,), items)})
    step = functools.partial(_note_items, items)
    found = cohort.scan(step, start, batch_size=width, shuffle=False, train=False)
    return found["item"], found["avoid"]


def _note_items(items: int, carry: Params, batch: Batch, given: None) -> Params:  # noqa: ARG001
    real = batch.y if batch.mask is None else torch.where(batch.mask > 0, batch.y, items)
    avoid = batch.x[0].reshape(-1)[: len(carry["avoid"])].long()
    return Params({"item": real, "avoid": avoid}, carry.layout)


def find_table(task: Facts, method: str) -> Params:
    """Return the table of items of a network that shares nothing else; raise for others."""
    shared = task.network.initial.without_part("head")
    if set(shared) != set(TABLE):
        raise ModelError(
            f"{method} shares a table of items and nothing else. {task.network.name} shares {', '.join(shared)}.",
            hint="choose the model `item-factors`.",
        )
    return shared


def count_items(cohort: Cohort) -> int:
    """Return how many items there are."""
    classes = cohort.task.classes
    assert classes is not None
    return classes


def drop_repeats(numbers: Tensor, filler: int) -> Tensor:
    """Sort each row of numbers and leave repeated ones out; the places left over are filled at the end."""
    ordered = numbers.sort(1).values
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.where(again, filler, ordered).sort(1).values


def draw_negatives(
    cohort: Cohort, known: Tensor, count: int, epoch: int, *, places: int = 0, purpose: str = "negatives"
) -> Tensor:
    """Draw `count` items for each place of each client, uniformly from those that are not `known` [client, width].

    Known items are sorted. Number j of the others is j plus how many known items are not above it. Draws depend on
    the seed, the client, the round, the epoch and the purpose alone. A client that knows everything gets the number of
    items.
    """
    items, places = count_items(cohort), places or cohort.width
    keys = Keys.of(cohort.ids, cohort.task.seed, purpose, cohort.round).fold(epoch)
    counter = torch.arange(places * count, device=cohort.device)
    bits = Keys(keys.low[:, None], keys.high[:, None]).bits(counter)
    unknown = items - (known < items).sum(1, keepdim=True)
    number = bits % unknown.clamp(min=1)
    before = torch.where(known < items, known - torch.arange(known.shape[1], device=known.device), 2 * items)
    drawn = number + torch.searchsorted(before.contiguous(), number, right=True)
    return torch.where(unknown > 0, drawn, items).reshape(len(cohort), places, count)


class Touched:
    """The rows that clients touch in a round, and where each training item and each of its negatives is among them.

    With `hold`, this share of a client's last training items, one at least, is held back: they do not train, and are in
    `held` [client, place], filled up with the number of items. Who has a single item holds back nothing.
    """

    def __init__(self, cohort: Cohort, negatives: int, epochs: int, *, hold: float = 0.0) -> None:
        self.items = count_items(cohort)
        in_time, avoid = list_items(cohort)
        self.known = drop_repeats(in_time, self.items)
        self.held = find_last(in_time, self.known, hold, self.items)
        self.trains = (self.known[:, :, None] != self.held[:, None, :]).all(2)
        others = drop_repeats(torch.cat([self.known, avoid], 1), self.items)
        drawn = [draw_negatives(cohort, others, negatives, epoch) for epoch in range(epochs)]
        self.ids = drop_repeats(torch.cat([self.known, *(one.flatten(1) for one in drawn)], 1), self.items)
        self.place = torch.searchsorted(self.ids, self.known)
        self.drawn = [torch.searchsorted(self.ids, one.flatten(1)).reshape(one.shape) for one in drawn]
        self.real = [one < self.items for one in drawn]

    def rows(self, table: Params | Stack) -> Stack:
        """Gather these rows of a table, or of each client's own; what fills up is a row of zeros."""
        return gather_rows(table, self.ids)

    def list_places(self, epoch: int) -> Stack:
        """Return what a step must know to find its rows."""
        return Stack.of(
            known=self.known, place=self.place, drawn=self.drawn[epoch], real=self.real[epoch], trains=self.trains
        )


def gather_rows(table: Params | Stack, ids: Tensor) -> Stack:
    """Gather rows of a table, or of each client's own, by numbers [client, ...]; 0 where there is no such row."""

    def gather(leaf: Tensor) -> Tensor:
        if isinstance(table, Params):
            return torch.cat([leaf, torch.zeros_like(leaf[:1])])[ids]
        each = torch.arange(len(ids), device=ids.device).reshape(-1, *[1] * (ids.ndim - 1))
        found = leaf[each, ids.clamp(max=leaf.shape[1] - 1)]
        return found.masked_fill((ids == leaf.shape[1]).reshape(*ids.shape, *[1] * (leaf.ndim - 2)), 0)

    return Stack({name: gather(leaf) for name, leaf in table.items()}, table.layout)


def write_rows(table: Stack, ids: Tensor, rows: Stack) -> Stack:
    """Return each client's own table with some rows written; a number past the last row stands for none."""

    def write(leaf: Tensor, new: Tensor) -> Tensor:
        wide = torch.cat([leaf, torch.zeros_like(leaf[:, :1])], 1)
        wide[torch.arange(len(ids), device=ids.device)[:, None], ids] = new
        return wide[:, :-1]

    return Stack({name: write(leaf, rows[name]) for name, leaf in table.items()}, table.layout)


def find_last(in_time: Tensor, known: Tensor, hold: float, items: int) -> Tensor:
    """Return the last share `hold` of each client's items, one at least of those who have two; fill up the rest."""
    count = (known < items).sum(1)
    last = torch.where(count > 1, (count * hold).long().clamp(min=1), 0) if hold else torch.zeros_like(count)
    real = in_time < items
    left = real.sum(1, keepdim=True) - real.cumsum(1)  # items that come after this one
    wanted = torch.where(real & (left < last[:, None]), in_time, items)
    return drop_repeats(wanted, items)[:, : max(int(in_time.shape[1] * hold), 1)]


Penalty = Callable[[Params, Params, Tensor, Tensor], Tensor]  # (leaves and rows, beside, places, weight) -> a number
Read = Callable[[Params, Tensor], Tensor]  # (leaves and rows, places) -> the rows that are scored


def read_rows(whole: Params, places: Tensor) -> Tensor:
    """Return the rows (q, b) at these places."""
    return torch.cat([whole[VECTOR][places], whole[BIAS][places][..., None]], -1)


@dataclass(frozen=True)
class RowRule:
    """How rows and what belongs to them are trained by binary cross-entropy.

    Every value moves against the mean gradient of the pairs that it is part of: a row by the mean over its pairs, all
    else by the mean over all pairs. With `alternate`, rows move after the rest, at its new values.
    """

    rate: float  # the step size
    l2: float = 0.0  # pull of the user's own leaves and of the rows' vectors towards 0
    alternate: bool = False
    penalty: Penalty | None = None  # is added to the loss, summed over pairs
    own: tuple[str, ...] = ()  # the user's own leaves
    read: Read = read_rows  # how rows are scored
    own_rate: float = 0.0  # the step size of leaves of rows that are not of the table


def find_pairs(batch: Batch, given: Params) -> tuple[Tensor, Tensor]:
    """Return the places of a batch's rows, each training item before its negatives, and how much each counts."""
    at = (given["known"] == batch.y[:, None]).to(torch.int8).argmax(1)
    places = torch.cat([given["place"][at][:, None], given["drawn"][at]], 1)
    real = torch.cat([torch.ones_like(given["real"][at][:, :1]), given["real"][at]], 1) & given["trains"][at][:, None]
    weight = real.to(batch.network.dtype)
    return places, weight if batch.mask is None else weight * batch.mask[:, None]


def sum_losses(rule: RowRule, whole: Params, places: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    """Return the binary cross-entropy of pairs, in which the first of each row is right, summed."""
    right = torch.zeros_like(weight).index_fill(1, torch.zeros(1, dtype=torch.long, device=weight.device), 1.0)
    scores = batch.head(whole.without((*TABLE, OWN)), rule.read(whole, places))
    return (binary_cross_entropy_with_logits(scores, right, reduction="none") * weight).sum()


def take_step(rule: RowRule, carry: tuple[Params, Params, Params], batch: Batch, given: Any) -> tuple[Params, ...]:
    """Take one step on the rows of a batch and on all other leaves; count the pairs of each row."""
    rest, rows, seen = carry
    where, beside, still = given
    places, weight = find_pairs(batch, where)

    def objective(at: Params) -> tuple[Tensor, Tensor]:
        whole = still | rest | at
        loss = sum_losses(rule, whole, places, weight, batch)
        return loss if rule.penalty is None else loss + rule.penalty(whole, beside, places, weight), loss

    pairs = weight.sum().clamp(min=1)
    touches = torch.zeros_like(seen["count"]).index_add(0, places.flatten(), weight.flatten())
    g, loss = batch.differentiate(objective, rest | rows)
    rest = rest.moved(g.only(rest), -rule.rate / pairs).moved(rest.only(rule.own), -rule.rate * rule.l2)
    if rule.alternate:
        g, _ = batch.differentiate(objective, rows)
    rows = Params({name: move_rows(rule, name, leaf, g[name], touches) for name, leaf in rows.items()}, rows.layout)
    return rest, rows, Params({"count": seen["count"] + touches, "loss": loss / pairs}, seen.layout)


def move_rows(rule: RowRule, name: str, leaf: Tensor, gradient: Tensor, touches: Tensor) -> Tensor:
    """Move each row against the mean gradient of its pairs; vectors of the table are pulled towards 0."""
    rate = rule.rate if name in TABLE else rule.own_rate
    share = (rate / touches.clamp(min=1)).reshape(-1, *[1] * (leaf.ndim - 1))
    if name != VECTOR:
        return leaf - share * gradient
    decay = rule.rate * rule.l2 * (touches > 0).to(leaf)  # a flag times a number would be in single precision
    return leaf - share * gradient - decay[:, None] * leaf


def train_rows(
    cohort: Cohort, leaves: Stack, first: Stack, touched: Touched, rule: RowRule, *, batch_size: int | None = None,
    beside: Stack | None = None, still: Stack | None = None,
) -> tuple[Stack, Stack]:  # fmt: skip
    """Train leaves of the clients and rows, from the `first` ones; return both, the rows with how often each was seen.

    Without a `batch_size` there is one step per epoch, on all training items. What is `still` is scored with, and does
    not move.
    """
    none = torch.zeros(touched.ids.shape, dtype=cohort.initial_dtype, device=cohort.device)
    seen = Stack.of(count=none, loss=none[:, 0].clone())
    carry = (leaves, first, seen)
    for epoch in range(len(touched.drawn)):
        carry = cohort.scan(
            functools.partial(take_step, rule),
            carry,
            given=(touched.list_places(epoch), beside or Stack({}), still or Stack({})),
            batch_size=min(batch_size or cohort.width, cohort.width),
            stream=f"main {epoch}" if epoch else "main",
        )
    leaves, rows, seen = carry
    cohort.observe(**{"loss/main": seen["loss"]})
    return leaves, rows | seen.only(["count"])


def send_rows(
    touched: Touched, table: Params, rows: Stack, keep: Tree, dense: Stack | None = None, weight: Tensor | None = None
) -> Update:
    """Send how touched rows changed, their numbers, in how many pairs each was, and what else is shared."""
    delta = rows.only(TABLE) - touched.rows(table)
    message = delta | Stack.of(row=touched.ids.to(torch.int32), count=rows["count"])
    return Update(send={"rows": message} | ({} if dense is None else {"delta": dense}), keep=keep, weight=weight)


def fit_vector(cohort: Cohort, model: Stack, touched: Touched, rule: RowRule) -> Stack:
    """Train the users' own leaves of whole models, a step per epoch, and nothing else."""
    own, still = model.part("head"), model.without_part("head").without(TABLE) | touched.rows(model.only(TABLE))
    for epoch in range(len(touched.drawn)):
        own = cohort.scan(
            functools.partial(_fit_step, rule), own, given=(touched.list_places(epoch), still), batch_size=cohort.width
        )
    return model | own


def _fit_step(rule: RowRule, own: Params, batch: Batch, given: Any) -> Params:
    where, still = given
    places, weight = find_pairs(batch, where)

    def objective(at: Params) -> tuple[Tensor, None]:
        return sum_losses(rule, still | at, places, weight, batch), None

    g, _ = batch.differentiate(objective, own)
    return own.moved(g, -rule.rate / weight.sum().clamp(min=1)).moved(own, -rule.rate * rule.l2)


def deploy_rows(model: Stack, ids: Tensor, rows: Stack) -> Predictor:
    """Return a predictor that answers by a client's own rows where it has some, and by its model elsewhere."""
    return Predictor(model, Stack({"row": ids, "vector": rows[VECTOR], "bias": rows[BIAS]}), answer_with_own_rows)


def answer_with_own_rows(model: Params, beside: Params, batch: Batch) -> Tensor:
    """Score all items by the table, and those that the client has rows of by these."""
    scores = batch.outputs(model)
    mine = batch.head(model, torch.cat([beside["vector"], beside["bias"][:, None]], -1)[None])
    wide = torch.nn.functional.pad(scores, (0, 1))  # what fills up a client's rows falls into the last place
    where = beside["row"].expand(len(scores), -1)
    return wide.scatter(1, where, mine.expand(where.shape))[:, :-1]
