"""What a page is made of: plain values, each shown by the macro of its name in `templates/parts.html`.

The templates escape every text that is put into them. Only a part, an element of SVG and the page's own style sheet and
script are markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


class Part:
    """A piece of the page. A template that names one shows it."""

    def __html__(self) -> str:
        """Show it by its macro."""
        macros = templates().get_template("parts.html").module
        return str(getattr(macros, type(self).__name__.lower())(self))


class Cell(NamedTuple):
    """A cell of a table: its text, its class in the style sheet, and the place of the method that it belongs to."""

    text: str
    kind: str | None = None
    method: int | None = None


class Row(NamedTuple):
    """A row of a table: its head and its other cells, and what it belongs to."""

    head: str
    cells: Sequence[str | Cell]
    kind: str | None = None
    method: int | None = None
    client: int | None = None


@dataclass(frozen=True)
class Table(Part):
    """A table; one with a note, even an empty one, links the protocol. A tall one is scrolled in a box."""

    heads: Sequence[str | Cell]
    rows: Sequence[Row]
    note: str | None = None
    kind: str | None = None
    label: str = "Scrolls sideways"  # for screen readers
    tall: bool = False


@dataclass(frozen=True)
class Figure(Part):
    """A drawing and the words above it."""

    words: str
    drawing: Markup | Part


@dataclass(frozen=True)
class Widths(Part):
    """The same drawing for a desk and for a phone."""

    wide: Markup
    narrow: Markup


@dataclass(frozen=True)
class Scrolled(Part):
    """A drawing that is scrolled sideways where a window is too narrow for it."""

    drawing: Markup


@dataclass(frozen=True)
class Block(Part):
    """What belongs to one method, and goes when the method is hidden."""

    method: int
    parts: Sequence[Markup | Part]
    name: str = ""
    words: str = ""
    kind: str | None = None


@dataclass(frozen=True)
class Grid(Part):
    """Blocks side by side."""

    blocks: Sequence[Block]


@dataclass(frozen=True)
class Details(Part):
    """A part that is folded under a line of words."""

    summary: str
    inner: Part
    open: bool = False


@dataclass(frozen=True)
class Sentences(Part):
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Text(Part):
    """Text as it is, line by line."""

    text: str
    head: str = ""
    kind: str | None = None


@cache
def templates() -> Environment:
    """Open the templates of this package. Everything that they show is escaped, and a misspelt name is an error."""
    found = Environment(
        loader=PackageLoader("atoll.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["anchor"] = _make_anchor
    found.filters["cell"] = _make_cell
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return found


def break_name(name: str) -> str:
    """Let a long name break where its parts end: after colons, commas, slashes and plus signs."""
    return re.sub(r"([:,/+@])", "\\1\u200b", name)


def _make_anchor(head: str) -> str:
    """Make the address of a section from its head."""
    return head.lower().replace(" ", "-")


def _make_cell(cell: str | Cell) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)
