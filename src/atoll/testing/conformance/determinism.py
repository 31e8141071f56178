"""The same seed gives the same bits, however clients are run, alone or together, in one go or after a stop."""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.params import Tree
from atoll.kernel.predictor import BESIDE
from atoll.kernel.wrapper import title_of
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.methods import remember
from atoll.testing.conformance.playing import (
    LONG,
    ROUNDS,
    close_memory,
    deploy,
    format_metrics,
    gather_outcome,
    personal_models,
    read_kept,
    train,
)
from atoll.testing.conformance.rehearsal import (
    Rehearsal,
    rehearse,
    rehearse_in_pairs,
    rehearse_short,
    scored_every,
)
from atoll.testing.conformance.tasks import build_task, draw_number, hold_task, task_for
from atoll.testing.conformance.trees import find_difference, require_same
from atoll.testing.conformance.tries import PURE, describe_isolation, take_client

ALWAYS = ("loop", "traced")  # strategies that are compared with "whole"
DRAWN = ("chunk:4", "threads:3", "cluster")  # of which each method is played on one


def same_seed_same_bits(method: Algorithm) -> None:
    """Check that two runs with one seed agree in every bit; another seed gives another run, unless of a closed form."""
    first = rehearse(method)
    hint = "draw from `atoll.kernel.randomness` only, and keep no state in the method or its module."
    if method.one_shot or not resumes_well(method):  # a run that was stopped and agrees is a second run
        second = train(method, rounds=LONG, evaluation="all", eval_every=scored_every(method))
        require_same(first.outcome, gather_outcome(second), "Two runs with one seed must agree.", hint)
        if first.report.ledger.entries != second.ledger.entries or format_metrics(first.report) != format_metrics(
            second
        ):
            raise ConformanceError(
                "Two runs with one seed must log the same. Their metrics or ledgers differ.", hint=hint
            )
    models, initial = rehearse_short(method).outcome["personal"], build_task(items_by=method.items_by).network.initial
    trained = any(find_difference(model, initial) is not None for model in models)
    networks = all(find_difference(model, initial, math.inf) is None for model in models)
    other = personal_models(train(method, seed=1)) if method.closed_form or (trained and networks) else []
    if method.closed_form:
        message = "A closed form must not depend on the order of batches, and so not on the seed."
        require_same(models, other, message, tolerance=1e-8)
    elif other and find_difference(models, other) is None:
        raise ConformanceError(
            "Another seed must give another run. Seeds 0 and 1 give the same models.",
            hint="a seed decides the order of batches; does the method fix it itself?",
        )


def strategies_agree(method: Algorithm) -> None:
    """Check that one cohort, single clients, traced steps, and chunks, threads or workers give the same bits."""
    whole = rehearse_short(method).outcome
    for strategy in (*ALWAYS, draw_strategy(method)):
        loop = strategy == "loop"
        other = rehearse_short(method, "loop").outcome if loop else gather_outcome(train(method, strategy=strategy))
        message = f"The engine's strategies `whole` and `{strategy}` must give the same numbers."
        require_same(whole, other, message, PURE)


def draw_strategy(method: Algorithm) -> str:
    """Draw a strategy for a method, the same in every run of the battery."""
    return DRAWN[draw_number(method, "strategy", 0, len(DRAWN))]


def clients_are_isolated(method: Algorithm) -> None:
    """Check that a client does the same in a cohort as on a device, which holds its samples and its memory alone."""
    rehearse(method).require("clients-are-isolated")
    if not method.one_shot:
        rehearse_in_pairs(method).require("clients-are-isolated")
    require_same_clients(rehearse_short(method), rehearse_short(method, "device"))


def order_of_clients_does_not_matter(method: Algorithm) -> None:
    """Check that clients in another order do the same, and the server makes the same of their replies."""
    rehearse(method).require("order-of-clients-does-not-matter")


def the_server_holds_no_samples(method: Algorithm) -> None:
    """Check that the server does the same without clients' samples, their numbers, and their memory."""
    task = task_for(method)
    require_same(
        method.start(task.public_facts()),
        method.start(hold_task(task, None).public_facts()),
        f"`start` of {title_of(method)} must not depend on clients' samples.",
        "what the server needs to know of clients they tell it in `prepare`.",
    )
    rehearse(method).require("the-server-holds-no-samples")


def inputs_are_unchanged(method: Algorithm) -> None:
    """Check that no part of a method writes into what it receives: states, messages, memory, data, initial model."""
    rehearse(method).require("inputs-are-unchanged")
    rehearse_short(method, "loop").require("inputs-are-unchanged")  # some writes need a client that is alone


def stop_and_resume(method: Algorithm) -> str | None:
    """Check that a run that is stopped and resumed ends as the one that was not, with either kind of memory."""
    if method.one_shot:
        return "a one-shot method has one round"
    require_resumed(rehearse(method).report, stop_far(method), RESUMED.format("memory: ram"))
    disk = {"memory": "disk", "evaluation": "none", "rounds": ROUNDS, "strategy": "dear"}
    require_resumes(rehearse_short(method).report, method, RESUMED.format("memory: disk"), 1, **disk)
    return None


RESUMED = "A run that was stopped and resumed ({}) must end like the one that was not."


class Stopped(Exception):
    """Ends a run from outside."""


@dataclass(frozen=True)
class Resumed:
    """A run that was stopped and resumed, and what it left."""

    report: Report
    left: Tree


@remember(2)
def stop_far(method: Algorithm) -> Resumed:
    """Play a long run once more, stop it after a round that is drawn, and resume it."""
    after = scored_every(method)  # a checkpoint comes with scores
    return stop_and_go_on(method, after, rounds=LONG, eval_every=after)


def resumes_well(method: Algorithm) -> bool:
    """Say whether a run that was stopped ends as the watched one."""
    try:
        require_resumed(rehearse(method).report, stop_far(method), "")
    except Exception:  # noqa: BLE001 - why is said where it is looked for
        return False
    return True


def stop_and_go_on(method: Algorithm, after: int, **asked: Any) -> Resumed:
    """Play a run, stop it after some rounds and resume it."""

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == after:
            raise Stopped

    with tempfile.TemporaryDirectory() as folder:
        run: dict[str, Any] = {"evaluation": "all", "eval_every": 1, **asked, "folder": Path(folder) / "run"}
        with suppress(Stopped):
            train(method, on_round=stop, **run)
        if asked["rounds"] == LONG:  # as another process: what a class or module remembers is of another run
            train(method, seed=1)
        resumed = train(method, resume=True, **run)
        left = {"server": resumed.server, "personal": personal_models(resumed)}
        if asked.get("memory") != "disk":
            left["kept"] = read_kept(resumed.population.memory)
        close_memory(resumed)
    return Resumed(resumed, left)


def require_resumes(straight: Report, method: Algorithm, message: str, after: int, **asked: Any) -> None:
    """Play a run once more, stop it after some rounds and resume it; it must end as the one that was not stopped."""
    require_resumed(straight, stop_and_go_on(method, after, **asked), message)


def require_resumed(straight: Report, resumed: Resumed, message: str) -> None:
    """Raise unless a run that was resumed ended as the one that was not stopped."""
    same = {"server": straight.server, "personal": personal_models(straight)}
    if "kept" in resumed.left:
        same["kept"] = read_kept(straight.population.memory)
    hint = "all state belongs in the server's state and in `Update(keep=...)`."
    require_same(same, resumed.left, message, hint)
    there = resumed.report
    if format_metrics(straight) != format_metrics(there) or straight.ledger.entries != there.ledger.entries:
        raise ConformanceError(f"{message} Their metrics or ledgers differ.", hint=hint)


def require_same_clients(together: Rehearsal, apart: Rehearsal) -> None:
    """Raise unless every client sent and kept the same, and deploys the same in the end."""
    for (round, client), (update, k) in together.updates.items():
        asked = sum(other == round for other, _ in together.updates)
        mine = take_client(*apart.updates[round, client])
        require_same(take_client(update, k), mine, describe_isolation(client, asked, round), PURE)
    message = "Clients must make the same models on devices, which hold their samples alone, as in a cohort."
    require_same(drop_tables(together), drop_tables(apart), message, PURE)


def drop_tables(seen: Rehearsal) -> Tree:
    """Return what a run leaves, with answers for what stands beside models: tables are as long as a cohort needs."""
    models = [
        {name: leaf for name, leaf in model.items() if not name.startswith(BESIDE)}
        for model in seen.outcome["personal"]
    ]
    return {**seen.outcome, "personal": models, "answers": deploy(seen.report, "answers")}
