"""The tables of all clients one below the other: columns of one kind throughout, without gaps."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from atoll.data.tables import Table, Values, as_objects, holds_tables, table_of, tables_by_client
from atoll.kernel.errors import DataError, unknown

FILL = "fill it in, or leave the row or the column out."


@dataclass(frozen=True, eq=False)
class Rows:
    """Tables, and the owner of each row."""

    tables: Sequence[Table]
    owners: tuple[str, ...] = ()
    owner: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of each row

    @classmethod
    def of(cls, source: Any, client: str | None) -> Rows:
        """Collect the rows of one table per client or, with a column `client`, of one table."""
        if client is None:
            tables = tables_by_client(source)
            sizes = [len(table) for table in tables.values()]
            return cls([*tables.values()], tuple(tables), np.repeat(np.arange(len(tables)), sizes))
        if holds_tables(source):
            raise DataError(
                f"`client` must name a column of one table. Got client={client!r} with one table per client.",
                hint="leave it out; to leave a column of that name out too, list the others in features=[...].",
            )
        rows = cls([table_of(source)])
        if client not in rows.names:
            raise unknown("column", client, rows.names)
        if not len(rows):
            raise DataError("Data must have at least 1 client. Got a table without rows.")
        values = rows.column(client, categorical=True)
        if values.ndim > 1:
            raise DataError(f"Column `{client}` must hold one name per row. Got arrays of shape {values.shape[1:]}.")
        found, first, owner = np.unique(values, return_index=True, return_inverse=True)
        if len(found) < 2:
            raise DataError(
                f"Column `{client}` must name at least 2 clients. It is {str(found[0])!r} in all {len(owner)} rows.",
                hint="choose another `client`; for data of one client, pass {name: data} and no `client`.",
            )
        order = np.argsort(first)  # clients in the order in which they first occur
        return replace(rows, owners=tuple(str(found[index]) for index in order), owner=np.argsort(order)[owner])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(table) for table in self.tables])

    @property
    def names(self) -> list[str]:
        """The columns of the first table."""
        return list(self.tables[0].columns)

    def place(self, row: int) -> str:
        """Say where a row stands, for messages."""
        index = int(np.searchsorted(self._ends, row, side="right"))
        table = self.tables[index]
        place = table.place(row - int(self._ends[index]) + len(table))
        if len(self.owners) in (0, len(self.tables)):
            return place
        return f"{place} (client {self.owners[self.owner[row]]!r})"

    def column(self, name: str, *, categorical: bool = False) -> Values:
        """Return a column: numbers, flags, text (as objects) or arrays; text is parsed unless `categorical`."""
        parts = [table.columns[name] for table in self.tables]
        if all(table.lines is not None for table in self.tables):
            return self._require_finite(name, self._parse_cells(name, np.concatenate(parts), categorical))
        if all(part.dtype.kind in "biuf" for part in parts) and len({part.shape[1:] for part in parts}) == 1:
            return self._require_finite(name, np.concatenate(parts))
        return self._require_finite(name, self._convert(name, as_objects([*chain.from_iterable(parts)])))

    def _parse_cells(self, name: str, cells: Values, categorical: bool) -> Values:
        """Parse the cells of text files as flags or numbers, if all of them are."""
        empty = cells == ""
        if empty.any():
            raise self.error(name, "must be filled in every row", "an empty cell", empty, FILL)
        if categorical:
            return cells
        if {cell.lower() for cell in cells} <= {"true", "false"}:
            return np.array([cell.lower() == "true" for cell in cells], dtype=bool)
        found = [_parse_number(cell) for cell in cells]
        text = np.array([number is None for number in found], dtype=bool)
        if text.all():
            return cells
        if text.any():
            odd = text if text.mean() <= 0.5 else ~text
            cell, others = cells[np.argmax(odd)], "numbers" if odd is text else "text"
            hint = f"correct it; if the numbers are codes, pass categorical=[{name!r}]."
            raise self.error(name, "must be numbers or text throughout", f"{cell!r} among {others}", odd, hint)
        values = np.array(found)
        return values if values.dtype.kind in "if" else values.astype(np.float64)  # whole numbers may be too large

    def _convert(self, name: str, values: Values) -> Values:
        """Convert Python objects to text, numbers or arrays."""
        missing = np.array([_is_missing(value) for value in values], dtype=bool)
        if missing.any():
            raise self.error(name, "must be filled in every row", str(values[np.argmax(missing)]), missing, FILL)
        for types, convert in CONVERSIONS:
            fits = np.array([isinstance(value, types) for value in values], dtype=bool)
            if fits.all():
                return self._stack(name, [convert(value) for value in values])
            if fits.any():
                odd = fits if fits.mean() <= 0.5 else ~fits
                here, there = int(np.argmax(odd)), int(np.argmin(odd))
                given = f"{_describe(values[here])} among values like {_describe(values[there])}"
                hint = "correct it, or make the column text at every client."
                raise self.error(name, "must be of one kind throughout", given, odd, hint)
        raise self._type_error(name, type(values[0]).__name__)

    def _stack(self, name: str, values: list[Any]) -> Values:
        if isinstance(values[0], str):
            return as_objects(values)
        for row, value in enumerate(values):
            if np.shape(value) != np.shape(values[0]):
                raise DataError(
                    f"Samples must be of one shape. `{name}` has {np.shape(values[0])} in {self.place(0)} and "
                    f"{np.shape(value)} in {self.place(row)}.",
                    hint="resize, pad or cut them.",
                )
        stacked = np.stack(values)
        if stacked.dtype.kind not in "biuf":
            raise self._type_error(name, f"list of {stacked.dtype}")
        return stacked

    def _require_finite(self, name: str, values: Values) -> Values:
        if values.dtype.kind != "f":
            return values
        flat = values.reshape(len(values), -1)
        with np.errstate(over="ignore"):
            wrong = ~np.isfinite(flat.astype(np.float32))
        rows = np.asarray(wrong.any(axis=1))
        if rows.any():
            raise self.error(name, "must hold finite numbers", str(flat[wrong][0]), rows, FILL)
        return values

    def error(self, name: str, rule: str, given: str, wrong: Values, hint: str | None = None) -> DataError:
        """Return the error for the `wrong` rows, with the place of the first."""
        more = f" and in {wrong.sum() - 1} more of {len(wrong)} rows" if wrong.sum() > 1 else ""
        place = self.place(int(np.argmax(wrong)))
        return DataError(f"Column `{name}` {rule}. Got {given} in {place}{more}.", hint=hint)

    def _type_error(self, name: str, given: str) -> DataError:
        return DataError(
            f"Column `{name}` must hold numbers, text, flags, images or arrays of numbers. Got a {given}.",
            hint="turn it into numbers, or list the columns to use in features=[...].",
        )


def _parse_number(cell: str) -> int | float | None:
    for kind in (int, float):
        try:
            return None if "_" in cell else kind(cell)
        except ValueError:
            continue
    return None


def _is_missing(value: Any) -> bool:
    of_pandas = type(value).__name__ in ("NAType", "NaTType")
    return value is None or of_pandas or (isinstance(value, float) and math.isnan(value))


def _describe(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return repr(value) if isinstance(value, str | bool | numbers.Real) else f"a {type(value).__name__}"


def _pixels(image: Image) -> NDArray[np.uint8]:
    """Return the pixels of an image: channels, rows, columns."""
    if image.mode.startswith(("I", "F")):
        raise DataError(
            f"Images must have 8 bits per channel. Got one of mode {image.mode}.", hint="convert them first."
        )
    pixels = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


# What a column of Python objects may hold; flags are numbers too, so they come first.
CONVERSIONS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (str, str),
    (bool | np.bool_, bool),
    (numbers.Real, lambda number: number),
    (Decimal, float),
    (Image, _pixels),
    (np.ndarray | list | tuple | torch.Tensor, np.asarray),
)
