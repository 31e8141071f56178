"""Tables of text as they are, with all their faults: nothing is refused, everything is noted."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.data.tables import DECIMAL_COMMA, READERS, find_separator, has_decimal_commas
from atoll.kernel.errors import AtollError

MISSING = {"", "na", "n/a", "nan", "null", "none", "nil", "?", "-", "--", "missing", "#n/a"}
MOST_SHOWN = 5  # lines that a problem names


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file or a column: where, what, and what a fix does about it, if there is one."""

    kind: str
    file: str  # or several, in words
    column: str
    what: str
    fix: str = ""
    rows: tuple[tuple[str, int], ...] = ()  # which rows of which file, counted from 0
    lines: str = ""  # the same for people


@dataclass(frozen=True, eq=False)
class Sheet:
    """A file as cells of text: a header and rows, with the line on which each row ends."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    problems: tuple[Problem, ...] = ()
    suffix: str = ".csv"

    def column(self, name: str) -> list[str]:
        """Return the cells of a column; empty ones where it is not there."""
        if name not in self.header:
            return [""] * len(self.rows)
        place = self.header.index(name)
        return [row[place] for row in self.rows]

    def describe_lines(self, rows: Sequence[int]) -> str:
        """Name the lines of some rows."""
        shown = ", ".join(str(self.lines[row]) for row in rows[:MOST_SHOWN])
        return f"{shown}, ..." if len(rows) > MOST_SHOWN else shown


def read_sheets(source: Path) -> tuple[list[Sheet], list[Problem]]:
    """Read a file or all files of a folder; beside them, what cannot be read at all."""
    paths = [source] if source.is_file() else sorted(path for path in source.iterdir() if not path.name.startswith("."))
    sheets, problems = [], []
    for path in paths:
        if path.is_dir() or path.suffix.lower() not in READERS:
            what = f"is no {', '.join(READERS)} file; a folder must hold one file per client and nothing else"
            problems.append(Problem("stray", path.name, "", what, "left out"))
            continue
        try:
            sheets.append(_read_text(path) if path.suffix.lower() == ".csv" else _read_other(path))
        except (AtollError, OSError, ValueError, csv.Error) as error:
            problems.append(
                Problem("unreadable", path.name, "", f"cannot be read: {error}".splitlines()[0], "left out")
            )
    return sheets, problems


def _read_text(path: Path) -> Sheet:
    problems, raw = [], path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("cp1252", errors="replace")
        problems.append(Problem("encoding", path.name, "", "is not UTF-8; read as Windows-1252", "written as UTF-8"))
    separator = _find_usual_separator(text)
    if separator != ",":
        named = {";": "semicolons", "\t": "tabs", "|": "bars"}[separator]
        problems.append(Problem("separator", path.name, "", f"cells are separated by {named}", "written with commas"))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    numbered = [(reader.line_num, tuple(cell.strip() for cell in row)) for row in reader if row]
    if len(numbered) < 2:
        raise ValueError("it is empty" if not numbered else "it has a header and no rows")
    (_, header), *rows = numbered
    ragged = [(line, len(row)) for line, row in rows if len(row) != len(header)]
    if ragged:
        shown = ", ".join(str(line) for line, _ in ragged[:MOST_SHOWN])
        what = f"{plural(len(ragged), 'line')} with {ragged[0][1]} cells instead of {len(header)}"
        problems.append(Problem("ragged", path.name, "", what, "lines left out", lines=shown))
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        problems.append(Problem("header", path.name, twice[0], "two columns have this name", "numbered"))
        seen: Counter[str] = Counter()
        header = tuple(_number_name(name, seen) for name in header)
    whole = [(line, row) for line, row in rows if len(row) == len(header)]
    return Sheet(path.name, header, tuple(row for _, row in whole), tuple(line for line, _ in whole), tuple(problems))


def _find_usual_separator(text: str) -> str:
    """Return the separator of most lines, even if some have too many cells or too few."""
    header = text.splitlines()[0] if text.strip() else ""
    found = find_separator(text)
    return found if found in header else max((",", ";", "\t", "|"), key=header.count)


def _number_name(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}_{seen[name]}"


def _read_other(path: Path) -> Sheet:
    """Read a file of columns as text; one of arrays has its own check."""
    columns = dict(READERS[path.suffix.lower()](path).columns)
    if any(values.ndim > 1 for values in columns.values()):
        raise ValueError("it holds arrays, and other files do not")
    rows = zip(*([_to_cell(value) for value in values] for values in columns.values()), strict=True)
    whole = tuple(tuple(row) for row in rows)
    return Sheet(path.name, tuple(columns), whole, tuple(range(len(whole))), suffix=path.suffix.lower())


def _to_cell(value: Any) -> str:
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        return ""
    value = value.item() if isinstance(value, np.generic) else value
    return "" if str(value) in ("NaT", "<NA>") else str(value)


def plural(number: int, what: str) -> str:
    """Count things in words: 1 row, 2 rows."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# -- columns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Column:
    """A column of all sheets: each cell, where it stands, and the number that it is, if it is one."""

    name: str
    sheets: Sequence[Sheet]
    cells: NDArray[Any] = field(repr=False)
    sheet: NDArray[np.int64] = field(repr=False)  # of each cell
    row: NDArray[np.int64] = field(repr=False)  # in its sheet

    @classmethod
    def of(cls, sheets: Sequence[Sheet], name: str) -> Column:
        """Collect a column from the sheets that have it; decimal commas are read as points."""
        having = [(index, sheet.column(name)) for index, sheet in enumerate(sheets) if name in sheet.header]
        cells = [cell for _, column in having for cell in column]
        array = np.empty(len(cells), dtype=object)
        array[:] = cells
        sheet = np.repeat([index for index, _ in having], [len(column) for _, column in having]).astype(np.int64)
        row = np.concatenate([np.arange(len(column)) for _, column in having]) if having else np.zeros(0, np.int64)
        return cls(name, sheets, array, sheet, row.astype(np.int64))

    @cached_property
    def with_commas(self) -> tuple[int, ...]:
        """The sheets in which numbers of this column have decimal commas."""
        there = []
        for index in np.unique(self.sheet):
            filled = [cell for cell in self.cells[self.sheet == index] if cell.lower() not in MISSING]
            usual = [cell for cell in filled if DECIMAL_COMMA.fullmatch(cell)]
            if len(usual) >= 0.9 * len(filled) and has_decimal_commas(usual):
                there.append(int(index))
        return tuple(there)

    @cached_property
    def plain(self) -> NDArray[Any]:
        """The cells with decimal points."""
        found = self.cells.copy()
        for place in np.flatnonzero(np.isin(self.sheet, self.with_commas)):
            if DECIMAL_COMMA.fullmatch(found[place]):
                found[place] = found[place].replace(".", "").replace(",", ".")
        return found

    @cached_property
    def missing(self) -> NDArray[np.bool_]:
        """Which cells are empty, or say that a value is missing."""
        return np.array([cell.lower() in MISSING for cell in self.cells], dtype=bool)

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The numbers; NaN where a cell is none."""
        return np.array([_parse(cell) for cell in self.plain], dtype=np.float64)

    @cached_property
    def of_numbers(self) -> bool:
        """Whether nearly all cells that are filled are numbers."""
        filled = ~self.missing
        return bool(filled.any()) and float(np.isfinite(self.numbers[filled]).mean()) >= 0.8

    def places(self, rows: NDArray[np.int64]) -> tuple[tuple[str, int], ...]:
        """Return the file and row of some cells."""
        return tuple((self.sheets[self.sheet[place]].name, int(self.row[place])) for place in rows)

    def by_sheet(self, wrong: NDArray[np.bool_]) -> Iterator[tuple[Sheet, NDArray[np.int64]]]:
        """Yield every sheet that has some of these cells, and which."""
        for index in np.unique(self.sheet[wrong]):
            yield self.sheets[index], np.flatnonzero(wrong & (self.sheet == index))

    def describe(self, sheet: Sheet, places: NDArray[np.int64]) -> str:
        """Name the lines of some cells of one sheet."""
        return sheet.describe_lines(self.row[places].tolist())


def _parse(cell: str) -> float:
    try:
        return float("nan") if "_" in cell else float(cell)
    except ValueError:
        return float("nan")


def rename(sheet: Sheet, names: dict[str, str]) -> Sheet:
    """Return a sheet with other names of columns."""
    return replace(sheet, header=tuple(names.get(name, name) for name in sheet.header))


def drop_columns(sheet: Sheet, names: Iterable[str]) -> Sheet:
    """Return a sheet without some columns."""
    gone = {*names}
    kept = [place for place, name in enumerate(sheet.header) if name not in gone]
    rows = tuple(tuple(row[place] for place in kept) for row in sheet.rows)
    return replace(sheet, header=tuple(sheet.header[place] for place in kept), rows=rows)


def drop_rows(sheet: Sheet, rows: Iterable[int]) -> Sheet:
    """Return a sheet without some rows."""
    gone = {*rows}
    kept = [place for place in range(len(sheet.rows)) if place not in gone]
    lines = tuple(sheet.lines[place] for place in kept)
    return replace(sheet, rows=tuple(sheet.rows[place] for place in kept), lines=lines)


def change_cells(sheet: Sheet, name: str, cells: dict[int, str]) -> Sheet:
    """Return a sheet with other cells in some rows of a column."""
    place = sheet.header.index(name)
    rows = [list(row) for row in sheet.rows]
    for row, cell in cells.items():
        rows[row][place] = cell
    return replace(sheet, rows=tuple(map(tuple, rows)))
