"""Tables for the terminal, and how their cells are written. Colour never carries meaning alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from atoll.federation.numbers import UNKNOWN, Numbers, mean_text, run_cells
from atoll.kernel.html import html_table

if TYPE_CHECKING:
    from atoll.federation.report import Report
    from atoll.federation.results import Results

BEST = "*"
SIGNIFICANT = "†"
HARM = "▼"
SHARED = "°"
TRANSDUCTIVE = "‡"
SERVERS_TEST = "Server's test: the shared model or ensemble, on the server's own test set."
LESS_IMPORTANT = ("std", "bottom\n10 %", "MB\ndown", "s", "gain vs\nFedAvg", "MB\nup")  # columns, the least first
SHORT_NAME = 20  # of a method, which may take several lines
NAME_WIDTH = 30  # names up to this length are shown whole in plain tables


@dataclass(frozen=True, repr=False)
class ComparisonTable:
    """One row per method. Where a terminal is too narrow for all columns, the least important ones are hidden."""

    comparison: Results

    def __repr__(self) -> str:
        return f"<Table of {self.comparison!r}; show it with rich.print>"

    def _repr_html_(self) -> str:
        """Show it in a notebook, with what its figures mean."""
        heads, rows = comparison_cells(self.comparison)
        return str(html_table(heads, rows, note=notes(self.comparison)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print it: `rich` calls this."""
        heads, rows = comparison_cells(self.comparison)
        heads = [*heads, "s"]
        rows = [[*row, f"{one['seconds']:.1f}"] for row, one in zip(rows, self.comparison.results, strict=True)]
        columns = [list(column) for column in zip(heads, *rows, strict=True)]
        hidden = []
        for head in LESS_IMPORTANT:
            if _width(columns) <= options.max_width:
                break
            hidden += [" ".join(head.split()) for column in columns if column[0] == head]
            columns = [column for column in columns if column[0] != head]
        table = plain_table([])
        table.add_column(columns[0][0], overflow="fold")  # a name may take two lines; figures are never cut
        for column in columns[1:]:
            table.add_column(column[0], justify="right", no_wrap=True)
        for row in zip(*(column[1:] for column in columns), strict=True):
            table.add_row(*map(Text, row), style="bold" if row[0].endswith(f" {BEST}") else None)
        yield table
        if hidden:
            yield Text(f"Hidden to fit the terminal: {', '.join(hidden)}. The files have all columns.", style="dim")


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Return the width of a table of these columns, where only names of methods are folded."""
    names, *others = [max(len(line) for cell in column for line in cell.splitlines()) for column in columns]
    return min(names, SHORT_NAME) + sum(others) + 3 * len(others)


def comparison_cells(comparison: Results) -> tuple[list[str], list[list[str]]]:
    """Return the heads, some of them in two lines, and the rows of a comparison's table, without the time."""
    numbers, several = Numbers.of(comparison), len(comparison.results) > 1
    central = has_central(comparison)
    heads = [
        "method", "val", "mean ± 95 %" if has_interval(comparison) else "mean",
        *(["server's\ntest"] if central else []),
        "worst\nclient", "bottom\n10 %", "std", "gain vs\nLocal", "gain vs\nFedAvg",
        f"harmed\nof {comparison.judged:,}", "MB\nup", "MB\ndown",
    ]  # fmt: skip
    if comparison.only_central:
        heads = ["method", "server's test", "MB\nup", "MB\ndown"]
        return heads, [
            [
                marked_name(row),
                central_text(numbers, row),
                *(megabytes(row[f"megabytes_{way}"]) for way in ("up", "down")),
            ]
            for row in comparison.results
        ]
    rows = [
        [
            f"{marked_name(row)} {BEST}" if several and row["method"] == comparison.best else marked_name(row),
            validation_text(numbers, row),
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


def marked_name(row: dict[str, Any]) -> str:
    """Return the name of a method, with a mark where its answers depend on the other samples of a batch."""
    return f"{row['method']} {TRANSDUCTIVE}" if row["transductive"] else row["method"]


def transductive_note(comparison: Results) -> str:
    """Explain the mark of methods whose answers depend on the other samples of a batch; with what they score alone."""
    numbers, rows = Numbers.of(comparison), [row for row in comparison.results if row["transductive"]]
    if not rows:
        return ""
    central = {
        row["method"]: f" (server's test {numbers.score(row['central_inductive'])})"
        for row in rows if row["central_inductive"] is not None
    }  # fmt: skip
    alone = [f"{row['method']} {numbers.score(row['inductive'])}{central.get(row['method'], '')}" for row in rows]
    impossible = f" ({UNKNOWN}: one sample has no statistics)" if any(row["inductive"] is None for row in rows) else ""
    return (
        f" {TRANSDUCTIVE} transductive: an answer depends on the other test samples of its batch. Mean with one sample "
        f"at a time{impossible}: {', '.join(alone)}."
    )


def epochs_table(outcomes: Mapping[str, Sequence[Report]]) -> Table | None:
    """Make a table of scores by epoch of one-shot training, one row per method; None without a curve."""
    heads, rows = epochs_cells(outcomes)
    if not rows:
        return None
    table = plain_table(heads[:1])
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def epochs_cells(outcomes: Mapping[str, Sequence[Report]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table of scores by epoch: means over seeds, with their intervals."""
    from atoll.metrics.significance import interval  # imports torch, for which the command line does not wait

    found = {method: [dict(one.by_epoch()) for one in of_method] for method, of_method in outcomes.items()}
    epochs = sorted({epoch for seeds in found.values() for one in seeds for epoch in one})
    numbers = Numbers(**next(iter(outcomes.values()))[0].metric)

    def write(values: list[float]) -> str:
        half = interval(values) if len(values) > 1 else None
        mean = numbers.score(float(np.mean(values)) if values else None)
        return mean if half is None else f"{mean} ± {numbers.score(half)}"

    rows = [
        [method, *(write([one[epoch] for one in seeds if epoch in one]) for epoch in epochs)]
        for method, seeds in found.items()
        if any(seeds)
    ]
    return ["after epoch", *map(str, epochs)], rows


EPOCHS = (
    "After so many epochs of one local training, on the server's test set if it has one, else on clients' own. Where a "
    "method plans over all epochs (stages, a falling step size), points are those of the long training, not of a "
    "shorter one."
)


def has_interval(comparison: Results) -> bool:
    """Say whether means have an interval: over seeds, or because clients were sampled."""
    return len(comparison.seeds) > 1 or comparison.sampled


def has_central(comparison: Results) -> bool:
    """Say whether any method was scored on a test set of the server's own."""
    return any(row["central"] is not None for row in comparison.results)


def newcomers_table(comparison: Results) -> Table:
    """Make a table of the scores of new clients, one row per method."""
    heads, rows = newcomers_cells(comparison)
    table = plain_table([heads[0]])
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def newcomers_cells(comparison: Results) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table of new clients."""
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
    """Explain the table of new clients."""
    numbers, found = Numbers.of(comparison), comparison.newcomers
    return (
        f"{found[0]['clients']} clients that took no part in training and join after the last round: mean "
        f"{numbers.name}{numbers.unit} on their test samples. Tuned: the method welcomes them with their labels and "
        f"tunes for so many epochs on their training samples. {SHARED} the method needs labels, so this is its shared "
        f"model; {UNKNOWN} it has no shared model."
    )


def notes(comparison: Results) -> str:
    """Explain the table of a comparison."""
    central = f"{SERVERS_TEST} " if has_central(comparison) else ""
    if comparison.only_central:
        return (
            f"{comparison.protocol} {central}{transductive_note(comparison).strip()} MB and seconds (s) of training are"
            " totals of all clients, for one seed."
        )
    return (
        f"{validation_note(comparison, BEST)} {comparison.protocol} {central}{gains_note(comparison)} "
        f"{harmed_note(comparison)}{harm_note(comparison)}{transductive_note(comparison)} "
        "Std is over clients. MB and seconds (s) of training are totals of all clients, for one seed."
    )


def validation_note(comparison: Results, mark: str) -> str:
    """Explain the mark of the best method, and the column that it rests on."""
    if all(row["validation"] is None for row in comparison.results):
        return "No method is marked as the best: there are no validation samples to choose by."
    rough = any(row["reads_validation"] for row in comparison.results)
    brackets = " In brackets: the method reads these samples itself, so its score on them is too good." if rough else ""
    return f"{mark} best on validation samples (val), by which a method may be chosen.{brackets}"


def gains_note(comparison: Results) -> str:
    """Explain gains and their mark."""
    over = "the clients of the sample" if comparison.sampled else comparison.everybody
    if len(comparison.seeds) > 1:
        over += ", each with its mean over seeds" if comparison.together else " and seeds"
    test = f"Wilcoxon's test over {over}"
    if comparison.estimates:
        test = f"a t-test over clients and {'cuts' if comparison.cuts > 1 else 'seeds'}"
    return (
        f"Gains are paired by client, in {Numbers.of(comparison).points}; {SIGNIFICANT} significant by {test} "
        "(p < 0.05 after Holm's correction)."
    )


def harm_note(comparison: Results) -> str:
    """Say how much clients lose against Local with each method, on average; gains do not make up for it."""
    numbers = Numbers.of(comparison)
    lost = [
        f"{row['method']} {numbers.score(row['harm_mass'])}"
        for row in comparison.results
        if not is_reference(comparison, row) and row["harm_mass"] is not None
    ]
    over = "the sample" if comparison.sampled else comparison.everybody
    return f" Mean loss against Local over {over} (a gain counts as 0): {', '.join(lost)}." if lost else ""


def run_table(outcome: Report) -> Table:
    """Make a table of a single run, one row per model and split."""
    heads, rows = run_cells(outcome)
    table = plain_table(heads[:2])
    for head in heads[2:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


# -- how figures are written, here and on the page ---------------------------------------------------------------------


def validation_text(numbers: Numbers, row: dict[str, Any]) -> str:
    """Write the mean score on validation samples; in brackets if the method reads them itself."""
    score = numbers.score(row["validation"])
    return f"({score})" if row["reads_validation"] and score != UNKNOWN else score


def central_text(numbers: Numbers, row: dict[str, Any]) -> str:
    """Write the score on the server's test set, with its interval over seeds."""
    score = numbers.score(row["central"])
    return score if row["central_interval"] is None else f"{score} ± {numbers.score(row['central_interval'])}"


def gain_text(comparison: Results, row: dict[str, Any], over: str = "local") -> str:
    """Write the mean gain over a reference, with its sign and mark; nothing for the reference itself."""
    if is_reference(comparison, row, over):
        return UNKNOWN
    numbers, p, half = Numbers.of(comparison), row[f"p_{over}"], row[f"gain_{over}_interval"]
    mark = SIGNIFICANT if p is not None and p < 0.05 else ""
    within = f" ± {numbers.score(half)}" if comparison.together and half is not None else ""
    return f"{numbers.gain(row[f'gain_{over}'])}{within}{mark}"


def harmed_text(comparison: Results, row: dict[str, Any]) -> str:
    """Write how many clients are harmed; where every seed has clients of its own, as a range over seeds."""
    harmed = comparison.find_harmed(row["method"])
    if is_reference(comparison, row) or harmed is None:
        return UNKNOWN
    return f"{count_range(harmed.sum(axis=1))} {HARM}" if harmed.any() else "0"


def count_range(counts: ArrayLike) -> str:
    """Write a count of clients that may differ between seeds: `3`, or `2 to 5`."""
    low, high = int(np.min(counts)), int(np.max(counts))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def harmed_note(comparison: Results) -> str:
    """Say who counts as harmed."""
    seeds = len(comparison.seeds)
    over = "; a client counts once, with the mean of its gains over seeds" if comparison.together else ""
    over = over or ("; a range is over seeds, each of which has clients of its own" if seeds > 1 else "")
    return f"Harmed ({HARM}): worse than with Local by more than one standard error{over}."


def is_reference(comparison: Results, row: dict[str, Any], over: str = "local") -> bool:
    """Say whether a row is the reference that the others are compared with."""
    return bool(row["method"] == comparison.reference(over))


def megabytes(value: float) -> str:
    """Write megabytes with few digits, but never 0 for what is more."""
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 0.05 else f"{value:.1g}"


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table without frames; cells are shown as they are, and names in the first column are not cut."""
    rows = list(rows)
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    if heads:
        table.columns[0].min_width = max((len(row[0]) for row in rows if len(row[0]) <= NAME_WIDTH), default=0)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
