"""Ratings as interactions: who had to do with which item, in time order. A user is a client.

Every rating counts as an interaction, whatever its value. The last one of a user is for testing, the one before it for
validation, all earlier ones train: the same for every method, and other users' later interactions do train.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.dates import ISO, parse_dates
from atoll.data.ranking import RANKINGS
from atoll.data.tables import table_of
from atoll.kernel.errors import DataError

log = logging.getLogger("atoll.data")

Numbers = NDArray[np.int64]
FEWEST = 5  # interactions of a user, and of an item
LEAST_FEWEST = 3  # one trains, one validates, one tests
MODEL = "item-factors"


def core(user: Numbers, item: Numbers, users: int, items: int) -> NDArray[np.bool_]:
    """Return which interactions stay where users and items with fewer than so many are left out, again and again."""
    keep = np.ones(len(user), dtype=bool)
    while True:
        of_user, of_item = (
            np.bincount(numbers[keep], minlength=int(numbers.max(initial=0)) + 1) for numbers in (user, item)
        )
        still: NDArray[np.bool_] = keep & (of_user[user] >= users) & (of_item[item] >= items)
        if still.sum() == keep.sum():
            return still
        keep = still


def list_interactions(
    name: str, source: str, user: Any, item: Any, time: Any, *, fewest: tuple[int, int] = (FEWEST, FEWEST),
    leak: bool = False, level: int = logging.INFO,
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a data set of interactions: of users and items with at least the `fewest` of them.

    Of ties in time, the item with the smaller number comes first. An item that a user has twice counts once, the first
    time. A sample holds the items that training must not draw as negatives although the user has not trained on them:
    none, unless `leak`, as some published code has it; then these are the user's items for validation and testing, and
    the answer is given away. What is left out, and what cannot be found, is logged at `level`.
    """
    if fewest[0] < LEAST_FEWEST:
        raise DataError(
            f"Users must have at least {LEAST_FEWEST} ratings: one to train, one to validate and one to test. "
            f"Got fewest={fewest!r}."
        )
    users, user = np.unique(np.asarray(user), return_inverse=True)
    items, item = np.unique(np.asarray(item), return_inverse=True)
    order = np.lexsort((item, np.asarray(time), user))
    first = np.sort(np.unique(user[order] * len(items) + item[order], return_index=True)[1])
    user, item = user[order][first], item[order][first]
    stay, few = core(user, item, *fewest), int((np.bincount(user, minlength=len(users)) < fewest[0]).sum())
    if few:
        words = "%s: %d of %d users have fewer than %d ratings and are left out"
        log.log(level, words, name, few, len(users), fewest[0])
    if not stay.any():
        raise DataError(
            f"There must be users with {fewest[0]} ratings or more of items with {fewest[1]} or more. "
            f"{source} has none: it has {len(user)} ratings of {len(items)} items by {len(users)} users.",
            hint=f"lower `fewest`; users need at least {LEAST_FEWEST}.",
        )
    kept, owner = np.unique(user[stay], return_inverse=True)
    known, item = np.unique(item[stay], return_inverse=True)
    last = np.append(owner[1:] != owner[:-1], True)
    before = np.append(last[1:], False)
    in_training = np.bincount(item[~last & ~before], minlength=len(known)) > 0
    lost = int((~in_training[item[last]]).sum())
    if lost:
        log.log(
            level, "%s: of %d users, %d have a test item that is in nobody's training data: no method can find it",
            name, len(kept), lost,
        )  # fmt: skip
    avoid = np.full((len(item), 2), len(known), dtype=np.int64)
    if leak:
        avoid = np.stack([item[before][owner], item[last][owner]], axis=1)
    return {
        "name": name, "x": torch.from_numpy(avoid), "y": torch.from_numpy(item), "classes": len(known),
        "central": None, "source": source, "owner": owner, "owners": tuple(f"user {one}" for one in users[kept]),
        "least": LEAST_FEWEST, "model": MODEL, "metric": RANKINGS["hr@10"], "recommends": True,
    }  # fmt: skip


WHY = "Leave-one-out needs an order: the last rating of a user is for testing."


def read_columns(source: Any, roles: Mapping[str, str]) -> tuple[Any, Any, Any]:
    """Read who had to do with which item when, from a file or a frame of ratings; say which column is missing.

    `roles` has the three columns in this order, by the names of the arguments that say them.
    """
    if isinstance(source, str | Path) and Path(source).is_dir():
        raise DataError(f"Ratings must be in one file, with a column of users. {source} is a folder.")
    table = table_of(source)
    user, item, time = roles.values()
    for what, column in roles.items():
        if column not in table.columns:
            why = f" {WHY}" if column == time else ""
            raise DataError(
                f"Ratings must have a column {column!r} for `{what}`.{why} The columns of {table.where} are: "
                f"{', '.join(table.columns)}.",
                hint=f"say which column it is: {what}='...'.",
            )
    times = table.columns[time]
    when = np.array([as_number(cell) for cell in times])
    dates = parse_dates([str(cell) for cell in times]) if np.isnan(when).all() else None
    when = when if dates is None else dates
    if np.isnan(when).any():
        row = int(np.flatnonzero(np.isnan(when))[0])
        raise DataError(
            f"Every rating must have a time, as a number such as seconds or as a date. {table.place(row)} has "
            f"{times[row]!r} in {time!r}.",
            hint=f"leave such ratings out; dates must look like {ISO}.",
        )
    return table.columns[user].astype(str), table.columns[item].astype(str), when


def as_number(cell: Any) -> float:
    """Return a cell as a number; NaN if it is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")
