"""The page that says what leaves a site says what the ledger says."""

import runpy
from pathlib import Path

import pytest

from atoll.algorithms import list_methods

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "sites.md").read_text()
ROWS = dict(line[2:].split(" | ", 1) for line in PAGE.partition("| methods | leaves")[2].splitlines() if "| `" in line)
CELLS = {name: cells for names, cells in ROWS.items() for name in names.replace("`", "").split(", ")}


def test_every_method_is_on_the_page() -> None:
    assert sorted(CELLS) == sorted(list_methods())


@pytest.mark.parametrize("name", ["ditto", "fedora", "fedcgs"])
def test_a_row_is_what_the_ledger_says(name) -> None:
    describe = runpy.run_path(str(ROOT / "benchmarks" / "leaving_page.py"))["describe"]
    assert describe(name) == CELLS[name]
