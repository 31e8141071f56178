"""federate(): the only round loop. Read this file first.

A round: the server chooses a cohort and sends it its state; the engine runs the method's `local` on the cohort; what
the clients send passes the channel, which counts it; the server aggregates; from time to time all clients are
evaluated. What the clients keep stays in their memory. A client that fails, drops out or is late leaves the round
valid.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.compose import create, upgrade_record
from atoll.compose.architectures import within_architectures
from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm, Arrival, Replies, Update, describe_values
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import DivergedError, RunError
from atoll.kernel.params import Tree, flatten, named_leaves, rows_of, stacked_leaves
from atoll.kernel.predictor import predictor_of
from atoll.kernel.randomness import generator
from atoll.metrics import evaluate, evaluate_central
from atoll.metrics.evaluation import Notes, observed
from atoll.metrics.newcomers import evaluate_newcomers
from atoll.records.configuration import Settings, describe, is_another_model
from atoll.records.report import Report
from atoll.records.rounds import Round
from atoll.records.runs import Run, peak_memory
from atoll.runtime.channel import Channel, Ledger, Stage
from atoll.runtime.engines.local import Done, Job, LocalEngine, Lost
from atoll.runtime.engines.trainings import OnEpoch, Trainings
from atoll.runtime.files import alone_in
from atoll.runtime.memory import Memory, open_memory
from atoll.runtime.participation import Late, Moment
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench

log = logging.getLogger("atoll.federation")

Clients = NDArray[np.int64]
CHECKPOINT_SECONDS = 30.0
TRAINED = "trained"  # the folder of trained clients


@dataclass
class Traffic:
    """What happened to the clients of one round."""

    asked: int
    replied: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    gradients: int = 0  # evaluations: one batch of one client each
    notes: Notes = field(default_factory=list)

    def losses(self) -> dict[str, float]:
        """Mean training losses over the clients that trained."""
        totals: dict[str, list[NDArray[np.float64]]] = {}
        for _, values in self.notes:
            for name, value in values.items():
                if name.startswith("loss/"):
                    totals.setdefault(name, []).append(value)
        return {name: float(np.concatenate(parts).mean()) for name, parts in totals.items()}


def federate(
    task: Task,
    algorithm: Algorithm | str,
    *,
    settings: Settings | None = None,
    engine: LocalEngine | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    stages: Sequence[Stage] = (),
    faults: Callable[[int, Clients], NDArray[np.bool_]] | None = None,
    on_round: Callable[[Round], None] | None = None,
    on_epoch: OnEpoch | None = None,
    stop: threading.Event | None = None,
    trained: Path | str | None = None,
    **more: Any,
) -> Report:
    """Run `algorithm` on `task` and report on every client.

    A method may be given by its name: `federate(task, "ditto:lam=0.1")`. Settings can be given as keywords:
    `federate(task, Ditto(lam=0.1), rounds=50, cohort=10)`. With a `folder` the run is written there and can be
    resumed after an interruption, bit for bit. `stages` change what clients send;
    `faults(round, clients)` says which clients are lost; `on_round` is called with each round's metrics,
    `on_epoch` in the long training of one-shot methods with how many clients have done how many epochs of all.
    Once `stop` is set the run ends after its round; by default Ctrl-C and SIGTERM set it. The clients of a one-shot
    method train long: where they are is kept in the folder `trained`, by default in the run's, and found there by other
    runs whose clients train the same way.
    """
    algorithm = create(algorithm) if isinstance(algorithm, str) else algorithm
    settings = replace(settings or Settings(), **more)
    settings.check(task, algorithm)
    algorithm = within_architectures(algorithm, task)
    say_limits(algorithm)
    say_overshooting(algorithm, task.training.lr)
    engine = engine or LocalEngine()
    with ExitStack() as held:
        if folder is not None:
            held.enter_context(alone_in(Path(folder)))
        run, begun = _open_run(task, algorithm, settings, engine, folder, resume)
        if run and run.statistics is None:
            run.keep_statistics(task.statistics.as_json())
        here = engine.place(task)
        memory = open_memory(settings.memory, task.clients, run.folder if run else None)
        population, channel = Population(here, memory, settings.seed), Channel(stages)
        if run:
            held.enter_context(run.logging())
        stop = held.enter_context(interruptions(enabled=run is not None)) if stop is None else stop
        kept_in = Path(trained) if trained else run.folder / TRAINED if run else None
        trainings = Trainings(kept_in, stop, on_epoch) if algorithm.one_shot and kept_in else None
        server, first = algorithm.start(here), 0
        loaded = run.load(here.layouts, engine.device) if run and begun else None
        if run and begun:
            server, first = _resume(run, loaded, server, population.memory, channel)
            engine.adopt(loaded[1]["plans"] if loaded else [], algorithm, here)
        history = run.metrics() if run else []
        written = len(channel.ledger.entries)
        if first == 0:
            teaching = trainings.of_the_server() if trainings else None
            server = algorithm.equip(server, Workbench(population, engine, round=-1, trainings=teaching))
        late = Late(settings.late, settings.delay, settings.seed)
        late.load(loaded[1].get("late", []) if loaded else [])
        met = loaded[1]["met"].cpu().numpy().copy() if loaded else np.zeros(task.clients, dtype=bool)
        saved_at, outcomes = time.monotonic(), run.outcomes() if run and begun else None
        for round in range(first, settings.rounds):
            began = time.perf_counter()
            cohort = choose(settings, task.clients, round, late.clients)
            traffic = Traffic(asked=len(cohort))
            present = _present(settings, cohort, round, faults, traffic)
            server = _prepare(algorithm, server, engine, population, channel, met, present, round, traffic)
            arrivals = _gather(
                algorithm, server, engine, population, channel, present, settings, round, traffic, trainings
            )
            arrivals = late.passing(arrivals, round, task.clients)
            first_arrival = next(arrivals, None)
            if first_arrival is None:
                log.warning("round %d: no client replied; the server's state stays as it is", round)
            else:
                replies = Replies(
                    itertools.chain([first_arrival], arrivals),
                    keep=not algorithm.sums_suffice,
                    workbench=Workbench(population, engine, round),
                )
                server = algorithm.aggregate(server, replies)
                for _ in arrivals:  # a method that asks nothing of its replies still trains its clients
                    pass
                _require_finite(server, round, task)
                _require_variances(server, round, task)
            if traffic.lost:
                log.info("round %d: lost %d of %d clients", round, traffic.lost.total(), traffic.asked)
            took = time.perf_counter() - began
            done = round + 1
            if done == settings.rounds:
                reachable = np.setdiff1d(list_present(settings, task.clients, round), np.setdiff1d(cohort, present))
                _finish(algorithm, server, engine, population, channel, reachable, done, traffic)
            line = _line(done, traffic, channel.ledger, round)
            if settings.evaluates_after(done):
                line["evaluation"], outcomes = _evaluate(algorithm, server, engine, population, settings, done)
            line["seconds"] = {"round": took, "evaluation": time.perf_counter() - began - took}
            if trainings and trainings.found:
                line["seconds"]["found"] = sum(trainings.found)
            line["memory"] = peak_memory(engine.device)
            written_down = Round.of_json(line)
            history.append(written_down)
            stopping = stop.is_set() and done < settings.rounds  # a signal that comes later waits for the next round
            if run:
                if outcomes is not None:
                    run.save_outcomes(outcomes)
                run.record(written_down, channel.ledger.entries[written:])
                written = len(channel.ledger.entries)
                due = settings.evaluates_after(done) or time.monotonic() - saved_at > CHECKPOINT_SECONDS
                if due or stopping or done == settings.rounds:
                    kept, plans = population.memory.save(round=done), engine.chosen(algorithm, here)
                    state = {"server": server, "memory": kept, "plans": plans, "late": late.save()}
                    state["met"] = torch.from_numpy(met)
                    run.save(done, state, here.layouts, population.memory.holders(before=done))
                    population.memory.prune(round=run.checkpoints()[0])
                    saved_at = time.monotonic()
            if on_round:
                on_round(written_down)
            if stopping:
                how = f"; continue with `atoll resume {run.folder}`" if run else ""
                raise KeyboardInterrupt(f"stopped after round {done}{how}")
    return Report.of_run(task, algorithm, settings, history, channel.ledger, server, population, engine, outcomes, run)


# -- the parts of a round ------------------------------------------------------------------------------------------


def list_present(settings: Settings, clients: int, round: int) -> Clients:
    """Return the clients that are there in a round, as the schedule says."""
    return np.flatnonzero(settings.schedule(Moment(round, clients, settings.seed, settings.rounds))).astype(np.int64)


def choose(settings: Settings, clients: int, round: int, busy: Clients | None = None) -> Clients:
    """The clients asked in a round: of those who are there, and not busy with an older reply."""
    present = list_present(settings, clients, round)
    if busy is not None:
        present = np.setdiff1d(present, busy)
    size = settings.cohort_size(clients)
    if size >= len(present):
        return present
    drawn = generator(settings.seed, "cohort", round).choice(present, size, replace=False)
    return np.sort(drawn).astype(np.int64)


def _present(
    settings: Settings,
    cohort: Clients,
    round: int,
    faults: Callable[[int, Clients], NDArray[np.bool_]] | None,
    traffic: Traffic,
) -> Clients:
    """The clients of a cohort that do not drop out."""
    lost = generator(settings.seed, "drop", round).random(len(cohort)) < settings.drop
    if faults is not None:
        lost |= np.asarray(faults(round, cohort), dtype=bool)
    if lost.any():
        traffic.lost["dropped out"] += int(lost.sum())
    return cohort[~lost]


def _gather(
    algorithm: Algorithm,
    server: Tree,
    engine: LocalEngine,
    population: Population,
    channel: Channel,
    clients: Clients,
    settings: Settings,
    round: int,
    traffic: Traffic,
    trainings: Trainings | None,
) -> Iterator[Arrival]:
    """What the clients send, as it arrives; what they keep goes to their memory."""
    broadcast = algorithm.broadcast(server)
    channel.broadcast(broadcast, clients, round)

    def unicast(some: Clients) -> Tree:
        return algorithm.unicast(server, some)

    job = Job(
        population,
        clients,
        round,
        lambda cohort: algorithm.local(broadcast, cohort),
        phase=("local", algorithm),
        calls=settings.rounds,
        usual=settings.cohort_size(population.task.clients),
        unicast=unicast,
        groups=algorithm.groups(server),
        trainings=trainings,
    )
    diverged: Clients = clients[:0]
    for outcome in engine.run(job) if len(clients) else ():
        if not isinstance(outcome, Done):
            _lose(outcome, round, traffic)
            continue
        cohort, update, bad = _finite(outcome, round, traffic, population.task)
        diverged = np.concatenate([diverged, bad])
        if not len(cohort):
            continue
        channel.unicast(cohort.received, cohort.clients, round)
        _keep(cohort.population.memory, cohort.clients, update, round)
        traffic.replied += len(cohort)
        arrival = channel.up(algorithm, cohort.clients, update, round)
        yield arrival._replace(broadcast=broadcast, unicast=cohort.received)
    if len(diverged) and not traffic.replied:
        raise _diverged(diverged, round, population.task)


def _diverged(clients: Clients, round: int, task: Task) -> DivergedError:
    """The error for a round in which nobody's work stayed finite."""
    first = int(clients[0])
    return DivergedError(
        f"Training must stay finite. In round {round} it did for none of {len(clients)} clients; the first is client "
        f"{task.client_name(first)}.",
        client=first,
        round=round,
        hint="lower --lr or set --clip; the run can be resumed from its last checkpoint.",
    )


def _lose(outcome: Lost, round: int, traffic: Traffic) -> None:
    """Write down who is lost, and why."""
    traffic.lost[outcome.reason] += len(outcome.clients)
    log.warning("round %d: lost client(s) %s: %s", round, outcome.clients.tolist(), outcome.reason)


def _finite(outcome: Done[Update], round: int, traffic: Traffic, task: Task) -> tuple[Cohort, Update, Clients]:
    """The clients whose work is finite, what they return, and who the others are, of whom nothing counts."""
    cohort, update = outcome
    traffic.gradients += cohort.scanner.tally.gradients
    notes = {name: value.double() for name, value in cohort.notes.items()}
    leaves, structure = flatten([dict(update.send), update.keep, dict(update.beside)])
    values = [leaf for leaf, row in zip(leaves, stacked_leaves(structure), strict=True) if row]
    values += [] if update.weight is None else [update.weight]
    sums = [leaf.flatten(1).sum(1) if leaf.ndim > 1 else leaf for leaf in values if leaf.is_floating_point()]
    if not sums and not notes:
        return cohort, update, cohort.clients[:0]
    # One number per client for everything that it returns: a sum is finite if all of its terms are.
    table = torch.stack([*notes.values(), *(one.double() for one in sums)]).cpu().numpy()
    good = np.isfinite(table).all(axis=0)
    bad: Clients = cohort.clients[~good]
    if len(bad):
        for client in bad.tolist():
            log.warning(
                "round %d: client %s is lost: its training did not stay finite, so its reply does not count",
                round, task.client_name(client),
            )  # fmt: skip
        traffic.lost["not finite"] += len(bad)
        rows = torch.from_numpy(np.flatnonzero(good)).to(cohort.ids.device)
        cohort = replace(cohort, clients=cohort.clients[good], received=rows_of(cohort.received, rows))
        update = update.rows(rows)
    if notes and good.any():
        traffic.notes.append((cohort.clients, dict(zip(notes, table[: len(notes), good], strict=True))))
    return cohort, update, bad


def _keep(memory: Memory, clients: Clients, update: Update, round: int) -> None:
    """What an update leaves with the clients goes to their memory, that of pieces beside it."""
    for name, tree in update.beside.items():
        memory.beside(name).keep(clients, tree, round=round)
    if update.keep is not None:
        memory.keep(clients, update.keep, round=round)


def _prepare(
    algorithm: Algorithm,
    server: Tree,
    engine: LocalEngine,
    population: Population,
    channel: Channel,
    met: NDArray[np.bool_],
    present: Clients,
    round: int,
    traffic: Traffic,
) -> Tree:
    """The light exchanges with clients that are asked for the first time, if the method has any; marks them as met.

    In the first round they are rounds -n to -1 of the ledger; who comes later exchanges in the round of its arrival.
    """
    new = present[~met[present]]
    if type(algorithm).prepare is Algorithm.prepare or not len(new):
        return server
    for number in range(-algorithm.exchanges, 0):
        at, broadcast = round + number, algorithm.broadcast(server)
        job = Job(population, new, at, partial(algorithm.prepare, broadcast), ("prepare", number, algorithm))
        arrivals, answered = [], [new[:0]]
        for outcome in engine.run(job):
            if not isinstance(outcome, Done):
                log.warning("client(s) %s could not prepare: %s", outcome.clients.tolist(), outcome.reason)
            elif outcome.result is None:  # they have nothing to say
                answered.append(outcome.cohort.clients)
            else:
                cohort, update, _ = _finite(outcome, round, traffic, population.task)
                answered.append(cohort.clients)
                if len(cohort):
                    written = round or at
                    channel.broadcast(broadcast, cohort.clients, written)
                    _keep(cohort.population.memory, cohort.clients, update, at)
                    arrival = channel.up(algorithm, cohort.clients, update, written)
                    arrivals.append(arrival._replace(broadcast=broadcast))
        if not any(map(len, answered)) and traffic.lost["not finite"]:
            raise _diverged(new, round, population.task)
        new = np.concatenate(answered)
        if arrivals:
            bench = Workbench(population, engine, at)
            server = algorithm.absorb(server, Replies(arrivals, keep=True, workbench=bench))
        if not len(new):
            return server
    met[new] = True
    return server


def _finish(
    algorithm: Algorithm,
    server: Tree,
    engine: LocalEngine,
    population: Population,
    channel: Channel,
    clients: Clients,
    round: int,
    traffic: Traffic,
) -> None:
    """The last local step of those who are there, if the method has one."""
    if type(algorithm).finish is Algorithm.finish or not len(clients):
        return
    broadcast, groups = algorithm.last_broadcast(server), algorithm.groups(server)
    job = Job(population, clients, round, partial(algorithm.finish, server), ("finish", algorithm), groups=groups)
    for outcome in engine.run(job):
        if not isinstance(outcome, Done):
            log.warning("client(s) %s did not finish: %s", outcome.clients.tolist(), outcome.reason)
        elif outcome.result is not None:
            made = Done(replace(outcome.cohort, notes={}), Update(keep=outcome.result))
            cohort, update, _ = _finite(made, round - 1, traffic, population.task)
            if len(cohort):
                channel.last_broadcast(broadcast, cohort.clients, round - 1)
                _keep(cohort.population.memory, cohort.clients, update, round - 1)


def _evaluate(
    algorithm: Algorithm,
    server: Tree,
    engine: LocalEngine,
    population: Population,
    settings: Settings,
    done: int,
) -> tuple[dict[str, Any], NDArray[np.float64] | None]:
    """Scores of the personal models; after the last round also of the shared one, and of every single test sample."""
    found: dict[str, Any] = {}
    outcomes = None
    calls = settings.rounds // (settings.eval_every or max(1, settings.rounds // 10)) + 1
    shared, last = algorithm.shared(server), done == settings.rounds
    if settings.evaluation == "all":
        kinds = ["personal"]
        if last and shared is not None and type(algorithm).personalize is not Algorithm.personalize:
            kinds.append("shared")
        for kind in kinds:
            each = last and kind == "personal"
            notes: Notes = []
            scores = evaluate(
                engine, population, algorithm, server, round=done, model=kind, calls=calls, each=each, notes=notes
            )
            found[kind] = {split: one.as_json() for split, one in scores.items()}
            outcomes = scores["test"].each if each else outcomes
            if each:
                found["deployed"] = scores["test"].deployed
                found |= {"observed": seen} if (seen := observed(notes)) else {}
        mixing = algorithm.mixing(server) if last else None
        if mixing is not None:
            found["mixing"] = mixing.tolist()
        clusters = algorithm.found_clusters(server) if last else None
        if clusters is not None:
            found["clusters"] = clusters.as_json()
        if last and population.task.unseen is not None:
            found["newcomers"] = evaluate_newcomers(
                engine, algorithm, server, population.task.unseen, seed=settings.seed, round=done
            )
    if population.task.central is not None and shared is not None:
        found["central"] = evaluate_central(engine, population.task, shared, exact=algorithm.solved)
        if last:
            found.setdefault("deployed", predictor_of(shared).bytes)
    return found, outcomes


def _line(done: int, traffic: Traffic, ledger: Ledger, round: int) -> dict[str, Any]:
    """The metrics of a round, as they are written."""
    return {
        "round": done,
        "asked": traffic.asked,
        "replied": traffic.replied,
        "lost": dict(traffic.lost),
        "loss": traffic.losses(),
        **({"observed": seen} if (seen := observed(traffic.notes)) else {}),
        "gradients": traffic.gradients,
        "bytes": ledger.in_round(round),
    }


def _require_finite(server: Tree, round: int, task: Task) -> None:
    sums: dict[torch.device, list[Tensor]] = {}  # a server may hold a few tables on the CPU beside models on a GPU
    for leaf in flatten(server)[0]:
        if leaf.is_floating_point():
            sums.setdefault(leaf.device, []).append(leaf.sum())
    if not all(bool(torch.isfinite(torch.stack(some).sum())) for some in sums.values()):
        raise DivergedError(
            f"Training must stay finite. The server's state after round {round} of {task.name} is not.",
            round=round,
            hint="lower --lr or set --clip; the run can be resumed from its last checkpoint.",
        )


def _require_variances(server: Tree, round: int, task: Task) -> None:
    variances = [(name, leaf) for name, leaf in named_leaves(server) if name.endswith("running_var") and leaf.numel()]
    lowest = [(name, leaf.min()) for name, leaf in variances]
    if lowest and bool((torch.stack([value for _, value in lowest]) < 0).any()):
        name, value = min(lowest, key=lambda one: float(one[1]))
        raise DivergedError(
            f"A variance must not be negative. In the server's state after round {round} of {task.name}, {name!r} is "
            f"{float(value):.3g}.",
            round=round,
            hint="scale only what is trained, `w.step(delta, size)`, or take a model without BatchNorm.",
        )


# -- around the loop -----------------------------------------------------------------------------------------------


def say_limits(algorithm: Algorithm) -> None:
    """Say aloud when hyperparameters make a method equal to a simpler one."""
    for other, values in algorithm.limits.items():
        if all(getattr(algorithm, name) == value for name, value in values.items()):
            log.warning("%s with %s does the same as %s", type(algorithm).__name__, describe_values(values), other)


def say_overshooting(algorithm: Algorithm, lr: float) -> None:
    """Say aloud when a penalty is so strong that steps lead away from what it pulls to."""
    for name, value in algorithm.pulls(lr).items():
        if value > 2:
            log.warning(
                "%s: %s must be at most 2, or steps lead away from where they are pulled. It is %g (lr %g)",
                type(algorithm).__name__, name, value, lr,
            )  # fmt: skip


def _open_run(
    task: Task,
    algorithm: Algorithm,
    settings: Settings,
    engine: LocalEngine,
    folder: Path | str | None,
    resume: bool,
) -> tuple[Run | None, bool]:
    """The run's folder, and whether it was begun before."""
    if folder is None:
        if resume:
            raise RunError("Only a run with a folder can be resumed. Got folder=None.")
        return None, False
    config = {**describe(task, algorithm, settings), "engine": engine.options}
    if not resume:
        return Run.create(Path(folder), config), False
    run = Run.open(Path(folder))
    written = run.config
    for part in ("task", "training", "algorithm", "settings", "schedule"):
        asked = _plain(config[part])
        before = written.get(part, {})
        if part == "algorithm":
            before = upgrade_record(before)
        if before != asked:
            differs = sorted(_differing(asked, before))
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
    return run, True


def _differing(asked: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """The names whose values differ; where these have names themselves, the inner ones."""
    for name in {*asked, *before}:
        mine, theirs = asked.get(name), before.get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _differing(mine, theirs)
        elif mine != theirs:
            yield name


def _plain(value: Any) -> Any:
    """As it looks after a round trip through JSON."""
    return json.loads(json.dumps(value))


def _resume(
    run: Run, loaded: tuple[int, Tree] | None, server: Tree, memory: Memory, channel: Channel
) -> tuple[Tree, int]:
    """The state of the newest whole checkpoint; everything written after it is forgotten."""
    rounds, state = loaded if loaded is not None else (0, {"server": server, "memory": None})
    run.rewind(rounds)
    memory.load(state["memory"], round=rounds)
    kept, there = run.kept(rounds) if rounds else None, memory.holders(before=rounds)
    if kept is not None and there != kept:
        raise RunError(
            f"A run must be resumed with what its clients kept. After round {rounds} they had {kept} trees in "
            f"{run.folder / 'memory.sqlite'}, now there are {there}.",
            hint="put the file back, or begin a new run in another folder.",
        )
    channel.ledger.entries.extend(run.ledger())
    log.info("resumed after round %d", rounds)
    return state["server"], rounds


@contextmanager
def interruptions(*, enabled: bool) -> Iterator[threading.Event]:
    """Ctrl-C or SIGTERM lets the round finish, so that nothing is lost; a second one stops at once."""
    stop = threading.Event()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        log.warning("stopping after this round; once more to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
