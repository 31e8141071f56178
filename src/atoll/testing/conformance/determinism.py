"""The same seed gives the same bits, however clients are run, alone or together, in one go or after a stop."""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.params import Tree
from atoll.kernel.predictor import BESIDE
from atoll.kernel.wrapper import title_of
from atoll.records.report import Report
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.playing import (
    ROUNDS,
    close_memory,
    deploy,
    format_metrics,
    gather_outcome,
    personal_models,
    read_kept,
    train,
)
from atoll.testing.conformance.rehearsal import Rehearsal, rehearse, rehearse_long
from atoll.testing.conformance.tasks import build_task, hold_task
from atoll.testing.conformance.trees import find_difference, require_same
from atoll.testing.conformance.tries import PURE, describe_isolation, take_client

STRATEGIES = ("chunk:4", "loop", "threads:3", "traced", "cluster")  # each is compared with "whole"


def same_seed_same_bits(method: Algorithm) -> None:
    """Check that two runs with one seed agree in every bit; another seed gives another run, unless of a closed form."""
    first = rehearse(method)
    second = train(method, evaluation="all", eval_every=1)
    hint = "draw from `atoll.kernel.randomness` only, and keep no state in the method or its module."
    require_same(first.outcome, gather_outcome(second), "Two runs with one seed must agree.", hint)
    if first.report.ledger.entries != second.ledger.entries or format_metrics(first.report) != format_metrics(second):
        raise ConformanceError("Two runs with one seed must log the same. Their metrics or ledgers differ.", hint=hint)
    models, initial = first.outcome["personal"], build_task(items_by=method.items_by).network.initial
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
    """Check that one cohort, chunks, single clients, threads, traced steps and workers give the same bits."""
    whole = rehearse(method).outcome
    for strategy in STRATEGIES:
        loop = strategy == "loop"
        other = rehearse(method, "loop").outcome if loop else gather_outcome(train(method, strategy=strategy))
        message = f"The engine's strategies `whole` and `{strategy}` must give the same numbers."
        require_same(whole, other, message, PURE)


def clients_are_isolated(method: Algorithm) -> None:
    """Check that a client does the same in a cohort as on a device, which holds its samples and its memory alone."""
    together, apart = rehearse(method), rehearse(method, "device")
    require_same_clients(together, apart)
    together.require("clients-are-isolated")
    if not method.one_shot:
        require_same_clients(rehearse_long(method), rehearse_long(method, "device"))


def order_of_clients_does_not_matter(method: Algorithm) -> None:
    """Check that clients in another order do the same, and the server makes the same of their replies."""
    rehearse(method).require("order-of-clients-does-not-matter")


def the_server_holds_no_samples(method: Algorithm) -> None:
    """Check that the server does the same without clients' samples, their numbers, and their memory."""
    task = build_task(items_by=method.items_by)
    require_same(
        method.start(task.public_facts()),
        method.start(hold_task(task, None).public_facts()),
        f"`start` of {title_of(method)} must not depend on clients' samples.",
        "what the server needs to know of clients they tell it in `prepare`.",
    )
    rehearse(method).require("the-server-holds-no-samples")


def inputs_are_unchanged(method: Algorithm) -> None:
    """Check that no part of a method writes into what it receives: states, messages, memory, data, initial model."""
    for strategy in ("whole", "loop"):  # some writes are possible only where there is a single client
        rehearse(method, strategy).require("inputs-are-unchanged")


def stop_and_resume(method: Algorithm) -> str | None:
    """Check that a run that is stopped and resumed ends as the one that was not, with either kind of memory."""
    if method.one_shot:
        return "a one-shot method has one round"
    straight = rehearse(method).report
    for memory, after in (("ram", 2), ("disk", 1)):
        message = f"A run that was stopped and resumed (memory: {memory}) must end like the one that was not."
        require_resumes(straight, method, message, after, memory=memory, rounds=ROUNDS)
    return None


class Stopped(Exception):
    """Ends a run from outside."""


def require_resumes(straight: Report, method: Algorithm, message: str, after: int, **asked: Any) -> None:
    """Play a run once more, stop it after some rounds and resume it; it must end as the one that was not stopped."""

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == after:
            raise Stopped

    with tempfile.TemporaryDirectory() as folder:
        run: dict[str, Any] = {"evaluation": "all", "eval_every": 1, **asked, "folder": Path(folder) / "run"}
        with suppress(Stopped):
            train(method, on_round=stop, **run)
        resumed = train(method, resume=True, **run)
        same = {"server": straight.server, "personal": personal_models(straight)}
        there = {"server": resumed.server, "personal": personal_models(resumed)}
        if asked.get("memory") != "disk":
            same["kept"], there["kept"] = (read_kept(one.population.memory) for one in (straight, resumed))
        close_memory(resumed)
    hint = "all state belongs in the server's state and in `Update(keep=...)`."
    require_same(same, there, message, hint)
    if format_metrics(straight) != format_metrics(resumed) or straight.ledger.entries != resumed.ledger.entries:
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
