"""Write a comparison as files: a page, and tables for spreadsheets, programs and papers."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.records.runs import write_json, write_text, writing
from atoll.report.html import render_page
from atoll.report.summary import write_verdict
from atoll.report.table import (
    BEST,
    EPOCHS,
    comparison_cells,
    epochs_cells,
    newcomers_cells,
    newcomers_notes,
    notes,
)

if TYPE_CHECKING:
    from atoll.federation.results import Results


def save(comparison: Results, folder: Path) -> dict[str, Path]:
    """Write all files; return their paths by name."""
    paths = {
        "report": folder / "report.html",
        "results": folder / "results.csv",
        "json": folder / "results.json",
        "markdown": folder / "results.md",
        "latex": folder / "results.tex",
        "clients": folder / "clients.csv",
        "citations": folder / "citations.bib",
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(paths["report"], render_page(comparison))
        write_text(paths["results"], _write_csv(comparison.results))
        write_json(paths["json"], as_json(comparison))
        write_text(paths["markdown"], write_markdown(comparison))
        write_text(paths["latex"], write_latex(comparison))
        write_text(paths["clients"], _write_csv(comparison.rows()))
        write_text(paths["citations"], f"{comparison.citations}\n")
    return paths


def as_json(comparison: Results) -> dict[str, Any]:
    """Return everything for programs; what is unknown is null."""
    found: dict[str, Any] = _replace_nan({
        "verdict": write_verdict(comparison),
        "protocol": comparison.protocol,
        "select": comparison.select,
        "metric": dict(comparison.metric),
        "missing": [*comparison.missing],
        "results": comparison.results,
        **({"newcomers": comparison.newcomers} if comparison.newcomers else {}),
        **({"by_epoch": curves} if (curves := _list_curves(comparison)) else {}),
        **({"classes": comparison.classes} if comparison.classes else {}),
        "groups": {
            method: {
                kind: {name: score._asdict() for name, score in of_kind.items()}
                for kind, of_kind in comparison.groups(method).items()
            }
            for method in comparison.outcomes
        },
        "clients": [*comparison.rows()],
    })  # fmt: skip
    return found


def _list_curves(comparison: Results) -> dict[str, list[dict[str, float]]]:
    """Return the scores by epoch of local training, for every method that has some a dictionary for each seed."""
    found = {
        method: [{f"{epoch}": score for epoch, score in one.by_epoch()} for one in of_method]
        for method, of_method in comparison.outcomes.items()
    }
    return {method: seeds for method, seeds in found.items() if any(seeds)}


def write_markdown(comparison: Results) -> str:
    """Write the table for a README or an issue."""
    found = f"{_write_pipes(*_list_cells(comparison))}\n\n{_escape_markdown(notes(comparison))}\n"
    heads, rows = epochs_cells(comparison.outcomes)
    if rows:
        found += f"\n{_write_pipes(heads, rows)}\n\n{_escape_markdown(EPOCHS)}\n"
    if comparison.newcomers:
        found += f"\n{_write_pipes(*newcomers_cells(comparison))}\n\n{_escape_markdown(newcomers_notes(comparison))}\n"
    return found


def _write_pipes(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(map(_escape_markdown, line))} |" for line in (heads, *rows))
    return "\n".join([head, f"| --- |{' ---: |' * (len(heads) - 1)}", *body])


def _escape_markdown(text: str) -> str:
    """Escape text, so it shows as it is, in one line: a name may hold anything."""
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", _join_lines(text)).replace("&", "&amp;").replace("|", "&#124;")


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def write_latex(comparison: Results) -> str:
    """Write the table for a paper; it needs the package booktabs."""
    heads, rows = _list_cells(comparison)
    best = comparison.best
    body = []
    for row, result in zip(rows, comparison.results, strict=True):
        cells = [_escape_latex(cell.removesuffix(f" {BEST}")) for cell in row]
        bold = result["method"] == best and len(rows) > 1
        body.append(
            " & ".join(f"\\textbf{{{cell}}}" if bold and index < 2 else cell for index, cell in enumerate(cells))
        )
    head = " & ".join(map(_escape_latex, heads))
    return "\n".join([
        f"% {_join_lines(notes(comparison))}",
        f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        "\\toprule", f"{head} \\\\", "\\midrule",
        *(f"{line} \\\\" for line in body),
        "\\bottomrule", "\\end{tabular}", "",
    ])  # fmt: skip


def _list_cells(comparison: Results) -> tuple[list[str], list[list[str]]]:
    """Return the cells of the table, each in one line and without padding."""
    heads, rows = comparison_cells(comparison)
    return [_join_lines(head) for head in heads], [[_join_lines(cell) for cell in row] for row in rows]


def _escape_latex(text: str) -> str:
    text = re.sub(r"([%_&#${}])|\\", lambda found: f"\\{found[1]}" if found[1] else r"\textbackslash{}", text)
    for plain, written in (
        ("~", r"\textasciitilde{}"),
        ("^", r"\textasciicircum{}"),
        ("±", r"$\pm$"),
        ("†", r"$^\dagger$"),
        ("‡", r"$^\ddagger$"),
        ("▼", r"$\downarrow$"),
        ("–", "--"),
    ):
        text = text.replace(plain, written)
    return text


def _write_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = [*rows]
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _disarm(value) for name, value in row.items()} for row in rows)
    return file.getvalue()


def _disarm(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would take for a formula; leave numbers as they are."""
    if not isinstance(value, str):
        return value
    value = "\n".join(value.splitlines())  # which the writer quotes, unlike a carriage return
    if not value.lstrip().startswith(("=", "+", "-", "@")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _replace_nan(value: Any) -> Any:
    """Replace NaN by None: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _replace_nan(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_replace_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
