"""Every golden run leaves what it left when its digests were written: the state, answers, bytes and losses."""

import functools

import pytest
from golden.cases import Case, list_cases, play
from golden.digests import digest_machine, digest_run, find_differences
from golden.files import GOLDEN, read_golden

CASES = list_cases()
MARKED = [pytest.param(name, marks=[pytest.mark.slow] * one.slow, id=name) for name, one in CASES.items()]
ACCEPT = "if that is meant, `python tests/golden --write [PART OF A NAME]` accepts it; say why in the commit"


@functools.cache
def same_machine() -> bool:
    """Whether this machine rounds like the one whose digests are kept; if not, sums are compared to rounding."""
    return bool(digest_machine() == read_golden(GOLDEN)["machine"])


@pytest.mark.parametrize("name", MARKED)
def test_a_run_leaves_what_it_left(name: str) -> None:
    golden = read_golden(GOLDEN)["runs"].get(name, {})
    parts = find_differences(golden, digest_run(play(CASES[name])), exact=same_machine())
    assert not parts, f"{name}: {', '.join(parts)} changed; {ACCEPT}"


def test_every_golden_run_is_still_played() -> None:
    assert read_golden(GOLDEN)["runs"].keys() == CASES.keys()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.how != "in memory"])
def test_folders_and_pauses_change_nothing(name: str) -> None:
    golden, case = read_golden(GOLDEN)["runs"], CASES[name]
    twins = [other for other, one in CASES.items() if one.method == case.method and one.settings == case.settings]
    assert len(twins) > 1
    assert [twin for twin in twins if golden[twin] != golden[name]] == []


def test_a_changed_part_is_named() -> None:
    golden = read_golden(GOLDEN)["runs"]["ditto"]
    answers = {**golden["answers"], "bits": "0" * 16, "sums": [1, 2.0, 3.0, 4.0]}
    for exact in (True, False):
        assert find_differences(golden, golden, exact=exact) == []
        assert find_differences(golden, {**golden, "answers": answers}, exact=exact) == ["answers"]
    rounded = {**golden["server"], "bits": "0" * 16}
    assert find_differences(golden, {**golden, "server": rounded}, exact=True) == ["server"]
    assert find_differences(golden, {**golden, "server": rounded}, exact=False) == []


def test_cases_differ_from_each_other() -> None:
    seen = [run["server"]["bits"] + run["answers"]["bits"] for run in read_golden(GOLDEN)["runs"].values()]
    assert len({*seen}) > 0.7 * len(seen)  # aliases, limits and settings that leave the numbers alone


def test_one_case_stays_what_it_is() -> None:
    assert CASES["ditto, late"] == Case("ditto", settings={"rounds": 4, "late": 0.5, "delay": 2, "cohort": 4})
