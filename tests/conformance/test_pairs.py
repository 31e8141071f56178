"""Pairs without a file of their own pass every check, too."""

import pytest

from atoll.compose import create
from atoll.testing.conformance import Check, checks

PAIRS = ("fafi/margins", "etf/average")  # whose clients answer by prototypes, or in a frame


@pytest.mark.parametrize(
    ("name", "check"), [pytest.param(name, check, id=f"{check.name}-{name}") for name in PAIRS for check in checks()]
)
def test_conforms(name: str, check: Check) -> None:
    check.run(create(name))
