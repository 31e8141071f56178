"""The table of the notes names methods, options and files that exist."""

import re
from pathlib import Path

import pytest

from atoll import algorithms
from atoll.compose import create
from atoll.compose.pieces import PIECES
from atoll.data.shift import WORDS as SHIFTS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "concepts" / "notes.md").read_text()
CHINESE = (DOCS / "zh" / "notes.md").read_text()
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


def rows(page: str) -> list[tuple[str, str]]:
    lines = [line for line in page.splitlines() if re.match(r"\| (?!paragraph|段落)", line)]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(paragraph, where) for paragraph, where in found]


def test_every_row_says_where_it_is() -> None:
    assert len(rows(PAGE)) > 100
    for paragraph, where in rows(PAGE):
        assert paragraph
        assert re.search(r"\]\(|`|\*\*Not here|Refused|Local is|Paired|Not names here", where), where


def marks(where: str, folder: str) -> tuple[list[str], list[Path], int]:
    """What a row names, links to and misses, in whatever language."""
    links = [(DOCS / folder / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)]+)\)", where)]
    missing = len(re.findall(r"\*\*(?:Not here|没有|暂时没有)\*\*", where))
    return sorted(re.findall(r"`[^`]+`", where)), sorted(links), missing


def test_both_languages_have_the_same_rows() -> None:
    """catches: a row, a name, a link or something missing that one of the pages has and the other has not."""
    ours, theirs = rows(PAGE), rows(CHINESE)
    for (paragraph, where), (other, there) in zip(ours, theirs, strict=True):
        assert marks(where, "concepts") == marks(there, "zh"), f"{paragraph}\n{other}"
        assert where.startswith("In part") == there.startswith("部分实现"), f"{paragraph}\n{other}"
