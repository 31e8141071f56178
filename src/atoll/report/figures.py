"""Draw figures as SVG: small, sharp, and readable without colour.

Marks have classes instead of colours, so one style sheet serves light and dark pages. What belongs to a method or to a
client says so in `data-method` and `data-client`, so a page can hide the one and highlight the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from atoll.report.drawing import (
    LETTER,
    NARROW,
    WIDTH,
    Scale,
    Style,
    draw_frame,
    draw_rule,
    find_decades,
    find_ticks,
    fit_head,
    group_marks,
    make_scale,
    move_apart,
    pick_evenly,
    write_note,
    write_text,
)
from atoll.report.svg import element

if TYPE_CHECKING:
    from atoll.kernel.clusters import Clusters

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#8c510a",
    "#5e3c99",
)  # after Okabe and Ito
DARK_COLOURS = ("#4fb0ec", "#ff8f4d", "#35cf9f", "#eda3cc", "#e6bd4f", "#a5d8f7", "#d9a066", "#b79df2")
GREYS = ("local", "fedavg")  # the references, in the greys of the page
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2")
MOST_MARKS = 200  # clients of one method in one figure
MOST_MIXING = 60  # rows and columns
LEVELS = 12  # shades
LONGEST = 26  # letters of a name in a figure; whoever points at it sees all


class Line(NamedTuple):
    """The points of one method: (x, y, half the width of an interval or None, a note for whoever points at it)."""

    points: Sequence[tuple[float, float, float | None, str]]

    @property
    def bare(self) -> Line:
        """The same line without intervals."""
        return Line([(x, y, None, note) for x, y, _, note in self.points])


def assign_styles(methods: Sequence[str]) -> dict[str, Style]:
    """Give the references greys, and every other method a colour and a dash of its own."""
    greys = {
        name: next((method for method in methods if method.partition(":")[0] == name), None) for name in GREYS
    }  # of several the first
    kinds = {method: Style(0, name, "") for name, method in greys.items() if method is not None}
    others = [method for method in methods if method not in kinds]
    for index, method in enumerate(others):
        kinds[method] = Style(0, f"m{index % len(COLOURS)}", DASHES[index % len(DASHES)])
    return {method: kinds[method]._replace(place=place, marker=place) for place, method in enumerate(methods)}


def write_palette() -> str:
    """Write the colours of methods as a style sheet."""
    light, dark = (
        "".join(f"--m{index}:{colour};" for index, colour in enumerate(colours)) for colours in (COLOURS, DARK_COLOURS)
    )
    kinds = [f"m{index}" for index in range(len(COLOURS))] + [*GREYS]
    uses = "".join(f".{kind}{{--c:var(--{kind})}}" for kind in kinds)
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{uses}"


# -- figures -----------------------------------------------------------------------------------------------------------


def draw_curves(
    lines: Mapping[str, Line], looks: Mapping[str, Style], title: str, across: str, up: str, *, width: int = WIDTH,
    log: bool = False, most: float = math.inf,
) -> Markup:  # fmt: skip
    """Draw a line for each method, with a band where there is an interval; a wide figure has names at their ends."""
    lines = {method: line for method, line in lines.items() if line.points}
    if not lines:
        return Markup("")
    points = [point for line in lines.values() for point in line.points]
    ticks = find_ticks(*_find_range(points, most))
    height, left, top, foot = (340, 44, 30, 300) if width == WIDTH else (270, 40, 30, 230)
    right = width - (28 + LETTER * max(len(_short(method)) for method in lines) if width == WIDTH else 12)
    low, high = min(x for x, *_ in points), max(x for x, *_ in points)
    x = make_scale(low if log else 0, high, left, right, log=log)
    y = make_scale(ticks[0], ticks[-1], foot, top)
    parts = [
        draw_rule(left, y(tick), right, y(tick)) + write_text(left - 8, y(tick) + 4, f"{tick:g}", "end")
        for tick in ticks
    ]
    whole = all(x == int(x) for x, *_ in points)  # there is no round 0.5
    linear = [tick for tick in find_ticks(0, high) if tick <= high and (tick == int(tick) or not whole)]
    marks = find_decades(low, high) if log else linear
    parts += [write_text(x(tick), foot + 18, f"{tick:g}", "middle") for tick in marks]
    parts.append(
        write_text((left + right) / 2, height - 4, across, "middle", "axis") + write_text(0, 14, up, kind="axis")
    )
    clip = f"plot-{''.join(filter(str.isalpha, across))}-{width}"
    area = element("rect", x=left, y=top, width=right - left, height=foot - top)
    parts.append(element("clipPath", area, id=clip))
    ends = {method: y(line.points[-1][1]) for method, line in lines.items()}
    places = move_apart(ends, 16)
    for method, line in lines.items():
        parts.append(_draw_curve(line, looks[method], x, y, clip))
        if width == WIDTH:
            tail = f"M{x(line.points[-1][0]):.1f} {ends[method]:.1f}L{right + 12} {places[method]:.1f}"
            name = write_text(right + 16, places[method] + 4, _short(method), kind="axis")
            parts.append(group_marks(looks[method], element("path", class_="tail", d=tail), name))
    return draw_frame(width, height, parts, title)


def _find_range(points: Sequence[tuple[float, float, float | None, str]], most: float) -> tuple[float, float]:
    """Choose what the axis shows: all lines, and so much of their bands that lines keep half of the height."""
    low, high = min(y for _, y, *_ in points), max(y for _, y, *_ in points)
    room = (high - low) / 2
    lowest = min(y - (half or 0) for _, y, half, _ in points)
    highest = max(y + (half or 0) for _, y, half, _ in points)
    return max(lowest, low - room, min(0.0, low)), min(highest, high + room, max(most, high))


def _draw_curve(line: Line, look: Style, x: Scale, y: Scale, clip: str) -> Markup:
    parts = []
    banded = [(a, b, half) for a, b, half, _ in line.points if half]
    if len(banded) > 1:
        there = "L".join(f"{x(a):.1f} {y(b + half):.1f}" for a, b, half in banded)
        back = "L".join(f"{x(a):.1f} {y(b - half):.1f}" for a, b, half in reversed(banded))
        parts.append(element("path", class_="band", clip_path=f"url(#{clip})", d=f"M{there}L{back}z"))
    path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b, _, _ in line.points)
    parts.append(element("path", class_="line", stroke_dasharray=look.dash, d=f"M{path}"))
    parts += [look.draw_marker(x(a), y(b), 3.2, write_note(note)) for a, b, _, note in line.points]
    return group_marks(look, *parts)


def draw_gains(
    values: NDArray[np.float64], harmed: NDArray[np.bool_], names: Sequence[str], notes: Sequence[str], look: Style,
    ticks: Sequence[float], title: str, ids: Sequence[int] | None = None,
) -> Markup:  # fmt: skip
    """Draw a bar for each client, sorted; those of harmed ones are hatched, in another colour, and point down.

    `ids` are the numbers of the clients, by default 0, 1, ..., here and in other figures.
    """
    known = np.flatnonzero(np.isfinite(values))
    drawn = pick_evenly(known[np.argsort(-values[known], kind="stable")], MOST_MARKS)
    if not len(drawn):
        return Markup("")
    width, left, right, top, foot = NARROW, 40, NARROW - 6, 10, 178
    step = (right - left) / len(drawn)
    y = make_scale(ticks[0], ticks[-1], foot, top)
    parts = [
        draw_rule(left, y(tick), right, y(tick))
        + write_text(left - 6, y(tick) + 4, f"{tick:+g}" if tick else "0", "end")
        for tick in ticks
    ]
    longest = max(len(names[client]) for client in drawn)
    named, turned = step >= 11, longest > 3
    room = 14 if not named or not turned else 8 + 5.8 * min(longest, LONGEST)
    bars = []
    for place, client in enumerate(drawn.tolist()):
        start, end = left + step * place, y(float(values[client]))
        upper, tall = min(y(0), end), max(abs(y(0) - end), 0.8)
        inner = min(2.0, step * 0.15)
        middle = start + step / 2
        marks = [
            write_note(notes[client]),
            element("rect", class_="hit", x=start, y=top, width=f"{step:.2f}", height=foot - top),
            element(
                "rect", class_="bar harmed" if harmed[client] else "bar", x=start + inner, y=upper,
                width=f"{step - 2 * inner:.2f}", height=tall,
            ),
        ]  # fmt: skip
        if harmed[client]:
            marks.append(_triangle(middle, end + 3))
        if named:
            place_of = (middle + 3, foot + 6) if turned else (middle, foot + 12)
            marks.append(
                write_text(
                    *place_of,
                    _short(names[client], LONGEST),
                    "end" if turned else "middle",
                    "small",
                    turn=-90 if turned else 0,
                )
            )
        bars.append(element("g", *marks, data_client=client if ids is None else ids[client]))
    parts.append(group_marks(look, *bars))
    parts.append(element("line", x1=left, y1=y(0), x2=right, y2=y(0), class_="zero"))
    some = f"{len(drawn)} of {len(known)} clients" if len(drawn) < len(known) else f"{len(known)} clients"
    height = foot + room + 20
    parts.append(write_text((left + right) / 2, height - 4, f"{some}, sorted by gain", "middle", "axis"))
    return draw_frame(width, height, parts, title)


def draw_strips(
    values: Mapping[str, NDArray[np.float64]], heads: Mapping[str, str], notes: Mapping[str, Sequence[str]],
    looks: Mapping[str, Style], title: str, across: str, *, width: int = WIDTH, ids: Sequence[int] | None = None,
) -> Markup:  # fmt: skip
    """Draw a row for each method with a dot for each client; a box holds the middle half, its line is the median."""
    known = {method: np.flatnonzero(np.isfinite(of_method)) for method, of_method in values.items()}
    every = np.concatenate([of_method[known[method]] for method, of_method in values.items()])
    if not len(every):
        return Markup("")
    ticks = find_ticks(every.min(), every.max())
    row, left, right, top = 70, 14, width - 14, 6
    foot = top + row * len(values) + 4
    x = make_scale(ticks[0], ticks[-1], left, right)
    parts = [
        element("line", x1=x(tick), y1=top, x2=x(tick), y2=foot, class_="rule")
        + write_text(x(tick), foot + 16, f"{tick:g}", "middle")
        for tick in ticks
    ]
    for index, (method, of_method) in enumerate(values.items()):
        upper = top + row * index
        first, middle, third = np.percentile(of_method[known[method]], (25, 50, 75)) if len(known[method]) else [0] * 3
        drawn = pick_evenly(known[method][np.argsort(of_method[known[method]], kind="stable")], MOST_MARKS)
        box = element(
            "rect", class_="box", x=x(first), y=upper + 24, width=float(max(x(third) - x(first), 1)), height=40, rx=3
        )
        median = element("path", class_="median", d=f"M{x(middle):.1f} {upper + 22}v44")
        dots = [
            element(
                "circle", write_note(notes[method][client]), class_="client",
                data_client=client if ids is None else ids[client], cx=x(of_method[client]),
                # the golden ratio spreads neighbours evenly: the same client is always at the same height
                cy=upper + 28 + 32 * (client * 0.618034 % 1), r=3.4,
            )
            for client in drawn.tolist()
        ]  # fmt: skip
        head = element("text", fit_head(heads[method], width), x=left, y=upper + 16, class_="axis plate")
        parts.append(group_marks(looks[method], box, median, *dots, head))
    parts.append(write_text((left + right) / 2, foot + 36, across, "middle", "axis"))
    return draw_frame(width, foot + 42, parts, title)


def draw_heatmap(
    matrix: NDArray[np.float64],
    names: Sequence[str],
    notes: Sequence[str],
    title: str,
    columns: Sequence[str] | None = None,
    ids: Sequence[int] | None = None,
) -> Markup:
    """Shade a matrix: a row for each client, a column for each client or for each of `columns`."""
    shown = min(len(matrix), MOST_MIXING)
    across = shown if columns is None else len(columns)
    part = np.nan_to_num(matrix[:shown, :across]).clip(min=0)
    called = names[:shown] if columns is None else columns
    # Names take the room that they need: rows to the left, long ones of columns upright above.
    left = max(84.0, 16 + LETTER * min(max(map(len, names[:shown])), LONGEST))
    turned = columns is None and max(map(len, called)) > 4
    top = 16 + LETTER * min(max(map(len, called)), LONGEST) if turned else 30.0
    room = WIDTH - left - 20
    high = min(24.0, room / shown)
    wide = high if columns is None else min(110.0, room / across)
    levels = np.ceil(part / (part.max() or 1) * LEVELS).astype(int)
    parts = []
    for level in range(1, LEVELS + 1):
        cells = "".join(
            f"M{left + wide * k:.1f} {top + high * i:.1f}h{wide:.2f}v{high:.2f}h-{wide:.2f}z"
            for i, k in np.argwhere(levels == level)
        )
        if cells:
            parts.append(element("path", class_="shade", fill_opacity=f"{level / LEVELS:.2f}", d=cells))
    parts.append(element("rect", class_="frame", x=left, y=top, width=wide * across, height=high * shown))
    every = max(1, math.ceil(15 / high))
    heads = range(0, shown, every if turned else 2 * every) if columns is None else range(across)
    most = LONGEST if columns is None else max(4, int(wide / 7))
    parts += [
        write_text(left - 8, top + high * (i + 0.5) + 4, _short(names[i], LONGEST), "end")
        for i in range(0, shown, every)
    ]
    parts += [
        write_text(left + wide * (k + 0.5) + 4, top - 8, _short(called[k], most), turn=-90)
        if turned
        else write_text(left + wide * (k + 0.5), top - 8, _short(called[k], most), "middle")
        for k in heads
    ]
    parts += [
        element(
            "rect", write_note(notes[client]), class_="hit", data_client=client if ids is None else ids[client], x=left,
            y=top + high * client, width=wide * across, height=f"{high:.2f}",
        )
        for client in range(shown)
    ]  # fmt: skip
    return draw_frame(WIDTH, top + high * shown + 8, parts, title)


def draw_clusters(
    found: Clusters, planted: NDArray[np.int64] | None, order: NDArray[np.int64], names: Sequence[str],
    notes: Sequence[str], title: str, *, width: int = WIDTH,
) -> Markup:  # fmt: skip
    """Draw a column for each client: the tree if there is one, its cluster, and its planted group if it is known."""
    drawn = pick_evenly(order, MOST_MARKS)
    left, top, foot = 58, 24, 10
    step = min(40.0, (width - left - 6) / len(drawn))
    middle = {int(client): left + step * (place + 0.5) for place, client in enumerate(drawn)}
    parts = []
    if found.merges is not None and len(found.merges):
        foot = 210 if width == WIDTH else 160
        parts += [
            write_text(0, 12, found.height, kind="axis"),
            *_draw_tree(found, middle, left, step * len(drawn), top, foot),
        ]
    short = {client: names[client].removeprefix("client ") for client in middle}
    if step >= 13 and all(len(name) <= 3 for name in short.values()):
        parts += [write_text(at, foot + 13, short[client], "middle", "small") for client, at in middle.items()]
    foot += 19
    rows = {"cluster": ("cluster", found.of_client)} | ({} if planted is None else {"planted": ("group", planted)})
    for row, (kind, of_client) in rows.items():
        parts.append(write_text(left - 8, foot + 16, row, "end"))
        parts += _draw_runs(kind, of_client[drawn].tolist(), left, foot, step)
        foot += 30
    parts += [
        element(
            "rect", write_note(notes[client]), class_="hit", data_client=client, x=at - step / 2, y=top,
            width=f"{step:.2f}", height=foot - top,
        )
        for client, at in middle.items()
    ]  # fmt: skip
    return draw_frame(width, foot, parts, title)


def _draw_tree(
    found: Clusters, middle: Mapping[int, float], left: float, wide: float, top: float, foot: float
) -> list[Markup]:
    """Draw the merges of these clients, in the colour of a cluster where all of them are in it."""
    assert found.merges is not None
    clients, highest = len(found.of_client), float(found.merges[:, 2].max()) or 1.0
    y = make_scale(0, highest, foot, top + 6)
    whole = bool((found.merges[:, 2] % 1 == 0).all())  # counts
    ticks = [tick for tick in find_ticks(0, highest, 4) if tick <= highest and (tick == int(tick) or not whole)]
    parts = [
        draw_rule(left, y(tick), left + wide, y(tick)) + write_text(left - 8, y(tick) + 4, f"{tick:g}", "end")
        for tick in ticks
    ]
    nodes = {client: (at, 0.0, int(found.of_client[client])) for client, at in middle.items()}
    paths: dict[int, list[str]] = {}
    for row, (one, other, height, _) in enumerate(found.merges.tolist()):
        below = [nodes[node] for node in (int(one), int(other)) if node in nodes]
        if len(below) == 2:
            (a, low, mine), (b, down, theirs) = below
            cluster = mine if mine == theirs else -1
            paths.setdefault(cluster, []).append(f"M{a:.1f} {y(low):.1f}V{y(height):.1f}H{b:.1f}V{y(down):.1f}")
            nodes[clients + row] = ((a + b) / 2, height, cluster)
        elif below:
            nodes[clients + row] = below[0]
    return parts + [element("path", class_=f"branch {_colour(of)}", d="".join(paths[of])) for of in sorted(paths)]


def _draw_runs(kind: str, numbers: Sequence[int], left: float, top: float, step: float) -> list[Markup]:
    """Draw a box for each run of equal numbers, with the word and the number in it where they fit."""
    parts, start = [], float(left)
    ranks = {number: rank for rank, number in enumerate(sorted({*numbers}))}
    for number, members in groupby(numbers):
        wide = step * len([*members])
        texts = (f"{kind} {number}", f"{number}") if number >= 0 else ("none", "–")
        fits = [text for text in texts if 8 + 6.6 * len(text) <= wide]
        look = _colour(number) if kind == "cluster" else f"g{ranks[number] % 2}"
        width = float(max(wide - 2, 1))
        parts.append(element("rect", class_=f"{kind} {look}", x=start + 1, y=top, width=width, height=24, rx=3))
        if fits:
            parts.append(write_text(start + wide / 2, top + 16.5, fits[0], "middle", "axis"))
        start += wide
    return parts


def _colour(cluster: int) -> str:
    return f"m{cluster % len(COLOURS)}" if cluster >= 0 else "none"


def _triangle(x: float, y: float) -> Markup:
    return element("path", class_="mark", d=f"M{x - 3.6:.1f} {y:.1f}h7.2l-3.6 6z")


def _short(name: str, most: int = 17) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
