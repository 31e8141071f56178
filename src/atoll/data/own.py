"""Your own data, in any common form: checked, and turned into numbers that a network can learn from.

read(frame, target="readmitted", client="hospital")     a pandas or polars frame
read("hospitals", target="readmitted")                  a folder with one CSV, Parquet or npz file per client
read({"Ulm": (x, y), "Porto": (x, y)})                  arrays, tensors, data sets of torch or Hugging Face
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.datasets import Dataset
from atoll.data.dates import ISO, find_forms, parse_dates
from atoll.data.ratings import LEAST_FEWEST, list_interactions, read_columns
from atoll.data.rows import Rows
from atoll.data.schema import Feature, Schema
from atoll.data.splits import Rule
from atoll.data.tables import Values, list_files
from atoll.kernel.errors import DataError, TaskError, unknown
from atoll.kernel.objective import PerSample, absolute_error, accuracy, cross_entropy, metric_of, squared_error

log = logging.getLogger("atoll.data")

Kind = Literal["auto", "classification", "regression", "tokens", "ratings"]
Standardise = Literal["auto", "none", "client", "global"]
LoneLabels = Literal["warn", "error"]

MOST_CATEGORIES = 50  # of a text column, and of a target that nobody says is of classes
SPLIT_WORDS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}


@dataclass(frozen=True, eq=False, repr=False)
class OwnData(Dataset):
    """A user's data: numbers that are not yet scaled, what they mean, and what decides the split of each."""

    schema: Schema | None = None
    rule: Rule = field(default_factory=Rule)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return () if self.schema is None else self.schema.classes

    @property
    def columns(self) -> tuple[str, ...]:
        """The features of a table in order: `age`, `sex=F`, `sex=M`."""
        return () if self.schema is None else self.schema.columns

    @property
    def facts(self) -> dict[str, Any]:
        """What a run's configuration says of the data: the classes, what rests on which samples, and the split."""
        if self.schema is None:
            return super().facts
        found: dict[str, Any] = {"standardise": self.schema.standardise}
        found |= {"class_names": list(self.class_names)} if self.class_names else {}
        return found | ({"split_by": self.rule.words} if self.rule.words else {})

    def take(self, rows: NDArray[np.int64]) -> Self:
        """Return some of the samples."""
        return replace(super().take(rows), rule=self.rule.take(rows))


@dataclass(frozen=True)
class Own:
    """Own data in words: where they lie, what their columns are for, and a digest of their files.

    These are the words of `read`. With them in its configuration, a run can find its data again, and sees whether they
    are still the same.
    """

    path: str
    target: str | None = None
    client: str | None = None
    kind: str = "auto"
    features: tuple[str, ...] | None = None
    categorical: tuple[str, ...] = ()
    classes: int | tuple[str, ...] | None = None
    standardise: str = "auto"
    group: str | None = None
    order: str | None = None
    gap: int = 0
    split: str | None = None
    min_samples: int = 2
    lone_labels: str = "warn"
    name: str | None = None
    digest: str | None = None

    @classmethod
    def of(cls, path: Path | str, **words: Any) -> Own:
        """Write own data down: the whole path, the words of `read`, and a digest of what the files hold now."""
        place = Path(path).resolve()
        known = {one.name for one in fields(cls)} - {"path", "digest"}
        for name in words:
            if name not in known:
                raise unknown("word of own data", name, known)
        plain: dict[str, Any] = {
            name: tuple(map(str, value)) if isinstance(value, list | tuple) else value for name, value in words.items()
        }
        return cls(str(place), digest=digest_files(place), **plain)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Own:
        """Rebuild the words from a configuration."""
        words: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}
        return cls(**words)

    @property
    def title(self) -> str:
        """What the data are called."""
        return self.name or name_of(self.path)

    def read(self) -> OwnData:
        """Read the data; raise if the files are gone, or hold something else than they did."""
        if not Path(self.path).exists():
            raise DataError(
                f"The files of own data must be where they were. There is no {self.path} any more.",
                hint="put the files back.",
            )
        now = digest_files(Path(self.path))
        if self.digest not in (None, now):
            raise DataError(
                f"The files of own data must be what they were. {self.path} has changed since this was begun: its "
                f"digest was {self.digest}, now it is {now}.",
                hint="put the files back, or begin a new run in another folder.",
            )
        return _read_once(replace(self, digest=now))

    @property
    def words(self) -> dict[str, Any]:
        """The arguments of `read`."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "digest")}


@lru_cache(maxsize=2)  # a comparison builds one task per seed from the same samples
def _read_once(own: Own) -> OwnData:
    return read(own.path, **own.words)


def name_of(source: Any) -> str:
    """Return what data are called that nobody named: as their folder or file."""
    return (isinstance(source, str | Path) and Path(source).stem) or "own"


def digest_files(path: Path) -> str:
    """Return a digest of the names and contents of a file or of all files in a folder."""
    paths = [path] if path.is_file() else list_files(path)
    return _digest_once(tuple((one, one.stat().st_size, one.stat().st_mtime_ns) for one in paths))


@lru_cache(maxsize=8)
def _digest_once(files: tuple[tuple[Path, int, int], ...]) -> str:
    whole = hashlib.sha256()
    for path, _, _ in files:
        try:
            with path.open("rb") as file:
                inner = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise DataError(f"{path} could not be read: {error}") from error
        whole.update(f"{path.name} {inner.hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


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
    group: str | None = None,
    order: str | None = None,
    gap: int = 0,
    split: str | None = None,
    min_samples: int = 2,
    lone_labels: LoneLabels = "warn",
    metric: PerSample | None = None,
    loss: PerSample | None = None,
    schema: Schema | None = None,
    name: str | None = None,
) -> OwnData:
    """Read one table with a `client` column, or one table per client; docs/guides/own-data.md has all the rules.

    `target` is the column to predict, `y` by default. All others are features unless `features` lists them; those in
    `categorical` are categories even if they look like numbers. `classes` fixes the labels and their order, or, for
    whole numbers, how many there are. Numbers are returned as they are; `standardise` says whose training samples give
    the mean and spread with which a task scales them. `group`, `order` (with a `gap`) and `split` are columns that
    decide the split of each sample. With a `schema` from elsewhere, nothing is found out from these data.

    Of `kind="ratings"`, one table says who (`client`) had to do with what (`target`) and when (`order`).
    """
    _require_known("lone_labels", lone_labels, LoneLabels)
    if kind == "ratings":
        _require_unset(
            features=features, categorical=tuple(categorical), classes=classes, group=group, split=split, schema=schema
        )
        return _read_interactions(source, client, target, order, min_samples, name)
    rows = Rows.of(source, client)
    _require_samples(rows, min_samples)
    apart = [one for one in (client, group, order, split) if one is not None]
    if schema is None:
        schema = find_schema(
            rows, target=target, apart=apart, kind=kind, features=features, categorical=categorical, classes=classes,
            standardise=standardise,
        )  # fmt: skip
    else:
        _report_extra_columns(rows, schema, apart)
    x = schema.encode(rows)
    count: int | None
    if schema.kind == "tokens":
        x, y, count = _shift_tokens(rows, x, schema)
        schema = replace(schema, outputs=count)
    else:
        y = schema.encode_target(rows)
        count = len(schema.classes) or None
        if count is not None:
            _report_lone_labels(rows, y, schema.classes, lone_labels)
    return OwnData(
        name or name_of(source),
        _to_tensor(x),
        _to_tensor(y if y.dtype.kind in "iu" else y.astype(np.float32)),
        classes=count,
        central=None,
        source=f"own data of {len(rows.owners)} clients",
        owner=rows.owner,
        owners=rows.owners,
        least=max(min_samples, 1),
        model="char-transformer" if schema.kind == "tokens" and y.ndim == 2 else None,
        loss=loss or (squared_error if count is None else cross_entropy),
        metric=metric_of(metric or (absolute_error if count is None else accuracy)),
        schema=schema,
        rule=_find_rule(rows, group, order, gap, split),
    )


def _read_interactions(
    source: Any, client: str | None, target: str | None, order: str | None, min_samples: int, name: str | None
) -> OwnData:
    """Read a table of ratings, in which every user is a client; its last rating is for testing."""
    roles = {"client": client or "user", "target": target or "item", "order": order or "time"}
    title = name or name_of(source)
    fewest = (max(min_samples, LEAST_FEWEST), 1)
    columns = read_columns(source, roles)
    return OwnData(**list_interactions(title, "own ratings", *columns, fewest=fewest, level=logging.WARNING))


def _require_unset(**words: Any) -> None:
    """Raise if something is said that ratings do not need."""
    for word, value in words.items():
        if value not in (None, ()):
            raise TaskError(
                f"Of ratings only who, what and when is read, so `{word}` must be left out. Got {value!r}.",
                hint="`client` is the column of users, `target` that of items, `order` that of times.",
            )


def find_schema_of(source: Any, *, client: str | None = None, apart: Sequence[str] = (), **words: Any) -> Schema:
    """Find out what the columns of a file, of a folder or of data in memory are; `apart` lists what is no feature."""
    alone = isinstance(source, str | Path) and Path(source).is_file() and client is None
    rows = Rows.of({name_of(source): source} if alone else source, client)
    for name in apart:
        if name not in rows.names:
            raise unknown("column", name, rows.names)
    schema = find_schema(rows, apart=[*apart, *([client] if client else [])], **words)
    if schema.kind == "tokens":
        schema = replace(schema, outputs=_shift_tokens(rows, schema.encode(rows), schema)[2])
    return schema


def parse_classes(text: str | None) -> int | tuple[str, ...] | None:
    """Parse classes: `10` is how many there are, `low,high` are labels."""
    if text is None or text.isdigit():
        return None if text is None else int(text)
    return tuple(label.strip() for label in text.split(","))


def find_schema(
    rows: Rows,
    *,
    target: str | None = None,
    apart: Sequence[str] = (),
    kind: Kind = "auto",
    features: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    classes: int | Sequence[Any] | None = None,
    standardise: Standardise = "auto",
) -> Schema:
    """Find out what the columns of data are; those `apart` are neither features nor the target."""
    _require_known("kind", kind, Kind)
    _require_known("standardise", standardise, Standardise)
    if kind == "ratings":
        raise TaskError("Ratings have no schema: users and items are what they are.", hint="leave `kind` out.")
    target = target or "y"
    to_shift = kind == "tokens" and target not in rows.names
    used = _select(rows, [*([] if to_shift else [target]), *apart], features)
    for column in categorical:
        if column not in (*used, target):
            raise unknown("column in `categorical`", column, [*used, target])
    found = _find_features(rows, used, categorical)
    by: Any = "client" if standardise == "auto" else standardise
    if kind == "tokens":
        if classes is not None and not isinstance(classes, int):
            raise TaskError(
                f"`classes` must be the size of the vocabulary where tokens are predicted. Got {classes!r}."
            )
        return Schema(found, None if to_shift else target, "tokens", outputs=classes, standardise="none")
    predicts, names = _find_classes(rows, target, kind, classes, as_text=target in categorical)
    return Schema(found, target, predicts, classes=names, standardise=by)


def _report_extra_columns(rows: Rows, schema: Schema, apart: Sequence[str]) -> None:
    known = {feature.name for feature in schema.features} | {schema.target, *apart}
    extra = [name for name in rows.names if name not in known]
    if extra:
        log.warning("left out, because the schema does not name them: %s", ", ".join(extra))


def _require_known(argument: str, given: str, known: Any) -> None:
    if given not in get_args(known):
        raise unknown(f"`{argument}`", given, get_args(known))


def _to_tensor(values: Values) -> torch.Tensor:
    """Convert to a tensor; whole numbers stay whole, as they may be tokens, and others exact until they are scaled."""
    kind = np.int64 if values.dtype.kind in "iu" else values.dtype if values.dtype == np.float32 else np.float64
    return torch.from_numpy(np.ascontiguousarray(values, kind))


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


def _find_features(rows: Rows, used: Sequence[str], categorical: Sequence[str]) -> tuple[Feature, ...]:
    """Find the type of each column; a column of arrays must be the only one."""
    found = tuple(_find_feature(rows, name, name in categorical) for name in used)
    arrays = [feature for feature in found if feature.type == "array"]
    if arrays and len(found) > 1:
        raise DataError(
            f"A column of arrays must be the only feature. Got `{arrays[0].name}` and {len(found) - 1} more.",
            hint=f"pass features=[{arrays[0].name!r}].",
        )
    return found


def _find_feature(rows: Rows, name: str, categorical: bool) -> Feature:
    values = rows.column(name, categorical=categorical)
    if values.ndim > 1:
        pixels = values.dtype == np.uint8 and values.ndim > 2
        holds = "pixels" if pixels else "tokens" if values.dtype.kind in "iu" else "amounts"
        return Feature(name, "array", shape=values.shape[1:], holds=holds)  # type: ignore[arg-type]
    if values.dtype != object and not categorical:
        return Feature(name, "flag" if values.dtype == bool else "number")
    if not categorical and find_forms(values.tolist()):
        raise DataError(
            f"Column `{name}` must hold numbers or categories. It holds dates, as {str(values[0])!r}.",
            hint=f"pass order={name!r} to train on the past, leave it out with features=[...], or have `atoll data "
            "check --fix` count days.",
        )
    found = np.unique(values)
    if len(found) > MOST_CATEGORIES:
        raise DataError(
            f"A column of text must have at most {MOST_CATEGORIES} different values. `{name}` has {len(found)}.",
            hint="drop it by listing the columns to use in features=[...], or encode it as numbers.",
        )
    return Feature(name, "category", categories=tuple(map(str, found)))


# -- splits ------------------------------------------------------------------------------------------------------------


def _find_rule(rows: Rows, group: str | None, order: str | None, gap: int, split: str | None) -> Rule:
    """Read the columns that decide the split of each sample."""
    if order is not None and (group is not None or split is not None):
        other = "group" if group is not None else "split"
        raise DataError(
            f"Samples must be split by one rule. Got order={order!r} and {other}={group or split!r}.",
            hint="leave one of them out.",
        )
    if gap < 0 or (gap and order is None):
        raise DataError(f"`gap` must be at least 0, and samples must have an `order`. Got gap={gap}, order={order!r}.")
    numbered = None
    if group is not None:
        values = _one_per_row(rows, group, categorical=True).astype(str)
        if _counts_within_clients(values, rows.owner):  # everybody's group 1 is another one
            values = np.array([f"{owner} {value}" for owner, value in zip(rows.owner, values, strict=True)])
        numbered = np.unique(values, return_inverse=True)[1]
    given = None if split is None else _read_split(rows, split)
    if given is not None and numbered is not None:
        _require_one_side(rows, group or "", numbered, given)
    time = None if order is None else _read_order(rows, order)
    by = f"by column {split}" if split else f"groups of {group} kept whole" if group else ""
    by = f"in the order of {order}{f', gap {gap}' if gap else ''}" if order else by
    return Rule(given=given, group=numbered, order=time, gap=gap, words=by)


def _counts_within_clients(values: Values, owner: NDArray[np.int64]) -> bool:
    """Return whether each client numbers its groups for itself: from 0 or 1 on, without a hole."""
    if not all(value.isdigit() for value in np.unique(values)):
        return False
    for client in np.unique(owner):
        found = np.unique(values[owner == client].astype(np.int64))
        if found[0] > 1 or len(found) != found[-1] - found[0] + 1:
            return False
    return True


def _one_per_row(rows: Rows, name: str, *, categorical: bool = False) -> Values:
    if name not in rows.names:
        raise unknown("column", name, rows.names)
    values = rows.column(name, categorical=categorical)
    if values.ndim > 1:
        raise DataError(f"Column `{name}` must hold one value per row. Got arrays of shape {values.shape[1:]}.")
    return values


def _read_split(rows: Rows, name: str) -> NDArray[np.int64]:
    values = np.array([str(value).lower() for value in _one_per_row(rows, name, categorical=True)])
    wrong = ~np.isin(values, [*SPLIT_WORDS])
    if wrong.any():
        raise rows.error(name, "must hold train, val or test", repr(str(values[wrong][0])), wrong)
    return np.array([SPLIT_WORDS[value] for value in values], dtype=np.int64)


def _require_one_side(rows: Rows, group: str, numbered: NDArray[np.int64], given: NDArray[np.int64]) -> None:
    """Raise for a group that a column of splits puts on both sides."""
    sides = np.zeros((int(numbered.max()) + 1, 3), dtype=bool)
    sides[numbered, given] = True
    torn = np.flatnonzero(sides.sum(axis=1) > 1)
    if len(torn):
        wrong = numbered == torn[0]
        *first, last = [word for word, there in zip(("train", "val", "test"), sides[torn[0]], strict=True) if there]
        value, owners = _one_per_row(rows, group, categorical=True)[np.argmax(wrong)], np.unique(rows.owner[wrong])
        whose = f" of client {rows.owners[owners[0]]!r}" if len(owners) == 1 else ""
        others = len(torn) - 1
        more = f" {others} other group{'s are' if others > 1 else ' is'} torn, too." if others else ""
        raise DataError(
            f"A group must be on one side of the split. {group} {str(value)!r}{whose} is in {', '.join(first)} and "
            f"{last}.{more}",
            hint="correct the column of splits, or leave it out: groups alone are split without tearing any.",
        )


def _read_order(rows: Rows, name: str) -> NDArray[np.float64]:
    """Read times: numbers, or dates."""
    values = _one_per_row(rows, name)
    if values.dtype != object:
        return values.astype(np.float64)
    times = parse_dates(values.tolist())
    if times is None:
        wrong = np.array([len(find_forms([value])) != 1 for value in values])
        given, hint = repr(str(values[np.argmax(wrong)])), f"write dates as {ISO}."
        raise rows.error(name, "must hold numbers, or dates of one form", given, wrong, hint)
    return times


# -- targets -----------------------------------------------------------------------------------------------------------


def _find_classes(
    rows: Rows, target: str, kind: Kind, classes: int | Sequence[Any] | None, *, as_text: bool
) -> tuple[Any, tuple[str, ...]]:
    """Return what is predicted, and the names of the classes or none."""
    values = rows.column(target, categorical=as_text)
    if values.shape[1:] == (1,):
        values = values[:, 0]
    if kind == "auto":
        kind = "classification" if classes is not None else _guess_kind(target, values)
    if kind == "regression":
        return kind, ()
    if values.ndim > 1:
        raise DataError(
            f"There must be one label per sample. `{target}` holds arrays of shape {values.shape[1:]}.",
            hint="pass kind='tokens' for sequences, kind='regression' for several numbers.",
        )
    if classes is not None:
        return kind, tuple(str(label) for label in (range(classes) if isinstance(classes, int) else classes))
    if values.dtype.kind == "f" and (values == np.rint(values)).all():
        values = values.astype(np.int64)
    labels = tuple(str(label) for label in np.unique(values))
    if len(labels) < 2:
        raise DataError(f"There must be at least 2 classes. All of `{target}` is {labels[0]!r}.")
    return kind, labels


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


def _shift_tokens(rows: Rows, x: Values, schema: Schema) -> tuple[Values, Values, int]:
    """Return sequences, their targets (by default the next token at each place), and the size of the vocabulary."""
    name, target, classes = schema.features[0].name, schema.target, schema.outputs
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
    tokens = np.column_stack([x, y])
    size = int(tokens.max()) + 1 if classes is None else classes
    outside = (tokens < 0) | (tokens >= size)
    if outside.any():
        rule, wrong = f"must hold tokens in 0 .. {size - 1}", np.asarray(outside.any(axis=1))
        raise rows.error(name, rule, str(tokens[outside][0]), wrong)
    return x, y, size
