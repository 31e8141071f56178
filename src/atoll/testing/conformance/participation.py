"""Clients that drop out, reply late, are not asked, have little, or are new."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import LabelsNeeded
from atoll.testing.conformance.determinism import draw_strategy, require_resumes
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.models import train_odd_model
from atoll.testing.conformance.playing import gather_outcome, require_sound, train, welcome
from atoll.testing.conformance.rehearsal import (
    LATE,
    rehearse,
    rehearse_in_pairs,
    rehearse_late,
    rehearse_short,
)
from atoll.testing.conformance.tasks import NEWCOMERS, SIZES, build_task
from atoll.testing.conformance.trees import require_finite, require_same
from atoll.testing.conformance.tries import PURE


def clients_may_drop_out(method: Algorithm) -> None:
    """Check that a round with lost clients is valid, and one in which all are lost leaves the server as it was."""
    report = train(method, faults=lambda round, clients: (round == 0) & np.isin(clients, (0, 2)))
    require_sound(report, "with clients that drop out")
    if report.history[0]["replied"] != len(SIZES) - 2:
        raise ConformanceError(f"All but 2 clients must have replied. Got {report.history[0]}.")
    if not method.one_shot:
        before = rehearse_short(method).servers[0]
        after = train(method, rounds=2, faults=lambda round, clients: np.full(len(clients), round == 1))
        hint = "a client that does not reply must not count."
        require_same(before, after.server, "A round without replies must leave the server as it was.", hint)
        never = train(method, rounds=2, faults=lambda round, clients: np.full(len(clients), round == 0))
        require_sound(never, "when nobody replied in the first round")


def late_replies_are_read(method: Algorithm) -> str | None:
    """Check that late replies are read with what clients were sent, and runs stay sound, reproducible, resumable."""
    if method.one_shot:
        return "a one-shot method has one round"
    seen = rehearse_late(method)
    require_sound(seen.report, "with late replies")
    seen.require("late-replies-are-read")
    loop = gather_outcome(train(method, strategy="loop", **LATE))
    message = "With late replies, the engine's strategies `whole` and `loop` must give the same numbers."
    require_same(seen.outcome, loop, message, PURE)
    message = "A run with late replies that was stopped and resumed must end like the one that was not."
    require_resumes(seen.report, method, message, 2, eval_every=LATE["rounds"], strategy="dear", **LATE)
    return None


def odd_clients_are_served(method: Algorithm) -> None:
    """Check that clients with one sample, or without some classes, train and answer with finite numbers."""
    require_sound(
        train(method, build_task(sizes=(1, 1, 6, 2), items_by=method.items_by)),
        "with one sample and with one class",
    )


def absent_clients_keep_their_memory(method: Algorithm) -> str | None:
    """Check that nothing changes in what clients keep that are not asked, with two of nine asked in a round."""
    if method.one_shot:
        return "a one-shot method has one round"
    seen = rehearse_in_pairs(method)
    seen.require("absent-clients-keep-their-memory")
    require_sound(seen.report, "with two clients per round")
    return None


def newcomers_are_welcome(method: Algorithm) -> None:
    """Check that new clients, more than took part, get models: whole, finite, the same in every strategy."""
    for plain in (True,) if method.items_by else (True, False):
        report = rehearse(method).report if plain else train_odd_model(method)
        newcomers = replace(build_task(sizes=NEWCOMERS, items_by=method.items_by), network=report.task.network)
        models = welcome(report, newcomers)
        require_finite(models, "for new clients")
        for strategy in (draw_strategy(method), "device") if plain else ():
            message = f"The engine's strategies `whole` and `{strategy}` must give new clients the same models."
            require_same(models, welcome(report, newcomers, strategy=strategy), message, PURE)
        with suppress(LabelsNeeded):  # a method may say so
            require_finite(welcome(report, newcomers, labelled=False), "for new clients without labels")
