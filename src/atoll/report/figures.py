"""Figures as SVG text, drawn by hand: small, sharp, and readable without colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
GREYS = {"local": "#8a8a8a", "fedavg": "#2b2b2b"}
DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2")
HARM = "#c2185b"
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 52, 128, 12, 40


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    dash: str


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """The references in grey, every other method in a colour and a dash of its own."""
    others = [method for method in methods if method not in GREYS]
    found = {
        method: Style(COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]) for index, method in enumerate(others)
    }
    return {**found, **{method: Style(GREYS[method], "") for method in methods if method in GREYS}}


def curves(series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Lines of (round, share of 1), each with its name at its end."""
    looks, height = styles(list(series)), 340
    rounds = [round for points in series.values() for round, _ in points]
    values = [100 * value for points in series.values() for _, value in points if math.isfinite(value)]
    if not values:
        return ""
    ticks = ticks_between(min(values), min(max(values), 100))
    x = _scale(0, max(rounds), LEFT, WIDTH - RIGHT)
    y = _scale(ticks[0], ticks[-1], height - BOTTOM, TOP)
    parts = [
        _rule(LEFT, y(tick), WIDTH - RIGHT, y(tick)) + _text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end")
        for tick in ticks
    ]
    across = [tick for tick in ticks_between(0, max(rounds)) if tick <= max(rounds) and tick == int(tick)]
    parts += [_text(x(tick), height - BOTTOM + 18, f"{tick:g}", "middle") for tick in across]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 4, "round", "middle", "axis"))
    ends = {method: y(100 * points[-1][1]) for method, points in series.items() if math.isfinite(points[-1][1])}
    places = apart(ends, 15)
    for method, points in series.items():
        path = " ".join(f"{x(round):.1f},{y(100 * value):.1f}" for round, value in points if math.isfinite(value))
        colour, dash = looks[method]
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"'
            f' stroke-dasharray="{dash}"/>'
        )
        if method in places:
            tail = f"{x(points[-1][0]):.1f},{ends[method]:.1f} {WIDTH - RIGHT + 10},{places[method]:.1f}"
            parts.append(f'<polyline points="{tail}" fill="none" stroke="{colour}" stroke-width="0.8"/>')
            parts.append(_text(WIDTH - RIGHT + 14, places[method] + 4, _short(method), fill=colour))
    return _svg(height, parts, "Mean validation accuracy over clients by round, one line per method")


def gains(
    values: Mapping[str, NDArray[np.float64]], harmed: Mapping[str, NDArray[np.bool_]], seeds: Sequence[int]
) -> str:
    """One row of dots per method, a dot for each client and seed; harmed ones are triangles of another colour."""
    if not values:
        return ""
    row, looks = 46, styles(list(values))
    left, right = 128, 20
    height = TOP + row * len(values) + BOTTOM
    known = np.concatenate([100 * value[np.isfinite(value)] for value in values.values()])
    ticks = ticks_between(min(0.0, known.min(initial=0)), max(0.0, known.max(initial=1)))
    x = _scale(ticks[0], ticks[-1], left, WIDTH - right)
    foot = height - BOTTOM
    parts = [
        _rule(x(tick), TOP, x(tick), foot) + _text(x(tick), foot + 18, f"{tick:+g}" if tick else "0", "middle")
        for tick in ticks
    ]
    parts.append(f'<line x1="{x(0):.1f}" y1="{TOP}" x2="{x(0):.1f}" y2="{foot}" stroke="#444" stroke-width="1.2"/>')
    parts.append(
        _text((left + WIDTH - right) / 2, height - 4, "gain against Local, percentage points", "middle", "axis")
    )
    for index, (method, value) in enumerate(values.items()):
        middle = TOP + row * (index + 0.5)
        parts.append(_text(left - 12, middle + 4, _short(method), "end", fill=looks[method].colour))
        for (seed, client), gain in np.ndenumerate(value):
            if not math.isfinite(gain):
                continue
            # the golden ratio spreads neighbours evenly: the same client is always at the same height
            down = middle + (((client * len(seeds) + seed) * 0.618034) % 1 - 0.5) * row * 0.62
            note = f"client {client}, seed {seeds[seed]}: {100 * gain:+.1f}"
            parts.append(_dot(x(100 * gain), down, looks[method].colour, bool(harmed[method][seed, client]), note))
        mean = x(100 * float(np.nanmean(value)))
        parts.append(
            f'<line x1="{mean:.1f}" y1="{middle - 19:.1f}" x2="{mean:.1f}" y2="{middle + 19:.1f}" class="mean"/>'
        )
    return _svg(height, parts, "Gain of every client against training alone, one row per method")


# -- the parts of a figure ---------------------------------------------------------------------------------------------


def ticks_between(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    span = max(high - low, 1e-9)
    power = 10 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


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

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.factor


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    return _Scale(low, (end - start) / ((high - low) or 1), start)


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick", fill: str = "") -> str:
    style = f' style="fill:{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"{style}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="rule"/>'


def _dot(x: float, y: float, colour: str, harmed: bool, note: str) -> str:
    title = f"<title>{escape(note)}{' (harmed)' if harmed else ''}</title>"
    if harmed:
        points = f"{x - 4.6:.1f},{y - 4:.1f} {x + 4.6:.1f},{y - 4:.1f} {x:.1f},{y + 4.6:.1f}"
        return f'<polygon points="{points}" fill="{HARM}">{title}</polygon>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.1" fill="{colour}" fill-opacity="0.55">{title}</circle>'


def _short(name: str, most: int = 17) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
