"""Draw values of very many clients: one histogram for each method, all with the same axis and the same bins."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from atoll.report.drawing import (
    WIDTH,
    Style,
    draw_frame,
    find_ticks,
    fit_head,
    group_marks,
    make_scale,
    write_note,
    write_text,
)
from atoll.report.svg import element

BINS = 41  # odd, so each tick of the axis, 0 among them, lies in the middle of one
ROW, TALL = 84, 48  # the height of a method, and of its bars


def draw_bins(
    values: Mapping[str, NDArray[np.float64]], harmed: Mapping[str, NDArray[np.bool_]], heads: Mapping[str, str],
    looks: Mapping[str, Style], title: str, across: str, *, width: int = WIDTH,
) -> Markup:  # fmt: skip
    """Draw a row for each method: how many clients have which value; the part of harmed ones is hatched.

    A line marks the median. The scales of the rows are the same.
    """
    known = {method: np.isfinite(of_method) for method, of_method in values.items()}
    every = np.concatenate([of_method[known[method]] for method, of_method in values.items()])
    if not len(every):
        return Markup("")
    ticks = find_ticks(every.min(), every.max())
    half = (ticks[-1] - ticks[0]) / (BINS - 1) / 2
    edges = np.linspace(ticks[0] - half, ticks[-1] + half, BINS + 1)
    counts = {method: np.histogram(of_method[known[method]], edges)[0] for method, of_method in values.items()}
    most = max(int(of_method.max()) for of_method in counts.values())
    left, right, top = 14, width - 14, 6
    foot = top + ROW * len(values) + 4
    x = make_scale(edges[0], edges[-1], left, right)
    parts = [
        element("line", x1=x(tick), y1=top, x2=x(tick), y2=foot, class_="rule")
        + write_text(x(tick), foot + 16, f"{tick:g}", "middle")
        for tick in ticks
    ]
    for index, (method, of_method) in enumerate(values.items()):
        base = top + ROW * (index + 1) - 8
        worse = harmed.get(method, np.zeros(len(of_method), dtype=bool)) & known[method]
        below = np.histogram(of_method[worse], edges)[0]
        bars = []
        for place, (count, bad) in enumerate(zip(counts[method].tolist(), below.tolist(), strict=True)):
            start, wide = x(edges[place]) + 0.5, x(edges[place + 1]) - x(edges[place]) - 1
            high, low = TALL * count / most, TALL * bad / most
            words = write_note(f"{edges[place]:.3g} to {edges[place + 1]:.3g}: {count:,} clients{_count_harmed(bad)}")
            if count > bad:
                bars.append(
                    element("rect", words, class_="bar", x=start, y=base - high, width=wide, height=float(high - low))
                )
            if bad:
                bars.append(
                    element("rect", words, class_="bar harmed", x=start, y=base - low, width=wide, height=float(low))
                )
        middle = float(np.median(of_method[known[method]])) if known[method].any() else ticks[0]
        median = element("path", class_="median", d=f"M{x(middle):.1f} {base - TALL - 4:.1f}v{TALL + 4}")
        head = element("text", fit_head(heads[method], width), x=left, y=base - TALL - 10, class_="axis plate")
        parts.append(group_marks(looks[method], *bars, median, head))
    parts.append(write_text((left + right) / 2, foot + 36, across, "middle", "axis"))
    return draw_frame(width, foot + 42, parts, title)


def _count_harmed(number: int) -> str:
    return f", {number:,} of them harmed" if number else ""
