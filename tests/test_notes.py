"""The table of the notes names methods, options and files that exist."""

import re
from pathlib import Path

import pytest

from atoll import algorithms
from atoll.compose import create
from atoll.compose.pieces import PIECES
from atoll.data.shift import WORDS as SHIFTS

PAGE = (Path(__file__).parents[1] / "docs" / "concepts" / "notes.md").read_text()
WORDS = sorted(set(re.findall(r"`([a-z][\w+@-]*(?::\w+=[^`]*)?)`", re.sub(r"`\]\([^)]*\)`", "", PAGE))))
NAMED = [word for word in WORDS if re.split(r"[:+@]", word)[0] in algorithms.list_methods()]


@pytest.mark.parametrize("word", [word for word in NAMED if not re.search(r"=[A-Z]\b", word)])
def test_a_named_method_can_be_made(word: str) -> None:
    create(word)


def test_methods_with_options_are_among_them() -> None:
    assert {"fafi-two-stage", "feddf:target=avg_logits", "ditto@ifca"} <= set(NAMED)


@pytest.mark.parametrize("piece", sorted(set(re.findall(r"`\+([a-z-]+)", PAGE)) - set(SHIFTS)))
def test_a_named_piece_exists(piece: str) -> None:
    assert piece in PIECES


def test_every_row_says_where_it_is() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| paragraph")]
    assert len(rows) > 100
    for row in rows:
        paragraph, where = (cell.strip() for cell in row.strip("|").split(" | "))
        assert paragraph
        assert re.search(r"\]\(|`|\*\*Not here|not here|Not here|Refused|As \*|Local is|Paired", where), row
