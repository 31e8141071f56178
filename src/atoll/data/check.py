"""All problems of all files of a folder at once, before anything is trained on them.

check("hospitals", target="readmitted").problems     file, column, lines, what is wrong, and what a fix would do
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.data.dates import find_forms
from atoll.data.leaks import LEAST_DISTINCT, NEAR, exceeds_chance, nearest
from atoll.data.own import MOST_CATEGORIES
from atoll.data.sheets import MISSING, Column, Problem, Sheet, plural, read_sheets, rename
from atoll.kernel.errors import DataError

FAR = 100.0  # interquartile ranges from the median; what lies beyond is a spike
FEW = 0.02  # the largest share of cells that may be spikes; more are a long tail
OTHER_UNIT = 20.0  # times the usual median of a column
TINY = 20  # rows of a client; a quarter of fewer is not enough to test with
MOSTLY = 0.5  # share of cells that may be missing before the column is given up


@dataclass(frozen=True, eq=False)
class Check:
    """The sheets of a folder with names of columns in common, and everything that is wrong with them."""

    source: Path
    sheets: Sequence[Sheet]
    target: str | None
    client: str | None
    apart: tuple[str, ...]  # columns that are no features: groups, times
    unreadable: tuple[Problem, ...] = ()

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns that most sheets have."""
        return {name: Column.of(self.sheets, name) for name in list_common_names(self.sheets)}

    @property
    def features(self) -> dict[str, Column]:
        """The columns that would enter a network."""
        return {name: column for name, column in self.columns.items() if name not in self._reserved}

    @property
    def _reserved(self) -> set[str | None]:
        return {self.target, self.client, *self.apart}

    @cached_property
    def problems(self) -> list[Problem]:
        """Everything that is wrong, files first, then columns, rows and clients."""
        found = [*self.unreadable, *(problem for sheet in self.sheets for problem in sheet.problems)]
        for look in LOOKS:
            found += look(self)
        return found

    @property
    def summary(self) -> str:
        """How much was looked at."""
        rows = sum(len(sheet.rows) for sheet in self.sheets)
        clients = len({owner for owners in self.owners for owner in owners})
        return f"{plural(len(self.sheets), 'file')}, {plural(clients, 'client')}, {plural(rows, 'row')}"

    @cached_property
    def owners(self) -> list[list[str]]:
        """The client of each row of each sheet."""
        stem = {sheet.name: Path(sheet.name).stem for sheet in self.sheets}
        return [
            sheet.column(self.client) if self.client else [stem[sheet.name]] * len(sheet.rows) for sheet in self.sheets
        ]


def check(
    source: Path | str, *, target: str | None = None, client: str | None = None, apart: Sequence[str] = ()
) -> Check:
    """Read all tables of a folder, or one with a column of clients, and find what is wrong with them."""
    source = Path(source)
    if not source.exists():
        raise DataError(f"Data must be in a folder or file that exists. There is no {source}.")
    sheets, unreadable = read_sheets(source)
    if not sheets and not unreadable:
        raise DataError(f"Data must have at least 1 client. Got an empty folder, {source}.")
    misspelt = {sheet.name: find_other_spellings(sheet, list_common_names(sheets)) for sheet in sheets}
    for sheet in sheets:
        for mine, usual in misspelt[sheet.name].items():
            what = f"is called `{usual}` in other files"
            unreadable.append(Problem("name", sheet.name, mine, what, f"renamed to {usual}"))
    sheets = [rename(sheet, misspelt[sheet.name]) for sheet in sheets]
    known = {name for sheet in sheets for name in sheet.header}
    for name in (client, *apart):
        if name is not None and name not in known:
            near = get_close_matches(name, known, 1)
            what = f"there is no such column.{f' Did you mean: {near[0]}?' if near else ''}"
            unreadable.append(Problem("absent", "all files", name, what))
    target = "y" if target is None and "y" in known else target
    return Check(source, sheets, target, client if client in known else None, tuple(apart), tuple(unreadable))


def list_common_names(sheets: Sequence[Sheet]) -> list[str]:
    """List the columns that at least half of the sheets have, in the order of the first one that has them all."""
    counts = Counter(name for sheet in sheets for name in sheet.header)
    return [name for name, count in counts.items() if count >= len(sheets) / 2]


def find_other_spellings(sheet: Sheet, common: Sequence[str]) -> dict[str, str]:
    """Return the columns of a sheet that others write differently: `Age` for `age`."""
    lacking = {_simplify(name): name for name in common if name not in sheet.header}
    return {
        name: lacking[_simplify(name)] for name in sheet.header if name not in common and _simplify(name) in lacking
    }


def _simplify(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


# -- columns -----------------------------------------------------------------------------------------------------------


def look_at_names(checked: Check) -> Iterator[Problem]:
    """Find the columns that only some files have, and a target that none has."""
    common = list_common_names(checked.sheets)
    for sheet in checked.sheets:
        for name in common:
            if name not in sheet.header:
                yield Problem("lacks", sheet.name, name, "is missing in this file")
        for name in sheet.header:
            if name not in common:
                yield Problem("extra", sheet.name, name, "only this file has it", "column left out")
    if checked.target is None:
        yield Problem("target", "all files", "", "nobody says which column to predict; labels are not checked")
    elif checked.target not in common:
        near = get_close_matches(checked.target, common, 1)
        what = f"there is no such column to predict.{f' Did you mean: {near[0]}?' if near else ''}"
        yield Problem("absent", "all files", checked.target, what)


def look_at_decimals(checked: Check) -> Iterator[Problem]:
    """Find decimal commas."""
    for name, column in checked.columns.items():
        for index in column.with_commas:
            example = next(cell for cell in column.cells[column.sheet == index] if "," in cell)
            what = f"decimal commas, as {example}"
            yield Problem("decimal", checked.sheets[index].name, name, what, "written with points")


def look_at_missing(checked: Check) -> Iterator[Problem]:
    """Find cells that are empty or say NA, and columns that mostly are."""
    for name, column in checked.columns.items():
        if not column.missing.any():
            continue
        if name != checked.target and column.missing.mean() > MOSTLY:
            what = f"{100 * column.missing.mean():.0f} % of all values are missing"
            yield Problem("hollow", "all files", name, what, "column left out")
            continue
        numbers = "filled with the client's median" if column.of_numbers else "filled with 'missing'"
        fix = "rows left out" if name in (checked.target, checked.client) else numbers
        for sheet, places in column.by_sheet(column.missing):
            what = f"{plural(len(places), 'value')} missing of {len(sheet.rows)}"
            yield Problem("missing", sheet.name, name, what, fix, column.places(places), column.describe(sheet, places))


def look_at_mixtures(checked: Check) -> Iterator[Problem]:
    """Find text among numbers."""
    for name, column in checked.columns.items():
        odd = ~column.missing & np.isnan(column.numbers)
        if not column.of_numbers or not odd.any():
            continue
        fix = "rows left out" if name == checked.target else "filled with the client's median"
        for sheet, places in column.by_sheet(odd):
            what = f"{column.cells[places[0]]!r} among numbers"
            what += f", and {len(places) - 1} more" if len(places) > 1 else ""
            yield Problem("mixed", sheet.name, name, what, fix, column.places(places), column.describe(sheet, places))


def look_at_dates(checked: Check) -> Iterator[Problem]:
    """Find text columns of dates, which would become one column per day."""
    for name, column in checked.features.items():
        forms = date_forms(column)
        if forms is None:
            continue
        days = len({*column.cells[~column.missing]})
        if all(len(several) == 1 for several in forms.values()):
            what = f"dates, as {column.cells[~column.missing][0]}: as text, {days} columns"
            yield Problem("dates", "all files", name, what, "counted in days since 1970-01-01")
        else:
            yield Problem("dates", "all files", name, "dates that may be day/month or month/day: write 2026-03-31")


def date_forms(column: Column) -> dict[int, list[str]] | None:
    """Return the forms of the dates in each sheet, by its number; None for a column that is not of dates."""
    if column.of_numbers or column.missing.all():
        return None
    forms = {
        int(index): find_forms(column.cells[(column.sheet == index) & ~column.missing].tolist())
        for index in np.unique(column.sheet[~column.missing])
    }
    return forms if all(forms.values()) else None


def look_at_spikes(checked: Check) -> Iterator[Problem]:
    """Find numbers that are far from all others, and those that are infinite."""
    for name, column in checked.columns.items():
        far = find_spikes(column)
        if far is None or name == checked.client:
            continue
        fix = "rows left out" if name == checked.target else "filled with the client's median"
        usual = np.median(column.numbers[np.isfinite(column.numbers)])
        for sheet, places in column.by_sheet(far):
            what = f"{column.cells[places[0]]} where {usual:g} is usual"
            what += f", and {len(places) - 1} more" if len(places) > 1 else ""
            yield Problem("spike", sheet.name, name, what, fix, column.places(places), column.describe(sheet, places))


def find_spikes(column: Column) -> NDArray[np.bool_] | None:
    """Return which numbers are spikes; None where there are none."""
    if not column.of_numbers:
        return None
    numbers = column.numbers
    real = numbers[np.isfinite(numbers)]
    low, middle, high = np.percentile(real, [25, 50, 75])
    reach = FAR * (high - low) if high > low else 1e6 * (1 + abs(middle))
    far = np.abs(np.nan_to_num(numbers, nan=middle, posinf=np.inf, neginf=-np.inf) - middle) > reach
    infinite = np.isinf(numbers)
    return far | infinite if 0 < far.mean() <= FEW or infinite.any() else None


def look_at_units(checked: Check) -> Iterator[Problem]:
    """Find files whose numbers are many times those of the others."""
    for name, column in checked.features.items():
        if not column.of_numbers or len(checked.sheets) < 3:
            continue
        medians = {
            int(index): float(np.nanmedian(column.numbers[column.sheet == index]))
            for index in np.unique(column.sheet)
            if np.isfinite(column.numbers[column.sheet == index]).sum() >= 5
        }
        usual = float(np.median([*medians.values()])) if medians else 0.0
        for index, middle in medians.items():
            ratio = abs(middle / usual) if usual else 1.0
            if ratio >= OTHER_UNIT or 0 < ratio <= 1 / OTHER_UNIT:
                what = f"the median is {middle:g}, in other files {usual:g}: another unit?"
                yield Problem("unit", checked.sheets[index].name, name, what)


def look_at_constants(checked: Check) -> Iterator[Problem]:
    """Find columns that say nothing."""
    for name, column in checked.features.items():
        values = {*column.plain[~column.missing]}
        if len(values) == 1:
            what = f"constant: all values are {values.pop()}"
            yield Problem("constant", "all files", name, what, "column left out")


def look_at_names_of_cases(checked: Check) -> Iterator[Problem]:
    """Find columns that number or name cases, and text with too many values."""
    for name, column in checked.features.items():
        filled = column.cells[~column.missing]
        different = len({*filled})
        if column.of_numbers:
            if _counts_rows(column):
                what = "counts the rows: it names cases and describes none"
                yield Problem("identifier", "all files", name, what, "column left out")
        elif different > MOST_CATEGORIES and date_forms(column) is None:
            what = f"{different} different texts in {len(filled)} rows: names of cases, or free text"
            yield Problem("identifier", "all files", name, what, "column left out")


def _counts_rows(column: Column) -> bool:
    """Return whether a column goes up by 1 from row to row in every sheet."""
    steps = [np.diff(column.numbers[column.sheet == index]) for index in np.unique(column.sheet)]
    return all(len(one) >= 5 and bool((one == 1).all()) for one in steps)


# -- labels, rows, clients ---------------------------------------------------------------------------------------------


def look_at_labels(checked: Check) -> Iterator[Problem]:
    """Find labels that occur once, and labels that differ only in how they are written."""
    if checked.target is None or checked.target not in checked.columns:
        return
    column = checked.columns[checked.target]
    labels = Counter(column.plain[~column.missing])
    whole = column.of_numbers and bool((np.nan_to_num(column.numbers) % 1 == 0).all())
    if len(labels) > MOST_CATEGORIES or (column.of_numbers and not whole):
        return
    for usual, others in group_spellings(labels).items():
        for other in others:
            wrong = column.plain == other
            what = f"{other!r} ({labels[other]}) is elsewhere written {usual!r} ({labels[usual]})"
            files = ", ".join(sheet.name for sheet, _ in column.by_sheet(wrong))
            rows = column.places(np.flatnonzero(wrong))
            yield Problem("spelling", files, column.name, what, f"written {usual!r}", rows)
    spelt = {other: usual for usual, others in group_spellings(labels).items() for other in others}
    for label in (label for label, count in labels.items() if count == 1 and label not in spelt):
        wrong = column.plain == label
        for sheet, places in column.by_sheet(wrong):
            what = f"the label {label!r} occurs once"
            rows, lines = column.places(places), column.describe(sheet, places)
            yield Problem("lone", sheet.name, column.name, what, "row left out", rows, lines)


def group_spellings(labels: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the usual spelling of each label that is written in several ways, and the others."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(" ".join(label.lower().split()), []).append(label)
    found = {}
    for several in groups.values():
        usual, *others = sorted(several, key=lambda label: (-labels[label], label))
        if others:
            found[usual] = others
    return found


def look_at_repeats(checked: Check) -> Iterator[Problem]:
    """Find rows that are in the files twice, or nearly so."""
    points = _rows_as_points(checked)
    if points is None:
        return
    near, _ = nearest(points, points, apart=True)
    parts = [*np.arange(points.shape[1])[:, None]]
    if not (near >= 0).any() or not exceeds_chance(int((near >= 0).sum()), points, parts):
        return
    sizes = np.cumsum([len(sheet.rows) for sheet in checked.sheets])
    later = np.flatnonzero((near >= 0) & (near < np.arange(len(near))))
    for index, sheet in enumerate(checked.sheets):
        first = int(sizes[index]) - len(sheet.rows)
        mine = later[(later >= first) & (later < sizes[index])]
        if not len(mine):
            continue
        elsewhere = int((near[mine] < first).sum())
        other = checked.sheets[int(np.searchsorted(sizes, near[mine[0]], side="right"))]
        twin = int(near[mine[0]] - (sizes[checked.sheets.index(other)] - len(other.rows)))
        what = f"{plural(len(mine), 'row')} nearly repeat{'s' if len(mine) == 1 else ''} another"
        what += f" ({elsewhere} of another file)" if elsewhere else ""
        what += f"; the first, line {other.lines[twin]} of {other.name}"
        rows = tuple((sheet.name, int(place - first)) for place in mine)
        lines = sheet.describe_lines([int(place - first) for place in mine])
        yield Problem("repeat", sheet.name, "", what, "later rows left out", rows, lines)


def _rows_as_points(checked: Check) -> NDArray[np.float64] | None:
    """Return all rows as numbers in standard deviations; None where rows do not tell cases apart."""
    silent = {problem.column for look in (look_at_names_of_cases, look_at_constants) for problem in look(checked)}
    total = sum(len(sheet.rows) for sheet in checked.sheets)
    parts = []
    for name, column in checked.features.items():
        if name in silent or len(column.cells) != total:
            continue
        if column.of_numbers:
            numbers = np.where(np.isfinite(column.numbers), column.numbers, np.nan)
            parts.append(np.clip(np.nan_to_num((numbers - np.nanmedian(numbers)) / _usual_spread(column)), -1e6, 1e6))
        else:
            parts.append(10.0 * np.unique(column.cells.astype(str), return_inverse=True)[1])  # others are far apart
    if not parts or total < 2:
        return None
    points = np.column_stack(parts)
    distinct = len(np.unique(np.round(points / NEAR), axis=0))
    return points if distinct >= LEAST_DISTINCT * total else None


def _usual_spread(column: Column) -> float:
    """Return the smallest spread of a file's numbers: files in other units must not make all rows of one look alike."""
    spreads = []
    for index in np.unique(column.sheet):
        mine = column.numbers[(column.sheet == index) & np.isfinite(column.numbers)]
        if len(mine) > 1:
            low, high = np.percentile(mine, [25, 75])
            spreads.append((high - low) / 1.349 or float(mine.std()))  # 1.349 quartile distances are one sigma
    return min((spread for spread in spreads if spread > 0), default=1.0)


def look_at_sizes(checked: Check) -> Iterator[Problem]:
    """Find clients with too few rows to test, and a column of clients that names one."""
    sizes: Counter[str] = Counter(
        owner for owners in checked.owners for owner in owners if owner.lower() not in MISSING
    )
    if checked.client and len(sizes) == 1:
        what = f"all rows belong to {next(iter(sizes))!r}: there must be at least 2 clients"
        yield Problem("clients", "all files", checked.client, what)
    for owner, size in sizes.items():
        if size < TINY:
            tested = max(1, round(size / 4))
            what = f"{plural(size, 'row')}, about {tested} to test with; it counts as much as a large client"
            rows = tuple(
                (sheet.name, row)
                for sheet, owners in zip(checked.sheets, checked.owners, strict=True)
                for row, mine in enumerate(owners)
                if mine == owner
            )
            file = f"client {owner}" if checked.client else rows[0][0]
            yield Problem("tiny", file, checked.client or "", what, "client left out", rows)


LOOKS: tuple[Any, ...] = (
    look_at_names, look_at_decimals, look_at_missing, look_at_mixtures, look_at_dates, look_at_spikes, look_at_units,
    look_at_constants, look_at_names_of_cases, look_at_labels, look_at_repeats, look_at_sizes,
)  # fmt: skip


def with_sheets(checked: Check, sheets: Sequence[Sheet]) -> Check:
    """Return the check of other sheets of the same source."""
    return replace(checked, sheets=[replace(sheet, problems=()) for sheet in sheets], unreadable=())
