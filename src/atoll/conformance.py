"""What every method must pass, whoever wrote it: `atoll check NAME`, `atoll check ./mine.py`, or from a test.

Each check trains tiny models on six unequal clients in float64, where results are compared bit for bit. One client has
a single sample, one has a single class. A method is made with its default hyperparameters, or with those that are
given (`atoll check ditto:lam=0`, `check(configured(Ditto(lam=0)))`). Nothing is downloaded.

    for result in check(Ditto):
        print(result.name, result.passed, result.message)

`quadratics` makes tasks whose answers are known in closed form, for the tests that are about one method only; `play`
runs a method on them and `personal_models` reads what came out.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll import algorithms
from atoll.algorithm import Algorithm, Replies, Update, WithEverybody, describe_values, hyperparameters
from atoll.channel import Channel
from atoll.cohort import Cohort, Population
from atoll.data.task import Task, Training
from atoll.engines.local import FORCED, Done, Job, LocalEngine, one_thread_each
from atoll.engines.programs import Plan
from atoll.errors import AtollError, HyperparameterError, LabelsNeeded
from atoll.federation import federate
from atoll.hyperparameters import Hyperparameter
from atoll.memory import Memory, RamMemory
from atoll.models import MLP, BodyAndHead
from atoll.params import Params, Stack, Tree, flatten, rows_of, stacked_leaves, unflatten
from atoll.predictor import BESIDE, predictor_of
from atoll.randomness import default_generator, generator
from atoll.report.report import Report
from atoll.runs import quietly
from atoll.serialise import from_bytes, to_bytes
from atoll.workbench import Workbench

__all__ = [
    "Check", "ConformanceError", "Result", "check", "checks", "configured", "personal_models", "play", "quadratics",
]  # fmt: skip

Method = type[Algorithm]
Watch = Callable[[Cohort, Update, Callable[[Cohort], Update]], None]

SIZES = (17, 1, 12, 5, 9, 2)  # samples of each client; the fourth has one class only
NEWCOMERS = (9, 3, 1, 4, 6, 2, 8, 5)  # samples of clients that are never seen: there are more of them
FEATURES, CLASSES = 5, 3
FEW = 2  # clients of a round in which not all are asked
PUBLIC = 11  # samples that everybody may see
STRATEGIES = ("chunk:2", "chunk:4", "loop", "threads", "traced")  # each is compared with "whole"
HOOKS = (
    "absorb", "aggregate", "broadcast", "finish", "local", "personalize", "prepare", "shared", "unicast", "welcome",
)  # fmt: skip
PURE = "pass what differs between clients in `carry` or `given`; a step must not capture it from outside."


class ConformanceError(AtollError, AssertionError):
    """A method does not do what every method must."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold; `function` raises if it does not, and may return a remark."""

    name: str
    describe: str
    function: Callable[[Method], str | None]

    def run(self, method: Method) -> str:
        """Raise ConformanceError unless it holds; returns a remark, such as why there was nothing to check."""
        try:
            with quietly():  # lost clients and limits are provoked on purpose
                return self.function(method) or ""
        except ConformanceError:
            raise
        except Exception as error:
            raise ConformanceError(f"{method.__name__} failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Result:
    """How a check went; `message` says what is wrong, or remarks on what was not checked."""

    name: str
    passed: bool
    message: str
    seconds: float


_CHECKS: list[Check] = []


def _check(function: Callable[[Method], str | None]) -> Callable[[Method], str | None]:
    """Name a check after its function; its docstring describes it."""
    _CHECKS.append(Check(function.__name__.strip("_").replace("_", "-"), function.__doc__ or "", function))
    return function


def checks() -> list[Check]:
    """All checks, in the order in which they are run."""
    return list(_CHECKS)


def check(method: Method, on_result: Callable[[Result], None] | None = None) -> list[Result]:
    """Run all checks on a method; `on_result` is called after each."""
    results = []
    for one in checks():
        began, passed = time.perf_counter(), True
        try:
            message = one.run(method)
        except ConformanceError as error:
            passed, message = False, str(error)
        results.append(Result(one.name, passed, message, time.perf_counter() - began))
        if on_result is not None:
            on_result(results[-1])
    return results


def configured(algorithm: Algorithm) -> Method:
    """A method whose defaults are the hyperparameters of this one; of other ones it declares no limits."""
    method = type(algorithm)
    if algorithm == method():
        return method
    values = [(one.name, one.type, getattr(algorithm, one.name)) for one in fields(method) if one.init]
    space = {"__module__": method.__module__, "limits": {}}
    return make_dataclass(method.__name__, values, bases=(method,), namespace=space, frozen=True, kw_only=True)


# -- the checks ----------------------------------------------------------------------------------------------------


@_check
def _same_seed_same_bits(method: Method) -> None:
    """Two runs with one seed agree in every bit; another seed gives another run, unless of a closed form."""
    algorithm = method()
    first, second, other = (_train(algorithm, seed=seed, evaluation="all", eval_every=1) for seed in (0, 0, 1))
    hint = "draw from `atoll.randomness` only, and keep no state in the method or its module."
    _require_same(_outcome(first), _outcome(second), "Two runs with one seed must agree.", hint)
    if first.ledger.entries != second.ledger.entries or _metrics(first) != _metrics(second):
        raise ConformanceError("Two runs with one seed must log the same. Their metrics or ledgers differ.", hint=hint)
    models, initial = personal_models(first), _task().network.initial
    trained = any(_difference(model, initial) is not None for model in models)
    networks = all(_difference(model, initial, math.inf) is None for model in models)
    if method.closed_form:
        message = "A closed form must not depend on the order of batches, and so not on the seed."
        _require_same(models, personal_models(other), message, tolerance=1e-8)
    elif trained and networks and _difference(models, personal_models(other)) is None:
        raise ConformanceError(
            "Another seed must give another run. Seeds 0 and 1 give the same models.",
            hint="a seed decides the order of batches; does the method fix it itself?",
        )


@_check
def _strategies_agree(method: Method) -> None:
    """One vectorised cohort, chunks, one client at a time, threads and traced steps give the same bits."""
    whole = _reference(method)
    for strategy in STRATEGIES:
        _require_same(
            whole,
            _outcome(_train(method(), strategy=strategy)),
            f"The engine's strategies `whole` and `{strategy}` must give the same numbers.",
            PURE,
        )


@_check
def _clients_are_isolated(method: Method) -> None:
    """A client's update is the same whoever trains beside it, and whatever data they have."""

    def watch(cohort: Cohort, update: Update, again: Callable[[Cohort], Update]) -> None:
        for k, client in enumerate(cohort.clients):
            _require_same(
                _of_client(update, k),
                _of_client(again(_some(cohort, [k])), 0),
                f"Client {client} must do the same alone as in a cohort of {len(cohort)}.",
                PURE,
            )
        for changed in (0, len(cohort) - 1):
            client = int(cohort.clients[changed])
            task = _altered(cohort.population.task, client)
            after = again(replace(cohort, population=replace(cohort.population, task=task), notes={}))
            for k in range(len(cohort)):
                if k != changed:
                    _require_same(
                        _of_client(update, k),
                        _of_client(after, k),
                        f"Client {cohort.clients[k]} must not depend on the data of client {client}.",
                        "nothing may be computed across the clients of a cohort; that is the server's work.",
                    )

    _train(_watched(method, watch), rounds=2)


@_check
def _order_of_clients_does_not_matter(method: Method) -> None:
    """Clients in another order do the same, and the server makes the same of their replies."""
    seen: list[tuple[Cohort, Update]] = []

    def watch(cohort: Cohort, update: Update, again: Callable[[Cohort], Update]) -> None:
        seen[:] = [(cohort, update)]
        order = generator(0, "order").permutation(len(cohort))
        shuffled = again(_some(cohort, order))
        for position, k in enumerate(order):
            _require_same(
                _of_client(update, int(k)),
                _of_client(shuffled, position),
                f"Client {cohort.clients[k]} must do the same wherever it stands in the cohort.",
                "use `cohort.ids`, not positions.",
            )

    def aggregate(algorithm: Algorithm, server: Tree, replies: Replies) -> Tree:
        result = method.aggregate(algorithm, server, replies)
        if not seen:  # nobody has replied yet, because nothing was asked of the replies
            return result
        bench = replies.workbench
        forth, back = (
            method.aggregate(algorithm, server, _replies(algorithm, server, *seen[0], step, bench)) for step in (1, -1)
        )
        _require_same(
            forth,
            back,
            "The server must not depend on the order in which replies arrive.",
            "weigh replies by their weight, not by their position.",
            tolerance=1e-9,
        )
        return result

    _train(_watched(method, watch, aggregate=aggregate), rounds=2)


@_check
def _inputs_are_unchanged(method: Method) -> None:
    """No part of a method writes into what it receives: states, messages, memory, data, initial parameters."""

    def guarded(name: str) -> Callable[..., Any]:
        def hook(algorithm: Algorithm, *inputs: Any) -> Any:
            before = _copy([_readable(value) for value in inputs])
            result = getattr(method, name)(algorithm, *inputs)
            _require_same(
                before,
                [_readable(value) for value in inputs],
                f"`{name}` of {method.__name__} must leave its inputs as they are.",
                "an operation whose name ends in `_`, or `+=` on a tensor, writes in place.",
            )
            return result

        return hook

    mine = [name for name in HOOKS if getattr(method, name) is not getattr(Algorithm, name)]
    guard = _subclass(method, {name: guarded(name) for name in {*mine, "local", "aggregate"}})
    for strategy in ("whole", "loop"):  # some writes are possible only where there is a single client
        _train(guard(), strategy=strategy, rounds=2, evaluation="all")


@_check
def _payload_survives_serialisation(method: Method) -> str | None:
    """What is sent comes out of its bytes as it went in, and the ledger counts exactly these bytes."""
    measured: dict[tuple[str, int, int, str], int] = {}

    def watch(cohort: Cohort, update: Update, *_: Any) -> None:
        fields = dict(update.send)
        if fields and update.weight is not None:  # it travels with them
            fields["weight"] = Stack.of(weight=update.weight)
        for field, stack in fields.items():
            for k, client in enumerate(cohort.clients):
                row = stack.client(k)
                message = to_bytes(row)
                _require_same(row, from_bytes(message, row.layout), f"Field {field!r} must survive serialisation.")
                measured["up", int(client), cohort.round, field] = len(message)

    def broadcast(algorithm: Algorithm, server: Tree) -> Tree:
        sent.append(method.broadcast(algorithm, server))
        return sent[-1]

    sent: list[Tree] = []
    report = _train(_watched(method, watch, broadcast=broadcast))
    sent = sent[-len(report.history) :]  # without that of `prepare`
    for round, tree in enumerate(sent):
        for client in range(len(SIZES)):
            if tree is not None:
                measured["down", client, round, "broadcast"] = len(to_bytes(tree))
    last = report.algorithm.last_broadcast(report.server)
    if last is not None:
        measured |= {("down", k, len(sent) - 1, "last broadcast"): len(to_bytes(last)) for k in range(len(SIZES))}
    counted: dict[tuple[str, int, int, str], int] = {
        (message.direction, message.client, message.round, message.field): message.bytes
        for message in report.ledger.messages()
        if message.round >= 0 and message.field != "unicast"
    }
    if counted != measured:
        wrong = min(key for key in counted.keys() | measured.keys() if counted.get(key) != measured.get(key))
        raise ConformanceError(
            f"The ledger must hold the bytes of every message. For {wrong} it says {counted.get(wrong)}, "
            f"serialised it has {measured.get(wrong)}."
        )
    return None if any(key[0] == "up" for key in measured) else "this method sends nothing"


@_check
def _only_what_is_declared_leaves(method: Method) -> str | None:
    """Only declared fields are sent; neither what clients keep nor their samples are among them."""
    fields: set[str] = set()

    def watch(cohort: Cohort, update: Update, *_: Any) -> None:
        fields.update(update.send)
        undeclared = update.send.keys() - method.sends.keys()
        if undeclared:
            raise ConformanceError(
                f"{method.__name__} must declare what it sends. It sends {sorted(undeclared)}, declared are "
                f"{sorted(method.sends)}.",
                hint='declare it: sends = {"name": "model"} (or "statistic", "labels").',
            )
        for k, client in enumerate(cohort.clients):
            one = _of_client(update, k)
            kept, sent = dict(_leaves(one["keep"])), dict(_leaves(one["send"]))
            samples = cohort.population.task.x[_owned(cohort.population.task, int(client))]
            for name, leaf in sent.items():
                for private, value in kept.items():
                    if _telling(value) and value.shape == leaf.shape and torch.equal(value, leaf):
                        raise ConformanceError(
                            f"What is kept must not leave. Client {client} keeps {private} and sends it as {name}.",
                            hint="send what the server needs and keep the rest: Update(send=..., keep=...).",
                        )
                if _contains(leaf, samples):
                    raise ConformanceError(f"Raw samples must not leave. Client {client} sends one in {name}.")

    _train(_watched(method, watch))
    return None if fields else "this method sends nothing"


@_check
def _stop_and_resume(method: Method) -> str | None:
    """A run that is stopped and resumed ends as the one that was not, with either kind of memory."""
    if method.one_shot:
        return "a one-shot method has one round"
    asked: dict[str, Any] = {"rounds": 4, "evaluation": "all", "eval_every": 1}
    straight = _train(method(), **asked)
    for memory in ("ram", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            run: dict[str, Any] = {**asked, "memory": memory, "folder": Path(folder) / "run"}
            try:
                _train(method(), on_round=_stop_after(2), **run)
            except _Stopped:
                resumed = _train(method(), resume=True, **run)
            same = {"server": straight.server, "personal": personal_models(straight)}
            there = {"server": resumed.server, "personal": personal_models(resumed)}
            if memory == "ram":
                same["kept"], there["kept"] = (_kept(one.population.memory) for one in (straight, resumed))
            _close(resumed)
        message = f"A run that was stopped and resumed (memory: {memory}) must end like the one that was not."
        hint = "all state belongs in the server's state and in `Update(keep=...)`."
        _require_same(same, there, message, hint)
        if _metrics(straight) != _metrics(resumed) or straight.ledger.entries != resumed.ledger.entries:
            raise ConformanceError(f"{message} Their metrics or ledgers differ.", hint=hint)
    return None


@_check
def _clients_may_drop_out(method: Method) -> None:
    """A round with lost clients is valid, and one in which all are lost leaves the server as it was."""
    report = _train(method(), faults=lambda round, clients: (round == 0) & np.isin(clients, (0, 2)))
    _require_finite(_outcome(report), "with clients that drop out")
    if report.history[0]["replied"] != len(SIZES) - 2:
        raise ConformanceError(f"All but 2 clients must have replied. Got {report.history[0]}.")
    if not method.one_shot:
        before = _train(method(), rounds=1)
        after = _train(method(), rounds=2, faults=lambda round, clients: np.full(len(clients), round == 1))
        hint = "who does not reply must not count."
        _require_same(before.server, after.server, "A round without replies must leave the server as it was.", hint)
        never = _train(method(), rounds=2, faults=lambda round, clients: np.full(len(clients), round == 0))
        _require_finite(_outcome(never), "when nobody replied in the first round")


@_check
def _odd_clients_are_served(method: Method) -> None:
    """Clients with one sample, and clients that lack classes, train and stay finite."""
    _require_finite(_outcome(_train(method(), _task(sizes=(1, 1, 6, 2)))), "with one sample and with one class")


@_check
def _batchnorm_and_dropout_work(method: Method) -> None:
    """Models with BatchNorm and dropout train; buffers keep their type; strategies agree."""
    for kind, tolerance in (("batchnorm", 1e-8), ("dropout", 0.0)):
        task = _task(kind)
        whole, loop = (_outcome(_train(method(), task, strategy=one)) for one in ("whole", "loop"))
        _require_finite(whole, f"on a model with {kind}")
        types = {name: leaf.dtype for name, leaf in task.network.initial.items()}
        for place, leaf in _leaves(whole):
            name = place.rpartition("/")[2]
            if isinstance(leaf, Tensor) and types.get(name, leaf.dtype) != leaf.dtype:
                raise ConformanceError(
                    f"Leaves must keep their type. {place} was {types[name]}, now it is {leaf.dtype}.",
                    hint="integer buffers are not averaged; `replies.mean` takes their maximum.",
                )
        message = f"On a model with {kind}, `whole` and `loop` must give the same numbers."
        _require_same(whole, loop, message, PURE, tolerance)


@_check
def _absent_clients_keep_their_memory(method: Method) -> str | None:
    """With two of six clients asked in a round, nothing changes in what the others keep."""
    if method.one_shot:
        return "a one-shot method has one round"
    last: list[tuple[Cohort, Tree]] = []

    def watch(cohort: Cohort, *_: Any) -> None:
        now = _copy(_kept(cohort.population.memory))
        for asked, before in last:
            absent = {client: tree for client, tree in before.items() if int(client) not in asked.clients}
            after = {client: now.get(client) for client in absent}
            _require_same(absent, after, "A client that was not asked must keep what it has.")
        last[:] = [(cohort, now)]

    _require_finite(_outcome(_train(_watched(method, watch), rounds=4, cohort=2)), "with two clients per round")
    return None


@_check
def _newcomers_are_welcome(method: Method) -> None:
    """Clients that were never seen, more than took part, get models: whole, finite, the same in every strategy."""
    for task in (_task(), _task("batchnorm")):
        report = _train(method(), task)
        newcomers = replace(_task(sizes=NEWCOMERS), network=task.network)
        models = _welcomed(report, newcomers)
        _require_finite(models, "for new clients")
        for strategy in STRATEGIES if task is _task() else ():
            message = f"The engine's strategies `whole` and `{strategy}` must give new clients the same models."
            _require_same(models, _welcomed(report, newcomers, strategy=strategy), message, PURE)
        with suppress(LabelsNeeded):  # a method may say so
            _require_finite(_welcomed(report, newcomers, labelled=False), "for new clients without labels")


@_check
def _bad_hyperparameters_are_refused(method: Method) -> str | None:
    """Each bad value raises an error that says what must be and what was given."""
    for one in hyperparameters(method):
        for value in _bad_values(one):
            try:
                method(**{one.name: value})
            except HyperparameterError as error:
                if "must be" not in str(error) or "Got" not in str(error):
                    raise ConformanceError(
                        f"The error for {one.name}={value!r} must say what it must be and what it got. It says: {error}"
                    ) from error
            else:
                raise ConformanceError(
                    f"`{one.name}` of {method.__name__} must be {one.expected}, but {value!r} was accepted.",
                    hint="give the field a range: Annotated[float, Range(low=0)]; call super().__post_init__().",
                )
    return None if hyperparameters(method) else "this method has no hyperparameters"


@_check
def _declared_limits_hold(method: Method) -> str | None:
    """With the hyperparameters of a declared limit, personal models equal those of the simpler method.

    So they must where few clients are asked in a round, unless the limit is declared for everybody only.
    """
    everybody = {None: "the same stream name and number of steps give the same batches."}
    some = {FEW: "begin with `cohort.initial`, or declare it `WithEverybody(...)`."}
    for other, values in method.limits.items():
        limit, simple = method(**values), algorithms.find(other)()
        for asked, hint in (everybody if isinstance(values, WithEverybody) else everybody | some).items():
            _require_same(
                personal_models(_train(limit, cohort=asked)),
                personal_models(_train(simple, cohort=asked)),
                f"{method.__name__} with {describe_values(values)} must equal {other}, as it declares"
                f"{'' if asked is None else f', also with {asked} clients a round'}.",
                hint,
            )
    return None if method.limits else "this method declares no limits"


@_check
def _test_data_are_never_read(method: Method) -> None:
    """With other test labels, and with test samples that are not even numbers, training is the same."""
    task = _task()
    test = task.splits["test"].order
    relabelled, unreadable = task.y.clone(), task.x.clone()
    relabelled[test] = (task.y[test] + 1) % CLASSES
    unreadable[test] = math.nan
    for poisoned, what in ((replace(task, y=relabelled), "labels"), (replace(task, x=unreadable), "samples")):
        _require_same(
            _reference(method),
            _outcome(_train(method(), poisoned)),
            f"Training must not depend on test {what}.",
            "select on the split `val`.",
        )


@_check
def _one_shot_methods_upload_once(method: Method) -> str | None:
    """Each client of a one-shot method uploads once and downloads once.

    One exchange of statistics may go before, and a download after the upload, for clients that then train on.
    """
    if not method.one_shot:
        return "not a one-shot method"
    messages = list(_train(method()).ledger.messages())
    early = [message for message in messages if message.round < 0]
    if any(message.direction == "up" and message.kind == "model" for message in early):
        raise ConformanceError("Before training, a one-shot method may exchange statistics. Models were uploaded.")
    for some in (early, [message for message in messages if message.round >= 0]):
        for direction in ("up", "down"):
            found = {(message.client, message.round) for message in some if message.direction == direction}
            if len(found) != len({client for client, _ in found}):
                raise ConformanceError(
                    f"A one-shot method must send once {direction} per client. Got (client, round) {sorted(found)}.",
                    hint="before training, statistics may be exchanged once, and no models.",
                )
    said = ["after an exchange of statistics"] if early else []
    said += ["with a download after the upload"] if any(one.field == "last broadcast" for one in messages) else []
    return "; ".join(said) or None


# -- training and watching -----------------------------------------------------------------------------------------


@functools.cache
def _task(kind: str = "plain", sizes: tuple[int, ...] = SIZES) -> Task:
    """Clients of these sizes, with a tiny network; the fourth client has a single class."""
    draw = generator(0, "conformance")
    centers = draw.normal(size=(CLASSES, FEATURES))
    data = {}
    for client, size in enumerate(sizes):
        y = np.zeros(size, np.int64) if client == 3 else draw.integers(CLASSES, size=size)
        x = centers[y] + draw.normal(size=(size, FEATURES))
        data[f"client {client}"] = (torch.from_numpy(x), torch.from_numpy(y))
    with default_generator(0):
        model = MLP((FEATURES,), CLASSES, hidden=(8,)) if kind == "plain" else _odd_model(kind)
    training = Training(lr=0.1, batch_size=4)
    task = Task.of_clients(data, model.double(), name="conformance", classes=CLASSES, training=training)
    y = draw.integers(CLASSES, size=PUBLIC)
    x = centers[y] + draw.normal(size=(PUBLIC, FEATURES))
    return replace(task, public=(torch.from_numpy(x), torch.from_numpy(y)))


def _odd_model(kind: str) -> nn.Module:
    layer = nn.BatchNorm1d(8) if kind == "batchnorm" else nn.Dropout(0.3)
    return BodyAndHead(nn.Sequential(nn.Linear(FEATURES, 8), layer, nn.ReLU()), nn.Linear(8, CLASSES))


class _Traced(LocalEngine):
    """Traces every step, which the engine does by itself only where there is much work ahead."""

    def _plan(self, job: Job) -> Plan:
        return Plan("whole", mode="traced")

    def _calls(self, job: Job, plan: Plan) -> int:
        return FORCED


@functools.cache
def _engine(strategy: str) -> LocalEngine:
    if strategy == "traced":
        return _Traced(device="cpu", dtype=torch.float64)
    return LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy=strategy)


def play(task: Task, algorithm: Algorithm, rounds: int = 1, *, strategy: str = "whole", **more: Any) -> Report:
    """A run in float64 without evaluation, in which no client may fail; `more` goes to `federate`."""
    with one_thread_each():  # these models are so small that a second thread only costs
        more = {"evaluation": "none", **more}
        report = federate(task, algorithm, engine=_engine(strategy), rounds=rounds, **more)
    failed = {reason for line in report.history for reason in line["lost"]} - {"dropped out"}
    if failed:
        raise ConformanceError(f"Every client must be able to train. Some failed: {'; '.join(sorted(failed))}")
    return report


def _train(algorithm: Algorithm, task: Task | None = None, *, rounds: int = 3, **more: Any) -> Report:
    """A short run on the usual task."""
    return play(task or _task(), algorithm, 1 if algorithm.one_shot else rounds, **more)


def _reference(method: Method) -> Tree:
    """The outcome of the usual run, which several checks compare with."""
    return _outcome(_train(method()))


def _subclass(method: Method, hooks: Mapping[str, Callable[..., Any]]) -> Method:
    """The same method with other hooks; it keeps its name, so that messages are about the author's own."""
    return type(method.__name__, (method,), {**hooks, "__module__": method.__module__})


def _watched(method: Method, watch: Watch, **hooks: Callable[..., Any]) -> Algorithm:
    """The method, with `watch(cohort, update, again)` called on every update; `again` makes one for another cohort."""

    def local(algorithm: Algorithm, broadcast: Tree, cohort: Cohort) -> Update:
        update = method.local(algorithm, broadcast, cohort)
        if cohort.scanner.limit is None:  # a measurement of the engine is cut short
            watch(cohort, update, lambda other: method.local(algorithm, broadcast, other))
        return update

    return _subclass(method, {"local": local, **hooks})()


class _Stopped(Exception):
    """Ends a run from outside."""


def _stop_after(rounds: int) -> Callable[[dict[str, Any]], None]:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == rounds:
            raise _Stopped

    return on_round


# -- what is compared ----------------------------------------------------------------------------------------------


def _outcome(report: Report) -> Tree:
    """All that a run leaves: the server's state, what clients keep, and their models."""
    kept = _kept(report.population.memory)
    return _copy({"server": report.server, "kept": kept, "personal": personal_models(report)})


def _kept(memory: Memory) -> dict[str, Tree]:
    """What each client keeps, by itself and in the memories beside."""
    saved = memory.save(round=0)
    return {} if saved is None else _by_client(saved)


def _by_client(saved: Tree) -> dict[str, Tree]:
    kept: dict[str, Tree] = {
        str(int(client)): {"": _row(saved["kept"], k)} for k, client in enumerate(saved["clients"])
    }
    for place, apart in saved["beside"].items():
        for client, tree in _by_client(apart).items():
            kept.setdefault(client, {})[place] = tree
    return kept


def personal_models(report: Report) -> list[Params]:
    """Each client's own model after a run, made without its test data."""
    algorithm, server, clients = report.algorithm, report.server, report.task.clients
    job = Job(
        report.population,
        np.arange(clients),
        report.settings.rounds,
        lambda cohort: cohort.stacked(predictor_of(algorithm.personalize(server, cohort)).values),
        phase=("conformance", algorithm),
        groups=algorithm.groups(server),
    )
    return _by_number(report.engine, job)


def _welcomed(report: Report, newcomers: Task, *, labelled: bool = True, strategy: str = "whole") -> list[Params]:
    """The models of new clients after a run."""
    network = newcomers.network.initial

    def work(cohort: Cohort) -> Stack:
        learner = replace(cohort, labelled=labelled)
        deployed = predictor_of(report.algorithm.welcome(report.server, learner))
        return learner.stacked(deployed.model or deployed.values)

    population = Population(newcomers, RamMemory(newcomers.clients), seed=1)
    phase = ("welcome", report.algorithm, labelled)
    models = _by_number(_engine(strategy), Job(population, np.arange(newcomers.clients), 0, work, phase))
    for client, model in enumerate(models):
        if any(name.startswith(BESIDE) for name in model):  # no single model: an ensemble, for example
            continue
        if {name: leaf.shape for name, leaf in model.items()} != {name: leaf.shape for name, leaf in network.items()}:
            raise ConformanceError(f"A new client must get a whole model, {network}. Client {client} got {model}.")
    return models


def _by_number(engine: LocalEngine, job: Job) -> list[Params]:
    """The model of each client of a job."""
    models: dict[int, Params] = {}
    reason = ""
    with one_thread_each():
        for outcome in engine.run(job):
            if isinstance(outcome, Done):
                models |= {int(client): _row(outcome.result, k) for k, client in enumerate(outcome.cohort.clients)}
            else:
                reason = f" The others: {outcome.reason}"
    if len(models) < len(job.clients):
        raise ConformanceError(
            f"Every client must get a model. Only {sorted(models)} of {len(job.clients)} did.{reason}"
        )
    return [models[client] for client in range(len(models))]


def _metrics(report: Report) -> str:
    """The log without times; as text, in which a score that does not exist equals itself."""
    varying = ("seconds", "memory")  # of the machine
    return json.dumps([{key: value for key, value in line.items() if key not in varying} for line in report.history])


def _of_client(update: Update, k: int) -> dict[str, Tree]:
    """One client's part of an update."""
    return {
        "send": {name: _row(stack, k) for name, stack in update.send.items()},
        "weight": None if update.weight is None else update.weight[k],
        "keep": _row(update.keep, k),
        "beside": _row(dict(update.beside), k),
    }


def _readable(value: Any) -> Tree:
    """What a method can read through an argument, and must not write to."""
    if isinstance(value, Cohort):
        task = value.population.task
        return {
            "received": value.received,
            "samples": task.x,
            "labels": task.y,
            "initial parameters": task.network.initial,
            "memory": _kept(value.population.memory),
        }
    return None if isinstance(value, Replies | np.ndarray) else value


def _row(tree: Tree, k: int) -> Tree:
    """One client's part of a stacked tree."""
    leaves, structure = flatten(tree)
    rows = stacked_leaves(structure)
    mine = [leaf[k] if row else leaf for leaf, row in zip(leaves, rows, strict=True)]
    return unflatten(structure, mine, one_client=True)


def _some(cohort: Cohort, order: Sequence[int] | NDArray[np.int64]) -> Cohort:
    """The clients at these positions of a cohort."""
    leaves, structure = flatten(cohort.received)
    rows = stacked_leaves(structure)
    index = torch.as_tensor(np.asarray(order))
    mine = [leaf[index] if row else leaf for leaf, row in zip(leaves, rows, strict=True)]
    return replace(cohort, clients=cohort.clients[order], received=unflatten(structure, mine), notes={})


def _replies(
    algorithm: Algorithm, server: Tree, cohort: Cohort, update: Update, step: int, workbench: Workbench
) -> Replies:
    """The replies of a cohort, arriving one by one in its order or, with step -1, in the opposite one."""
    channel = Channel()
    arrivals = []
    for k in range(len(cohort))[::step]:
        one = slice(k, k + 1)
        send = {name: stack.rows(one) for name, stack in update.send.items()}
        weight = None if update.weight is None else update.weight[one]
        arrival = channel.up(algorithm, cohort.clients[one], Update(send, weight), cohort.round)
        sent = {"broadcast": algorithm.broadcast(server), "unicast": rows_of(cohort.received, one)}
        arrivals.append(arrival._replace(**sent))
    return Replies(arrivals, keep=not algorithm.sums_suffice, workbench=workbench)


def _owned(task: Task, client: int) -> Tensor:
    """The numbers of all samples of a client."""
    parts = [split.order[split.offsets[client] : split.offsets[client + 1]] for split in task.splits.values()]
    return torch.cat(parts)


def _altered(task: Task, client: int) -> Task:
    """The same task with other samples and labels for one client."""
    mine = _owned(task, client)
    x, y = task.x.clone(), task.y.clone()
    x[mine], y[mine] = 1 - 2 * x[mine], (y[mine] + 1) % CLASSES
    return replace(task, x=x, y=y)


def _bad_values(one: Hyperparameter) -> list[Any]:
    """Values that a hyperparameter must refuse."""
    bad: list[Any] = [[], *([] if one.optional else [None])]
    if one.choices:
        return [*bad, "no such choice", 0.5]
    if one.type in (int, float):
        bad += ["three", True, math.nan, math.inf]
    if one.type is int:
        bad.append(1.5)
    if one.type is bool:
        bad += ["yes", 2]
    if one.type is str:
        bad.append(3)
    if one.range is not None:
        low, high = one.range.low, one.range.high
        bad += [one.type(low - 1)] if math.isfinite(low) else []
        bad += [one.type(high + 1)] if math.isfinite(high) else []
        bad += [one.type(end) for end, out in ((low, one.range.open_low), (high, one.range.open_high)) if out]
    return bad


# -- comparing trees -----------------------------------------------------------------------------------------------


def _leaves(tree: Tree, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their places, such as `server/head.bias`."""
    if isinstance(tree, Mapping):
        for name, part in tree.items():
            yield from _leaves(part, f"{place}/{name}" if place else str(name))
    elif isinstance(tree, list | tuple):
        for number, part in enumerate(tree):
            yield from _leaves(part, f"{place}/{number}" if place else str(number))
    elif tree is not None:
        yield place, tree


def _difference(left: Tree, right: Tree, tolerance: float = 0.0) -> str | None:
    """Where two trees differ first, and by how much."""
    mine, theirs = dict(_leaves(left)), dict(_leaves(right))
    if mine.keys() != theirs.keys():
        return f"{min(mine.keys() ^ theirs.keys())}, which only one of them has"
    for place, value in mine.items():
        other = theirs[place]
        if not isinstance(value, Tensor):
            if value != other:
                return f"{place}: {value!r} and {other!r}"
        elif value.shape != other.shape or value.dtype != other.dtype:
            return f"{place}: {tuple(value.shape)} {value.dtype} and {tuple(other.shape)} {other.dtype}"
        elif not torch.equal(value, other):
            gap = float((value.double() - other.double()).abs().max())
            if not gap <= tolerance:
                return f"{place} by {gap:.3g}"
    return None


def _require_same(left: Tree, right: Tree, message: str, hint: str | None = None, tolerance: float = 0.0) -> None:
    where = _difference(left, right, tolerance)
    if where is not None:
        raise ConformanceError(f"{message} They differ in {where}.", hint=hint)


def _require_finite(tree: Tree, when: str) -> None:
    for place, leaf in _leaves(tree):
        if isinstance(leaf, Tensor) and not bool(torch.isfinite(leaf).all()):
            raise ConformanceError(f"Training must stay finite {when}. {place} is not.")


T = TypeVar("T")


def _copy(tree: T) -> T:
    """The same tree in tensors of its own."""
    leaves, structure = flatten(tree)
    copied: T = unflatten(structure, [leaf.clone() for leaf in leaves])
    return copied


def _telling(leaf: Any) -> bool:
    """Whether a tensor says something about its client: counters and zeros are the same for all."""
    return isinstance(leaf, Tensor) and leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())


def _contains(leaf: Tensor, samples: Tensor) -> bool:
    """Whether one of the samples stands in a tensor, value for value."""
    values = leaf.flatten()
    if len(values) < FEATURES or values.dtype != samples.dtype:
        return False
    windows = values.unfold(0, FEATURES, 1)
    return bool((windows[:, None] == samples[None]).all(-1).any())


def _close(report: Report) -> None:
    close = getattr(report.population.memory, "close", None)
    if close is not None:
        close()


# -- tasks with known answers --------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """f(w) = 1/2 (w - c)^T H (w - c): the output is the loss, and a sample carries c and H."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        """One loss per sample."""
        size = len(self.w)
        apart, curvature = self.w - x[:, :size], x[:, size:].reshape(-1, size, size)
        return 0.5 * torch.einsum("ni,nij,nj->n", apart, curvature, apart)


def quadratics(
    optima: Tensor,
    curvatures: Tensor | None = None,
    *,
    samples: Iterable[int] | None = None,
    start: Tensor | None = None,
    lr: float = 0.1,
) -> Task:
    """Client k has f_k(w) = 1/2 (w - c_k)^T H_k (w - c_k), and takes one full-batch step per epoch.

    `optima` holds c_k in its rows, `curvatures` the H_k (the identity by default), `samples` how much each client
    counts. The parameters begin at `start`, or at 0, and are called `w`.
    """
    clients, size = optima.shape
    curvatures = torch.eye(size, dtype=optima.dtype).expand(clients, size, size) if curvatures is None else curvatures
    sizes = [1] * clients if samples is None else list(samples)
    data = {}
    for client, number in enumerate(sizes):
        x = torch.cat([optima[client], curvatures[client].flatten()])
        data[str(client)] = (x.repeat(number, 1), torch.zeros(number, dtype=optima.dtype))
    return Task.of_clients(
        data,
        Quadratic(torch.zeros(size, dtype=optima.dtype) if start is None else start),
        name="quadratics",
        loss=_output,
        score=_output,
        training=Training(lr=lr, batch_size=max(sizes)),
        shares=(1.0, 0.0, 0.0),
    )


def _output(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs
