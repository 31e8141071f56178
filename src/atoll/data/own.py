"""Your own data, in any common form: checked, and turned into numbers that a network can learn from.

read(frame, target="readmitted", client="hospital")     a pandas or polars frame
read("hospitals", target="readmitted")                  a folder with one CSV, Parquet or npz file per client
read({"Ulm": (x, y), "Porto": (x, y)})                  arrays, tensors, data sets of torch or Hugging Face
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.datasets import Dataset
from atoll.data.rows import Rows
from atoll.data.tables import Values
from atoll.kernel.errors import DataError, TaskError, unknown
from atoll.kernel.objective import PerSample, absolute_error, accuracy, cross_entropy, metric_of, squared_error

log = logging.getLogger("atoll.data")

Kind = Literal["auto", "classification", "regression", "tokens"]
Standardise = Literal["auto", "none", "client", "global"]
LoneLabels = Literal["warn", "error"]

MOST_CATEGORIES = 50  # of a text column, and of a target that nobody says is of classes
LEAST_SPREAD = 1e-12  # relative to the mean; below it a column is constant but for rounding


@dataclass(frozen=True, eq=False, repr=False)
class OwnData(Dataset):
    """A user's data, with the names of classes and columns."""

    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # of tables, the features in order: `age`, `sex=F`, `sex=M`


def read(
    source: Any,
    *,
    target: str | None = None,
    client: str | None = None,
    kind: Kind = "auto",
    features: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    classes: int | Sequence[Any] | None = None,
    standardise: Standardise = "auto",
    min_samples: int = 2,
    lone_labels: LoneLabels = "warn",
    metric: PerSample | None = None,
    loss: PerSample | None = None,
    name: str = "own",
) -> OwnData:
    """Read one table with a `client` column, or one table per client; docs/guides/own-data.md has all the rules.

    `target` is the column to predict, `y` by default. All others are features unless `features` lists them; those in
    `categorical` are categories even if they look like numbers. `classes` fixes the labels and their order, or, for
    whole numbers, how many there are. `standardise` takes mean and spread from each client's rows or from all rows.
    """
    _require_known("kind", kind, Kind)
    _require_known("standardise", standardise, Standardise)
    _require_known("lone_labels", lone_labels, LoneLabels)
    rows = Rows.of(source, client)
    _require_samples(rows, min_samples)
    target = target or "y"
    to_shift = kind == "tokens" and target not in rows.names
    used = _select(rows, [*([] if to_shift else [target]), *([] if client is None else [client])], features)
    for column in categorical:
        if column not in (*used, target):
            raise unknown("column in `categorical`", column, [*used, target])

    x, columns = _encode_samples(rows, used, categorical, standardise)
    names: tuple[str, ...] = ()
    count: int | None
    if kind == "tokens":
        x, y, count = _shift_tokens(rows, x, used[0], None if to_shift else target, classes)
    else:
        y, names = _encode_targets(rows, target, kind, classes, as_text=target in categorical)
        count = len(names) or None
        if names:
            _report_lone_labels(rows, y, names, lone_labels)
    return OwnData(
        name,
        _to_tensor(x),
        _to_tensor(y),
        classes=count,
        central=None,
        source=f"own data of {len(rows.owners)} clients",
        owner=rows.owner,
        owners=rows.owners,
        least=max(min_samples, 1),
        model="char-transformer" if kind == "tokens" and y.ndim == 2 else None,
        loss=loss or (squared_error if count is None else cross_entropy),
        metric=metric_of(metric or (absolute_error if count is None else accuracy)),
        class_names=names,
        columns=columns,
    )


def _require_known(argument: str, given: str, known: Any) -> None:
    if given not in get_args(known):
        raise unknown(f"`{argument}`", given, get_args(known))


def _to_tensor(values: Values) -> torch.Tensor:
    """Convert to a tensor; whole numbers stay whole, as they may be tokens."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int64 if values.dtype.kind in "iu" else np.float32))


# -- which rows and columns --------------------------------------------------------------------------------------------


def _require_samples(rows: Rows, least: int) -> None:
    least = max(least, 1)
    sizes = np.bincount(rows.owner, minlength=len(rows.owners))
    few = np.flatnonzero(sizes < least)
    if len(few):
        shown = ", ".join(f"{rows.owners[index]!r} has {sizes[index]}" for index in few[:5])
        raise DataError(
            f"Every client must have at least {least} samples. {len(few)} of {len(rows.owners)} have fewer: "
            f"{shown}{', ...' if len(few) > 5 else ''}.",
            hint="leave these clients out, or pass min_samples=1: a client with one sample trains and is not tested.",
        )


def _select(rows: Rows, apart: Sequence[str], features: Sequence[str] | None) -> list[str]:
    """Return the feature columns; every client must have them and, where they are not listed, no others."""
    for name in (*apart, *(features or ())):
        if name not in rows.names:
            raise unknown("column", name, rows.names)
    used = [name for name in rows.names if name not in apart] if features is None else list(features)
    if not used or set(used) & set(apart):
        raise DataError(
            f"There must be a feature besides target and client ({', '.join(apart)}), and neither may be one. "
            f"Got {', '.join(used) or 'none'}.",
            hint=f"the columns are: {', '.join(rows.names)}.",
        )
    first, *others = rows.tables
    for table in others:
        lacks = [name for name in (*used, *apart) if name not in table.columns]
        extra = [name for name in table.columns if name not in first.columns] if features is None else []
        if lacks or extra:
            differences = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"also has {', '.join(extra)}"] * bool(extra)
            raise DataError(
                f"Every client must have the same columns. Compared with {first.where}, {table.where} "
                f"{' and '.join(differences)}.",
                hint="rename or remove columns, or list those to use in features=[...].",
            )
    return used


# -- samples -----------------------------------------------------------------------------------------------------------


def _encode_samples(
    rows: Rows, used: Sequence[str], categorical: Sequence[str], standardise: Standardise
) -> tuple[Values, tuple[str, ...]]:
    """Return the numbers that enter the network and, for a table, their names."""
    columns = {name: rows.column(name, categorical=name in categorical) for name in used}
    arrays = [name for name, values in columns.items() if values.ndim > 1]
    if not arrays:
        encoded = [
            _encode(name, values, name in categorical, rows.owner, standardise) for name, values in columns.items()
        ]
        blocks, names = zip(*encoded, strict=True)
        return np.concatenate(blocks, axis=1), tuple(name for several in names for name in several)
    if len(columns) > 1:
        raise DataError(
            f"A column of arrays must be the only feature. Got `{arrays[0]}` and {len(columns) - 1} more.",
            hint=f"pass features=[{arrays[0]!r}].",
        )
    return _scale_arrays(columns[arrays[0]], rows.owner, standardise), ()


def _scale_arrays(x: Values, owner: NDArray[np.int64], standardise: Standardise) -> Values:
    if x.dtype == np.uint8 and x.ndim > 2:  # pixels
        x = (x.astype(np.float32) / 255 - 0.5) / 0.5
    if standardise in ("auto", "none"):
        return x
    flat = x.reshape(len(x), -1)
    return np.stack([_standardise(place, owner, standardise) for place in flat.T], axis=1).reshape(x.shape)


def _encode(
    name: str, values: Values, categorical: bool, owner: NDArray[np.int64], standardise: Standardise
) -> tuple[NDArray[np.float64], list[str]]:
    """Return a column as one or several columns of numbers, with their names."""
    if values.dtype == object or categorical:
        found, number = np.unique(values, return_inverse=True)
        if len(found) > MOST_CATEGORIES:
            raise DataError(
                f"A column of text must have at most {MOST_CATEGORIES} different values. `{name}` has {len(found)}.",
                hint="drop it by listing the columns to use in features=[...], or encode it as numbers.",
            )
        return np.eye(len(found))[number], [f"{name}={value}" for value in found]
    if values.dtype != bool:
        values = _standardise(values, owner, standardise)
    return values[:, None].astype(np.float64), [name]


def _standardise(values: Values, owner: NDArray[np.int64], standardise: Standardise) -> Values:
    """Subtract the mean and divide by the standard deviation, of the client's own values or of all."""
    if standardise == "none":
        return values
    group = np.zeros_like(owner) if standardise == "global" else owner
    sizes = np.bincount(group)
    mean = np.bincount(group, values) / sizes
    centred = values - mean[group]
    spread = np.sqrt(np.bincount(group, centred**2) / sizes)
    spread[spread <= LEAST_SPREAD * np.abs(mean)] = 1.0
    return centred / spread[group]


# -- targets -----------------------------------------------------------------------------------------------------------


def _encode_targets(
    rows: Rows, target: str, kind: Kind, classes: int | Sequence[Any] | None, *, as_text: bool
) -> tuple[Values, tuple[str, ...]]:
    """Return class numbers and the names of the classes, or numbers and no names."""
    values = rows.column(target, categorical=as_text)
    if values.shape[1:] == (1,):
        values = values[:, 0]
    if kind == "auto":
        kind = "classification" if classes is not None else _guess_kind(target, values)
    if kind == "regression":
        if values.dtype == object:
            raise DataError(f"The target of a regression must be numbers. `{target}` holds {values[0]!r}.")
        return values.astype(np.float32), ()
    if values.ndim > 1:
        raise DataError(
            f"There must be one label per sample. `{target}` holds arrays of shape {values.shape[1:]}.",
            hint="pass kind='tokens' for sequences, kind='regression' for several numbers.",
        )
    return _number_labels(rows, target, values, classes)


def _guess_kind(target: str, values: Values) -> Kind:
    if values.dtype.kind == "f":
        return "regression"
    different = len(np.unique(values))
    if different > MOST_CATEGORIES:
        raise DataError(
            f"It must be clear what to predict. `{target}` has {different} different values, which may be classes "
            "or amounts.",
            hint="pass kind='classification' or kind='regression'.",
        )
    return "classification"


def _number_labels(
    rows: Rows, target: str, values: Values, classes: int | Sequence[Any] | None
) -> tuple[Values, tuple[str, ...]]:
    if values.dtype.kind == "f" and (values == np.rint(values)).all():
        values = values.astype(np.int64)
    found, number = np.unique(values, return_inverse=True)
    labels = [str(label) for label in found]
    if classes is None:
        if len(found) < 2:
            raise DataError(f"There must be at least 2 classes. All of `{target}` is {labels[0]!r}.")
        return number, tuple(labels)
    names = tuple(str(label) for label in (range(classes) if isinstance(classes, int) else classes))
    for index, label in enumerate(labels):
        if label not in names:
            raise rows.error(target, f"must be one of the {len(names)} classes", repr(label), number == index)
    return np.array([names.index(label) for label in labels])[number], names


def _report_lone_labels(rows: Rows, y: Values, names: Sequence[str], what: LoneLabels) -> None:
    """Warn or raise where only one client has a label: nobody else can learn it, or it is misspelt."""
    if len(rows.owners) == 1:
        return
    present = np.zeros((len(rows.owners), len(names)), dtype=bool)
    present[rows.owner, y] = True
    lone = np.flatnonzero(present.sum(axis=0) == 1)
    if len(lone):
        shown = ", ".join(f"{names[label]!r} only at {rows.owners[present[:, label].argmax()]!r}" for label in lone[:5])
        message = f"{len(lone)} of {len(names)} labels occur at one client alone: {shown}{', ...' * (len(lone) > 5)}."
        if what == "error":
            hint = "check their spelling, or pass lone_labels='warn'."
            raise DataError(f"Every label must occur at two clients or more. {message}", hint=hint)
        log.warning(message)


def _shift_tokens(
    rows: Rows, x: Values, name: str, target: str | None, classes: int | Sequence[Any] | None
) -> tuple[Values, Values, int]:
    """Return sequences, their targets (by default the next token at each place), and the size of the vocabulary."""
    if x.ndim != 2 or x.dtype.kind not in "iu" or x.shape[1] < 2:
        raise DataError(
            f"Tokens must be whole numbers of shape [samples, length], of length at least 2. `{name}` is {x.dtype} "
            f"of shape [{', '.join(map(str, x.shape))}]."
        )
    x, y = (x[:, :-1], x[:, 1:]) if target is None else (x, rows.column(target))
    if y.dtype.kind not in "iu" or y.shape not in (x.shape, x.shape[:1]):
        raise DataError(
            f"Targets must be one token per sample or per place. Got {y.dtype} of shape {y.shape} for {x.shape}."
        )
    if classes is not None and not isinstance(classes, int):
        raise TaskError(f"`classes` must be the size of the vocabulary where tokens are predicted. Got {classes!r}.")
    tokens = np.column_stack([x, y])
    size = int(tokens.max()) + 1 if classes is None else classes
    outside = (tokens < 0) | (tokens >= size)
    if outside.any():
        rule, wrong = f"must hold tokens in 0 .. {size - 1}", np.asarray(outside.any(axis=1))
        raise rows.error(name, rule, str(tokens[outside][0]), wrong)
    return x, y, size
