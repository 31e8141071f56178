"""Every method in the package passes every check; of a one-shot pair whose halves others have, some are drawn."""

import pytest

from atoll.algorithms import list_methods
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.randomness import generator
from atoll.testing.conformance import Check, checks
from atoll.toolbox.pairs import Pair, Part

SAMPLED = 6  # checks of a pair whose halves are checked in others


def chosen_checks(methods: dict[str, type[Algorithm]]) -> dict[str, list[Check]]:
    """Return the checks of each method: all of them, unless it is a pair of halves that other pairs have as well."""
    covered, found = set[type[Part]](), {}
    for name, method in sorted(methods.items(), key=lambda one: -len(parts_of(one[1]))):
        known = len(parts_of(method)) > 0 and parts_of(method) <= covered
        covered |= parts_of(method)
        drawn = generator(0, f"checks of {name}").permutation(len(checks()))[:SAMPLED]
        found[name] = [checks()[place] for place in sorted(drawn)] if known else checks()
    return found


def parts_of(method: type[Algorithm]) -> set[type[Part]]:
    return {*method.client_parts, *method.server_parts} if issubclass(method, Pair) else set()


CHOSEN = chosen_checks(list_methods())


# One method after another: its checks look at the same runs, which are played once where they follow each other.
@pytest.mark.parametrize(
    ("method", "check"),
    [
        pytest.param(method, check, id=f"{check.name}-{name}")
        for name, method in list_methods().items()
        for check in CHOSEN[name]
    ],
)
def test_conforms(method: type[Algorithm], check: Check) -> None:
    check.run(method)


def test_every_half_is_checked_in_full_in_some_pair() -> None:
    full = {name for name, chosen in CHOSEN.items() if len(chosen) == len(checks())}
    every, checked = set[type[Part]](), set[type[Part]]()
    for name, method in list_methods().items():
        every |= parts_of(method)
        checked |= parts_of(method) if name in full else set()
    assert checked == every
    assert len(CHOSEN) - len(full) >= 5
