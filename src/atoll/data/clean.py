"""A cleaned copy of tables: what `atoll data check` finds and can mend, and a list of all that was done."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from atoll.data.check import Check, date_forms, with_sheets
from atoll.data.dates import parse_dates
from atoll.data.sheets import Column, Problem, Sheet, change_cells, drop_columns, drop_rows
from atoll.kernel.errors import DataError

# In this order: whole columns, then cells, then rows, then clients.
ORDER = (
    "extra", "hollow", "constant", "identifier", "dates", "spelling", "missing", "mixed", "spike", "lone", "repeat",
    "tiny",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Something that was done to a file."""

    file: str
    column: str
    lines: str
    problem: str
    done: str


def clean(checked: Check) -> tuple[Check, list[Change]]:
    """Mend what can be mended; return the check of what is then left, and what was done."""
    sheets, changes = [_with_points(sheet, checked) for sheet in checked.sheets], []
    spoilt = {  # cells that are nothing to take a median of
        (name, row, problem.column)
        for problem in checked.problems
        if problem.kind in ("missing", "mixed", "spike")
        for name, row in problem.rows
    }
    gone: dict[str, set[int]] = {sheet.name: set() for sheet in sheets}
    mended = [problem for problem in checked.problems if problem.fix]
    for problem in sorted(mended, key=lambda one: ORDER.index(one.kind) if one.kind in ORDER else -1):
        changes.append(Change(problem.file, problem.column, problem.lines, problem.what, problem.fix))
        if problem.kind in ("hollow", "constant", "identifier"):
            sheets = [drop_columns(sheet, [problem.column]) for sheet in sheets]
        elif problem.kind == "extra":
            sheets = [drop_columns(one, [problem.column]) if one.name == problem.file else one for one in sheets]
        elif problem.kind == "dates":
            sheets = _count_days(sheets, checked.columns[problem.column])
        elif problem.kind == "spelling":
            usual = problem.fix.removeprefix("written ").strip("'\"")
            sheets = _change(sheets, problem, dict.fromkeys(problem.rows, usual))
        elif problem.fix.startswith("filled"):
            filled = {(name, row): _fill(checked, spoilt, problem.column, name, row) for name, row in problem.rows}
            sheets = _change(sheets, problem, filled)
        elif problem.rows:
            for name, row in problem.rows:
                gone[name].add(row)
    left = [drop_rows(sheet, gone[sheet.name]) for sheet in sheets]
    return with_sheets(checked, [sheet for sheet in left if sheet.rows]), changes


def save(checked: Check, changes: Sequence[Change], folder: Path) -> dict[str, Path]:
    """Write the cleaned files to a new folder, which holds nothing else, and beside it the list of what was done."""
    make_folder(folder)
    for sheet in checked.sheets:
        with (folder / f"{Path(sheet.name).stem}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([sheet.header, *sheet.rows])
    return {"cleaned": folder, "changes": write_changes(changes, folder)}


def make_folder(folder: Path) -> None:
    """Make the folder of a cleaned copy; raise if something is in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"A cleaned copy must have a folder of its own. {folder} holds something already.")
    folder.mkdir(parents=True, exist_ok=True)


def write_changes(changes: Sequence[Change], folder: Path) -> Path:
    """Write the list of changes beside a folder."""
    path = folder.with_name(f"{folder.name}-changes.json")
    text = json.dumps([asdict(change) for change in changes], indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _with_points(sheet: Sheet, checked: Check) -> Sheet:
    """Return a sheet with decimal points."""
    for name, column in checked.columns.items():
        index = next(place for place, one in enumerate(checked.sheets) if one.name == sheet.name)
        if index in column.with_commas:
            cells = column.plain[column.sheet == index]
            sheet = change_cells(sheet, name, dict(enumerate(cells)))
    return sheet


def _change(sheets: Sequence[Sheet], problem: Problem, new: Mapping[tuple[str, int], str]) -> list[Sheet]:
    """Return sheets with other cells in some rows."""
    found = []
    for sheet in sheets:
        mine = {row: cell for (name, row), cell in new.items() if name == sheet.name}
        found.append(change_cells(sheet, problem.column, mine) if mine else sheet)
    return found


def _fill(checked: Check, spoilt: set[tuple[str, int, str]], name: str, file: str, row: int) -> str:
    """Return what a value that is missing becomes: the median of its client's other values, or a category."""
    column = checked.columns[name]
    if not column.of_numbers:
        return "missing"
    index = next(place for place, one in enumerate(checked.sheets) if one.name == file)
    owners = checked.owners[index]
    numbers, rows = (part[column.sheet == index] for part in (column.numbers, column.row))
    usable = [
        float(number)
        for number, place in zip(numbers, rows, strict=True)
        if owners[place] == owners[row] and np.isfinite(number) and (file, int(place), name) not in spoilt
    ]
    if not usable:  # nothing of its own: the row cannot be filled without telling others' values
        return ""
    whole = all(number.is_integer() for number in usable)
    middle = median(usable)
    return str(int(middle)) if whole and float(middle).is_integer() else f"{middle:g}"


def _count_days(sheets: Sequence[Sheet], column: Column) -> list[Sheet]:
    """Return sheets with dates as days since 1970."""
    forms = date_forms(column) or {}
    named = {column.sheets[index].name: several[0] for index, several in forms.items()}
    found = []
    for sheet in sheets:
        written = {}
        if sheet.name in named and column.name in sheet.header:
            cells = sheet.column(column.name)
            filled = [row for row, cell in enumerate(cells) if cell]
            days = parse_dates([cells[row] for row in filled], named[sheet.name])
            assert days is not None
            written = {row: f"{day:.5f}".rstrip("0").rstrip(".") for row, day in zip(filled, days, strict=True)}
        found.append(change_cells(sheet, column.name, written) if written else sheet)
    return found
