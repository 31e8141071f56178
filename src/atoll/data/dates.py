"""Dates in text columns: which form they have, and which day they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

ISO = "2026-03-31"  # with a time of day or without; what messages recommend
FORMS = (  # as strptime writes them; the ISO forms are read by Python itself
    "%Y/%m/%d", "%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y%m%d %H:%M",
    "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S", "%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M", "%Y/%m/%d %H:%M",
    "%Y/%m/%d %H:%M:%S", "%d %b %Y", "%b %d, %Y",
)  # fmt: skip
SECONDS_PER_DAY = 86400.0


def find_forms(cells: Sequence[str]) -> list[str]:
    """Return the forms in which all cells are dates; several where 03/04/2026 may be in March or in April."""
    first = cells[0] if len(cells) else ""
    if not first or not any(character.isdigit() for character in first) or len(first) < 6 or len(first) > 35:
        return []
    return [form for form in ("iso", *FORMS) if _fits(first, form) and all(_fits(cell, form) for cell in cells)]


def parse_dates(cells: Sequence[str], form: str | None = None) -> NDArray[np.float64] | None:
    """Return days since 1970 of cells that are all dates of one form; None if they are not, or if two forms fit."""
    forms = find_forms(cells) if form is None else [form]
    if len(forms) != 1:
        return None
    return np.array([_parse(cell, forms[0]).timestamp() / SECONDS_PER_DAY for cell in cells])


def _fits(cell: str, form: str) -> bool:
    try:
        _parse(cell, form)
    except ValueError:
        return False
    return True


def _parse(cell: str, form: str) -> datetime:
    """Return the time that a cell says; one without a zone is taken as UTC."""
    if form == "iso":
        if cell.isdigit() or "-" not in cell:
            raise ValueError("a number")
        found = datetime.fromisoformat(cell)
    else:
        found = datetime.strptime(cell, form)  # noqa: DTZ007 - its zone is set below
    return found if found.tzinfo else found.replace(tzinfo=UTC)
