"""federate(): the only round loop. Read this file first.

A round: the server chooses a cohort and sends it its state; the engine runs the method's `local` on the cohort; what
the clients send passes the channel, which counts it; the server aggregates; from time to time clients are evaluated,
all or a sample. What the clients keep stays in their memory. A client that fails, drops out or is late leaves the
round valid.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from atoll.compose import as_method
from atoll.compose.architectures import within_architectures
from atoll.compose.steps import adopt_step_size
from atoll.data.task import Task, require_task
from atoll.federation.exchange import Traffic
from atoll.federation.guards import require_sound
from atoll.federation.labels import label
from atoll.federation.progress import call_all, show_progress
from atoll.federation.report import Report
from atoll.federation.session import Session
from atoll.federation.settings import Settings, count_epochs
from atoll.kernel.algorithm import Algorithm, Arrival, Replies
from atoll.kernel.engine import Engine, require_engine
from atoll.kernel.job import Job, Local
from atoll.kernel.params import Tree
from atoll.kernel.randomness import generator
from atoll.metrics.afterwards import evaluate_round
from atoll.metrics.evaluation import Arrays, collect_observations
from atoll.protect.channel import Channel
from atoll.protect.stages import Stage
from atoll.records.rounds import Round
from atoll.records.runs import peak_memory
from atoll.runtime.engines import LocalEngine
from atoll.runtime.engines.trainings import OnEpoch

if TYPE_CHECKING:
    from atoll.federation.typed import GivenSettings

log = logging.getLogger("atoll.federation")

Clients = NDArray[np.int64]
OF_A_POINT = ("sample", "personal", "central")  # what a curve by epoch has of an evaluation


def federate(
    task: Task,
    algorithm: Algorithm | str,
    *,
    settings: Settings | None = None,
    engine: Engine | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    stages: Sequence[Stage] = (),
    faults: Callable[[int, Clients], NDArray[np.bool_]] | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_reply: Callable[[int, Arrival], None] | None = None,
    on_epoch: OnEpoch | None = None,
    on_point: Callable[[dict[str, Any], Tree], None] | None = None,
    stop: threading.Event | None = None,
    trained: Path | str | None = None,
    progress: bool = True,
    **more: Unpack[GivenSettings],
) -> Report:
    """Run `algorithm` on `task` and report on every client.

    A method may be given by its name: `federate(task, "ditto:lam=0.1")`. Settings can be given as keywords:
    `federate(task, Ditto(lam=0.1), rounds=50, cohort=10)`. With a `folder` the run is written there and can be
    resumed after an interruption, bit for bit. `stages` change what clients send;
    `faults(round, clients)` says which clients are lost; `on_round` is called with each round's metrics,
    `on_reply` with a round's number and replies as the server reads them, a row per client, `on_epoch` in the long
    training of one-shot methods with how many clients have done how many of all epochs. With `curve=(1, 11, 21)` the
    answer of a one-shot method is scored after these epochs, too; `on_point` is called with each point and the server's
    state there.
    Once `stop` is set the run ends after its round; by default Ctrl-C and SIGTERM set it. The clients of a one-shot
    method train long: their progress is kept in the folder `trained`, by default in the run's, where other runs
    whose clients train the same way find it. With `progress`, a bar is shown in terminals and notebooks.
    """
    require_task(task)
    require_engine(engine)
    method = as_method(algorithm)
    task = adopt_step_size(task, method)
    settings = (settings or Settings()).change(more, federate).resolve(task.clients)
    settings.check(task, method)
    with show_progress(settings.rounds, enabled=progress) as bar:
        opened = Session.open(
            task, within_architectures(method, task.public_facts()), settings, engine or LocalEngine(), folder, stages,
            resume=resume, faults=faults, on_round=call_all(bar.begin(label(method)), on_round), on_reply=on_reply,
            on_point=on_point, on_epoch=call_all(bar.show_epoch, on_epoch), stop=stop, trained=trained,
        )  # fmt: skip
        with opened as session:
            for round in session.rounds():
                cohort = choose(session, round)
                replies = exchange(session, round, cohort)  # broadcast, local work, channel, ledger
                session.server = conclude(session, replies)
                close(session, round)  # check, evaluate, record, save a checkpoint
    return session.report()


def choose(session: Session, round: int) -> Clients:
    """Choose the cohort of a round; return those of it that do not drop out."""
    clients, train = session.task.clients, session.task.splits["train"]
    samples = (
        train.sizes(np.arange(clients)) if train.is_known and session.settings.select_clients != "uniform" else None
    )
    session.cohort = session.settings.choose(clients, round, session.busy, session.known, samples)
    session.traffic = Traffic(asked=len(session.cohort))
    lost = generator(session.settings.seed, "drop", round).random(len(session.cohort)) < session.settings.drop
    if session.faults is not None:
        lost |= np.asarray(session.faults(round, session.cohort), dtype=bool)
    if lost.any():
        session.traffic.lost["dropped out"] += int(lost.sum())
    return session.cohort[~lost]


def exchange(session: Session, round: int, present: Clients) -> Replies | None:
    """Send the server's state and have the clients work; return their replies, or None if nobody replies."""
    session.present, met = present, session.met
    session.server, prepared = session.exchanges.prepare(session.server, present[~met[present]], round, session.traffic)
    met[prepared] = True
    adder = session.exchanges.protection.adder
    job = Job(
        Local(), session.method, session.server, present, round, session.method.groups(session.server),
        calls=session.settings.rounds, usual=session.settings.cohort_size(len(met)), sums=session.adds_up,
        stages=session.channel.stages, masked=adder is not None,
        neighbours=0 if adder is None else adder.neighbours,
    )  # fmt: skip
    draw_curve(session, job)
    arrived = session.late.pass_on(session.exchanges.gather(job, session.traffic, session.cohort), round, len(met))
    session.arrivals = session.watch(arrived, round)
    first = next(session.arrivals, None)
    if first is None and session.exchanges.protection.always_releases:
        first = session.exchanges.send_nothing(job)
    if first is None:
        log.warning("round %d: no client replied; the server's state stays as it is", round)
        return None
    keep, bench = not session.method.sums_suffice, session.engine.bench(session.population, round)
    arrivals = itertools.chain([first], session.arrivals)
    return Replies(
        arrivals, keep=keep, workbench=bench, rule=session.exchanges.protection.rule_in(round, session.cohort)
    )


def conclude(session: Session, replies: Replies | None) -> Tree:
    """Return the server's state after it has read the replies of a round: as it was if there are none."""
    return session.server if replies is None else session.method.aggregate(session.server, replies)


def draw_curve(session: Session, job: Job) -> None:
    """Score what a one-shot method would answer had its clients trained for fewer epochs, as the settings ask.

    All points are of one training, which pauses and goes on. What is sent for them is no message: nobody counts it.
    """
    engine, trainings = session.engine, session.trainings
    aside = replace(session.exchanges, channel=Channel(seed=session.settings.seed))
    for epoch in session.settings.curve:
        if epoch == count_epochs(session.method):  # the end of the round scores it
            break
        assert trainings is not None
        trainings.until = epoch
        traffic = Traffic(asked=len(job.clients))
        arrivals = [*aside.gather(job, traffic, session.cohort)]
        began = engine.clock()
        if arrivals:
            replies = Replies(arrivals, keep=True, workbench=engine.bench(session.population, job.round))
            server = conclude(session, replies)
            found, _ = evaluate(session, server, job.round + 1, last=False)
            add_point(session, epoch, found, server, traffic)
        session.aside += engine.clock() - began
    if trainings is not None:
        trainings.until = None


def add_point(session: Session, epoch: int, evaluation: dict[str, Any], server: Tree, traffic: Traffic) -> None:
    """Add a point to the curve, with what clients observed on the way, and show it to `on_point`."""
    seen = collect_observations(traffic.notes, session.scored)
    session.points.append({"epoch": epoch, "evaluation": evaluation, **({"observed": seen} if seen else {})})
    if session.on_point:
        session.on_point(session.points[-1], server)


def close(session: Session, round: int) -> None:
    """End a round: check the state, evaluate, record, save a checkpoint, call `on_round`, and stop if asked to."""
    for _ in session.arrivals:  # clients train even if the method reads no reply
        pass
    session.learn(round)
    require_sound(session.server, round, session.population.task, session.method)
    traffic, settings, done = session.traffic, session.settings, round + 1
    if traffic.lost:
        log.info("round %d: lost %d of %d clients", round, traffic.lost.total(), traffic.asked)
    took = session.engine.clock() - session.began
    if done == settings.rounds:
        everybody = settings.list_present(session.task.clients, round)
        reachable = everybody[~np.isin(everybody, np.setdiff1d(session.cohort, session.present))]
        session.exchanges.finish(session.server, reachable, done, traffic)
    found = describe(session, round)
    if settings.evaluates_after(done):
        found["evaluation"], session.outcomes = evaluate(session, session.server, done, last=done == settings.rounds)
    evaluation_took = session.engine.clock() - session.began - took
    if settings.curve:
        if settings.curve[-1] == (epochs := count_epochs(session.method)):
            kept = {name: found["evaluation"][name] for name in OF_A_POINT if name in found["evaluation"]}
            add_point(session, epochs, kept, session.server, traffic)
        found["curve"] = session.points
    found["seconds"] = {"round": took - session.aside, "evaluation": evaluation_took + session.aside}
    if session.trainings and session.trainings.found:
        found["seconds"]["found"] = sum(session.trainings.found)
    line = Round.of_json({**found, "memory": peak_memory(session.engine.device)})
    stopping = session.stop.is_set() and done < settings.rounds  # a signal that comes later waits for the next round
    session.record(line, stopping=stopping)
    if session.on_round:
        session.on_round(line)
    if stopping:
        how = f"; continue with `atoll resume {session.run.folder}`" if session.run else ""
        raise KeyboardInterrupt(f"stopped after round {done}{how}")


def evaluate(session: Session, server: Tree, done: int, *, last: bool) -> tuple[dict[str, Any], Arrays | None]:
    """Score a state of the server after so many rounds; after the last one, also all that is asked at the end."""
    settings = session.settings
    return evaluate_round(
        session.engine, session.population, session.method, server, round=done, seed=settings.seed, last=last,
        calls=settings.rounds // settings.every + 1, scored=session.scored, metric=settings.metric,
        triggered=settings.show_trigger(session.task) if last else None,
        out_of=settings.count_honest(session.task.clients),
    )  # fmt: skip


def describe(session: Session, round: int) -> dict[str, Any]:
    """Return what happened in a round, as a line of metrics.jsonl."""
    traffic = session.traffic
    return {
        "round": round + 1,
        "asked": traffic.asked,
        "replied": traffic.replied,
        "lost": dict(traffic.lost),
        "loss": traffic.losses(),
        **({"observed": seen} if (seen := collect_observations(traffic.notes, session.scored)) else {}),
        "gradients": traffic.gradients,
        "bytes": session.channel.ledger.bytes_in_round(round),
    }
