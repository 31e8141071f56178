"""Tables for the terminal. Colour never carries meaning by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from atoll.comparison import Comparison, Outcome

BEST = "*"
UNKNOWN = "–"


def comparison_table(comparison: Comparison) -> Table:
    """One row per method."""
    several = len(comparison.seeds) > 1
    table = plain_table([])
    table.add_column("method", no_wrap=True)
    heads = [
        "mean ± 95 %" if several else "mean",
        "worst\nclient",
        "bottom\n10 %",
        "std over\nclients",
        "gain vs\nLocal",
    ]
    for head in [*heads, f"harmed\nof {comparison.clients}", "MB\nup", "MB\ndown", "seconds"]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in comparison.results:
        best = row["method"] == comparison.best and len(comparison.results) > 1
        table.add_row(
            Text(f"{row['method']} {BEST}" if best else row["method"]),
            mean_text(row),
            percent(row["worst"]),
            percent(row["bottom10"]),
            percent(row["std"]),
            gain_text(comparison, row),
            UNKNOWN if is_reference(comparison, row) or row["harmed"] is None else f"{row['harmed']:.1f}",
            megabytes(row["megabytes_up"]),
            megabytes(row["megabytes_down"]),
            f"{row['seconds']:.1f}",
            style="bold" if best else None,
        )
    return table


def run_table(outcome: Outcome) -> Table:
    """One row per model and split of a single run."""
    table = plain_table(["model", "split"])
    for head in ("mean", "over samples", "worst client", "bottom 10 %", "std over clients", "loss"):
        table.add_column(head, justify="right", no_wrap=True)
    evaluation = outcome.history[-1]["evaluation"]
    for model, split in ((model, split) for model in ("personal", "shared") for split in ("test", "val")):
        if model in evaluation:
            found = evaluation[model][split]
            names = ("macro", "micro", "worst", "bottom10", "std")
            table.add_row(model, split, *(percent(found[name]) for name in names), f"{found['loss']:.3f}")
    return table


# -- how figures are written, here and on the page ---------------------------------------------------------------------


def percent(value: float) -> str:
    """A share of 1 in percent."""
    return f"{100 * value:.1f}"


def mean_text(row: dict[str, Any]) -> str:
    """The mean with its interval."""
    return (
        percent(row["mean"]) if row["interval"] is None else f"{percent(row['mean'])} ± {percent(row['interval']):>4}"
    )


def gain_text(comparison: Comparison, row: dict[str, Any], over: str = "local") -> str:
    """The mean gain over a reference, with its sign; none for the reference itself."""
    gain = row[f"gain_{over}"]
    return UNKNOWN if gain is None or is_reference(comparison, row, over) else f"{100 * gain:+.1f}"


def is_reference(comparison: Comparison, row: dict[str, Any], over: str = "local") -> bool:
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
