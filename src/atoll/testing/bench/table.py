"""The benchmark's table: one row for each workload, whatever is measured, for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.records.runs import command, machine, now, versions

COLUMNS = ("workload", "unit", "beside", "theirs", "atoll", "times as fast", "target", "first result", "plan")
WIDTHS = (18, 10, 8, 8, 13, 13, 12, 0)  # of the columns after the first
TEXT = ("workload", "unit", "beside", "plan")  # the others are figures


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one workload took.

    `atoll` is the steady state: later rounds, or a comparison whose plans and programs were found again. `first` is the
    seconds until the first result, or of a comparison that finds nothing.
    """

    workload: str
    unit: str
    atoll: float
    first: float
    beside: str = ""  # what else was measured, by turns with Atoll
    theirs: float | None = None
    least: float | None = None  # target: times as fast
    most: float | None = None  # target: in the unit
    plan: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times as fast as what stands beside it."""
        return None if self.theirs is None else self.theirs / self.atoll

    @property
    def missed(self) -> bool:
        """Whether a target was not reached."""
        slow = self.least is not None and self.ratio is not None and self.ratio < self.least
        return slow or (self.most is not None and self.atoll > self.most)

    @property
    def cells(self) -> list[str]:
        """The row as text, by `COLUMNS`."""
        least = "" if self.least is None else f"{self.least:g}x"
        most = "" if self.most is None else f"<= {self.most:g}"
        target = ", ".join(filter(None, [least, most]))
        return [
            self.workload, self.unit, self.beside, write_figure(self.theirs), write_figure(self.atoll),
            "" if self.ratio is None else f"{self.ratio:.2f}x",
            target + " missed" * self.missed, f"{self.first:.1f} s",
            " ".join(filter(None, [self.plan, self.note and f"({self.note})"])),
        ]  # fmt: skip


def write_figure(value: float | None) -> str:
    """Write a figure with three digits at least."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def write_line(cells: Sequence[str], longest: int) -> str:
    """Write one line of the table, whose first column is `longest` wide; the others are as wide as their figures."""
    widths = (longest, *WIDTHS)
    parts = [
        f"{cell:<{width}}" if column in TEXT else f"{cell:>{width}}"
        for cell, width, column in zip(cells, widths, COLUMNS, strict=True)
    ]
    return "  ".join(parts).rstrip()


def describe(device: str, rows: list[Row]) -> dict[str, Any]:
    """Return the rows with where they come from: machine, versions with the commit, and command."""
    found = [asdict(row) | {"ratio": row.ratio, "missed": row.missed} for row in rows]
    return {
        "command": command(), "device": device, "machine": machine(), "versions": versions(), "when": now(),
        "rows": found,
    }  # fmt: skip


def write(file: Path, device: str, rows: list[Row]) -> None:
    """Write the rows as JSON."""
    file.write_text(json.dumps(describe(device, rows), indent=1) + "\n", encoding="utf-8")
