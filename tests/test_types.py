"""Types reach the user: every public name has one through the import that the README shows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import stubs

from atoll import algorithms
from atoll.algorithms import list_methods


@pytest.mark.parametrize(("path", "write"), stubs.STUBS.items(), ids=lambda one: getattr(one, "name", ""))
def test_a_stub_is_what_is_made_of_the_code(path: Path, write: Callable[[], str]) -> None:
    assert path.read_text(encoding="utf-8") == write(), "run `python tests/stubs.py`"


def test_a_method_is_found_by_its_class() -> None:
    for method in list_methods().values():
        assert getattr(algorithms, method.__name__) is method
    with pytest.raises(AttributeError, match=r"module 'atoll\.algorithms' has no attribute 'Dito'"):
        algorithms.Dito  # noqa: B018
