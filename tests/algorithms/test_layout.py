"""Every method has its test and its page, and its docstring says what it minimises and where it comes from."""

import ast
import re
from pathlib import Path

import pytest

from atoll import algorithms
from atoll.toolbox.references import bibtex

ROOT = Path(__file__).parents[2]
FILES = [file for file in sorted(Path(algorithms.__file__).parent.glob("*.py")) if file.stem != "__init__"]

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text())) or ""


@each_file
def test_has_a_test(file: Path) -> None:
    assert (ROOT / "tests" / "algorithms" / f"test_{file.stem}.py").is_file()


@each_file
def test_has_a_page(file: Path) -> None:
    assert (ROOT / "docs" / "algorithms" / f"{file.stem.replace('_', '-')}.md").is_file()


@each_file
def test_is_found_under_the_name_of_its_file(file: Path) -> None:
    assert file.stem.replace("_", "-") in algorithms.list_methods()


@each_file
def test_docstring_states_the_objective(file: Path) -> None:
    formulas = re.findall(r"^ {4,}.*(?:min_|<-|=|F_k).*$", docstring(file), re.MULTILINE)
    assert formulas, "the docstring must have an indented line with the objective or the update"


@each_file
def test_docstring_names_its_source(file: Path) -> None:
    assert re.search(r"^Reference: .*\d{4}", docstring(file), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "cites", [pytest.param(one.cites, id=name) for name, one in algorithms.list_methods().items() if one.cites]
)
def test_citation_is_bibtex(cites: str) -> None:
    entry = bibtex(cites)
    assert re.match(rf"@\w+\{{{cites},\n", entry)
    assert entry.count("{") == entry.count("}")
    assert all(f"{field} = {{" in entry for field in ("title", "author", "year"))
