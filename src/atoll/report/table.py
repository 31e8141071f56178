"""Tables for the terminal. Colour never carries meaning by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from atoll.records.report import Report
    from atoll.records.results import Results

BEST = "*"
SIGNIFICANT = "†"
HARM = "▼"
UNKNOWN = "–"
SHARED = "°"
SERVERS_TEST = "Server's test: what all deploy alike, on the server's own test set."
LESS_IMPORTANT = ("std", "bottom\n10 %", "MB\ndown", "s", "gain vs\nFedAvg", "MB\nup")  # columns, the least first
SHORT_NAME = 20  # of a method, which may take several lines


@dataclass(frozen=True)
class Numbers:
    """How the figures of a metric are written: shares of 1 in percent, others with few digits."""

    name: str
    higher_is_better: bool = True
    share: bool = True

    @classmethod
    def of(cls, comparison: Results) -> Numbers:
        """For the metric of a comparison."""
        return cls(**comparison.metric)

    def score(self, value: float | None) -> str:
        """A score, or a distance between scores."""
        if value is None or not math.isfinite(value):
            return UNKNOWN
        return f"{100 * value:.1f}" if self.share else f"{value:.3g}"

    def gain(self, value: float | None) -> str:
        """A difference of scores, with its sign."""
        if value is None or not math.isfinite(value):
            return UNKNOWN
        return f"{100 * value:+.1f}" if self.share else f"{value:+.2g}"

    @property
    def unit(self) -> str:
        """What follows the name of the metric."""
        return " in %" if self.share else ""

    @property
    def points(self) -> str:
        """What gains are counted in."""
        return "percentage points" if self.share else f"units of {self.name}, positive is better"


@dataclass(frozen=True)
class ComparisonTable:
    """One row per method. Where a terminal is too narrow for all columns, the least important ones are left out."""

    comparison: Results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich prints."""
        heads, rows = comparison_cells(self.comparison)
        heads = [*heads, "s"]
        rows = [[*row, f"{one['seconds']:.1f}"] for row, one in zip(rows, self.comparison.results, strict=True)]
        columns = [list(column) for column in zip(heads, *rows, strict=True)]
        left_out = []
        for head in LESS_IMPORTANT:
            if _width(columns) <= options.max_width:
                break
            left_out += [" ".join(head.split()) for column in columns if column[0] == head]
            columns = [column for column in columns if column[0] != head]
        table = plain_table([])
        table.add_column(columns[0][0], overflow="fold")  # rather a name in two lines than figures cut short
        for column in columns[1:]:
            table.add_column(column[0], justify="right", no_wrap=True)
        for row in zip(*(column[1:] for column in columns), strict=True):
            table.add_row(*map(Text, row), style="bold" if row[0].endswith(f" {BEST}") else None)
        yield table
        if left_out:
            yield Text(f"For want of room without {', '.join(left_out)}: the files have all columns.", style="dim")


def _width(columns: Sequence[Sequence[str]]) -> int:
    """How wide a table of these columns is, without folding more than names of methods."""
    names, *others = [max(len(line) for cell in column for line in cell.splitlines()) for column in columns]
    return min(names, SHORT_NAME) + sum(others) + 3 * len(others)


def comparison_cells(comparison: Results) -> tuple[list[str], list[list[str]]]:
    """Heads, some of them in two lines, and rows of that table, but for the time."""
    numbers, several = Numbers.of(comparison), len(comparison.results) > 1
    central = has_central(comparison)
    heads = [
        "method", "mean ± 95 %" if len(comparison.seeds) > 1 else "mean", *(["server's\ntest"] if central else []),
        "worst\nclient", "bottom\n10 %", "std", "gain vs\nLocal", "gain vs\nFedAvg",
        f"harmed\nof {comparison.clients}", "MB\nup", "MB\ndown",
    ]  # fmt: skip
    rows = [
        [
            f"{row['method']} {BEST}" if several and row["method"] == comparison.best else row["method"],
            mean_text(numbers, row),
            *([numbers.score(row["central"])] if central else []),
            *(numbers.score(row[name]) for name in ("worst", "bottom10", "std")),
            *(gain_text(comparison, row, over) for over in ("local", "fedavg")),
            harmed_text(comparison, row),
            megabytes(row["megabytes_up"]),
            megabytes(row["megabytes_down"]),
        ]
        for row in comparison.results
    ]
    return heads, rows


def has_central(comparison: Results) -> bool:
    """Whether any method was scored on a test set of the server's own."""
    return any(row["central"] is not None for row in comparison.results)


def newcomers_table(comparison: Results) -> Table:
    """How new clients are served, one row per method."""
    heads, rows = newcomers_cells(comparison)
    table = plain_table([heads[0]])
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def newcomers_cells(comparison: Results) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of that table."""
    numbers, found = Numbers.of(comparison), comparison.newcomers
    epochs = [*found[0]["tuned"]]
    heads = ["new clients", "without labels", *(f"tuned {one} epoch{'s' * (one != '1')}" for one in epochs)]
    marks = {"welcome": "", "shared": f" {SHARED}", "none": ""}
    rows = [
        [
            row["method"],
            numbers.score(row["unlabelled"]) + marks[row["way"]],
            *(numbers.score(row["tuned"][one]) for one in epochs),
        ]
        for row in found
    ]
    return heads, rows


def newcomers_notes(comparison: Results) -> str:
    """What a reader of that table must know."""
    numbers, found = Numbers.of(comparison), comparison.newcomers
    return (
        f"{found[0]['clients']} clients that took no part, welcomed after the last round: mean {numbers.name}"
        f"{numbers.unit} on their test samples. With labels: the method's own welcome, then so many epochs of tuning "
        f"on their training samples. {SHARED} the method needs labels: the shared model; {UNKNOWN} it has none."
    )


def notes(comparison: Results) -> str:
    """What a reader of the table must know."""
    numbers = Numbers.of(comparison)
    central = f"{SERVERS_TEST} " if has_central(comparison) else ""
    return (
        f"{BEST} best mean. {comparison.protocol} {central}Gains are paired, client by client, in {numbers.points}; "
        f"{SIGNIFICANT} differs by Wilcoxon's test over all clients of all seeds (p < 0.05 after Holm's correction). "
        f"Harmed ({HARM}): worse off than alone by more than one standard error.{harm_note(comparison)} Std is over "
        "clients; MB and seconds (s) of training: all clients, one seed."
    )


def harm_note(comparison: Results) -> str:
    """What clients lose against Local with each method, on average; nothing is set off against it."""
    numbers = Numbers.of(comparison)
    lost = [
        f"{row['method']} {numbers.score(row['harm_mass'])}"
        for row in comparison.results
        if not is_reference(comparison, row) and row["harm_mass"] is not None
    ]
    return f" Lost against Local, a mean over all clients with gains as 0: {', '.join(lost)}." if lost else ""


def run_table(outcome: Report) -> Table:
    """One row per model and split of a single run."""
    numbers = Numbers(**outcome.metric)
    table = plain_table(["model", "split"])
    for head in ("mean", "over samples", "worst client", "bottom 10 %", "std over clients", "loss"):
        table.add_column(head, justify="right", no_wrap=True)
    evaluation = outcome.evaluations[-1].evaluation if outcome.evaluations else None
    models = {} if evaluation is None else {"personal": evaluation.personal, "shared": evaluation.shared}
    for model, split in ((model, split) for model in models for split in ("test", "val")):
        found = (models[model] or {}).get(split)
        if found is not None:
            shown = (found.macro, found.micro, found.worst, found.bottom10, found.std)
            loss = f"{found.loss:.3f}" if math.isfinite(found.loss) else UNKNOWN
            table.add_row(model, split, *map(numbers.score, shown), loss)
    if outcome.central is not None:
        table.add_row("shared", "central", UNKNOWN, numbers.score(outcome.central), *[UNKNOWN] * 4)
    return table


# -- how figures are written, here and on the page ---------------------------------------------------------------------


def mean_text(numbers: Numbers, row: dict[str, Any]) -> str:
    """The mean with its interval."""
    mean = numbers.score(row["mean"])
    return mean if row["interval"] is None else f"{mean} ± {numbers.score(row['interval']):>4}"


def gain_text(comparison: Results, row: dict[str, Any], over: str = "local") -> str:
    """The mean gain over a reference, with its sign and mark; none for the reference itself."""
    if is_reference(comparison, row, over):
        return UNKNOWN
    p = row[f"p_{over}"]
    mark = SIGNIFICANT if p is not None and p < 0.05 else ""
    return f"{Numbers.of(comparison).gain(row[f'gain_{over}'])}{mark}"


def harmed_text(comparison: Results, row: dict[str, Any]) -> str:
    """How many clients are harmed, mean over seeds."""
    if is_reference(comparison, row) or row["harmed"] is None:
        return UNKNOWN
    return f"{row['harmed']:.1f} {HARM}" if row["harmed"] else "0"


def is_reference(comparison: Results, row: dict[str, Any], over: str = "local") -> bool:
    """Whether a row is what the others are compared with."""
    return bool(row["method"] == comparison.reference(over))


def megabytes(value: float) -> str:
    """Few digits, but never 0 for something."""
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 0.05 else f"{value:.1g}"


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table without frames; cells are shown as they are."""
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
