"""The public names and their types are those that were accepted last."""

import difflib

from golden.api import API, describe_api


def test_the_public_names_and_their_types_are_the_accepted_ones() -> None:
    accepted, now = API.read_text(encoding="utf-8"), describe_api()
    changes = [*difflib.unified_diff(accepted.splitlines(), now.splitlines(), "accepted", "now", lineterm="", n=0)]
    shown = "\n".join(changes)
    assert not changes, f"{shown}\n\nIf that is meant, `python tests/golden --api` accepts it."


def test_the_snapshot_shows_names_types_and_defaults() -> None:
    lines = describe_api().splitlines()
    assert any(line.startswith("atoll.federate(task: Task, algorithm: Algorithm | str, *") for line in lines)
    assert any(line.startswith("class atoll.algorithms.Ditto(") and "lam: float = 1.0" in line for line in lines)
    assert "    .seconds: float  (property)" in lines
    assert not [line for line in lines if "0x" in line or "/" in line.partition("=")[0]]
