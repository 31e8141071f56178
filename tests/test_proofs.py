"""The table of proofs is that of the tests there are, and the tests that pages name exist."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from atoll.algorithms import list_methods

ROOT = Path(__file__).parents[1]
DEFECTS = (ROOT / "docs" / "concepts" / "defects.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)", DEFECTS)))


@pytest.fixture(scope="module")
def proofs() -> ModuleType:
    """docs/proofs.py, which writes the table."""
    spec = importlib.util.spec_from_file_location("proofs", ROOT / "docs" / "proofs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date(proofs: ModuleType) -> None:
    same = proofs.PAGE.read_text() == proofs.page()
    assert same, "docs/concepts/proofs.md is out of date: run `python docs/proofs.py`"


def test_every_theory_test_says_what_it_shows_and_of_which_methods(proofs: ModuleType) -> None:
    for path in sorted((ROOT / "tests" / "theory").glob("test_*.py")):
        for test in proofs.functions(path) if path.name != "test_defects.py" else ():
            marks = proofs.marks(test)
            assert len(marks) == 1, f'{path.name}: mark {test.name}, as in @pytest.mark.closed_form("ditto")'
            assert set(marks[0][1]) <= set(list_methods())
            assert marks[0][1] == sorted(marks[0][1])


def test_the_marks_are_those_that_pytest_knows(proofs: ModuleType, pytestconfig: pytest.Config) -> None:
    known = {line.partition("(")[0] for line in pytestconfig.getini("markers")}
    assert set(proofs.KINDS) <= known


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_a_page_names_exists(file: str, name: str) -> None:
    assert name in {
        node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_defect_has_a_row() -> None:
    assert re.findall(r"^\| (\d+) \|", DEFECTS, flags=re.MULTILINE) == [str(number) for number in range(1, 21)]
