"""A picture of a partition as SVG: who has how many samples of what. Ink takes the colour of the page's text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from atoll.report.figures import COLOURS, WIDTH, ticks_between
from atoll.report.table import UNKNOWN, plain_table

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


def picture(statistics: Statistics) -> str:
    """Clients side by side: sizes, what they hold, how much they diverge. With very many clients, how these spread."""
    return _histograms(statistics) if _is_spread(statistics) else _side_by_side(statistics)


def caption(statistics: Statistics) -> str:
    """What the picture shows, to stand below it."""
    if _is_spread(statistics):
        return "How many clients have a value in each interval."
    words = ["Each column is a client; its number of samples stands above."]
    if statistics.counts is not None:
        words.append("The larger a disc or the stronger a cell, the more samples it has of the class.")
    else:
        words.append("The dot is the mean of its targets, the line one standard deviation to both sides.")
    if statistics.divergence is not None:
        words.append("Below: the Jensen-Shannon divergence of its labels from those of all clients, 0 to 1 bit.")
    if statistics.groups is not None:
        words.append("Colours mark the planted groups.")
    return " ".join(words)


def save_picture(statistics: Statistics, path: str | Path) -> None:
    """The picture as a file of its own, for light and dark pages."""
    drawn = picture(statistics).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = drawn.partition(">")
    Path(path).write_text(f"{head}><style>{STYLE}</style>{rest}\n", encoding="utf-8")


def _is_spread(statistics: Statistics) -> bool:
    return statistics.clients > MOST_CLIENTS or (statistics.counts is None and statistics.target_mean is None)


# -- client by client --------------------------------------------------------------------------------------------------


def _side_by_side(statistics: Statistics) -> str:
    clients = statistics.clients
    step = (WIDTH - LEFT - RIGHT) / clients
    parts, top = [_panel_name("samples", TOP, PANEL)], TOP
    parts.append(_bars(statistics.samples, top, PANEL, step))
    top += PANEL + GAP
    if statistics.counts is not None:
        counts, row = _rows_of(statistics.counts)
        parts.append(_matrix(counts, statistics.counts.shape[1], top, row, step))
        top += row * counts.shape[1] + GAP
    else:
        parts.append(_targets(statistics, top, 4 * PANEL, step))
        top += 4 * PANEL + GAP
    if statistics.divergence is not None:
        parts += [_panel_name("divergence", top, PANEL), _bars(statistics.divergence, top, PANEL, step, most=1.0)]
        top += PANEL + 4
    if statistics.groups is not None:
        parts.append(_groups(statistics.groups, top, step))
        top += 12
    every = _every(clients, max(1, int((WIDTH - LEFT - RIGHT) / 34)))
    parts += [
        _text(LEFT + step * (client + 0.5), top + 14, str(client), "middle") for client in range(0, clients, every)
    ]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, top + 34, "client", "middle", strong=True))
    # an invisible column over each client says in words what is drawn
    parts += [
        f'<rect x="{LEFT + step * client:.1f}" y="{TOP}" width="{step:.2f}" height="{top - TOP:.0f}" '
        f'fill="transparent"><title>{escape(_note(statistics, client))}</title></rect>'
        for client in range(clients)
    ]
    return _svg(top + 42, parts, f"Who has what: {statistics.sentence}")


def _rows_of(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Counts by rows that are drawn, at most `MOST_CLASSES`, and the height of one."""
    classes = counts.shape[1]
    together = math.ceil(classes / MOST_CLASSES)
    rows = np.add.reduceat(counts, np.arange(0, classes, together), axis=1)
    return rows, min(24.0, max(3.0, 300 / rows.shape[1]))


def _matrix(counts: NDArray[np.int64], classes: int, top: float, row: float, step: float) -> str:
    """Discs whose area is the count where there is room for them, else shaded cells."""
    clients, rows = counts.shape
    share = counts / max(counts.max(), 1)
    middle_x, middle_y = LEFT + step * (np.arange(clients) + 0.5), top + row * (np.arange(rows) + 0.5)
    if min(step, row) >= 8:
        largest = 0.48 * min(step, row)
        drawn = "".join(
            f'<circle cx="{middle_x[client]:.1f}" cy="{middle_y[label]:.1f}" '
            f'r="{max(largest * math.sqrt(share[client, label]), 0.8):.1f}"/>'
            for client, label in np.argwhere(counts > 0)
        )
        lines = "".join(_rule(LEFT, y, WIDTH - RIGHT, y) for y in middle_y)
        marks = f'{lines}<g style="fill:{INK}" fill-opacity="0.9">{drawn}</g>'
    else:
        levels = np.where(counts > 0, np.maximum(np.ceil(np.sqrt(share) * LEVELS), 1), 0).astype(int)
        marks = "".join(
            f'<path style="fill:{INK}" fill-opacity="{level / LEVELS:.2f}" '
            f'd="{_cells(levels == level, top, row, step)}"/>'
            for level in range(1, LEVELS + 1)
            if np.any(levels == level)
        )
    together = math.ceil(classes / MOST_CLASSES)
    every = _every(rows, max(1, int(row * rows / 16)))
    names = [_text(LEFT - 8, middle_y[label] + 4, str(label * together), "end") for label in range(0, rows, every)]
    title = _text(14, top + row * rows / 2, "class", "middle", strong=True, turned=True)
    frame = f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{row * rows:.1f}" {_FRAME}/>'
    return frame + marks + "".join(names) + title


def _cells(chosen: NDArray[np.bool_], top: float, row: float, step: float) -> str:
    """One path for all cells of a shade: a page of many thousand elements is slow."""
    width, height = f"{step + 0.05:.2f}", f"{row + 0.05:.2f}"
    return "".join(
        f"M{LEFT + step * client:.1f} {top + row * label:.1f}h{width}v{height}h-{width}z"
        for client, label in np.argwhere(chosen)
    )


def _bars(values: NDArray[Any], top: float, height: float, step: float, most: float | None = None) -> str:
    """A bar for each client, from the foot of the panel up."""
    highest = float(np.nanmax(values)) if most is None else most
    foot, gap = top + height, min(2.0, step * 0.2)
    bars = "".join(
        f"M{LEFT + step * client + gap / 2:.1f} {foot:.1f}v-{height * value / (highest or 1):.1f}"
        f"h{step - gap:.2f}V{foot:.1f}z"
        for client, value in enumerate(np.nan_to_num(values))
    )
    label = f"{highest:,g}" if most is not None else f"{int(highest):,}"
    ends = _text(LEFT - 8, top + 9, label, "end") + _text(LEFT - 8, foot, "0", "end")
    lines = _rule(LEFT, top, WIDTH - RIGHT, top) + _rule(LEFT, foot, WIDTH - RIGHT, foot)
    return f'{lines}<path style="fill:{INK}" fill-opacity="0.6" d="{bars}"/>{ends}'


def _targets(statistics: Statistics, top: float, height: float, step: float) -> str:
    """The mean target of each client, and one standard deviation to both sides."""
    means, spread = np.asarray(statistics.target_mean), np.asarray(statistics.target_std)
    ticks = _ticks(np.nanmin(means - spread), np.nanmax(means + spread))
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
        parts.append(f'<path style="stroke:{INK}" stroke-width="1.5" d="M{x:.1f} {low:.1f}V{high:.1f}"/>')
        radius = min(4.0, max(1.2, step / 3))
        parts.append(f'<circle style="fill:{INK}" cx="{x:.1f}" cy="{down(means[client]):.1f}" r="{radius:.1f}"/>')
    title = _text(14, top + height / 2, "target, mean ± std", "middle", strong=True, turned=True)
    return "".join(parts) + title


def _groups(groups: NDArray[np.int64], top: float, step: float) -> str:
    """A coloured mark under each client, with the number of its group where there is room."""
    marks = []
    for client, group in enumerate(groups.tolist()):
        x = LEFT + step * client
        colour = COLOURS[group % len(COLOURS)]
        marks.append(f'<rect x="{x:.1f}" y="{top}" width="{step * 0.92:.2f}" height="12" fill="{colour}"/>')
        if step >= 11:
            style = 'style="fill:#fff;font-size:10px"'
            marks.append(f'<text x="{x + step * 0.46:.1f}" y="{top + 9.5}" text-anchor="middle" {style}>{group}</text>')
    return "".join(marks) + _text(LEFT - 8, top + 10, "group", "end")


def _note(statistics: Statistics, client: int) -> str:
    """What is drawn of a client, in words."""
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


def _histograms(statistics: Statistics) -> str:
    """How sizes, divergences and the like are spread over clients, one histogram below the other."""
    panels = {
        "samples of a client": statistics.samples,
        "divergence of its labels, bits": statistics.divergence,
        "its mean target": statistics.target_mean,
        "distance of its mean sample, standard deviations": statistics.feature_distance,
    }
    parts, top, height = [], float(TOP), 110
    for name, values in panels.items():
        if values is not None:
            parts.append(_histogram(values[np.isfinite(values)], name, top, height))
            top += height + 58
    return _svg(top, parts, f"How the data of clients spread: {statistics.sentence}")


def _histogram(values: NDArray[Any], name: str, top: float, height: float) -> str:
    ticks = _ticks(values.min(), values.max())
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
    parts = [_rule(LEFT, foot, WIDTH - RIGHT, foot), f'<path style="fill:{INK}" fill-opacity="0.7" d="{bars}"/>']
    parts += [_text(LEFT - 8, top + 9, f"{counts.max():,}", "end"), _text(LEFT - 8, foot, "0", "end")]
    inside = [tick for tick in ticks if edges[0] <= tick <= edges[-1]]
    parts += [_text(LEFT + scale * (tick - edges[0]), foot + 16, f"{tick:,g}", "middle") for tick in inside]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, foot + 36, name, "middle", strong=True))
    parts.append(_text(14, top + height / 2, "clients", "middle", strong=True, turned=True))
    return "".join(parts)


# -- the parts of a picture --------------------------------------------------------------------------------------------

_FRAME = 'fill="none" stroke="currentColor" stroke-opacity="0.15"'


def _svg(height: float, parts: Iterable[str], title: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" class="partition">'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"


def _text(x: float, y: float, text: str, anchor: str, *, strong: bool = False, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    shade = 'style="fill:currentColor"' if strong else 'style="fill:currentColor;fill-opacity:0.65"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {shade}{turn}>{escape(text)}</text>'


def _panel_name(name: str, top: float, height: float) -> str:
    return _text(14, top + height / 2, name, "middle", strong=True, turned=True)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" {_FRAME}/>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around these, also where both are the same."""
    room = 0 if high > low else abs(float(low)) or 1.0
    return ticks_between(float(low) - room, float(high) + room)


def _every(number: int, most: int) -> int:
    """The smallest of 1, 2, 5, 10, ... such that counting in it gives at most `most` of `number`."""
    steps: Sequence[int] = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]
    return next(step for step in steps if number / step <= most)


def statistics_table(found: Statistics) -> Table:
    """One row per client, the first `MOST_ROWS` of them, and the mean of all."""
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
