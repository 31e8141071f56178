"""Figures as SVG text, drawn by hand: small, sharp, and readable without colour.

Marks have classes instead of colours, so that one style sheet serves light and dark pages; everything that belongs to a
method or to a client says so in `data-method` and `data-client`, so that a page can hide the one and show the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
WIDTH, NARROW = 760, 360  # for a desk and for a phone
MOST_MARKS = 200  # clients of one method in one figure
MOST_MIXING = 60  # rows and columns
LEVELS = 12  # shades


class Style(NamedTuple):
    """How a method is drawn: its place in the order, the class that gives its colour, its dashes."""

    place: int
    kind: str
    dash: str


class Line(NamedTuple):
    """One method's figures: (x, y, half the width of an interval or None, what to say about it)."""

    points: Sequence[tuple[float, float, float | None, str]]

    @property
    def bare(self) -> Line:
        """Without intervals."""
        return Line([(x, y, None, note) for x, y, _, note in self.points])


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """The references in grey, every other method in a colour and a dash of its own."""
    greys = {
        name: next((method for method in methods if method.partition(":")[0] == name), None) for name in GREYS
    }  # of several the first
    kinds = {method: Style(0, name, "") for name, method in greys.items() if method is not None}
    others = [method for method in methods if method not in kinds]
    for index, method in enumerate(others):
        kinds[method] = Style(0, f"m{index % len(COLOURS)}", DASHES[index % len(DASHES)])
    return {method: kinds[method]._replace(place=place) for place, method in enumerate(methods)}


def palette() -> str:
    """The colours of methods as a style sheet."""
    light, dark = (
        "".join(f"--m{index}:{colour};" for index, colour in enumerate(colours)) for colours in (COLOURS, DARK_COLOURS)
    )
    kinds = [f"m{index}" for index in range(len(COLOURS))] + [*GREYS]
    uses = "".join(f".{kind}{{--c:var(--{kind})}}" for kind in kinds)
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}{uses}"


# -- figures -----------------------------------------------------------------------------------------------------------


def curves(
    lines: Mapping[str, Line], looks: Mapping[str, Style], title: str, across: str, up: str, *, width: int = WIDTH,
    log: bool = False, most: float = math.inf,
) -> str:  # fmt: skip
    """A line for each method, with a band where there is an interval; on a wide figure with its name at its end."""
    lines = {method: line for method, line in lines.items() if line.points}
    if not lines:
        return ""
    points = [point for line in lines.values() for point in line.points]
    ticks = ticks_between(*_range(points, most))
    height, left, top, foot = (340, 44, 30, 300) if width == WIDTH else (270, 40, 30, 230)
    right = width - (140 if width == WIDTH else 12)
    low, high = min(x for x, *_ in points), max(x for x, *_ in points)
    x = _scale(low if log else 0, high, left, right, log=log)
    y = _scale(ticks[0], ticks[-1], foot, top)
    parts = [_rule(left, y(tick), right, y(tick)) + _text(left - 8, y(tick) + 4, f"{tick:g}", "end") for tick in ticks]
    whole = all(x == int(x) for x, *_ in points)  # there is no round 0.5
    linear = [tick for tick in ticks_between(0, high) if tick <= high and (tick == int(tick) or not whole)]
    marks = decades(low, high) if log else linear
    parts += [_text(x(tick), foot + 18, f"{tick:g}", "middle") for tick in marks]
    parts.append(_text((left + right) / 2, height - 4, across, "middle", "axis") + _text(0, 14, up, kind="axis"))
    clip = f"plot-{''.join(filter(str.isalpha, across))}-{width}"
    area = f'<rect x="{left}" y="{top}" width="{right - left}" height="{foot - top}"/>'
    parts.append(f'<clipPath id="{clip}">{area}</clipPath>')
    ends = {method: y(line.points[-1][1]) for method, line in lines.items()}
    places = apart(ends, 16)
    for method, line in lines.items():
        parts.append(_curve(line, looks[method], x, y, clip))
        if width == WIDTH:
            tail = f"M{x(line.points[-1][0]):.1f} {ends[method]:.1f}L{right + 12} {places[method]:.1f}"
            name = _text(right + 16, places[method] + 4, _short(method), kind="axis")
            parts.append(f'{_group(looks[method])}<path class="tail" d="{tail}"/>{name}</g>')
    return _svg(width, height, parts, title)


def _range(points: Sequence[tuple[float, float, float | None, str]], most: float) -> tuple[float, float]:
    """What the axis shows: all lines, and of their bands so much that the lines still have half of the height."""
    low, high = min(y for _, y, *_ in points), max(y for _, y, *_ in points)
    room = (high - low) / 2
    lowest = min(y - (half or 0) for _, y, half, _ in points)
    highest = max(y + (half or 0) for _, y, half, _ in points)
    return max(lowest, low - room, min(0.0, low)), min(highest, high + room, max(most, high))


def _curve(line: Line, look: Style, x: _Scale, y: _Scale, clip: str) -> str:
    path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b, _, _ in line.points)
    banded = [(a, b, half) for a, b, half, _ in line.points if half]
    band = ""
    if len(banded) > 1:
        there = "L".join(f"{x(a):.1f} {y(b + half):.1f}" for a, b, half in banded)
        back = "L".join(f"{x(a):.1f} {y(b - half):.1f}" for a, b, half in reversed(banded))
        band = f'<path class="band" clip-path="url(#{clip})" d="M{there}L{back}z"/>'
    dots = "".join(
        f'<circle class="dot" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6"><title>{escape(note)}</title></circle>'
        for a, b, _, note in line.points
    )
    return f'{_group(look)}{band}<path class="line" stroke-dasharray="{look.dash}" d="M{path}"/>{dots}</g>'


def gains(
    values: NDArray[np.float64], harmed: NDArray[np.bool_], names: Sequence[str], notes: Sequence[str], look: Style,
    ticks: Sequence[float], title: str,
) -> str:  # fmt: skip
    """A bar for each client, sorted; harmed ones are hatched, in another colour, and point down."""
    known = np.flatnonzero(np.isfinite(values))
    drawn = evenly(known[np.argsort(-values[known], kind="stable")], MOST_MARKS)
    if not len(drawn):
        return ""
    width, height, left, right, top, foot = NARROW, 210, 40, NARROW - 6, 10, 178
    step = (right - left) / len(drawn)
    y = _scale(ticks[0], ticks[-1], foot, top)
    parts = [
        _rule(left, y(tick), right, y(tick)) + _text(left - 6, y(tick) + 4, f"{tick:+g}" if tick else "0", "end")
        for tick in ticks
    ]
    named = step >= 13 and all(len(names[client]) <= 3 for client in drawn)
    bars = []
    for place, client in enumerate(drawn.tolist()):
        start, end = left + step * place, y(float(values[client]))
        upper, tall = min(y(0), end), max(abs(y(0) - end), 0.8)
        inner = min(2.0, step * 0.15)
        bar = (
            f'<rect class="{"bar harmed" if harmed[client] else "bar"}" x="{start + inner:.1f}" y="{upper:.1f}" '
            f'width="{step - 2 * inner:.2f}" height="{tall:.1f}"/>'
        )
        bars.append(
            f'<g data-client="{client}"><title>{escape(notes[client])}</title>'
            f'<rect class="hit" x="{start:.1f}" y="{top}" width="{step:.2f}" height="{foot - top}"/>{bar}'
            f"{_triangle(start + step / 2, end + 3) if harmed[client] else ''}"
            f"{_text(start + step / 2, foot + 12, names[client], 'middle', 'small') if named else ''}</g>"
        )
    zero = f'<line x1="{left}" y1="{y(0):.1f}" x2="{right}" y2="{y(0):.1f}" class="zero"/>'
    parts.append(f"{_group(look)}{''.join(bars)}</g>{zero}")
    some = f"{len(drawn)} of {len(known)} clients" if len(drawn) < len(known) else f"{len(known)} clients"
    parts.append(_text((left + right) / 2, height - 3, f"{some}, sorted by gain", "middle", "axis"))
    return _svg(width, height, parts, title)


def strips(
    values: Mapping[str, NDArray[np.float64]], heads: Mapping[str, str], notes: Mapping[str, Sequence[str]],
    looks: Mapping[str, Style], title: str, across: str, *, width: int = WIDTH,
) -> str:  # fmt: skip
    """A row for each method with a dot for each client; the box holds the middle half, its line is the median."""
    known = {method: np.flatnonzero(np.isfinite(of_method)) for method, of_method in values.items()}
    every = np.concatenate([of_method[known[method]] for method, of_method in values.items()])
    if not len(every):
        return ""
    ticks = ticks_between(every.min(), every.max())
    row, left, right, top = 70, 14, width - 14, 6
    foot = top + row * len(values) + 4
    x = _scale(ticks[0], ticks[-1], left, right)
    parts = [
        f'<line x1="{x(tick):.1f}" y1="{top}" x2="{x(tick):.1f}" y2="{foot}" class="rule"/>'
        + _text(x(tick), foot + 16, f"{tick:g}", "middle")
        for tick in ticks
    ]
    for index, (method, of_method) in enumerate(values.items()):
        upper = top + row * index
        first, middle, third = np.percentile(of_method[known[method]], (25, 50, 75)) if len(known[method]) else [0] * 3
        drawn = evenly(known[method][np.argsort(of_method[known[method]], kind="stable")], MOST_MARKS)
        dots = "".join(
            # the golden ratio spreads neighbours evenly: the same client is always at the same height
            f'<circle class="client" data-client="{client}" cx="{x(of_method[client]):.1f}" '
            f'cy="{upper + 28 + 32 * (client * 0.618034 % 1):.1f}" r="3.4">'
            f"<title>{escape(notes[method][client])}</title></circle>"
            for client in drawn.tolist()
        )
        box = (
            f'<rect class="box" x="{x(first):.1f}" y="{upper + 24}" width="{max(x(third) - x(first), 1):.1f}" '
            f'height="40" rx="3"/><path class="median" d="M{x(middle):.1f} {upper + 22}v44"/>'
        )
        head = f'<text x="{left}" y="{upper + 16}" class="axis plate">{escape(heads[method])}</text>'
        parts.append(f"{_group(looks[method])}{box}{dots}{head}</g>")
    parts.append(_text((left + right) / 2, foot + 36, across, "middle", "axis"))
    return _svg(width, foot + 42, parts, title)


def heatmap(
    matrix: NDArray[np.float64],
    names: Sequence[str],
    notes: Sequence[str],
    title: str,
    columns: Sequence[str] | None = None,
) -> str:
    """Row k belongs to client k, a column to every client or to what `columns` names; the stronger a cell, the more."""
    shown = min(len(matrix), MOST_MIXING)
    across = shown if columns is None else len(columns)
    part = np.nan_to_num(matrix[:shown, :across]).clip(min=0)
    left, top = 84, 30
    room = WIDTH - left - 20
    high = min(24.0, room / shown)
    wide = high if columns is None else min(110.0, room / across)
    levels = np.ceil(part / (part.max() or 1) * LEVELS).astype(int)
    parts = [
        f'<path class="shade" fill-opacity="{level / LEVELS:.2f}" d="'
        + "".join(
            f"M{left + wide * k:.1f} {top + high * i:.1f}h{wide:.2f}v{high:.2f}h-{wide:.2f}z"
            for i, k in np.argwhere(levels == level)
        )
        + '"/>'
        for level in range(1, LEVELS + 1)
        if (levels == level).any()
    ]
    parts.append(f'<rect class="frame" x="{left}" y="{top}" width="{wide * across:.1f}" height="{high * shown:.1f}"/>')
    every = max(1, math.ceil(15 / high))
    heads = range(0, shown, 2 * every) if columns is None else range(across)
    called, most = (names, 4) if columns is None else (columns, max(4, int(wide / 7)))
    parts += [_text(left - 8, top + high * (i + 0.5) + 4, _short(names[i], 10), "end") for i in range(0, shown, every)]
    parts += [_text(left + wide * (k + 0.5), top - 8, _short(called[k], most), "middle") for k in heads]
    parts += [
        f'<rect class="hit" data-client="{client}" x="{left}" y="{top + high * client:.1f}" '
        f'width="{wide * across:.1f}" height="{high:.2f}"><title>{escape(notes[client])}</title></rect>'
        for client in range(shown)
    ]
    return _svg(WIDTH, top + high * shown + 8, parts, title)


def clusters(
    found: Clusters, planted: NDArray[np.int64] | None, order: NDArray[np.int64], names: Sequence[str],
    notes: Sequence[str], title: str, *, width: int = WIDTH,
) -> str:  # fmt: skip
    """A column for each client: the tree, if there is one, its cluster, and its planted group, if that is known."""
    drawn = evenly(order, MOST_MARKS)
    left, top, foot = 58, 24, 10
    step = min(40.0, (width - left - 6) / len(drawn))
    middle = {int(client): left + step * (place + 0.5) for place, client in enumerate(drawn)}
    parts = []
    if found.merges is not None and len(found.merges):
        foot = 210 if width == WIDTH else 160
        parts += [_text(0, 12, found.height, kind="axis"), *_tree(found, middle, left, step * len(drawn), top, foot)]
    short = {client: names[client].removeprefix("client ") for client in middle}
    if step >= 13 and all(len(name) <= 3 for name in short.values()):
        parts += [_text(at, foot + 13, short[client], "middle", "small") for client, at in middle.items()]
    foot += 19
    rows = {"cluster": ("cluster", found.of_client)} | ({} if planted is None else {"planted": ("group", planted)})
    for row, (kind, of_client) in rows.items():
        parts.append(_text(left - 8, foot + 16, row, "end"))
        parts += _runs(kind, of_client[drawn].tolist(), left, foot, step)
        foot += 30
    parts += [
        f'<rect class="hit" data-client="{client}" x="{at - step / 2:.1f}" y="{top}" width="{step:.2f}" '
        f'height="{foot - top}"><title>{escape(notes[client])}</title></rect>'
        for client, at in middle.items()
    ]
    return _svg(width, foot, parts, title)


def _tree(found: Clusters, middle: Mapping[int, float], left: float, wide: float, top: float, foot: float) -> list[str]:
    """The merges of the clients that are drawn, in the colour of a cluster where all of them are in it."""
    assert found.merges is not None
    clients, highest = len(found.of_client), float(found.merges[:, 2].max()) or 1.0
    y = _scale(0, highest, foot, top + 6)
    whole = bool((found.merges[:, 2] % 1 == 0).all())  # counts
    ticks = [tick for tick in ticks_between(0, highest, 4) if tick <= highest and (tick == int(tick) or not whole)]
    parts = [
        _rule(left, y(tick), left + wide, y(tick)) + _text(left - 8, y(tick) + 4, f"{tick:g}", "end") for tick in ticks
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
    return parts + [f'<path class="branch {_colour(of)}" d="{"".join(paths[of])}"/>' for of in sorted(paths)]


def _runs(kind: str, numbers: Sequence[int], left: float, top: float, step: float) -> list[str]:
    """A box for each run of equal numbers; the word and the number are in it where they fit."""
    parts, start = [], left
    ranks = {number: rank for rank, number in enumerate(sorted({*numbers}))}
    for number, members in groupby(numbers):
        wide = step * len([*members])
        texts = (f"{kind} {number}", f"{number}") if number >= 0 else ("in none", "–")
        fits = [text for text in texts if 8 + 6.6 * len(text) <= wide]
        look = _colour(number) if kind == "cluster" else f"g{ranks[number] % 2}"
        parts.append(
            f'<rect class="{kind} {look}" x="{start + 1:.1f}" y="{top}" width="{max(wide - 2, 1):.1f}" height="24" '
            f'rx="3"/>{_text(start + wide / 2, top + 16.5, fits[0], "middle", "axis") if fits else ""}'
        )
        start += wide
    return parts


def _colour(cluster: int) -> str:
    return f"m{cluster % len(COLOURS)}" if cluster >= 0 else "none"


# -- the parts of a figure ---------------------------------------------------------------------------------------------


def ticks_between(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    span = max(high - low, 1e-9)
    power = 10 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Round numbers between two for a logarithmic axis: powers of ten, with 2 and 5 times them where these are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high < 1000 * low else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low <= value <= high] or [low]


def evenly(order: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most `most` of them, evenly spaced, with the first and the last."""
    if len(order) <= most:
        return order
    return np.asarray(order[np.linspace(0, len(order) - 1, most).round().astype(int)])


def apart(places: Mapping[str, float], distance: float) -> dict[str, float]:
    """The same order with at least `distance` between neighbours, moved as little as a single pass can."""
    found: dict[str, float] = {}
    for name, place in sorted(places.items(), key=lambda entry: entry[1]):
        found[name] = max(place, max(found.values(), default=-math.inf) + distance)
    if found:  # what was pushed down is shared by all
        shift = sum(found[name] - places[name] for name in found) / len(found)
        found = {name: place - shift for name, place in found.items()}
    return found


class _Scale(NamedTuple):
    low: float
    factor: float
    start: float
    log: bool

    def __call__(self, value: float) -> float:
        return self.start + ((math.log10(value) if self.log else value) - self.low) * self.factor


def _scale(low: float, high: float, start: float, end: float, *, log: bool = False) -> _Scale:
    low, high = (math.log10(low), math.log10(high)) if log else (low, high)
    return _Scale(low, (end - start) / ((high - low) or 1), start, log)


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" data-width="{width:g}">'
        f"{''.join(parts)}</svg>"
    )


def _group(look: Style) -> str:
    return f'<g class="{look.kind}" data-method="{look.place}">'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="rule"/>'


def _triangle(x: float, y: float) -> str:
    return f'<path class="mark" d="M{x - 3.6:.1f} {y:.1f}h7.2l-3.6 6z"/>'


def _short(name: str, most: int = 17) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
