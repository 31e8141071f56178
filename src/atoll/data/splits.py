"""Cutting each client's samples into train, val and test."""

from __future__ import annotations

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


def cut_splits(
    parts: list[Indices], shares: Shares, labels: NDArray[np.int64] | None, gap: int | None, seed: int
) -> dict[str, Split]:
    """Cut each client's samples into train, val and test, class by class where samples have one.

    Samples without a time order are shuffled first. With a `gap`, the first ones in time are for training, and so many
    are left out before each of the other two: neighbours in time are nearly the same sample.
    """
    if not (len(shares) == 3 and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6 and shares[0] > 0):
        raise TaskError(f"`shares` must be three shares (train, val, test) that sum to 1. Got {shares!r}.")
    turns = deal_turns(shares, max(map(len, parts), default=0))
    cut: dict[str, list[Indices]] = {name: [] for name in SPLITS}
    for client, part in enumerate(parts):
        order = part if gap is not None else generator(seed, "split", client).permutation(part)
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
