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
FEWEST_FOLDS = 3  # one for testing, one for validation, the rest for training
FOLDS, REPEATS = 5, 2
MOST_FOLDED = 20_000  # samples; with more, one cut says enough
SMALL_CLIENT = 500  # samples of the median client; a larger one scores alike on any cut
HARMLESS = 0.001  # of a Brier score: how far a cut class by class may flatter personal models


@dataclass(frozen=True)
class Cut:
    """How each client's samples are cut: one part held out by shares, or one of several folds.

    Samples are dealt at random within a client. With ``stratify`` they are dealt class by class, so a client's test
    samples have the class shares of its training samples: with few samples that flatters personal models.
    """

    shares: Shares = SHARES
    stratify: bool = False
    folds: int = 0  # 0: held out by shares
    number: int = 0  # of the cut: fold `number % folds` of repeat `number // folds`

    def __post_init__(self) -> None:
        if not (len(self.shares) == 3 and min(self.shares) >= 0 and abs(sum(self.shares) - 1) <= 1e-6):
            raise TaskError(f"`shares` must be three shares (train, val, test) that sum to 1. Got {self.shares!r}.")
        if self.shares[0] <= 0:
            raise TaskError(f"The share of training samples must be above 0. Got {self.shares!r}.")
        if self.folds and self.folds < FEWEST_FOLDS:
            raise TaskError(
                f"`folds` must be at least {FEWEST_FOLDS}: one for testing, one for validation, the rest for training. "
                f"Got {self.folds}.",
                hint="0 holds out one part instead.",
            )
        if self.folds and self.stratify:
            raise TaskError("Folds are dealt at random, so `stratify` must be left out. Got both.")

    @property
    def repeat(self) -> int:
        """How often all folds were dealt before."""
        return self.number // self.folds if self.folds else 0

    def deal(self, samples: int, draw: np.random.Generator) -> NDArray[np.int64]:
        """Return the split of each of so many samples in drawn order."""
        if not self.folds:
            return deal_turns(self.shares, samples)
        return self.side_of((np.arange(samples) + int(draw.integers(self.folds))) % self.folds)

    def side_of(self, fold: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the split of samples in these folds; what would validate trains where nothing else is left to."""
        ahead = (fold - self.number) % self.folds
        side = np.where(ahead == 0, 2, np.where(ahead == 1, 1, 0))
        return side if (side == 0).any() else np.where(side == 1, 0, side)

    def facts(self, words: str = "") -> dict[str, Any]:
        """Describe the cut for a run's configuration, after the `words` of a rule."""
        rule = f"in {self.folds} folds" if self.folds else "class by class" if self.stratify else ""
        found: dict[str, Any] = {"split_by": " ".join(filter(None, [rule, words]))} if rule or words else {}
        return found | ({"folds": self.folds, "cut": self.number} if self.folds else {})


def list_cuts(folds: int, repeats: int) -> list[Cut]:
    """Return the cuts in which each fold is for testing so many times."""
    if repeats < 1:
        raise TaskError(f"`repeats` must be at least 1. Got {repeats!r}.")
    return [Cut(folds=folds, number=number) for number in range(folds * repeats)]


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

    @property
    def groups_alone(self) -> bool:
        """Whether groups decide, and neither a column nor the time."""
        return self.group is not None and self.given is None and self.order is None

    def take(self, rows: Indices) -> Rule:
        """Return the rule of some samples."""

        def some(values: Any) -> Any:
            return None if values is None else values[rows]

        return replace(self, given=some(self.given), group=some(self.group), order=some(self.order))


def cut_by_rule(
    rule: Rule, parts: list[Indices], dealt: list[Indices], cut: Cut, seed: int, first: int = 0
) -> dict[str, Split]:
    """Cut each client's samples as a rule says; the rows `parts` of a task were made from the samples `dealt`."""
    pieces: dict[str, list[Indices]] = {name: [] for name in SPLITS}
    sides: dict[int, int] = {}  # of groups: one that several clients have is on the same side with all of them
    for client, (rows, own) in enumerate(zip(parts, dealt, strict=True)):
        if rule.given is not None:
            where = rule.given[own]
        elif rule.group is not None:
            where = _cut_groups(rule.group[own], cut, sides, _draw(cut, seed, first + client))
        else:
            assert rule.order is not None
            order = np.argsort(rule.order[own], kind="stable")
            where = np.empty(len(own), dtype=np.int64)
            where[order] = _cut_in_time(len(own), cut.shares, rule.gap)
        for index, name in enumerate(SPLITS):
            pieces[name].append(rows[where == index])
    return {name: _join_pieces(some) for name, some in pieces.items()}


def _draw(cut: Cut, seed: int, client: int) -> np.random.Generator:
    """Return the draws of a client's cut: the same for all folds of a repeat."""
    return generator(seed, "split", client) if not cut.folds else generator(seed, "split", cut.repeat, client)


def _cut_groups(
    group: NDArray[np.int64], cut: Cut, sides: dict[int, int], draw: np.random.Generator
) -> NDArray[np.int64]:
    """Return the split of each sample of a client, whole groups at a time in drawn order, and note their sides.

    Each group goes to the split that is furthest behind its share of samples, or to the fold with fewest samples, of
    equals a drawn one. If a client would be left without training or test samples, its last groups are those.
    """
    found, number, sizes = np.unique(group, return_inverse=True, return_counts=True)
    order = draw.permutation(len(found))
    known = [index for index in order if int(found[index]) in sides]
    queue = [*known, *(index for index in order if int(found[index]) not in sides)]
    wanted = np.full(cut.folds, 1 / cut.folds) if cut.folds else np.array(cut.shares)
    have, side = np.zeros(len(wanted)), np.full(len(found), -1)
    for place, index in enumerate(queue):
        chosen = sides.get(int(found[index]))
        if chosen is None:
            empty = [] if cut.folds else [split for split in (0, 2) if wanted[split] > 0 and not have[split]]
            behind = np.where(wanted > 0, wanted * (have.sum() + sizes[index]) - have, -np.inf)
            best = np.flatnonzero(np.isclose(behind, behind.max()))
            chosen = empty[0] if empty and len(queue) - place <= len(empty) else int(draw.choice(best))
            sides[int(found[index])] = chosen
        side[index] = chosen
        have[chosen] += sizes[index]
    return cut.side_of(side[number]) if cut.folds else side[number]


def cut_splits(
    parts: list[Indices], cut: Cut, labels: NDArray[np.int64] | None, gap: int | None, seed: int, first: int = 0
) -> dict[str, Split]:
    """Cut each client's samples into train, val and test, at random unless the `cut` is class by class.

    What is drawn for a client depends on its number; `first` is that of the first one, at a site with some of many.
    With a `gap`, samples are in time order, class by class: the first ones are for training, and so many are left out
    before each of the other two, because neighbours in time are nearly the same sample.
    """
    pieces: dict[str, list[Indices]] = {name: [] for name in SPLITS}
    for client, part in enumerate(parts):
        if gap is None:
            draw = _draw(cut, seed, first + client)
            order = draw.permutation(part)
            if cut.stratify and labels is not None:
                order, where = _cut_by_class(order, labels, cut, draw)
            else:
                where = cut.deal(len(order), draw)
        else:
            order = part if labels is None else part[np.argsort(labels[part], kind="stable")]
            runs = [order] if labels is None else np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
            where = np.concatenate([_cut_in_time(len(run), cut.shares, gap) for run in runs])
        for index, name in enumerate(SPLITS):
            pieces[name].append(order[where == index])
    return {name: _join_pieces(some) for name, some in pieces.items()}


def _cut_by_class(
    order: Indices, labels: NDArray[np.int64], cut: Cut, draw: np.random.Generator
) -> tuple[Indices, NDArray[np.int64]]:
    """Return samples class by class, classes in drawn order, and the split of each, from a drawn turn on."""
    rank = draw.permutation(int(labels.max(initial=0)) + 1)
    turns = deal_turns(cut.shares, 2 * len(order) + 1)
    first = np.flatnonzero(turns[: len(order) + 1] == 0)  # the first sample is for training, and one for testing
    tested = [turn for turn in first.tolist() if cut.shares[2] == 0 or 2 in turns[turn : turn + len(order)]]
    begin = int(draw.choice(tested or [0]))
    return order[np.argsort(rank[labels[order]], kind="stable")], turns[begin : begin + len(order)]


def measure_flattery(parts: list[Indices], labels: NDArray[np.int64], shares: Shares) -> float:
    """Return how far a cut class by class flatters a personal model, in Brier score, as a mean over clients.

        B_k = 1/2 sum_c p_c (1 - p_c) (1 / n_k + 1 / n_train)

    A client's own class shares fit its test samples by so much better than they fit what comes next.
    """
    found = []
    for part in parts:
        if len(part):
            share = np.bincount(labels[part]) / len(part)
            found.append(0.5 * (share * (1 - share)).sum() * (1 + 1 / shares[0]) / len(part))
    return float(np.mean(found)) if found else 0.0


def cut_shared_splits(
    parts: list[Indices], dealt: list[Indices], cut: Cut, labels: NDArray[np.int64] | None, gap: int | None, seed: int,
    samples: int,
) -> dict[str, Split]:  # fmt: skip
    """Cut samples that clients share: one goes to the same split with all who have it.

    So nobody trains on what another is tested with. All samples are cut at once, as if one client had them; `parts`
    are the rows of each client, which were made from the samples `dealt`.
    """
    split_of = np.full(samples, -1)
    for number, split in enumerate(cut_splits([np.arange(samples)], cut, labels, gap, seed).values()):
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

    The first n of these hold every split's share of n, to rounding, for every n. The very first is for training, and
    the second for testing, whatever their shares, unless nothing is to be tested.
    """
    turns = np.zeros(most, dtype=np.int64)
    have = [1, 0, 0]
    order = (0, 2, 1)  # of equals, test comes before val
    for place in range(1, most):
        if place == 1 and shares[2] > 0:
            turns[1], have[2] = 2, 1
            continue
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
