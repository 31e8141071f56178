"""Draw a partition as SVG: who has how many samples of what. Ink takes the colour of the page's text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from atoll.federation.numbers import UNKNOWN
from atoll.report.drawing import LETTER, WIDTH, find_ticks
from atoll.report.figures import COLOURS, LONGEST
from atoll.report.svg import element, join
from atoll.report.table import plain_table

if TYPE_CHECKING:
    from atoll.data.statistics import Statistics

MOST_CLIENTS = 200  # that are drawn one by one
MOST_ROWS = 30  # of the table
MOST_CLASSES = 100  # rows; beyond, neighbouring classes share one
LEVELS = 12  # shades
LEFT, RIGHT, TOP, GAP = 76, 24, 14, 16
PANEL = 64  # height of the bars

INK = "var(--reef, #0b6e78)"
STYLE = """
svg { font: 12.5px system-ui, sans-serif; color: #1d2428; background: #fff; --reef: #0b6e78; }
@media (prefers-color-scheme: dark) { svg { color: #e4eaec; background: #14191c; --reef: #4fb6c0; } }
"""


def draw_partition(statistics: Statistics, *, classes: Sequence[str] = (), style: str = "") -> Markup:
    """Draw clients side by side: sizes, labels, divergence; with very many clients, histograms of these.

    `classes` are the names of the classes; their numbers by default.
    """
    return _draw_histograms(statistics, style) if _has_many(statistics) else _draw_clients(statistics, classes, style)


def describe_picture(statistics: Statistics) -> str:
    """Say what the picture shows, to stand beside it."""
    if _has_many(statistics):
        return "The number of clients in each interval."
    words = ["Each column is a client, with its number of samples on top."]
    if statistics.counts is not None:
        words.append("A larger disc or a stronger shade means more samples of the class.")
    else:
        words.append("The dot is the mean of its targets, the line one standard deviation to each side.")
    if statistics.divergence is not None:
        words.append("Below: the Jensen-Shannon divergence of its labels from those of all clients, 0 to 1 bit.")
    if statistics.groups is not None:
        words.append("Colours mark the planted groups.")
    return " ".join(words)


def save_picture(statistics: Statistics, path: str | Path) -> None:
    """Write the picture as a file of its own, for light and dark pages."""
    Path(path).write_text(f"{draw_partition(statistics, style=STYLE)}\n", encoding="utf-8")


def _has_many(statistics: Statistics) -> bool:
    """Say whether clients are too many to be drawn one by one, or have nothing that could be drawn."""
    return statistics.clients > MOST_CLIENTS or (statistics.counts is None and statistics.target_mean is None)


# -- client by client --------------------------------------------------------------------------------------------------


def _draw_clients(statistics: Statistics, classes: Sequence[str], style: str) -> Markup:
    clients = statistics.clients
    step = (WIDTH - LEFT - RIGHT) / clients
    parts, top = [_panel_name("samples", TOP, PANEL)], TOP
    parts.append(_draw_bars(statistics.samples, top, PANEL, step))
    top += PANEL + GAP
    if statistics.counts is not None:
        counts, row = _merge_classes(statistics.counts)
        parts.append(_draw_matrix(counts, statistics.counts.shape[1], top, row, step, classes))
        top += row * counts.shape[1] + GAP
    else:
        parts.append(_draw_targets(statistics, top, 4 * PANEL, step))
        top += 4 * PANEL + GAP
    if statistics.divergence is not None:
        parts += [_panel_name("divergence", top, PANEL), _draw_bars(statistics.divergence, top, PANEL, step, most=1.0)]
        top += PANEL + 4
    if statistics.groups is not None:
        parts.append(_draw_groups(statistics.groups, top, step))
        top += 12
    # Names have the room that they need: short ones side by side, long ones upright.
    names = [_short(statistics.name(client)) for client in range(clients)]
    longest = max(map(len, names))
    turned = longest > 4
    every = _choose_step(clients, max(1, int((WIDTH - LEFT - RIGHT) / (14 if turned else 34))))
    labelled = range(0, clients, every)
    middle = [LEFT + step * (client + 0.5) for client in range(clients)]
    if turned:
        parts += [_text(middle[client] + 4, top + 8, names[client], "end", turned=True) for client in labelled]
    else:
        parts += [_text(middle[client], top + 14, names[client], "middle") for client in labelled]
    below = 12 + LETTER * longest if turned else 18.0
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, top + below + 16, "client", "middle", strong=True))
    # an invisible column over each client says in words what is drawn
    parts += [
        element(
            "rect", element("title", _describe_client(statistics, client)), x=LEFT + step * client, y=TOP,
            width=f"{step:.2f}", height=f"{top - TOP:.0f}", fill="transparent",
        )
        for client in range(clients)
    ]  # fmt: skip
    widest = max((len(_short(name)) for name in classes), default=0)
    return _svg(
        top + below + 24,
        parts,
        f"Who has what: {statistics.sentence}",
        style,
        beside=max(0.0, LETTER * widest - LEFT + 36),
    )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _merge_classes(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Add up neighbouring classes until at most `MOST_CLASSES` rows are left; return them and the height of one."""
    classes = counts.shape[1]
    together = math.ceil(classes / MOST_CLASSES)
    rows = np.add.reduceat(counts, np.arange(0, classes, together), axis=1)
    return rows, min(24.0, max(3.0, 300 / rows.shape[1]))


def _draw_matrix(
    counts: NDArray[np.int64], classes: int, top: float, row: float, step: float, names: Sequence[str]
) -> Markup:
    """Draw discs whose area is the count where there is room for them, else shaded cells."""
    clients, rows = counts.shape
    share = counts / max(counts.max(), 1)
    middle_x, middle_y = LEFT + step * (np.arange(clients) + 0.5), top + row * (np.arange(rows) + 0.5)
    parts = [element("rect", x=LEFT, y=top, width=WIDTH - LEFT - RIGHT, height=row * rows, **_FRAME)]
    if min(step, row) >= 8:
        largest = 0.48 * min(step, row)
        discs = [
            element(
                "circle", cx=middle_x[client], cy=middle_y[label],
                r=max(largest * math.sqrt(share[client, label]), 0.8),
            )
            for client, label in np.argwhere(counts > 0)
        ]  # fmt: skip
        parts += [_rule(LEFT, y, WIDTH - RIGHT, y) for y in middle_y]
        parts.append(element("g", *discs, style=f"fill:{INK}", fill_opacity=0.9))
    else:
        levels = np.where(counts > 0, np.maximum(np.ceil(np.sqrt(share) * LEVELS), 1), 0).astype(int)
        parts += [
            element(
                "path", style=f"fill:{INK}", fill_opacity=f"{level / LEVELS:.2f}",
                d=_trace_cells(levels == level, top, row, step),
            )
            for level in range(1, LEVELS + 1)
            if np.any(levels == level)
        ]  # fmt: skip
    together = math.ceil(classes / MOST_CLASSES)
    every = _choose_step(rows, max(1, int(row * rows / 16)))
    named = [_short(names[label]) if len(names) == classes else str(label) for label in range(0, classes, together)]
    parts += [_text(LEFT - 8, middle_y[label] + 4, named[label], "end") for label in range(0, rows, every)]
    aside = max(0.0, LETTER * max(map(len, named)) - LEFT + 36) if len(names) == classes else 0.0
    parts.append(_text(14 - aside, top + row * rows / 2, "class", "middle", strong=True, turned=True))
    return join(*parts)


def _trace_cells(chosen: NDArray[np.bool_], top: float, row: float, step: float) -> str:
    """Write one path for all cells of a shade: a page of many thousand elements is slow."""
    width, height = f"{step + 0.05:.2f}", f"{row + 0.05:.2f}"
    return "".join(
        f"M{LEFT + step * client:.1f} {top + row * label:.1f}h{width}v{height}h-{width}z"
        for client, label in np.argwhere(chosen)
    )


def _draw_bars(values: NDArray[Any], top: float, height: float, step: float, most: float | None = None) -> Markup:
    """Draw a bar for each client, from the foot of the panel up."""
    highest = float(np.nanmax(values)) if most is None else most
    foot, gap = top + height, min(2.0, step * 0.2)
    bars = "".join(
        f"M{LEFT + step * client + gap / 2:.1f} {foot:.1f}v-{height * value / (highest or 1):.1f}"
        f"h{step - gap:.2f}V{foot:.1f}z"
        for client, value in enumerate(np.nan_to_num(values))
    )
    label = f"{highest:,g}" if most is not None else f"{int(highest):,}"
    return join(
        _rule(LEFT, top, WIDTH - RIGHT, top),
        _rule(LEFT, foot, WIDTH - RIGHT, foot),
        element("path", style=f"fill:{INK}", fill_opacity=0.6, d=bars),
        _text(LEFT - 8, top + 9, label, "end"),
        _text(LEFT - 8, foot, "0", "end"),
    )


def _draw_targets(statistics: Statistics, top: float, height: float, step: float) -> Markup:
    """Draw the mean target of each client, and one standard deviation to both sides."""
    means, spread = np.asarray(statistics.target_mean), np.asarray(statistics.target_std)
    ticks = _find_ticks(np.nanmin(means - spread), np.nanmax(means + spread))
    scale = height / (ticks[-1] - ticks[0])

    def down(value: float) -> float:
        return top + height - (value - ticks[0]) * scale

    parts = [
        _rule(LEFT, down(tick), WIDTH - RIGHT, down(tick)) + _text(LEFT - 8, down(tick) + 4, f"{tick:g}", "end")
        for tick in ticks
    ]
    for client in np.flatnonzero(np.isfinite(means)):
        x = LEFT + step * (client + 0.5)
        low, high = down(means[client] - spread[client]), down(means[client] + spread[client])
        line = f"M{x:.1f} {low:.1f}V{high:.1f}"
        parts.append(element("path", style=f"stroke:{INK}", stroke_width=1.5, d=line))
        radius = min(4.0, max(1.2, step / 3))
        parts.append(element("circle", style=f"fill:{INK}", cx=float(x), cy=float(down(means[client])), r=radius))
    parts.append(_text(14, top + height / 2, "target, mean ± std", "middle", strong=True, turned=True))
    return join(*parts)


def _draw_groups(groups: NDArray[np.int64], top: float, step: float) -> Markup:
    """Draw a coloured mark under each client, with the number of its group where there is room."""
    marks = []
    for client, group in enumerate(groups.tolist()):
        x = LEFT + step * client
        colour = COLOURS[group % len(COLOURS)]
        marks.append(element("rect", x=x, y=top, width=f"{step * 0.92:.2f}", height=12, fill=colour))
        if step >= 11:
            style = "fill:#fff;font-size:10px"
            marks.append(element("text", group, x=x + step * 0.46, y=top + 9.5, text_anchor="middle", style=style))
    return join(*marks, _text(LEFT - 8, top + 10, "group", "end"))


def _describe_client(statistics: Statistics, client: int) -> str:
    """Say in words what is drawn of a client."""
    words = [f"client {statistics.name(client)}: {statistics.samples[client]:,} samples"]
    if not statistics.samples[client]:
        return words[0]
    if statistics.counts is not None:
        counts = statistics.counts[client]
        first = np.argsort(-counts, kind="stable")[:5]
        most = ", ".join(f"class {label}: {counts[label]:,}" for label in first if counts[label])
        words.append(f"{np.count_nonzero(counts)} of {len(counts)} classes, most of {most}")
    if statistics.divergence is not None:
        words.append(f"divergence {statistics.divergence[client]:.2f} bits")
    if statistics.target_mean is not None and statistics.target_std is not None:
        words.append(f"target {statistics.target_mean[client]:.3g} ± {statistics.target_std[client]:.3g}")
    if statistics.groups is not None:
        words.append(f"group {statistics.groups[client]}")
    return "; ".join(words)


# -- very many clients -------------------------------------------------------------------------------------------------


def _draw_histograms(statistics: Statistics, style: str) -> Markup:
    """Draw how sizes, divergences and the like are spread over clients, one histogram below the other."""
    panels = {
        "samples of a client": statistics.samples,
        "divergence of its labels, bits": statistics.divergence,
        "its mean target": statistics.target_mean,
        "distance of its mean sample, standard deviations": statistics.feature_distance,
    }
    parts, top, height = [], float(TOP), 110
    for name, values in panels.items():
        if values is not None:
            parts.append(_draw_histogram(values[np.isfinite(values)], name, top, height))
            top += height + 58
    return _svg(top, parts, f"How the data of clients spread: {statistics.sentence}", style)


def _draw_histogram(values: NDArray[Any], name: str, top: float, height: float) -> Markup:
    ticks = _find_ticks(values.min(), values.max())
    edges = np.linspace(ticks[0], ticks[-1], 41)
    if values.dtype.kind == "i" and ticks[-1] - ticks[0] < 40:  # one bar per whole number
        edges = np.arange(ticks[0], ticks[-1] + 2) - 0.5
    counts, _ = np.histogram(values, edges)
    scale = (WIDTH - LEFT - RIGHT) / (edges[-1] - edges[0])
    foot, width = top + height, scale * (edges[1] - edges[0])
    bars = "".join(
        f"M{LEFT + scale * (edge - edges[0]) + 0.5:.1f} {foot:.1f}v-{height * count / counts.max():.1f}"
        f"h{width - 1:.2f}V{foot:.1f}z"
        for edge, count in zip(edges[:-1], counts, strict=True)
        if count
    )
    parts = [_rule(LEFT, foot, WIDTH - RIGHT, foot), element("path", style=f"fill:{INK}", fill_opacity=0.7, d=bars)]
    parts += [_text(LEFT - 8, top + 9, f"{counts.max():,}", "end"), _text(LEFT - 8, foot, "0", "end")]
    inside = [tick for tick in ticks if edges[0] <= tick <= edges[-1]]
    parts += [_text(LEFT + scale * (tick - edges[0]), foot + 16, f"{tick:,g}", "middle") for tick in inside]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, foot + 36, name, "middle", strong=True))
    parts.append(_text(14, top + height / 2, "clients", "middle", strong=True, turned=True))
    return join(*parts)


# -- the parts of a picture --------------------------------------------------------------------------------------------

_FRAME = {"fill": "none", "stroke": "currentColor", "stroke-opacity": "0.15"}


def _svg(height: float, parts: Sequence[Markup], title: str, style: str, beside: float = 0.0) -> Markup:
    """Write the picture, wider to the left by `beside`; one with a style sheet of its own is a file of its own."""
    alone = [element("style", style)] if style else []
    space = "http://www.w3.org/2000/svg" if style else None
    size = {"viewBox": f"{-beside:.0f} 0 {WIDTH + beside:.0f} {height:.0f}"}
    head = element("title", title)
    named = {"aria_label": title}
    return element("svg", *alone, head, *parts, xmlns=space, role="img", class_="partition", **named, **size)


def _text(x: float, y: float, text: str, anchor: str, *, strong: bool = False, turned: bool = False) -> Markup:
    turn = f"rotate(-90 {x:.1f} {y:.1f})" if turned else None
    shade = "fill:currentColor" if strong else "fill:currentColor;fill-opacity:0.65"
    return element("text", text, x=float(x), y=float(y), text_anchor=anchor, style=shade, transform=turn)


def _panel_name(name: str, top: float, height: float) -> Markup:
    return _text(14, top + height / 2, name, "middle", strong=True, turned=True)


def _rule(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return element("path", d=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", **_FRAME)


def _find_ticks(low: float, high: float) -> list[float]:
    """List round numbers around these, also where both are the same."""
    room = 0 if high > low else abs(float(low)) or 1.0
    return find_ticks(float(low) - room, float(high) + room)


def _choose_step(number: int, most: int) -> int:
    """Choose the smallest of 1, 2, 5, 10, ... that divides `number` into at most `most` steps."""
    steps: Sequence[int] = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]
    return next(step for step in steps if number / step <= most)


def statistics_table(found: Statistics) -> Table:
    """Make a table: one row per client, for the first `MOST_ROWS` of them, and the mean of all."""
    columns: dict[str, tuple[Any, str]] = {
        "group": (found.groups, "d"),
        "samples": (found.samples, ",d"),
        f"classes\nof {found.classes}": (found.present, "d"),
        "label entropy\nbits": (found.entropy, ".2f"),
        "share of\nthe most": (found.evenness, ".2f"),
        "divergence\nbits": (found.divergence, ".3f"),
        "total\nvariation": (found.variation, ".3f"),
        "target\nmean": (found.target_mean, ".3g"),
        "target\nstd": (found.target_std, ".3g"),
        "target\nshift": (found.target_shift, "+.2f"),
        "feature\ndistance": (found.feature_distance, ".2f"),
    }
    known = {head: (values, form) for head, (values, form) in columns.items() if values is not None}

    def cell(value: float, form: str) -> str:
        return UNKNOWN if math.isnan(value) else format(value, form)

    table = plain_table(["client"])
    for head in known:
        table.add_column(head, justify="right", no_wrap=True)
    for client in range(min(found.clients, MOST_ROWS)):
        table.add_row(Text(found.name(client)), *(cell(values[client], form) for values, form in known.values()))
    if found.clients > MOST_ROWS:
        table.add_row("…", *[""] * len(known))
    table.add_section()
    means = [
        "" if head == "group" else cell(float(np.nanmean(values)), form.replace("d", ".1f"))
        for head, (values, form) in known.items()
    ]
    table.add_row(f"mean of {found.clients:,}", *means)
    return table
