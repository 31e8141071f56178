"""How long a user waits for the first round: with empty caches, and with what an earlier process left in them.

A process also remembers by itself, so each time is taken in a new one. Importing Atoll and making the task are not part
of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.data.recipe import Recipe
from atoll.federation.loop import federate
from atoll.kernel.errors import RunError
from atoll.runtime.engines.figures import TORCH_FOLDER, Measured
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.engines.parts import Part
from atoll.runtime.engines.plan import Plan


@dataclass(frozen=True)
class FirstRound:
    """The seconds until the first round is done and evaluated, and what was done in them."""

    seconds: float
    measured: list[str]  # plans
    compiled: int  # programs that torch did not find in its cache


def time_first_round(
    method: str, recipe: Mapping[str, Any], *, rounds: int, places: Mapping[str, str] | None = None, **options: Any
) -> tuple[FirstRound, FirstRound]:
    """Time the first of so many rounds in two processes, one after the other: the first one finds empty caches.

    `recipe` holds the fields of a Recipe, `options` those of the LocalEngine, `places` what to add to the environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = {"ATOLL_CACHE": str(Path(folder, "atoll")), TORCH_FOLDER: str(Path(folder, "torch")), **(places or {})}
        work = json.dumps({"method": method, "recipe": dict(recipe), "rounds": rounds, "options": options})
        cold, warm = (_run_in_new_process(work, own) for _ in range(2))
    return cold, warm


def _run_in_new_process(work: str, places: Mapping[str, str]) -> FirstRound:
    command = [sys.executable, "-m", "atoll.testing.first_round", work]
    done = subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"A first round that is timed must succeed. This one failed:\n{done.stderr.strip()}")
    return FirstRound(**json.loads(done.stdout.splitlines()[-1]))


class _Counting(LocalEngine):
    """Writes down which plans it measures."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.measured: list[str] = []

    def _measure(self, plan: Plan, part: Part, calls: int) -> Measured:
        self.measured.append(f"{part.name}: {plan}")
        return super()._measure(plan, part, calls)


class _Done(Exception):
    """The first round is done."""


def _stop(_: Mapping[str, Any]) -> None:
    raise _Done


def run_first_round(method: str, recipe: Mapping[str, Any], rounds: int, options: Mapping[str, Any]) -> FirstRound:
    """Run the first of so many rounds in this process, which should be a new one."""
    task, engine = Recipe(**recipe).build(), _Counting(**options)
    began = time.perf_counter()
    with contextlib.suppress(_Done):
        federate(task, method, rounds=rounds, engine=engine, on_round=_stop)
    seconds, loaded = time.perf_counter() - began, sys.modules.get("torch._dynamo.utils")
    misses = 0 if loaded is None else loaded.counters["inductor"]["fxgraph_cache_miss"]
    return FirstRound(seconds, engine.measured, misses)


if __name__ == "__main__":
    found = run_first_round(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(found)))  # noqa: T201 - the process that asks reads it
