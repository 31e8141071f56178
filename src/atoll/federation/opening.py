"""How a run's folder is opened: for a new run, or for one that goes on where it stopped."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.data.task import Task
from atoll.federation.config import RunConfig, begin_run, describe, is_another_model
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine, Memory
from atoll.kernel.errors import RunError
from atoll.kernel.params import Tree
from atoll.records.runs import Run
from atoll.runtime.memory import choose_memory

log = logging.getLogger("atoll.federation")


def open_run(
    task: Task, algorithm: Algorithm, settings: Settings, engine: Engine, folder: Path | str | None, *, resume: bool
) -> tuple[Run | None, bool]:
    """Return the run's folder, if there is one, and whether it was begun before; raise if it was begun differently."""
    if folder is None:
        if resume:
            raise RunError("Only a run with a folder can be resumed. Got folder=None.")
        return None, False
    config = replace(describe(task, algorithm, settings), engine=dict(engine.options))
    run = Run.open(Path(folder)) if resume else begin_run(folder, config)
    if resume:
        _require_same(RunConfig.of_run(run), json.loads(json.dumps(config.as_json())), task)
    if run.statistics is None and task.splits["train"].is_known:
        run.keep_statistics(task.statistics.as_json())
    if run.scaling is None and task.scaling is not None:
        run.keep_scaling(task.scaling.as_json())
    return run, resume


def settle_memory(
    settings: Settings, task: Task, engine: Engine, folder: Path | str | None, *, resume: bool
) -> Settings:
    """Return the settings with a memory that is chosen: the run's own, or the one that a model per client fits in."""
    if settings.memory != "auto":
        return settings
    if folder is None:
        return replace(settings, memory="ram")
    if resume:
        return replace(settings, memory=RunConfig.of_run(Run.open(folder)).settings.memory)
    networks = task.networks or (task.network,)
    models = [sum(leaf.nbytes for leaf in network.initial.values()) for network in networks]
    return replace(settings, memory=choose_memory(task.clients * max(models), engine.device))


def _require_same(written: Mapping[str, Any], asked: Mapping[str, Any], task: Task) -> None:
    for part in ("task", "training", "algorithm", "settings", "schedule"):
        before = written[part]
        if before != asked[part]:
            differs = sorted(_find_differences(asked[part], before))
            raise RunError(
                f"A run must be resumed with what it was begun with. The {part} differs in {', '.join(differs)}.",
                hint="begin a new run in another folder.",
            )
    if is_another_model(written, task):
        raise RunError(
            "A run must be resumed with what it was begun with. The model computes something else: one of its "
            "attributes differs.",
            hint="begin a new run in another folder.",
        )


def _find_differences(asked: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names whose values differ; where these have names themselves, the inner ones."""
    for name in {*asked, *before}:
        mine, theirs = asked.get(name), before.get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _find_differences(mine, theirs)
        elif mine != theirs:
            yield name


def rewind(run: Run, loaded: tuple[int, Tree] | None, memory: Memory) -> int:
    """Return to the newest whole checkpoint, in the folder and in memory; return how many rounds it has.

    Everything written after it is forgotten.
    """
    rounds, kept = (0, []) if loaded is None else (loaded[0], loaded[1]["memory"])
    run.rewind(rounds)
    memory.load(kept, round=rounds)
    holders, there = run.count_keepers(rounds) if rounds else None, memory.holders(before=rounds)
    if holders is not None and there != holders:
        raise RunError(
            f"A run must be resumed with what its clients kept. After round {rounds} they had {holders} trees in "
            f"{run.folder / 'memory.sqlite'}, now there are {there}.",
            hint="put the file back, or begin a new run in another folder.",
        )
    prune(run, memory)  # as after a checkpoint, which a kill may have followed
    log.info("resumed after round %d", rounds)
    return rounds


def prune(run: Run, memory: Memory) -> None:
    """Forget what clients kept that no checkpoint can need."""
    for oldest in run.checkpoints()[:1]:
        memory.prune(round=oldest)
