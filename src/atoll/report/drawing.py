"""What figures are made of: axes, scales, frames, and how a method is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from atoll.report.svg import element

WIDTH, NARROW = 760, 360  # for a desk and for a phone
LETTER = 7.6  # the width that a letter may take, wide ones among them


MARKERS = (  # outlines in a square from -1 to 1
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0z",  # a disc
    "M-.9 -.9h1.8v1.8h-1.8z",  # a square
    "M0 -1.15L1.05 .85H-1.05z",  # a triangle
    "M0 -1.25L1.25 0L0 1.25L-1.25 0z",  # a diamond
    "M0 1.15L1.05 -.85H-1.05z",  # a triangle that points down
    "M-.4 -1.2h.8v.8h.8v.8h-.8v.8h-.8v-.8h-.8v-.8h.8z",  # a plus
    "M-1.1 -1.1L0 -.45L1.1 -1.1L.45 0L1.1 1.1L0 .45L-1.1 1.1L-.45 0z",  # a star with four points
)


class Style(NamedTuple):
    """How a method is drawn: its place in the order, the class that gives its colour, its dashes, its marker."""

    place: int
    kind: str
    dash: str
    marker: int = 0

    def draw_marker(self, x: float, y: float, size: float, *inner: Markup) -> Markup:
        """Draw the marker of the method at a place: methods differ in shape, not in colour alone."""
        where = f"translate({x:.1f} {y:.1f}) scale({size:g})"
        return element(
            "path", *inner, class_="dot", transform=where, d=MARKERS[self.marker % len(MARKERS)],
            vector_effect="non-scaling-stroke",
        )  # fmt: skip


def find_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """List round numbers from below `low` to above `high`."""
    span = max(high - low, 1e-9)
    power = 10 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def find_decades(low: float, high: float) -> list[float]:
    """List round numbers for a logarithmic axis: powers of ten, with 2 and 5 times them where these are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high < 1000 * low else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low <= value <= high] or [low]


def pick_evenly(order: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Pick at most `most` of them, evenly spaced, the first and the last among them."""
    if len(order) <= most:
        return order
    return np.asarray(order[np.linspace(0, len(order) - 1, most).round().astype(int)])


def move_apart(places: Mapping[str, float], distance: float) -> dict[str, float]:
    """Move places until neighbours have this distance, keeping their order, as little as a single pass can."""
    found: dict[str, float] = {}
    for name, place in sorted(places.items(), key=lambda entry: entry[1]):
        found[name] = max(place, max(found.values(), default=-math.inf) + distance)
    if found:  # what was pushed down is shared by all
        shift = sum(found[name] - places[name] for name in found) / len(found)
        found = {name: place - shift for name, place in found.items()}
    return found


class Scale(NamedTuple):
    """Maps a value to a place along an axis."""

    low: float
    factor: float
    start: float
    log: bool

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        return self.start + ((math.log10(value) if self.log else value) - self.low) * self.factor


def make_scale(low: float, high: float, start: float, end: float, *, log: bool = False) -> Scale:
    """Make the scale that puts `low` at `start` and `high` at `end`."""
    low, high = (math.log10(low), math.log10(high)) if log else (low, high)
    return Scale(low, (end - start) / ((high - low) or 1), start, log)


def draw_frame(width: float, height: float, parts: Sequence[Markup], title: str) -> Markup:
    """Put the parts of a figure together."""
    size = {"viewBox": f"0 0 {width:g} {height:g}", "data-width": f"{width:g}"}
    return element("svg", *parts, role="img", aria_label=title, **size)


def group_marks(look: Style, *parts: Markup) -> Markup:
    """Group what belongs to a method, in its colour."""
    return element("g", *parts, class_=look.kind, data_method=look.place)


def write_note(text: str) -> Markup:
    """Write what is shown to whoever points at a mark."""
    return element("title", text)


def write_text(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick", *, turn: float = 0) -> Markup:
    """Write a text at a place, turned by so many degrees."""
    turned = f"rotate({turn:g} {x:.1f} {y:.1f})" if turn else None
    return element("text", text, x=float(x), y=float(y), text_anchor=anchor, class_=kind, transform=turned)


def fit_head(text: str, width: float) -> str:
    """Shorten a head, `METHOD: FIGURES`, to the width of a figure: the method's name gives way, no figure does."""
    most = int((width - 28) / (LETTER + 0.6))  # heads are bold
    name, colon, figures = text.rpartition(": ")
    if len(text) <= most or not colon:
        return text
    return f"{name[: max(1, most - len(figures) - 3)]}…{colon}{figures}"


def draw_rule(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """Draw a thin line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_="rule")
