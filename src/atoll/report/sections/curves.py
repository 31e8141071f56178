"""Scores by rounds, by megabytes, and by epochs of tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from atoll.metrics import significance
from atoll.report import figures
from atoll.report.drawing import NARROW, WIDTH
from atoll.report.figures import Line
from atoll.report.parts import Figure, Part, Row, Table, Widths
from atoll.report.table import EPOCHS, epochs_cells, newcomers_cells, newcomers_notes
from atoll.report.view import View

if TYPE_CHECKING:
    from atoll.federation.report import Report

WIDE_SPREAD = 20  # between the least and the most megabytes: beyond, their axis is logarithmic


def collect_curves(view: View) -> list[Part]:
    """Draw the validation score by rounds."""
    lines = {method: _average(view, method, _list_rounds) for method in view.looks}
    seeds = len(view.comparison.seeds)
    bands = "bands are 95 % t-intervals, cut where they leave the figure"
    over = f" Means over {seeds} seeds; {bands}." if seeds > 1 else ""
    words = f"Validation score after each evaluated round, mean over {view.comparison.who}.{over}"
    title = f"Mean validation {view.numbers.name} by round, one line per method"
    return _draw(view, lines, words, title, "round")


def collect_megabytes(view: View) -> list[Part]:
    """Draw the validation score by megabytes; for methods that send nothing, their last score as a horizontal line."""
    sending = [method for method, (one, *_) in view.comparison.outcomes.items() if one.bytes]
    lines = {method: _average(view, method, _list_megabytes).bare for method in sending}
    known = [point[0] for line in lines.values() for point in line.points]
    if not known:
        return []
    low, high = min(known), max(known)
    silent = [method for method in view.looks if method not in sending]
    for method in silent:  # others can be compared with it wherever they end
        last = _average(view, method, _list_rounds).bare.points[-1:]
        lines[method] = Line([(at, *point[1:]) for point in last for at in (low, high)])
    log = 0 < WIDE_SPREAD * low < high  # a ledger that lost lines may count 0
    level = f" {silent[0]} sends nothing: its last score is drawn as a horizontal line." if len(silent) == 1 else ""
    whose = f"Mean validation score of {view.comparison.who}"
    words = f"{whose}, by the megabytes that clients and server have sent so far.{level}"
    title = f"Mean validation {view.numbers.name} against megabytes, one line per method"
    across = f"megabytes, both directions{', logarithmic' if log else ''}"
    return _draw(view, lines, words, title, across, log=log)


def collect_epochs(view: View) -> list[Part]:
    """Draw the score of one-shot methods by epoch of their one local training, where they have a curve."""
    (head, *heads), cells_of = epochs_cells(view.comparison.outcomes)
    if not cells_of:
        return []
    lines = {method: _average(view, method, _list_epochs) for method, *_ in cells_of}
    rows = [Row(method, cells, method=view.place(method)) for method, *cells in cells_of]
    title = f"Mean test {view.numbers.name} by epoch of local training, one line per method"
    drawn = _draw(view, lines, EPOCHS, title, "epoch of local training", split="test")
    return [*drawn, Table([head.capitalize(), *heads], rows, "")]


def collect_newcomers(view: View) -> list[Part]:
    """Show how clients that took no part are served, and how their scores grow with tuning."""
    comparison = view.comparison
    if not comparison.newcomers:
        return []
    (_, *heads), cells_of = newcomers_cells(comparison)
    rows = [Row(method, cells, method=view.place(method)) for method, *cells in cells_of]
    heads = ["Method", *(f"{head[0].upper()}{head[1:]}" for head in heads)]
    lines = {row["method"]: _average(view, row["method"], _list_tuning).bare for row in comparison.newcomers}
    title = f"Mean test {view.numbers.name} of new clients by epochs of tuning, one line per method"
    words = "Test score of new clients with labels, by epochs of tuning on their own training samples."
    drawn = _draw(view, lines, words, title, "epochs of tuning", split="test")
    return [Table(heads, rows, newcomers_notes(comparison)), *drawn]


def _list_rounds(outcome: Report) -> list[tuple[float, float]]:
    return [*outcome.curve()]


def _list_epochs(outcome: Report) -> list[tuple[float, float]]:
    return [(float(epoch), score) for epoch, score in outcome.by_epoch()]


def _list_megabytes(outcome: Report) -> list[tuple[float, float]]:
    return [(at, score) for at, (_, score) in zip(outcome.spent, outcome.curve(), strict=True)]


def _list_tuning(outcome: Report) -> list[tuple[float, float]]:
    stages = outcome.newcomers.labelled if outcome.newcomers else {}
    return [(float(epochs), scores.macro) for epochs, scores in stages.items()]


def _average(view: View, method: str, list_points: Callable[[Report], list[tuple[float, float]]]) -> Line:
    """Average the points of all seeds, as far as every seed has them."""
    seeds = [list_points(outcome) for outcome in view.comparison.outcomes[method]]
    points = []
    for at_once in zip(*seeds, strict=False):  # an incomplete run has fewer
        x, values = float(np.mean([x for x, _ in at_once])), [view.scale * value for _, value in at_once]
        mean, half = float(np.mean(values)), significance.interval(values)
        if math.isfinite(mean):
            spread = "" if half is None else f" ± {half:.3g}"
            points.append((x, mean, half, f"{method}, {x:.4g}: {view.numbers.name} {mean:.4g}{spread}"))
    return Line(points)


def _draw(
    view: View, lines: Mapping[str, Line], words: str, title: str, across: str, *, log: bool = False,
    split: str = "validation",
) -> list[Part]:  # fmt: skip
    up, most = f"{split} {view.numbers.name}{view.numbers.unit}", 100 if view.numbers.share else math.inf
    wide, narrow = (
        figures.draw_curves(lines, view.looks, title, across, up, width=width, log=log, most=most)
        for width in (WIDTH, NARROW)
    )
    return [Figure(words, Widths(wide, narrow))] if wide else []
