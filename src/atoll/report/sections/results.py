"""The first table of a page, and the figures that a reader asks for after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from atoll.federation.numbers import UNKNOWN, mean_text
from atoll.metrics.fairness import DECILES
from atoll.report.parts import Cell, Details, Part, Row, Table
from atoll.report.table import (
    HARM,
    SERVERS_TEST,
    gain_text,
    gains_note,
    harmed_note,
    harmed_text,
    has_interval,
    marked_name,
    megabytes,
    transductive_note,
    validation_note,
    validation_text,
)
from atoll.report.view import View

BEST = "★"


def collect_results(view: View) -> list[Part]:
    """List the methods with their scores, gains and harm."""
    comparison, numbers = view.comparison, view.numbers
    several = len(comparison.outcomes) > 1
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "Validation": lambda row: validation_text(numbers, row),
        "Mean ±\u00a095\u00a0%" if has_interval(comparison) else "Mean": lambda row: mean_text(numbers, row),
        "Server's test": lambda row: numbers.score(row["central"]),
        "Worst client": lambda row: numbers.score(row["worst"]),
        "Bottom 10\u00a0%": lambda row: numbers.score(row["bottom10"]),
        "Std over clients": lambda row: numbers.score(row["std"]),
        "Gain vs Local": lambda row: gain_text(comparison, row),
        "Gain vs FedAvg": lambda row: gain_text(comparison, row, "fedavg"),
        f"Harmed of\u00a0{comparison.judged:,}": lambda row: harmed_text(comparison, row),
        "All samples": lambda row: numbers.score(row["micro"]),
        "Shared model": lambda row: numbers.score(row["shared_union"]),
    }
    columns = {head: text for head, text in columns.items() if any(text(row) != UNKNOWN for row in comparison.results)}
    rows = []
    for row in comparison.results:
        method = row["method"]
        best = several and method == comparison.best
        cells = [Cell(text, "harm" if HARM in text else None) for text in (write(row) for write in columns.values())]
        name = marked_name(row)
        rows.append(Row(f"{name} {BEST}" if best else name, cells, "best" if best else None, view.place(method)))
    return [
        Table(["Method", *columns], rows, _explain_columns(view, columns)),
        Details("Deciles, evenness, calibration, significance, cost of a target", _list_details(view)),
    ]


def _explain_columns(view: View, columns: Iterable[str]) -> str:
    """Say what the columns of the table mean."""
    comparison, numbers = view.comparison, view.numbers
    notes = {
        "Gain": gains_note(comparison),
        "Harmed": harmed_note(comparison),
        "Server": SERVERS_TEST,
        "All": f"All samples: {numbers.name} over the test samples of {comparison.who} together, each answered by its "
        "client's own model.",
        "Shared": "Shared model: the global model, on the same samples.",
    }
    star = [validation_note(comparison, BEST)] if len(comparison.outcomes) > 1 else []
    columns_said = (note for word, note in notes.items() if any(head.startswith(word) for head in columns))
    return " ".join([*star, *columns_said]) + transductive_note(comparison)


def _list_details(view: View) -> Table:
    """List the figures that a reader asks for after the first ones, methods side by side."""
    numbers, results = view.numbers, view.comparison.results
    lines: dict[str, tuple[str, Callable[[float | None], str]]] = {
        **{f"Decile p{decile}": (f"p{decile}", numbers.score) for decile in DECILES},
        "Best minus worst client": ("spread", numbers.score),
        "Wilson bound of the worst client": ("worst_wilson", numbers.score),
        "Coefficient of variation": ("cv", _write_figure),
        "Gini": ("gini", _write_figure),
        "Jain": ("jain", _write_figure),
        "Jain of errors": ("jain_error", _write_figure),
        "Entropy": ("entropy", _write_figure),
        "Mean loss": ("loss", _write_figure),
        "Expected calibration error": ("ece", _write_figure),
        "Rounds to target": ("rounds_to_target", _write_short),
        "MB to target": ("megabytes_to_target", _write_megabytes),
        "Clusters": ("clusters", _write_count),
        "Adjusted Rand index of clusters and planted groups": ("adjusted_rand", _write_figure),
        "Median gain vs Local": ("gain_local_median", numbers.gain),
        "± 95 % of the mean by its sample": ("interval_of_sample", numbers.score),
        "± 95 % of the gain vs Local": ("gain_local_interval", numbers.score),
        "Mean loss against Local (a gain counts as 0)": ("harm_mass", numbers.score),
        "Clients that gain vs Local": ("helped", _write_count),
        "Harmed vs FedAvg": ("harmed_fedavg", _write_count),
        "p vs Local": ("p_local", _write_p),
        "p vs FedAvg": ("p_fedavg", _write_p),
    }
    rows = [
        Row(head, [Cell(write(row[name]), method=place) for place, row in enumerate(results)])
        for head, (name, write) in lines.items()
        if any(write(row[name]) != UNKNOWN for row in results)
    ]
    heads = [Cell(row["method"], method=place) for place, row in enumerate(results)]
    comparison = view.comparison
    target = (
        f"{numbers.score(comparison.target)}{' %' if numbers.share else ''}"
        if comparison.target is not None
        else "95 % as good as FedAvg's best"
    )
    note = (
        f"Means over seeds. Target: a validation score of {target}, as a mean of three evaluations; – if a seed does "
        "not reach it. MB count all clients and both directions. A calibration error of 0 is best."
    )
    return Table(["Figure", *heads], rows, note)


def _write(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else form(value)


def _write_figure(value: float | None) -> str:
    return _write(value, "{:.3f}".format)


def _write_short(value: float | None) -> str:
    return _write(value, "{:.3g}".format)


def _write_megabytes(value: float | None) -> str:
    return _write(value, megabytes)


def _write_count(value: float | None) -> str:
    return _write(value, lambda count: f"{count:.0f}" if count == int(count) else f"{count:.1f}")


def _write_p(value: float | None) -> str:
    return _write(value, lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}")
