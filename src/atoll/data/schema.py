"""What the columns of a user's data are: names, types, categories and classes, without a sample or a mean.

A schema is found once, from all data or from one file, and says how any other file becomes numbers. Sites that never
meet prepare their files alike by it, and a file that does not fit it is refused with the name of the column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from atoll.data.rows import Rows
from atoll.data.tables import Values
from atoll.kernel.errors import DataError

Type = Literal["number", "flag", "category", "array"]
Holds = Literal["amounts", "pixels", "tokens"]
Kind = Literal["classification", "regression", "tokens"]
ScaledBy = Literal["client", "global", "none"]

FORM = "atoll-schema-1"  # what a file of a schema says it is
MOST_NAMED = 10  # columns in a message


@dataclass(frozen=True)
class Feature:
    """A column that enters the network: a number, a flag, a category, or an array of numbers."""

    name: str
    type: Type
    categories: tuple[str, ...] = ()  # in the order of their 0/1 columns
    shape: tuple[int, ...] = ()  # of arrays
    holds: Holds = "amounts"  # of arrays; pixels are whole numbers from 0 to 255

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the network's inputs: `age`, or `sex=F` and `sex=M`; none for arrays."""
        if self.type == "array":
            return ()
        return tuple(f"{self.name}={one}" for one in self.categories) if self.type == "category" else (self.name,)

    @property
    def channel_axis(self) -> int | None:
        """The axis of a sample that counts channels: the first one; of two, the shorter; None where there is none.

        A list of numbers is a row of columns, each with a scale of its own; a square is a picture of one channel.
        """
        if len(self.shape) == 2:
            return None if self.shape[0] == self.shape[1] else int(np.argmin(self.shape))
        return 0 if self.shape else None

    def encode(self, rows: Rows) -> Values:
        """Return the column as numbers [rows, ...], not yet scaled; raise, naming it, where it is something else."""
        _require_column(self.name, rows)
        values = rows.column(self.name, categorical=self.type == "category")
        if self.type == "category":
            return self._encode_categories(rows, values)
        if self.type == "array":
            return self._encode_arrays(values)
        given = "text" if values.dtype == object else "flags" if values.dtype == bool else "numbers"
        if values.ndim > 1:
            given = f"arrays of shape {values.shape[1:]}"
        if given != f"{self.type}s":
            raise _misfit(self.name, f"{self.type}s", given)
        return values[:, None].astype(np.float64)

    def _encode_categories(self, rows: Rows, values: Values) -> Values:
        if values.ndim > 1:
            raise _misfit(self.name, "categories", f"arrays of shape {values.shape[1:]}")
        found, number = np.unique(values, return_inverse=True)
        place = {name: index for index, name in enumerate(self.categories)}
        for index, value in enumerate(found):
            if str(value) not in place:
                rule = f"must hold one of {', '.join(self.categories)}"
                raise rows.error(
                    self.name, rule, repr(str(value)), number == index, "correct it, or add it to the schema."
                )
        return np.eye(len(place))[np.array([place[str(value)] for value in found], dtype=np.int64)][number]

    def _encode_arrays(self, values: Values) -> Values:
        fits = values.ndim == len(self.shape) + 1 and (self.holds == "tokens" or values.shape[1:] == self.shape)
        if values.dtype == object or not fits:  # a sequence of tokens may be of another length
            given = "text" if values.dtype == object else f"shape {values.shape[1:]}"
            raise _misfit(self.name, f"arrays of shape {self.shape}", given)
        if self.holds == "pixels":
            return (values.astype(np.float32) / 255 - 0.5) / 0.5
        if self.holds == "tokens" and values.dtype.kind not in "iu":
            raise _misfit(self.name, "whole numbers", str(values.dtype))
        return values


@dataclass(frozen=True)
class Schema:
    """The features in order, and what is predicted. It holds no sample and no statistics."""

    features: tuple[Feature, ...]
    target: str | None  # None where tokens predict the next ones
    kind: Kind
    classes: tuple[str, ...] = ()  # names, in the order of the network's outputs
    outputs: int | None = None  # of tokens, how many there are
    standardise: ScaledBy = "client"  # whose training samples give mean and spread

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the network's inputs, of a table."""
        return tuple(name for feature in self.features for name in feature.columns)

    @property
    def array(self) -> Feature | None:
        """The column of arrays, where it is the only feature."""
        return self.features[0] if self.features[0].type == "array" else None

    @property
    def scaled(self) -> NDArray[np.int64]:
        """Which inputs of a table are numbers, which have a mean and a spread; flags and categories have none."""
        types = [feature.type for feature in self.features for _ in feature.columns]
        return np.flatnonzero([kind == "number" for kind in types])

    def encode(self, rows: Rows) -> Values:
        """Return samples as numbers [rows, ...], not yet scaled."""
        if self.array is not None:
            return self.array.encode(rows)
        return np.concatenate([feature.encode(rows) for feature in self.features], axis=1)

    def encode_target(self, rows: Rows) -> Values:
        """Return class numbers or amounts; raise, naming the column, where it holds anything else."""
        assert self.target is not None
        _require_column(self.target, rows)
        values = rows.column(self.target, categorical=_are_names(self.classes))
        values = values[:, 0] if values.shape[1:] == (1,) else values
        if self.kind == "regression":
            if values.dtype == object:
                raise DataError(f"The target of a regression must be numbers. `{self.target}` holds {values[0]!r}.")
            return values.astype(np.float32)
        if self.kind == "tokens":
            return values
        return number_labels(rows, self.target, values, self.classes)

    def holding_amounts(self) -> Schema:
        """Return the schema of arrays whose whole numbers are amounts: the network takes no tokens."""
        if self.array is None or self.array.holds != "tokens":
            return self
        return replace(self, features=(replace(self.array, holds="amounts"),))

    def as_json(self) -> dict[str, Any]:
        """Return the schema as JSON holds it."""
        return {"form": FORM, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Schema:
        """Rebuild a schema from what `as_json` gave; raise DataError if it is something else."""
        try:
            words = dict(found)
            if words.pop("form") != FORM:
                raise ValueError("it is of another form")
            features = tuple(_feature_of_json(one) for one in words.pop("features"))
            schema = cls(features=features, **{**words, "classes": tuple(map(str, words["classes"]))})
            known = (
                features and schema.kind in get_args(Kind) and schema.standardise in get_args(ScaledBy)
                and isinstance(schema.target, str | None) and isinstance(schema.outputs, int | None)
            )  # fmt: skip
            if not known:
                raise ValueError("it has no features, or a word that is not known")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"A schema must be one that `atoll data schema` writes. This is another: {error}.",
                hint="write it again.",
            ) from error
        return schema

    def save(self, path: Path | str) -> None:
        """Write the schema to a JSON file."""
        Path(path).write_text(json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Schema:
        """Read a schema from a JSON file."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"A schema must be a JSON file. {path} could not be read: {error}.") from error
        return cls.of_json(found)


def number_labels(rows: Rows, target: str, values: Values, names: Sequence[str]) -> Values:
    """Return the number of each label among the names; raise, naming the place, where there is another."""
    if values.dtype.kind == "f" and (values == np.rint(values)).all():
        values = values.astype(np.int64)
    found, number = np.unique(values, return_inverse=True)
    place = {name: index for index, name in enumerate(names)}
    for index, label in enumerate(found):
        if str(label) not in place:
            raise rows.error(
                target, f"must be one of the {len(place)} classes", repr(str(label)), number == index,
            )  # fmt: skip
    return np.array([place[str(label)] for label in found])[number]


def _are_names(classes: Sequence[str]) -> bool:
    """Return whether classes are text, which must not be parsed: at one site all of them may look like numbers."""
    return bool(classes) and not all(name.lstrip("-").isdigit() or name in ("True", "False") for name in classes)


def _feature_of_json(found: Mapping[str, Any]) -> Feature:
    feature = Feature(
        **{**found, "categories": tuple(map(str, found["categories"])), "shape": tuple(map(int, found["shape"]))}
    )
    if feature.type not in get_args(Type) or feature.holds not in get_args(Holds) or not isinstance(feature.name, str):
        raise ValueError(f"{feature.name} is of an unknown type")
    return feature


def _misfit(name: str, expected: str, given: str) -> DataError:
    return DataError(
        f"Column `{name}` must hold {expected}, as the schema says. It holds {given}.",
        hint="correct the column, or agree on another schema.",
    )


def _require_column(name: str, rows: Rows) -> None:
    """Raise unless every table has a column."""
    for table in rows.tables:
        if name not in table.columns:
            near, some = get_close_matches(name, table.columns, 1), [*table.columns]
            listed = ", ".join(some[:MOST_NAMED]) + (", ..." if len(some) > MOST_NAMED else "")
            raise DataError(
                f"Column `{name}` must be there, as the schema says. There is none in {table.where}.",
                hint=f"is it `{near[0]}` there?" if near else f"its columns are {listed}.",
            )
