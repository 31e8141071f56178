"""Client by client: what each gains, how scores are spread, groups, and all of them in a table.

Of very many clients there are histograms and percentiles instead.
"""

from __future__ import annotations

import numpy as np

from atoll.federation.numbers import UNKNOWN
from atoll.metrics import fairness
from atoll.report import figures
from atoll.report.bins import draw_bins
from atoll.report.drawing import NARROW, WIDTH, find_ticks
from atoll.report.parts import Block, Cell, Details, Figure, Grid, Part, Row, Table, Widths, break_name
from atoll.report.table import HARM
from atoll.report.view import View
from atoll.runtime.population import MANY_CLIENTS

MOST_CLIENTS = 200  # rows of the table by client; clients.csv has them all
MOST_UNFOLDED = 30
MOST_GROUPS = 40
FEW_SAMPLES = 10  # of a test, which stand beside the client's gain
GROUPS = {
    "size": "by size",
    "label entropy": "by label entropy",
    "label divergence": "by label divergence",
    "planted": "planted",
}


def collect_gains(view: View) -> list[Part]:
    """Draw the gains over training alone: one small chart per method, all with the same scale."""
    clients = view.clients
    if not clients.gains:
        return []
    if view.comparison.scored > MANY_CLIENTS:
        return _bin_gains(view)
    known = np.concatenate([values[np.isfinite(values)] for values in clients.gains.values()]) * view.scale
    ticks = find_ticks(min(0.0, known.min(initial=0)), max(0.0, known.max(initial=0)), 5)
    charts = []
    for method, values in clients.gains.items():
        look, harmed = view.looks[method], clients.harmed[method]
        count, helped = int(np.isfinite(values).sum()), int((values > 0).sum())
        words = f"{helped} of {count} gain, {f'{HARM} ' if harmed.any() else ''}{harmed.sum()} harmed"
        notes = [
            f"client {name}, {method}: {view.numbers.gain(gain)}{' (harmed)' if harm else ''}"
            for name, gain, harm in zip(view.names, values, harmed, strict=True)
        ]
        title = f"Gain of each client with {method} against training alone, sorted"
        drawing = figures.draw_gains(values * view.scale, harmed, view.names, notes, look, ticks, title, view.ids)
        charts.append(Block(look.place, [drawing], method, words))
    words = (
        f"Gain of each client over training alone, in {view.numbers.points}. {HARM} and hatching mark harmed clients: "
        f"worse than alone by more than one standard error. {clients.words}"
    )
    return [*_shade_gains(view), Figure(words, Grid(charts))]


def _shade_gains(view: View) -> list[Part]:
    """Shade the gain of every client with every method: blue where it gains, orange where it loses, ▼ where harmed."""
    clients = view.clients
    gains = np.stack([*clients.gains.values()], axis=1)
    known = np.isfinite(gains).any(axis=1)
    if not known.any():
        return []
    mean = np.full(len(gains), np.nan)
    mean[known] = np.nanmean(gains[known], axis=1)
    order = np.argsort(mean, kind="stable")[: min(MOST_CLIENTS, int(known.sum()))]
    most = float(np.nanpercentile(np.abs(gains), 95)) or 1.0  # a single client must not make all others pale
    rows = []
    for place in order.tolist():
        cells = []
        for method, values in clients.gains.items():
            harmed, gain = bool(clients.harmed[method][place]), float(values[place])
            text = view.numbers.gain(gain)
            kind = _shade(gain / most)
            cells.append(Cell(f"{HARM} {text}" if harmed else text, kind, view.place(method)))
        samples = int(clients.samples[place])
        few = f" ({samples} test sample{'s' * (samples > 1)})" if samples < FEW_SAMPLES else ""
        rows.append(Row(f"{view.names[place]}{few}", cells, client=view.ids[place]))
    heads = [Cell(break_name(method), method=view.place(method)) for method in clients.gains]
    which = "The clients that gain least" if len(order) < known.sum() else "Clients"
    note = (
        f"Gain over training alone in {view.numbers.points}. {which}, the smallest mean gain first. Blue: gains; "
        f"orange: loses; the stronger, the more, up to {view.numbers.score(most)} and beyond. {HARM} harmed: worse "
        f"than alone by more than one standard error. {clients.words}"
    )
    label = "Gains of clients with each method; scrolls"
    return [Table(["Client", *heads], rows, note, "heat", label, tall=len(rows) > MOST_UNFOLDED)]


def _shade(share: float) -> str | None:
    """Return the shade of a gain: its share of the largest one, in four steps to both sides."""
    if not np.isfinite(share) or share == 0:
        return None
    step = max(1, min(4, int(np.ceil(4 * abs(share)))))
    return f"{'up' if share > 0 else 'down'}{step}"


def _bin_gains(view: View) -> list[Part]:
    """Draw how many clients gain how much, one histogram per method."""
    clients = view.clients
    heads = {
        method: f"{method}: {(values > 0).sum():,} of {np.isfinite(values).sum():,} gain, "
        f"{f'{HARM} ' if clients.harmed[method].any() else ''}{clients.harmed[method].sum():,} harmed"
        for method, values in clients.gains.items()
    }
    gains = {method: values * view.scale for method, values in clients.gains.items()}
    title = "How many clients gain how much against training alone, one row per method"
    wide, narrow = (
        draw_bins(gains, clients.harmed, heads, view.looks, title, f"gain in {view.numbers.points}", width=width)
        for width in (WIDTH, NARROW)
    )
    words = (
        f"How many clients gain how much over training alone. Hatching marks harmed clients: worse than alone by more "
        f"than one standard error. The line is the median. {clients.words}"
    )
    return [Figure(words, Widths(wide, narrow))] if wide else []


def collect_spread(view: View) -> list[Part]:
    """Draw the scores of all clients, one row per method."""
    numbers = view.numbers
    scores = {method: of_method for method, of_method in view.clients.scores.items() if np.isfinite(of_method).any()}
    if not scores:
        return []
    best, worst = (np.nanmax, np.nanmin) if numbers.higher_is_better else (np.nanmin, np.nanmax)
    medians = {method: f"{method}: median {numbers.score(float(np.nanmedian(of)))}" for method, of in scores.items()}
    ends = {
        method: f"{median}, worst {numbers.score(float(worst(of)))}, best {numbers.score(float(best(of)))}"
        for (method, median), of in zip(medians.items(), scores.values(), strict=True)
    }
    shown, across = {method: view.scale * of for method, of in scores.items()}, f"test {numbers.name}{numbers.unit}"
    widths = ((WIDTH, ends), (NARROW, medians))
    if view.comparison.scored > MANY_CLIENTS:
        title = f"Test {numbers.name} of clients, one row per method"
        wide, narrow = (draw_bins(shown, {}, heads, view.looks, title, across, width=width) for width, heads in widths)
        words = f"How many clients have which score; the line is the median. {view.clients.words}"
        return [Figure(words, Widths(wide, narrow))]
    notes = {
        method: [f"client {name}, {method}: {numbers.score(one)}" for name, one in zip(view.names, of, strict=True)]
        for method, of in scores.items()
    }
    title = f"Test {numbers.name} of each client, one row per method"
    wide, narrow = (
        figures.draw_strips(shown, heads, notes, view.looks, title, across, width=width, ids=view.ids)
        for width, heads in widths
    )
    some = ""
    if view.comparison.scored > figures.MOST_MARKS:
        some = f" {figures.MOST_MARKS} of them are drawn, evenly spaced in the order of their scores."
    whole = "the sample" if view.comparison.sampled else view.comparison.everybody
    words = f"Each dot is a client.{some} The box holds the middle half of {whole}, the line is their median."
    return [Figure(f"{words} {view.clients.words}", Widths(wide, narrow))]


def collect_groups(view: View) -> list[Part]:
    """List the mean scores of groups of clients: a mean over all may hide whom a method fails."""
    comparison = view.comparison
    by_method = {method: comparison.groups(method) for method in comparison.outcomes}
    several, sign = len(by_method) > 1, comparison.example.sign
    empty = [""] * (len(by_method) + 1)
    rows = []
    for kind, groups in next(iter(by_method.values())).items():
        if len(groups) < 2:
            continue
        rows.append(Row(GROUPS[kind], empty, "rows"))
        for name, group in [*groups.items()][:MOST_GROUPS]:
            scores = [of_method[kind][name].mean for of_method in by_method.values()]
            top = max(sign * score for score in scores)
            cells = [
                Cell(view.numbers.score(score), "top" if several and sign * score == top else None, place)
                for place, score in enumerate(scores)
            ]
            rows.append(Row(name, [f"{group.clients:,}", *cells]))
        if len(groups) > MOST_GROUPS:
            rows.append(Row(f"{len(groups) - MOST_GROUPS} more in results.json", empty))
    if not rows:
        return []
    heads = [Cell(method, method=place) for place, method in enumerate(by_method)]
    note = (
        f"Means over the clients of each group{' that were scored' if comparison.sampled else ''}. Size, entropy and "
        "divergence are those of the training data, in thirds of the clients. The best mean of each row is bold."
    )
    return [Table(["Group", "Clients", *heads], rows, note)]


def collect_clients(view: View) -> list[Part]:
    """List the clients with their scores; of many, percentiles and the first ones; of very many, percentiles only."""
    clients, scored = view.clients, view.comparison.scored
    if scored > MANY_CLIENTS:
        return [_list_percentiles(view)]
    rows = []
    for place, samples in enumerate(clients.samples[:MOST_CLIENTS].tolist()):
        cells: list[str | Cell] = [f"{samples:,}"]
        for column, (method, scores) in enumerate(clients.scores.items()):
            text = view.numbers.score(scores[place])
            harmed = method in clients.harmed and bool(clients.harmed[method][place])
            cells.append(Cell(f"{HARM} {text}" if harmed else text, "harm" if harmed else None, column))
        rows.append(Row(view.names[place], cells, client=view.ids[place]))
    heads = [Cell(method, method=place) for place, method in enumerate(view.comparison.outcomes)]
    marks = f" {HARM} harmed: worse than alone by more than one standard error." if clients.gains else ""
    some = f" The first {MOST_CLIENTS}; clients.csv has all." if scored > MOST_CLIENTS else ""
    table = Table(["Client", "Test samples", *heads], rows, f"{clients.words}{marks}{some}")
    listed = Details(f"{len(rows)} clients", table, open=len(rows) <= MOST_UNFOLDED)
    return [_list_percentiles(view), listed] if scored > MOST_CLIENTS else [listed]


def _list_percentiles(view: View) -> Table:
    """List percentiles of scores and of gains over clients, methods side by side."""
    clients, numbers = view.clients, view.numbers
    methods = [*view.comparison.outcomes]
    scores = [fairness.percentiles(clients.scores[method]) for method in methods]
    gains = [fairness.percentiles(clients.gains[method]) if method in clients.gains else None for method in methods]
    empty = [""] * len(methods)
    rows = [Row(f"{numbers.name}{numbers.unit}", empty, "rows")]
    for place, percentile in enumerate(fairness.PERCENTILES):
        cells = [Cell(numbers.score(of[place]), method=column) for column, of in enumerate(scores)]
        rows.append(Row(f"{percentile} %", cells))
    if clients.gains:
        rows.append(Row(f"gain over Local, {numbers.points}", empty, "rows"))
        for place, percentile in enumerate(fairness.PERCENTILES):
            texts = [UNKNOWN if of is None else numbers.gain(of[place]) for of in gains]
            rows.append(Row(f"{percentile} %", [Cell(text, method=column) for column, text in enumerate(texts)]))
    heads = [Cell(method, method=column) for column, method in enumerate(methods)]
    note = (
        f"Percentiles over {view.comparison.who}: so many have at most this value. Each column has its own order. "
        f"{clients.words}"
    )
    return Table(["Percentile", *heads], rows, note)
