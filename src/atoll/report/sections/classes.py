"""Class by class: which ones a method tells apart, and which it takes for which."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.report.parts import Block, Cell, Details, Part, Row, Table
from atoll.report.view import View

MOST_CLASSES = 40  # rows
MOST_CONFUSED = 20  # rows and columns of a confusion matrix; with more classes, so many pairs
FIGURES = {"f1": "F1", "recall": "recall", "precision": "precision"}


def collect_classes(view: View) -> list[Part]:
    """List how well each class is recognised, and how often one is taken for another."""
    comparison = view.comparison
    if not comparison.classes:
        return []
    tables = {name: _list_classes(view, name) for name in FIGURES}
    parts: list[Part] = [
        tables["f1"],
        *(Details(f"The same with {FIGURES[name]}", tables[name]) for name in ("recall", "precision")),
    ]
    for method in comparison.outcomes:
        counts = comparison.confusion(method)
        assert counts is not None
        confused = _list_confusion(view, counts) if len(counts) <= MOST_CONFUSED else _list_pairs(view, counts)
        first = method == (comparison.best or method)
        folded = Details(f"What {method} takes for what", confused, open=first and len(comparison.outcomes) > 1)
        parts.append(Block(view.place(method), [folded]))
    return parts


def _list_classes(view: View, figure: str) -> Table:
    """List one figure of every class, methods side by side."""
    comparison = view.comparison
    by_method: dict[str, list[dict[str, float]]] = {}
    for row in comparison.classes:
        by_method.setdefault(row["method"], []).append(row)
    first = next(iter(by_method.values()))
    there = [label for label, row in enumerate(first) if row["samples"]]
    hardest = sorted(there, key=lambda label: np.nanmin([of[label][figure] for of in by_method.values()] + [1.0]))
    shown = sorted(hardest[:MOST_CLASSES])
    rows = []
    for label in shown:
        values = [of[label][figure] for of in by_method.values()]
        top = np.nanmax(values) if np.isfinite(values).any() else np.nan
        cells = [
            Cell(_write(value), "top" if len(values) > 1 and value == top else None, view.place(method))
            for method, value in zip(by_method, values, strict=True)
        ]
        rows.append(Row(str(first[label]["class"]), [f"{first[label]['samples']:,}", *cells]))
    heads = [Cell(method, method=view.place(method)) for method in by_method]
    some = (
        f" The {MOST_CLASSES} hardest of {len(there)} classes; results.json has all." if len(there) > len(shown) else ""
    )
    seeds = f" and {len(comparison.seeds)} seeds" if len(comparison.seeds) > 1 else ""
    note = (
        f"{FIGURES[figure][0].upper()}{FIGURES[figure][1:]} in %, over the test samples of {comparison.who}{seeds} "
        f"together, each answered by its client's own model. The best of each row is bold.{some}"
    )
    return Table(["Class", "Test samples", *heads], rows, note, label=f"{FIGURES[figure]} by class; scrolls sideways")


def _write(share: float) -> str:
    return f"{100 * share:.1f}" if np.isfinite(share) else "–"


def _list_confusion(view: View, counts: NDArray[np.int64]) -> Table:
    """Show how many samples of each class were given each class; shades are shares of the row."""
    names = [view.comparison.example.class_name(label) for label in range(len(counts))]
    rows = []
    for label, of_class in enumerate(counts):
        total = max(int(of_class.sum()), 1)
        cells = []
        for answer, count in enumerate(of_class.tolist()):
            step = min(4, int(np.ceil(4 * count / total)))
            shade = f"{'up' if answer == label else 'down'}{step}" if count else ""
            kind = " ".join(filter(None, [shade, "same" if answer == label else ""])) or None
            cells.append(Cell(f"{count:,}" if count else "·", kind))
        rows.append(Row(names[label], cells))
    note = (
        "Rows: the true class; columns: the answer. Framed: right answers. The stronger the shade, the larger the "
        "share of the row: blue is right, orange is wrong."
    )
    return Table(["True class", *names], rows, note, "heat", "Confusion matrix; scrolls sideways")


def _list_pairs(view: View, counts: NDArray[np.int64]) -> Table:
    """List the classes that are most often taken for another."""
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSED]
    pairs = [divmod(int(place), len(counts)) for place in order if wrong.flat[place]]
    name = view.comparison.example.class_name
    rows = [
        Row(name(true), [name(said), f"{counts[true, said]:,}", _write(counts[true, said] / counts[true].sum())])
        for true, said in pairs
    ]
    return Table(["True class", "Answer", "Samples", "% of the class"], rows, "The most frequent wrong answers.")
