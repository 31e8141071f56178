"""Crossings: a method with pieces, inside clusters, under late replies, compression, privacy, rules and attacks.

    python tests/oracles/crossings.py --draws 1500 --seed 1        # how many ran, were refused, differed
    python tests/oracles/crossings.py --seed 1 --only 17           # one of them, with all that it says

Crossings are drawn by seed. Each either ends as it must or is refused before a client works. What must hold of a run:

- it is finite, and no client fails;
- clients in chunks, watched from outside, leave the same bits as the whole cohort;
- what arrives is what the compressor makes of what was sent, written here in plain loops;
- where a method takes the plain mean, its server moves by the weighted mean or by the rule, late replies discounted;
- words that change nothing (`topk:1.0`, a rule that cuts nothing, noise of almost 0) leave the run as it was.

What must hold of a refusal: it is one of Atoll's errors, it names something that was typed, and its hint leads out.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1])] if __name__ == "__main__" else []

from oracles.rules import RULES, combine  # noqa: E402

from atoll import Task, Training, federate  # noqa: E402
from atoll.algorithms import list_methods, list_pairs, list_parts  # noqa: E402
from atoll.compose import create  # noqa: E402
from atoll.federation.report import Report  # noqa: E402
from atoll.federation.settings import Settings  # noqa: E402
from atoll.kernel.algorithm import Algorithm  # noqa: E402
from atoll.kernel.errors import AtollError, DivergedError  # noqa: E402
from atoll.kernel.objective import absolute_error, squared_error  # noqa: E402
from atoll.kernel.params import Params  # noqa: E402
from atoll.kernel.randomness import default_generator, generator  # noqa: E402
from atoll.kernel.wrapper import core_of  # noqa: E402
from atoll.models import MLP, BodyAndHead, CharTransformer  # noqa: E402
from atoll.protect.stages import Place, Sent, Stage  # noqa: E402
from atoll.runtime.engines import LocalEngine, planning  # noqa: E402
from atoll.testing.conformance.engines import PROGRAMS  # noqa: E402
from atoll.testing.conformance.methods import shorten  # noqa: E402
from atoll.testing.conformance.playing import gather_outcome  # noqa: E402
from atoll.testing.conformance.rehearsal import with_hooks  # noqa: E402
from atoll.testing.conformance.trees import find_difference, list_leaves  # noqa: E402
from atoll.toolbox.pairs import AnswerPiece, LocalTraining, ServerAnswer, TrainingPiece  # noqa: E402

ROUNDING = 1e-9  # between clients in chunks and all at once: where matrices of another shape are multiplied or solved
SIZES = (13, 9, 12, 6, 8, 10)  # samples of each client
SHARES = (0.5, 0.25, 0.25)
KINDS = ("classes", "norm", "numbers", "tokens", "mixed", "items")
NAMES = {
    "norm": "normalised", "numbers": "regression", "tokens": "next-token", "mixed": "architectures", "items": "items",
}  # fmt: skip


# -- tasks -------------------------------------------------------------------------------------------------------------


def smooth(width: int = 8) -> nn.Module:
    return BodyAndHead(nn.Sequential(nn.Linear(12, width), nn.Tanh()), nn.Linear(width, 3))


def normalised() -> nn.Module:
    return BodyAndHead(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(8, 3))


@cache
def task_of(kind: str, *, public: bool, items_by: str = "") -> Task:
    """Build six unequal clients of one kind, in float64; for `items`, eight users of a recommender."""
    draw = generator(0, "crossings", kind)
    training = Training(lr=0.05, batch_size=4)
    if kind == "items":
        rows = [
            (user, (3 * user + step * (1 + user % 3)) % 11, step) for user in range(8) for step in range(5 + user % 3)
        ]
        columns = dict(zip(("user", "item", "time"), map(list, zip(*rows, strict=True)), strict=True))
        made = Task.ratings(columns, fewest=(4, 1), model=items_by or None)
        return made.with_training(lr=0.05, batch_size=4)
    more: dict[str, Any] = {"classes": 3}

    def samples(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "tokens":
            text = torch.from_numpy(draw.integers(5, size=(size, 5)))
            return text[:, :-1], text[:, 1:]
        x = torch.from_numpy(draw.normal(size=(size, 12)))
        if kind == "numbers":
            return x, x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * torch.from_numpy(draw.normal(size=(size, 1)))
        y = torch.from_numpy(draw.integers(3, size=size))
        return x + 1.5 * torch.eye(12, dtype=torch.float64)[y], y

    with default_generator(0):
        models = [{"norm": normalised}.get(kind, smooth)()]
        if kind == "numbers":
            models = [MLP((12,), 1, hidden=(8,))]
            more = {"classes": None, "loss": squared_error, "score": absolute_error}
        if kind == "tokens":
            models, more = [CharTransformer((4,), 5, width=8, heads=1, layers=1)], {"classes": 5}
        if kind == "mixed":
            models = [smooth(), smooth(10)]
    data = {f"island {k}": samples(size) for k, size in enumerate(SIZES)}
    double = [model.double() for model in models]
    made = Task.of_clients(data, double, name="islands", training=training, shares=SHARES, **more)
    return replace(made, public=samples(9)) if public else made


# -- what is drawn -----------------------------------------------------------------------------------------------------


PIECES = (
    "prox:mu=0.1", "sam:rho=0.05", "asam:rho=0.2", "fsa:top_c=1", "partial:slowest=0.5", "tune:tune_epochs=1",
    "gate", "dpsgd:sample_clip=1,noise=0.1",
)  # fmt: skip
FINDERS = ("ifca", "cfl", "flhc")
METRICS = (
    "accuracy", "balanced-accuracy", "f1", "auroc", "average-precision", "log-loss", "top-2", "mae", "mse", "rmse",
    "r2", "hr@10", "ndcg@10",
)  # fmt: skip
WORDS: dict[str, tuple[Any, ...]] = {
    "cohort": (4, 0.7, "poisson:0.8"),
    "select_clients": ("power-of-choice:4", "oort", "ucb", "turns"),
    "participation": ("random:0.8", "diurnal:2", "turnover:0.3"),
    "drop": (0.2,),
    "late": (0.4,),
    "metric": METRICS,
    "compress": ("topk:0.3", "randk:0.5", "qsgd:4", "qsgd:8", "sign", "lowrank:1"),
    "aggregate": (
        "median", "trimmed:1", "meamed:1", "krum:1", "multi-krum:1", "geometric", "centered-clip", "norm-bound",
        "fltrust", "nnm+trimmed:1", "nnm:1+median", "bucket:2+median",
    ),
    "attack": (
        "sign-flip:0.2", "ipm", "gaussian", "scaling", "alie", "min-max", "mimic", "free-rider", "not-finite",
        "label-flip", "backdoor:size=1",
    ),
    "dp": ("client:noise=0.1,clip=5", "client:noise=0.1,clip=adaptive:0.5", "local:noise=0.01,clip=5"),
    "secure": ("sums", "masks"),
}  # fmt: skip
OFTEN = ("compress", "compress", "aggregate", "aggregate", "attack", "dp", "late", "late", "cohort", "metric")


@dataclass(frozen=True)
class Crossing:
    """What a user types: a method, the kind of task, and settings."""

    method: str
    kind: str
    public: bool
    rounds: int
    words: Mapping[str, Any]

    def __str__(self) -> str:
        task = f"on {NAMES[self.kind]}" if self.kind in NAMES else ""
        public = "" if self.public else "without public samples"
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.words.items())
        return " ".join(filter(None, [self.method, task, public, f"--rounds {self.rounds}", options]))

    @property
    def typed(self) -> set[str]:
        """The words by which a message may name what was typed."""
        name = self.method.partition(":")[0]
        parts = {name, *re.split(r"[+@/]", name)}
        classes = {method.__name__.lower() for one, method in list_methods().items() if one in parts}
        heads = {str(value).partition(":")[0] for value in self.words.values() if isinstance(value, str)}
        values = {word.partition("=")[0] for word in re.split(r"[:,]", self.method)[1:]}
        return {word.lower() for word in parts | classes | heads | values | self.words.keys()}

    def build(self) -> Algorithm:
        """Make the method, no longer than it takes to see it work."""
        return shorten(create(self.method))

    def task(self) -> Task:
        """Build the task; a recommender has the model by which it scores items."""
        if self.kind != "items":
            return task_of(self.kind, public=self.public)
        return task_of(self.kind, public=False, items_by=create(self.method).items_by)


@cache
def names_of_methods() -> dict[str, list[str]]:
    """List what methods there are, by what they are."""
    methods = list_methods()
    found: dict[str, list[str]] = {"rounds": [], "one shot": [], "items": []}
    for name, method in methods.items():
        found["items" if method.items_by else "one shot" if method.one_shot else "rounds"].append(name)
    found["trainings"], found["answers"] = [*list_parts(LocalTraining)], [*list_parts(ServerAnswer)]
    found["sums"] = [name for name in found["rounds"] if methods[name].sums_suffice is True]
    found["pairs"] = [*list_pairs()]
    found["before"], found["after"] = [*list_parts(TrainingPiece)], [*list_parts(AnswerPiece)]
    return found


def draw_method(draw: np.random.Generator, *, sums: bool) -> str:
    """Draw a method, often put together with something; with `sums`, mostly one whose server needs no more."""
    known, luck = names_of_methods(), draw.random(6)

    def one(of: str) -> str:
        return str(draw.choice(known[of]))

    if luck[0] < 0.08:
        name = one("items")
    elif luck[0] < 0.2:
        name = one("one shot")
    elif luck[0] < 0.27:
        before = f"+{one('before')}" if luck[4] < 0.2 else ""
        name = f"{one('trainings')}{before}/{one('answers')}" if luck[5] < 0.2 else one("pairs")
    else:
        name = one("sums" if sums and luck[4] < 0.8 else "rounds")
    values: list[str] = []
    for chance in (0.35, 0.06):
        if luck[1] < chance:
            piece, _, value = str(draw.choice(PIECES)).partition(":")
            name, values = f"{name}+{piece}", [*values, *filter(None, [value])]
    if luck[2] < 0.12 and luck[0] > 0.27:
        name, values = f"{name}@{draw.choice(FINDERS)}", [*values, "cluster_rounds=1"]
    return f"{name}:{','.join(values)}" if values else name


def draw_crossing(seed: int, number: int) -> Crossing:
    """Draw one crossing, the same for a seed and a number. Most fit together; what does not must be refused."""
    draw = generator(seed, "crossing", number)
    chosen = {str(one) for one in draw.choice([*OFTEN, *WORDS], size=draw.integers(5))}
    strays = draw.random(4) < 0.12  # into what cannot be
    method = draw_method(draw, sums=bool(chosen & {"aggregate", "dp", "secure"}))
    base = re.split(r"[+:@/]", method)[0]
    recommends = base in names_of_methods()["items"]
    kinds = ["classes"] * 6 + ["norm"] * 2 + ["numbers", "tokens"] + (["mixed"] * 4 if base in mixing() else [])
    kind = "items" if recommends else str(draw.choice(kinds))
    if strays[0]:
        kind = str(draw.choice(KINDS))
    if chosen & {"select_clients"} and not strays[1]:
        chosen |= {"cohort"}
    words = {name: values[draw.integers(len(values))] for name, values in WORDS.items() if name in chosen}
    if "metric" in words and not strays[2]:
        fitting = (
            METRICS[:7]
            if kind in ("classes", "norm", "mixed")
            else METRICS[7:11]
            if kind == "numbers"
            else (("accuracy", "log-loss") if kind == "tokens" else METRICS[11:])
        )
        words["metric"] = str(draw.choice(fitting))
    if not strays[3] and "dp" in words:
        words = {name: value for name, value in words.items() if name not in ("late", "participation", "aggregate")}
        words["cohort"] = "poisson:0.8"
    if not strays[3] and "secure" in words:
        words = {name: value for name, value in words.items() if name not in ("late", "aggregate")}
    if "late" in words:
        words["delay"] = int(draw.integers(1, 3))
    one_shot = base in names_of_methods()["one shot"] or "/" in method
    rounds = 1 if one_shot and "@" not in method else 3 if "late" in words or "@" in method else 2
    return Crossing(method, kind, bool(draw.random() < 0.9), rounds, words)


@cache
def mixing() -> set[str]:
    """Return the methods whose clients may have different networks."""
    return {name for name, method in list_methods().items() if method.mixes_architectures is True}


# -- how it is run -----------------------------------------------------------------------------------------------------


class Counting(LocalEngine):
    """Runs clients as told, and counts how often some were asked to work."""

    def __init__(self, strategy: str) -> None:
        super().__init__(device="cpu", dtype=torch.float64, strategy=f"{strategy} eager")
        self.programs, self.jobs = PROGRAMS, 0

    def run(self, *given: Any) -> Iterator[Any]:
        self.jobs += 1
        return super().run(*given)


@dataclass(frozen=True)
class Alike(Stage):
    """Every client counts the same."""

    def apply(self, sent: Sent, place: Place) -> Sent:
        return sent._replace(weight=None)


@dataclass
class Watched:
    """What was seen of a run from outside: what clients made, what arrived, and where the server was."""

    made: dict[tuple[int, int], tuple[dict[str, Params], float | None]] = field(default_factory=dict)
    models: dict[tuple[int, int], Any] = field(default_factory=dict)  # what each change is one of
    arrived: list[tuple[int, Any]] = field(default_factory=list)
    servers: list[tuple[Any, Any]] = field(default_factory=list)

    def watch(self, method: Algorithm) -> Algorithm:
        """Return the method, each of whose rounds is written down."""

        def local(inner: Algorithm, broadcast: Any, cohort: Any) -> Any:
            update = inner.local(broadcast, cohort)
            for k, client in enumerate(cohort.clients.tolist()):
                sent = {
                    name: {leaf: rows[k].clone() for leaf, rows in value.items()} for name, value in update.send.items()
                }
                self.made[client, cohort.round] = sent, None if update.weight is None else float(update.weight[k])
                self.models[client, cohort.round] = name_model(inner, broadcast, update, k)
            return update

        def aggregate(inner: Algorithm, server: Any, replies: Any) -> Any:
            after = inner.aggregate(server, replies)
            self.servers.append((server, after))
            return after

        return with_hooks(method, {"local": local, "aggregate": aggregate})


def name_model(method: Algorithm, broadcast: Any, update: Any, k: int) -> Any:
    """Return which of the server's models a client's change is of: that which it chose, or was told."""
    if isinstance(broadcast, dict) and broadcast.get("inside"):
        return "inside"
    if "cluster" in update.send:
        return int(update.send["cluster"]["cluster"][k])
    return None if update.of_model is None else int(update.of_model[k])


def run(
    crossing: Crossing, strategy: str = "whole", watched: Watched | None = None, stages: Any = (), **words: Any
) -> Report:
    """Run a crossing, watched or not; other words stand in for its own."""
    method = crossing.build()
    more: dict[str, Any] = {"rounds": crossing.rounds, "evaluation": "all", **crossing.words, **words}
    if watched is not None:
        method = watched.watch(method)
        more["on_reply"] = lambda round, arrival: watched.arrived.append((round, arrival))
    return federate(crossing.task(), method, engine=Counting(strategy), progress=False, stages=stages, **more)


def outcome_of(report: Report) -> Any:
    """Return all that a run leaves but for what compressors remember."""
    found = gather_outcome(report)
    kept = {
        client: {place: without_rests(tree) for place, tree in places.items() if not place.startswith("compress ")}
        for client, places in found["kept"].items()
    }
    return {**found, "kept": {client: places for client, places in kept.items() if any(map(bool, places.values()))}}


def without_rests(tree: Any) -> Any:
    """Return what a client keeps, without what compressors remember."""
    return {place: leaf for place, leaf in list_leaves(tree) if not re.search(r"(^|/)compress [^/]*/", place)}


# -- what must hold ----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How a crossing ended: ran, rounded, refused, known or differed; and what is to be said of it."""

    status: str
    detail: str = ""


class Differs(Exception):
    """Something that must hold of a run does not."""


def judge(crossing: Crossing, number: int = 0) -> Outcome:
    """Run a crossing and compare it with what must hold."""
    engine_jobs = Jobs()
    try:
        with engine_jobs, warnings.catch_warnings():
            warnings.simplefilter("error")
            report = run(crossing)
    except Exception as error:  # noqa: BLE001 - whatever it raises is what is looked for
        if isinstance(error, AtollError) and not engine_jobs.asked:
            complaint = complain_of_refusal(crossing, error)
            return Outcome("differed", complaint) if complaint else Outcome("refused", str(error))
        where = "in the middle" if engine_jobs.asked else "before round 1"
        # Noise and attackers make BatchNorm's variances negative.
        known = "A variance must not be negative" in str(error) and {"attack", "dp"} & crossing.words.keys()
        return Outcome("known" if known else "differed", f"{type(error).__name__} {where}: {error}")
    try:
        rounding = check_run(crossing, report, number)
    except Differs as difference:
        return Outcome("differed", str(difference))
    except Exception as error:  # noqa: BLE001
        how = f"{type(error).__name__} when it is run in another way: {error}"
        return Outcome("differed", how)
    return Outcome("rounded" if rounding else "ran", rounding)


class Jobs:
    """Counts whether any client was asked to work while it is open."""

    asked = False

    def __enter__(self) -> Jobs:
        self.usual = Counting.run
        jobs = self

        def run(engine: Counting, *given: Any) -> Iterator[Any]:
            jobs.asked = True
            return jobs.usual(engine, *given)

        Counting.run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Counting.run = self.usual  # type: ignore[method-assign]


def check_run(crossing: Crossing, report: Report, number: int) -> str:
    """Raise Differs unless a run is what it must be; say where clients in chunks differ by rounding, if they do."""
    require_whole(report, crossing)
    found = outcome_of(report)
    require_finite(found)
    watched = Watched()
    strategy = ("loop", "chunk:2")[number % 2]
    again = run(crossing, strategy, watched)
    ended = outcome_of(again)
    if gap := find_difference(found, ended, ROUNDING):
        raise Differs(f"under {strategy} the run ends elsewhere: {gap}")
    check_messages(crossing, report, watched)
    check_server(crossing, report, watched)
    check_neutral_words(crossing, report, found, watched, number)
    return find_difference(found, ended) or ""


def require_whole(report: Report, crossing: Crossing) -> None:
    """Raise unless only those clients were lost that had to be, and all scores are numbers."""
    for line in report.history:
        allowed = {"dropped out"} | ({"not finite"} if crossing.words.get("attack") == "not-finite" else set())
        if lost := {*line["lost"]} - allowed - {"too few were left to read their sum"}:
            raise Differs(f"clients are lost: {lost.pop()}")
        for models, splits in line.get("evaluation", {}).items():
            for split, figures in splits.items() if isinstance(splits, dict) else ():
                loss = figures.get("loss") if isinstance(figures, dict) else None
                if loss is not None and not math.isfinite(loss):
                    raise Differs(f"the {models} {split} loss is {loss}")


def require_finite(found: Any, place: str = "") -> None:
    """Raise unless all that a run leaves is finite."""
    gap = find_difference(found, found, tolerance=0.0)
    if gap:
        raise Differs(f"{place}{gap.partition(' by ')[0]} is not finite")


# -- what arrives ------------------------------------------------------------------------------------------------------


def check_messages(crossing: Crossing, report: Report, watched: Watched) -> None:
    """Raise unless what arrives is what the compressor makes of what was sent."""
    words = crossing.words
    if "dp" in words or "secure" in words:
        return
    attackers = set(report.settings.draw_attackers(report.task.clients).tolist())
    rest: dict[tuple[Any, ...], np.ndarray] = {}  # of a client, a field, its shapes, and the model that it changes
    places: dict[tuple[int, str, int], set[int]] = {}  # of a round, a field and its size
    for round, arrival in watched.arrived:
        for k, client in enumerate(arrival.clients.tolist()):
            sent, weight = watched.made[client, round - arrival.late]
            if client in attackers:
                continue
            told = float(arrival.weight[k])
            if not math.isclose(told, 1.0 if weight is None else weight, rel_tol=1e-12):
                raise Differs(f"the weight {weight} of client {client} arrives as {told}")
            for name, value in arrival.fields.items():
                leaves = {leaf: rows[k] for leaf, rows in value.items()}
                floating = [leaf for leaf in sent[name] if sent[name][leaf].is_floating_point()]
                packed = crossing.words.get("compress", "none")
                if report.algorithm.sends.get(name) != "model" or not floating:
                    packed = "none"
                for leaf in leaves.keys() - set(floating if packed != "none" else ()):
                    if not torch.equal(leaves[leaf], sent[name][leaf]):
                        raise Differs(f"{name} {leaf} of client {client} changed on its way")
                if packed == "none":
                    continue
                before, after = ([tree[leaf].double().numpy() for leaf in floating] for tree in (sent[name], leaves))
                p, a = (np.concatenate([one.ravel() for one in part]) for part in (before, after))
                shapes = [one.shape for one in before]
                where = client, name, (*shapes,), watched.models[client, round - arrival.late]
                p = p + rest.get(where, 0.0)
                check_packed(packed, p, a, shapes, places.setdefault((round - arrival.late, name, len(p)), set()))
                if packed.startswith(("topk", "sign", "lowrank")):
                    rest[where] = p - a


def check_packed(words: str, p: np.ndarray, a: np.ndarray, shapes: list[tuple[int, ...]], places: set[int]) -> None:
    """Raise unless `a` is what the compression in words makes of `p`."""
    kind, _, value = words.partition(":")
    d = len(p)
    if kind == "topk":
        k = math.ceil(float(value) * d)
        order = sorted(range(d), key=lambda i: (-abs(p[i]), i))[:k]
        expected = np.zeros(d)
        for i in order:
            expected[i] = p[i]
        near(a, expected, "topk")
    elif kind == "randk":
        k = math.ceil(float(value) * d)
        places |= set(np.flatnonzero(a).tolist())
        if len(places) > k:
            raise Differs(f"randk sends {len(places)} places of {k}")
        for i in np.flatnonzero(a):
            near(a[i : i + 1], p[i : i + 1] * d / k, "randk")
        if np.abs(p).min() > 0 and np.count_nonzero(a) != k:
            raise Differs(f"randk sends {np.count_nonzero(a)} numbers, not {k}")
    elif kind == "qsgd":
        levels, norm = 2 ** (int(value) - 1) - 1, math.sqrt(float(p @ p))
        for one, made in zip(p, a, strict=True):
            exact = levels * abs(one) / norm if norm else 0.0
            level = made * levels / norm if norm else made
            if abs(level - round(level)) > 1e-4 * levels or not math.floor(exact - 1e-6) <= abs(
                round(level)
            ) <= math.ceil(exact + 1e-6):
                raise Differs(f"qsgd makes {made} of {one}, norm {norm}")
            if round(level) * one < 0:
                raise Differs(f"qsgd turns the sign of {one}")
    elif kind == "sign":
        near(a, np.where(p >= 0, 1.0, -1.0) * np.abs(p).sum() / d, "sign", 1e-6)
    elif kind == "lowrank":
        start = 0
        for shape in shapes:
            size = math.prod(shape)
            before, after = p[start : start + size], a[start : start + size]
            start += size
            m, n = shape[0] if shape else 1, math.prod(shape[1:])
            if len(shape) < 2 or int(value) * (m + n) >= m * n:
                near(after, before, "lowrank's vectors")
                continue
            big, lean = before.reshape(m, n), after.reshape(m, n)
            near(lean.T @ (big - lean), 0.0 * lean.T @ lean, "lowrank's projection", 1e-9)
            if np.linalg.matrix_rank(lean, tol=1e-9 * max(1e-12, np.abs(lean).max())) > int(value):
                raise Differs("lowrank sends a matrix of a larger rank")


def near(a: np.ndarray, b: np.ndarray, what: str, tolerance: float = 1e-12) -> None:
    """Raise Differs unless two arrays agree."""
    gap = float(np.abs(np.asarray(a) - b).max(initial=0.0))
    if not gap <= tolerance * max(1.0, float(np.abs(b).max(initial=0.0))):
        raise Differs(f"{what} differs by {gap:.3g}")


# -- what the server makes of it ---------------------------------------------------------------------------------------


def check_server(crossing: Crossing, report: Report, watched: Watched) -> None:
    """Raise unless a server of plain means moves by the weighted mean of what arrived, or by the rule."""
    plain = type(core_of(crossing.build())).aggregate is Algorithm.aggregate and "@" not in crossing.method
    if not plain or {"dp", "secure"} & crossing.words.keys() or crossing.kind == "mixed":
        return
    rule = crossing.words.get("aggregate", "mean")
    size = report.settings.cohort_size(report.task.clients)
    by_round: dict[int, list[Any]] = {}
    for round, arrival in watched.arrived:
        by_round.setdefault(round, []).append(arrival)
    for (before, after), arrivals in zip(watched.servers, by_round.values(), strict=True):
        if not isinstance(before, Params):
            return
        replies = sum(len(one.clients) for one in arrivals)
        if rule != "mean" and (rule.partition(":")[0] not in RULES or replies != size):
            return  # with fewer replies, a rule bears fewer hostile ones
        moved = [name for name, leaf in after.items() if leaf.is_floating_point()]
        fields_sent = sorted(arrivals[0].fields)
        rows, weights = [], []
        for one in arrivals:
            for k in range(len(one.clients)):
                parts = {
                    (name, leaf): value[k].double().numpy().ravel()
                    for name in fields_sent
                    for leaf, value in sorted(one.fields[name].items())
                    if value.is_floating_point()
                }
                rows.append(np.concatenate([*parts.values()]))
                weights.append(float(one.weight[k]) / math.sqrt(1 + one.late))
        table = np.stack(rows)
        mean = np.array(weights) @ table / sum(weights) if rule == "mean" else combine(rule, table)
        start = 0
        for (name, leaf), part in parts.items():
            step, start = mean[start : start + len(part)], start + len(part)
            if name == "delta" and leaf in moved:
                moved_to, within = before[leaf].numpy().ravel() + step, 1e-6 if "geometric" in rule else 1e-9
                near(after[leaf].numpy().ravel(), moved_to, f"the server's {leaf}", within)  # Weiszfeld's steps end


# -- words that change nothing -----------------------------------------------------------------------------------------


SECURE_CLIP = 20  # of norms and of weights


def largest_message(watched: Watched) -> float:
    """Return the largest norm of a message, or weight."""
    found = [1.0]
    for sent, weight in watched.made.values():
        leaves = [leaf for value in sent.values() for leaf in value.values() if leaf.is_floating_point()]
        found += [math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves)), weight or 0.0]
    return max(found)


NEUTRAL: tuple[tuple[str, Any, bool, float], ...] = (  # a setting, its value, whether clients then count alike, within
    ("compress", "topk:1.0", False, 0.0),
    ("compress", "randk:1.0", False, 0.0),
    ("participation", "random:1", False, 0.0),
    ("late", 1e-12, False, 0.0),
    ("drop", 1e-12, False, 0.0),
    ("aggregate", "trimmed:0", True, 1e-9),
    ("aggregate", "multi-krum:0", True, 1e-9),
    ("aggregate", "norm-bound:1e9", True, 1e-9),
    ("aggregate", "bucket:1+trimmed:0", True, 1e-9),
    ("attack", "scaling:share=0.2,factor=1", False, 0.0),
    ("dp", "client:noise=1e-15,clip=1e6", True, 1e-6),
    ("dp", "local:noise=1e-15,clip=1e6", True, 1e-6),
    ("secure", f"sums:clip={SECURE_CLIP},most={SECURE_CLIP}", False, 1e-5),
    ("secure", f"masks:clip={SECURE_CLIP},most={SECURE_CLIP}", False, 1e-5),
)


def check_neutral_words(crossing: Crossing, report: Report, found: Any, watched: Watched, number: int) -> None:
    """Raise unless a word that changes nothing leaves the run as it was."""
    name, value, alike, tolerance = NEUTRAL[number % len(NEUTRAL)]
    words = crossing.words.keys()
    if name in words or words & {"dp", "secure"} or (name == "secure" and "attack" in words):
        return
    if name == "aggregate" and ("late" in words or "ifca" in crossing.method):
        return  # under a rule, late replies count as all others do, and so do clusters
    if name == "dp" and (words & {"cohort", "drop"} or re.search("mtfl-adam|fafi|features|margins", crossing.method)):
        return  # means divide by the expected cohort; roots of squares near 0, and whole counts at a bound, jump
    if name == "secure" and (largest_message(watched) > 0.9 * SECURE_CLIP or "mtfl-adam" in crossing.method):
        return  # messages are cut, and roots of squares near 0 enlarge what rounding to whole numbers leaves
    if name == "attack" and re.search(r"(nnm|trimmed|meamed|krum)(\+|$)", crossing.words.get("aggregate", "")):
        return  # without a number, a rule bears as many as attack
    jobs = Jobs()
    try:
        with jobs:
            other = run(crossing, **{name: value})
    except AtollError as error:
        if jobs.asked:
            raise Differs(f"with --{name} {value} it fails in the middle: {error}") from error
        return
    ended = outcome_of(other)
    if alike:
        found = outcome_of(run(crossing, stages=(Alike(),)))
    if alike or name == "secure":  # of whole numbers rules take a median, and secure sums none
        found, ended = without_counters(found), without_counters(ended)
    gap = find_difference(found, ended, max(tolerance, ROUNDING if "aggregate" in words else 0.0))
    if gap:
        raise Differs(f"--{name} {value} changes the run: {gap}")


def without_counters(tree: Any) -> Any:
    """Return the leaves of a tree that are no whole numbers."""
    return {
        place: leaf for place, leaf in list_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }


# -- refusals ----------------------------------------------------------------------------------------------------------


def complain_of_refusal(crossing: Crossing, error: AtollError) -> str:
    """Say what is wrong with a refusal: it names nothing that was typed, or its hint leads nowhere."""
    message = str(error)
    if isinstance(error, DivergedError) or not message.strip():
        return f"refused by {type(error).__name__}: {message}"
    spoken = re.findall(r"[a-z0-9@+/_-]+", message.lower().replace("`", " "))
    whole = " ".join(spoken)
    if not any(re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", whole) for word in crossing.typed):
        return f"the refusal names nothing that was typed: {message}"
    for other in follow_hint(crossing, error.hint or ""):
        dead = "" if refusal_of(replace(other, words={})) else find_dead_end(other)  # what can never be is no dead end
        if dead:
            return f"the hint leads nowhere: {message} -> {dead}"
    return ""


def find_dead_end(crossing: Crossing, steps: int = 2) -> str:
    """Follow a hint and those that come after it; say where that ends, if it ends in a refusal."""
    error = refusal_of(crossing)
    if error is None:
        return ""
    here = f"{crossing}: {error}"
    others = [*follow_hint(crossing, getattr(error, "hint", None) or "")] if steps > 1 else []
    ends = [find_dead_end(other, steps - 1) for other in others]
    return "" if ends and not any(ends) else " -> ".join([here, *filter(None, ends)])


def follow_hint(crossing: Crossing, hint: str) -> Iterator[Crossing]:
    """Yield what is left to type by what a hint says, without all else, on a task for which nothing is missing."""
    known, method = {one.name for one in fields(Settings)}, crossing.method
    recommends = re.split(r"[+:@/]", method)[0] in names_of_methods()["items"]
    crossing = replace(crossing, kind="items" if recommends else "classes", public=True)
    usual = {"client:...": "client:noise=1", "local:...": "local:noise=1"}
    for name, value in re.findall(r"\b(\w+)='([^']+)'", hint):
        if name not in known or name in ("cohort", "select_clients"):
            continue
        bare = re.sub(r"\+dpsgd|sample_clip=[^,]*,?|noise=[^,]*,?", "", method).rstrip(":,") if name == "dp" else method
        yield replace(crossing, method=bare, words={name: usual.get(value, value)})
    for public in re.findall(r"`public=([a-z/]+)`", hint):
        if "dp" in crossing.words:
            yield replace(crossing, words={"dp": f"{crossing.words['dp']},public={public}"})
    if "without the piece" in hint:
        name = re.split(r"[+:]", method)[0]
        yield replace(crossing, method=name, words={})


def refusal_of(crossing: Crossing) -> Exception | None:
    """Return why a crossing does not run; None if it does."""
    try:
        run(crossing)
    except Exception as error:  # noqa: BLE001
        return error
    return None


# -- the command -------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Keep the engine from measuring, and the log quiet: what the command does once, and tests for themselves."""
    planning.WORTH_MEASURING = math.inf
    logging.getLogger("atoll").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)


def main() -> int:
    """Judge crossings; print what differed, and how many ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    prepare()
    numbers = [asked.only] if asked.only is not None else range(asked.first, asked.first + asked.draws)
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    for number in numbers:
        crossing = draw_crossing(asked.seed, number)
        try:
            outcome = judge(crossing, number)
        except KeyboardInterrupt:
            break
        counts[outcome.status] += 1
        if asked.verbose or asked.only is not None or outcome.status in ("differed", "known"):
            print(f"{number:5d} {outcome.status:9} {crossing}\n                {outcome.detail}", flush=True)
    seconds = time.perf_counter() - began
    said = ", ".join(f"{counts[status]} {status}" for status in ("refused", "known", "differed"))
    ran = f"{counts['ran'] + counts['rounded']} ran ({counts['rounded']} equal to rounding, the others in every bit)"
    print(f"{sum(counts.values())} crossings, seed {asked.seed}: {ran}, {said} ({seconds:.0f} s)")
    return 1 if counts["differed"] else 0


if __name__ == "__main__":
    sys.exit(main())
