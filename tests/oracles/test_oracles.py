"""Atoll gives the numbers of plain loops that were written from the papers, for unequal clients in every case."""

import pytest
from oracles.tools import largest_difference, load_oracles

ORACLES = load_oracles()
PLAYED = [(name, case) for name, one in ORACLES.items() for case in one.cases]


@pytest.mark.parametrize(("name", "case"), PLAYED, ids=[f"{name}-{case}" for name, case in PLAYED])
def test_method_agrees_with_its_oracle(name, case):
    assert ORACLES[name].compare(case) < 1e-9


@pytest.mark.parametrize("name", [name for name, one in ORACLES.items() if len(one.cases) > 1])
def test_cases_of_an_oracle_differ(name):
    first, *others = (ORACLES[name].expect(case) for case in ORACLES[name].cases)
    for other in others:
        assert largest_difference(first, other) > 1e-6
