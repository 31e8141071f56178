"""What runs must have in common to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.federation.report import Report
from atoll.kernel.errors import RunError


def require_same_task(one: Report, other: Report) -> None:
    """Raise RunError unless two runs have their task and model in common, and have scored the same clients."""
    if not np.array_equal(one.scored, other.scored):
        raise RunError(
            f"The runs of a comparison must have scored the same clients. With seed {one.seed}, {one.label} has "
            f"{len(one.scored):,} and {other.label} {len(other.scored):,}, or others.",
            hint="run them again with one `evaluation`.",
        )
    for part in ("task", "model"):
        mine, theirs = (_drop_place(outcome.config.get(part, {})) for outcome in (one, other))
        names = {*mine} & {*theirs} if part == "model" else {*mine, *theirs}  # older runs say less of their model
        differs = sorted(name for name in names if mine.get(name) != theirs.get(name))
        if differs:
            shown = "; ".join(f"{name}: {_describe_difference(mine, theirs, name)}" for name in differs)
            raise RunError(
                f"The runs of a comparison must have their {part} in common. {one.label} and {other.label} with seed "
                f"{one.seed} differ in {shown}.",
                hint="compare runs of the same task, or run them again with one `atoll compare`.",
            )


def _drop_place(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out where the data are: their fingerprint says whether they are the same."""
    recipe = facts.get("recipe")
    if recipe is None:
        return facts
    own = {"own": {**recipe["own"], "path": None}} if recipe.get("own") else {}
    return {**facts, "recipe": {**recipe, "data": None, **own}}


def _describe_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    """Say where two configurations differ in one thing."""
    one, other = mine.get(name), theirs.get(name)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        inner = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
        return ", ".join(f"{key} {one.get(key)!r} and {other.get(key)!r}" for key in inner)
    return f"{one!r} and {other!r}"
