"""Pairs without a file of their own pass the checks that are drawn for them, and those of answers."""

import pytest

from atoll.compose import create
from atoll.kernel.randomness import generator
from atoll.testing.conformance import Check, checks

SAMPLED = 8  # checks
PAIRS = ("fafi/margins", "etf/average")  # whose clients answer by prototypes, or in a frame


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{check.name}-{name}")
        for name in PAIRS
        for check, place in zip(checks(), generator(0, f"checks of {name}").permutation(len(checks())), strict=True)
        if place < SAMPLED or check.name.startswith("answers")
    ],
)
def test_conforms(name: str, check: Check) -> None:
    check.run(create(name))
