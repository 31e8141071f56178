"""Cutting each client's samples into train, val and test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.batches import Split
from atoll.data.partition import Indices
from atoll.kernel.errors import TaskError
from atoll.kernel.randomness import generator

SPLITS = ("train", "val", "test")
Shares = tuple[float, float, float]
SHARES: Shares = (0.6, 0.15, 0.25)  # of a client's samples: train, val, test


@dataclass(frozen=True, eq=False)
class Rule:
    """What decides the split of each sample beside its client's shares: nothing, one of these, or two that agree."""

    given: NDArray[np.int64] | None = None  # the split itself: 0 train, 1 val, 2 test
    group: NDArray[np.int64] | None = None  # a recording, a patient: all of one group are on the same side
    order: NDArray[np.float64] | None = None  # the time: the past trains, the future tests
    gap: int = 0  # samples in time order that are left out before val and before test
    words: str = ""  # the rule as a protocol states it

    def __bool__(self) -> bool:
        return any(one is not None for one in (self.given, self.group, self.order))

    def take(self, rows: Indices) -> Rule:
        """Return the rule of some samples."""

        def some(values: Any) -> Any:
            return None if values is None else values[rows]

        return replace(self, given=some(self.given), group=some(self.group), order=some(self.order))


def cut_by_rule(
    rule: Rule, parts: list[Indices], dealt: list[Indices], shares: Shares, labels: NDArray[np.int64] | None, seed: int,
    first: int = 0,
) -> dict[str, Split]:  # fmt: skip
    """Cut each client's samples as a rule says; the rows `parts` of a task were made from the samples `dealt`."""
    _require_shares(shares)
    cut: dict[str, list[Indices]] = {name: [] for name in SPLITS}
    sides: dict[int, int] = {}  # of groups: one that several clients have is on the same side with all of them
    for client, (rows, own) in enumerate(zip(parts, dealt, strict=True)):
        if rule.given is not None:
            where = rule.given[own]
        elif rule.group is not None:
            mine = None if labels is None else labels[rows]
            where = _cut_groups(rule.group[own], mine, shares, sides, generator(seed, "split", first + client))
        else:
            assert rule.order is not None
            order = np.argsort(rule.order[own], kind="stable")
            where = np.empty(len(own), dtype=np.int64)
            where[order] = _cut_in_time(len(own), shares, rule.gap)
        for index, name in enumerate(SPLITS):
            cut[name].append(rows[where == index])
    return {name: _join_pieces(pieces) for name, pieces in cut.items()}


def _cut_groups(
    group: NDArray[np.int64],
    labels: NDArray[np.int64] | None,
    shares: Shares,
    sides: dict[int, int],
    draw: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the split of each sample of a client, whole groups at a time, and note the side of each group.

    The groups with most samples go first, each to where the counts of the classes come nearest to the shares. If a
    client would be left without training samples, or without test samples, its last groups are those.
    """
    found, number = np.unique(group, return_inverse=True)
    classes = np.zeros(len(group), dtype=np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    counts = np.zeros((len(found), int(classes.max(initial=0)) + 1))
    np.add.at(counts, (number, classes), 1)
    wanted = np.array(shares)[:, None] * counts.sum(axis=0)
    have, side = np.zeros((3, counts.shape[1])), np.full(len(found), -1)
    order = draw.permutation(len(found))
    order = order[np.argsort(-counts[order].sum(axis=1), kind="stable")]
    known = [index for index in order if int(found[index]) in sides]
    queue = [*known, *(index for index in order if int(found[index]) not in sides)]
    for place, index in enumerate(queue):
        chosen = sides.get(int(found[index]))
        if chosen is None:
            chosen = _choose_side(counts[index], have, wanted, shares, left=len(queue) - place)
            sides[int(found[index])] = chosen
        side[index] = chosen
        have[chosen] += counts[index]
    return side[number]


def _choose_side(
    counts: NDArray[np.float64], have: NDArray[np.float64], wanted: NDArray[np.float64], shares: Shares, left: int
) -> int:
    """Return the split that a group fits best; if only so many are `left` as splits need, the first of those."""
    empty = [split for split in (0, 2) if shares[split] > 0 and not have[split].any()]
    if empty and left <= len(empty):
        return empty[0]
    scale = np.maximum(wanted.sum(axis=0), 1)  # a rare class counts as much as a common one
    misfits = []
    for place in range(3):
        then = have.copy()
        then[place] += counts
        misfit = float((((then - wanted) / scale) ** 2).sum())
        misfits.append(misfit if shares[place] > 0 else np.inf)
    return int(np.argmin(misfits))


def _require_shares(shares: Shares) -> None:
    if not (len(shares) == 3 and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6 and shares[0] > 0):
        raise TaskError(f"`shares` must be three shares (train, val, test) that sum to 1. Got {shares!r}.")


def cut_splits(
    parts: list[Indices], shares: Shares, labels: NDArray[np.int64] | None, gap: int | None, seed: int, first: int = 0
) -> dict[str, Split]:
    """Cut each client's samples into train, val and test, class by class where samples have one.

    What is drawn for a client depends on its number; `first` is that of the first one, at a site with some of many.
    Samples without a time order are shuffled first. With a `gap`, the first ones in time are for training, and so many
    are left out before each of the other two: neighbours in time are nearly the same sample.
    """
    _require_shares(shares)
    turns = deal_turns(shares, max(map(len, parts), default=0))
    cut: dict[str, list[Indices]] = {name: [] for name in SPLITS}
    for client, part in enumerate(parts):
        order = part if gap is not None else generator(seed, "split", first + client).permutation(part)
        if labels is not None:
            order = order[np.argsort(labels[order], kind="stable")]
        if gap is None:
            where = turns[: len(order)]
        else:
            runs = [order] if labels is None else np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
            where = np.concatenate([_cut_in_time(len(run), shares, gap) for run in runs])
        for index, name in enumerate(SPLITS):
            cut[name].append(order[where == index])
    return {name: _join_pieces(pieces) for name, pieces in cut.items()}


def cut_shared_splits(
    parts: list[Indices], dealt: list[Indices], shares: Shares, labels: NDArray[np.int64] | None, gap: int | None,
    seed: int, samples: int,
) -> dict[str, Split]:  # fmt: skip
    """Cut samples that clients share: one goes to the same split with all who have it.

    So nobody trains on what another is tested with. All samples are cut at once, as if one client had them; `parts`
    are the rows of each client, which were made from the samples `dealt`.
    """
    split_of = np.full(samples, -1)
    for number, split in enumerate(cut_splits([np.arange(samples)], shares, labels, gap, seed).values()):
        split_of[split.order.numpy()] = number
    both = list(zip(parts, dealt, strict=True))
    return {
        name: _join_pieces([rows[split_of[own] == number] for rows, own in both]) for number, name in enumerate(SPLITS)
    }


def leave_last_out(parts: list[Indices]) -> dict[str, Split]:
    """Cut samples in time order: the last of each client is for testing, the one before it for validation."""
    short = next((client for client, part in enumerate(parts) if len(part) < len(SPLITS)), None)
    if short is not None:
        raise TaskError(
            f"Every user must have at least 3 ratings: one to train, one to validate, one to test. Client {short} has "
            f"{len(parts[short])}.",
            hint="leave such users out: `fewest`.",
        )
    return {
        "train": _join_pieces([part[:-2] for part in parts]),
        "val": _join_pieces([part[-2:-1] for part in parts]),
        "test": _join_pieces([part[-1:] for part in parts]),
    }


def deal_turns(shares: Shares, most: int) -> NDArray[np.int64]:
    """Return which split each next sample goes to: the one furthest behind its share, of equals train first.

    The first n of these hold every split's share of n, to rounding, for every n; so do the samples of any one class
    where a client's samples are in the order of their classes. The very first is for training, whatever its share.
    """
    have, turns = [1, 0, 0], np.zeros(most, dtype=np.int64)
    order = (0, 2, 1)  # of equals, test comes before val
    for place in range(1, most):
        # rounded: a sum of shares that is 1 - 1e-16 must not decide between equals
        behind = [round((place + 1) * share - got, 9) for share, got in zip(shares, have, strict=True)]
        turns[place] = max(order, key=lambda split: (behind[split], -order.index(split)))
        have[turns[place]] += 1
    return turns


def _cut_in_time(samples: int, shares: Shares, gap: int) -> NDArray[np.int64]:
    """Return the split of each of so many samples in time order; -1 for those that are left out."""
    test, val = (int(samples * share + 0.5) for share in (shares[2], shares[1]))
    train = max(samples - test - val, min(samples, 1))
    where = np.repeat([0, 1, 2], [train, min(val, samples - train), max(samples - train - val, 0)])
    for later in (1, 2):
        where[np.flatnonzero(where == later)[:gap]] = -1
    return where


def _join_pieces(pieces: list[Indices]) -> Split:
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    order = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    return Split(torch.from_numpy(order.astype(np.int64)), offsets)
