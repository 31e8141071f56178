"""Runs that are watched: what goes to and fro is written down, and what is wrong on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm, Arrival, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.wrapper import Wrapper, title_of
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance.engines import OwnMemory, population_of
from atoll.testing.conformance.errors import ConformanceError, blame
from atoll.testing.conformance.methods import remember
from atoll.testing.conformance.playing import LONG, gather_outcome, read_kept, train
from atoll.testing.conformance.tasks import draw_number
from atoll.testing.conformance.trees import copy_tree, list_leaves, require_same, take_row
from atoll.testing.conformance.tries import TRIED_EVERY, call_hook, try_again, try_on_device

HOOKS = (
    "absorb", "aggregate", "broadcast", "equip", "finish", "local", "personalize", "prepare", "shared", "unicast",
    "welcome",
)  # fmt: skip
LATE: dict[str, Any] = {"rounds": 4, "cohort": 3, "late": 0.5, "delay": 2}


@dataclass
class Rehearsal:
    """A run that was watched: what went to and fro, what it left, and what was wrong, by the check that finds it so."""

    method: Algorithm
    updates: dict[tuple[int, int], tuple[Update, int]] = field(default_factory=dict)  # by round and client: its row
    broadcasts: dict[int, Tree] = field(default_factory=dict)  # by round
    unicasts: dict[tuple[int, int], Tree] = field(default_factory=dict)
    notes: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    far: dict[tuple[int, int], tuple[Update, int]] = field(default_factory=dict)  # in rounds that were not played
    servers: dict[int, Tree] = field(default_factory=dict)  # after each round
    wrong: dict[str, ConformanceError] = field(default_factory=dict)
    report: Report = field(init=False)
    outcome: Any = field(init=False)

    @contextmanager
    def finding(self, check: str) -> Iterator[None]:
        """Remember what is wrong, and go on: others look at this run, too."""
        try:
            with blame(self.method):
                yield
        except ConformanceError as error:
            self.wrong.setdefault(check, error)

    def require(self, check: str) -> None:
        """Raise what this check found."""
        if check in self.wrong:
            raise self.wrong[check]

    def note(self, broadcast: Tree, cohort: Cohort, update: Update | None) -> None:
        """Write down what clients did in a round."""
        self.broadcasts[cohort.round] = broadcast
        for k, client in enumerate(cohort.clients.tolist()):
            self.unicasts[cohort.round, client] = take_row(cohort.received, k)
            self.notes[cohort.round, client] = {name: value[k] for name, value in cohort.notes.items()}
            if update is not None:
                self.updates[cohort.round, client] = update, k


@remember(2)
def rehearse(method: Algorithm) -> Rehearsal:
    """Watch a long run of all clients together, in which everything is tried again in other ways."""
    seen = Rehearsal(method)
    hooks: dict[str, Callable[..., Any]] = {"local": note_clients(seen, "local"), "aggregate": note_servers(seen)}
    if method.defines("prepare"):
        hooks["prepare"] = note_clients(seen, "prepare")
    hooks = guard(seen, {**hooks, **try_again(seen, hooks)})
    report = train(with_hooks(method, hooks), rounds=LONG, evaluation="all", eval_every=scored_every(method))
    seen.report = replace(report, algorithm=method)  # nobody watches what is asked of it from now on
    seen.outcome = gather_outcome(seen.report)
    return seen


@remember(4)
def rehearse_short(method: Algorithm, strategy: str = "whole") -> Rehearsal:
    """Watch a short run, with clients one by one (`loop`) or on devices of their own (`device`)."""
    seen = Rehearsal(method)
    hooks: dict[str, Callable[..., Any]] = {"local": note_clients(seen, "local"), "aggregate": note_servers(seen)}
    if strategy == "loop":
        hooks = guard(seen, hooks)
    report = train(with_hooks(method, hooks), strategy=strategy)
    seen.report = replace(report, algorithm=method)
    seen.outcome = gather_outcome(seen.report)
    return seen


@remember(2)
def rehearse_in_pairs(method: Algorithm) -> Rehearsal:
    """Watch a long run with two clients in each round; what the others keep must stay."""
    seen = Rehearsal(method)
    note = note_clients(seen, "local")
    last: list[tuple[Cohort, Tree]] = []

    def local(algorithm: Algorithm, broadcast: Tree, cohort: Cohort) -> Update:
        now = copy_tree(read_kept(population_of(cohort).memory))
        with seen.finding("absent-clients-keep-their-memory"):
            for asked, before in last:
                absent = {client: tree for client, tree in before.items() if int(client) not in asked.clients}
                after = {client: now.get(client) for client in absent}
                require_same(absent, after, "A client that was not asked must keep what it has.")
        last[:] = [(cohort, now)]
        update: Update = note(algorithm, broadcast, cohort)
        if cohort.round % TRIED_EVERY == 0:
            with seen.finding("clients-are-isolated"):
                try_on_device(algorithm, broadcast, cohort, update, cohort.round // TRIED_EVERY % len(cohort))
        return update

    report = train(with_hooks(method, {"local": local}), rounds=LONG, cohort=2)
    seen.report = replace(report, algorithm=method)
    seen.outcome = gather_outcome(seen.report)
    return seen


@remember(2)
def rehearse_late(method: Algorithm) -> Rehearsal:
    """Watch a run in which replies are late: each must be read with what its client was sent."""
    seen = Rehearsal(method)

    def aggregate(algorithm: Algorithm, server: Tree, replies: Replies) -> Tree:
        asked: list[Params | Stack] = []
        if replies._kept is not None and replies._workbench is not None:
            replies._workbench = note_models(cast("Workbench", replies._workbench), asked)
        after = algorithm.aggregate(server, replies)
        with seen.finding("late-replies-are-read"):
            if replies._kept is not None:
                require_own_starts(method, algorithm.broadcast(server), replies._kept, [after, asked])
        return after

    report = train(with_hooks(method, {"aggregate": aggregate}), evaluation="all", eval_every=LATE["rounds"], **LATE)
    seen.report = replace(report, algorithm=method)
    seen.outcome = gather_outcome(seen.report)
    return seen


def scored_every(method: Algorithm) -> int:
    """Draw after how many rounds clients of a long run are scored; there it can be stopped."""
    return draw_number(method, "stop", LONG // 3, LONG - 1)


def note_models(bench: Workbench, asked: list[Params | Stack]) -> Workbench:
    """Return a workbench that writes down which models are asked for answers."""

    class Noting(Workbench):
        def answers(self, models: Params | Stack, x: Tensor, *, features: bool = False) -> Tensor:
            asked.append(models)
            return super().answers(models, x, features=features)

    return Noting(**{one.name: getattr(bench, one.name) for one in fields(bench)})


def require_own_starts(method: Algorithm, newest: Tree, arrivals: Sequence[Arrival], made: Tree) -> None:
    """Raise if a table of models, one for each reply, has a late one that begins at the newest model.

    No client has ever had such a model: it is what a client was sent that its change belongs to.
    """
    replied = sum(len(one.clients) for one in arrivals)
    tables = [leaf for _, leaf in list_leaves(made) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == replied]
    now = {place.rpartition("/")[2]: leaf for place, leaf in list_leaves(newest) if isinstance(leaf, Tensor)}
    for late in (one for one in arrivals if one.late):
        then = {place.rpartition("/")[2]: leaf for place, leaf in list_leaves(late.broadcast)}
        for name, stack in late.fields.items():
            for leaf, change in stack.items():
                start, old = now.get(leaf), then.get(leaf)
                if start is None or old is None or start.shape != change.shape[1:] or torch.equal(start, old):
                    continue
                for client, row in zip(late.clients, start + change, strict=True):
                    rows = [table for table in tables if table.shape[1:] == row.shape]
                    if any(bool((table == row).flatten(1).all(1).any()) for table in rows if row.numel() > 1):
                        raise ConformanceError(
                            f"A late reply must be read with what its client was sent. {title_of(method)} adds "
                            f"{name!r} of client {client}, {late.late} round(s) late, to the newest model.",
                            hint="replies.models(start) begins at what each client was sent.",
                        )


@dataclass(frozen=True, kw_only=True)
class Watched(Wrapper):
    """A method that is watched."""

    inner: Algorithm


def with_hooks(method: Algorithm, hooks: Mapping[str, Callable[..., Any]]) -> Algorithm:
    """Wrap a method in other hooks, each of which gets the method and what the method's own hook gets."""
    space = {name: pass_method(hook) for name, hook in hooks.items()}
    return cast("Algorithm", type(Watched.__name__, (Watched,), space)(inner=method))


def pass_method(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Make a hook of a wrapper that passes the method inside on."""
    return lambda watched, *inputs: hook(watched.inner, *inputs)


def note_clients(seen: Rehearsal, name: str) -> Callable[..., Any]:
    """Make a hook that calls the method's `local` or `prepare` and writes down what clients did."""

    def hook(algorithm: Algorithm, broadcast: Tree, cohort: Cohort) -> Any:
        update = getattr(algorithm, name)(broadcast, cohort)
        seen.note(broadcast, cohort, update)
        return update

    return hook


def note_servers(seen: Rehearsal) -> Callable[..., Any]:
    """Make a hook that calls the method's `aggregate` and writes down what the server is afterwards."""

    def aggregate(algorithm: Algorithm, server: Tree, replies: Replies) -> Tree:
        after = algorithm.aggregate(server, replies)
        seen.servers[len(seen.servers)] = copy_tree(after)
        return after

    return aggregate


def guard(seen: Rehearsal, hooks: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Make hooks after which everything that they could read must be as it was."""
    method = seen.method

    def guard_hook(name: str) -> Callable[..., Any]:
        work = hooks.get(name, call_hook(name))

        def hook(algorithm: Algorithm, *inputs: Any) -> Any:
            before = copy_tree([read_argument(value) for value in inputs])
            result = work(algorithm, *inputs)
            with seen.finding("inputs-are-unchanged"):
                require_same(
                    before,
                    [read_argument(value) for value in inputs],
                    f"`{name}` of {title_of(method)} must leave its inputs as they are.",
                    "an operation whose name ends in `_`, or `+=` on a tensor, writes in place.",
                )
            return result

        return hook

    mine = {name for name in HOOKS if method.defines(name)}
    return {name: guard_hook(name) for name in sorted(mine | hooks.keys())}


def read_argument(value: Any) -> Tree:
    """Return what a method can read through an argument, and must not write to."""
    if isinstance(value, Cohort):
        population = population_of(value)
        task = population.task
        if isinstance(population.memory, OwnMemory):  # something is being tried on a device
            return value.received
        return {
            "received": value.received,
            "samples": task.x,
            "labels": task.y,
            "initial parameters": task.network.initial,
            "memory": read_kept(population.memory),
        }
    if isinstance(value, Replies):
        return [{"clients": torch.from_numpy(one.clients), **one.fields} for one in value._kept or ()]
    return None if isinstance(value, Workbench | np.ndarray) else value
