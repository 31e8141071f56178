"""The golden runs: every method once, and what a run can be asked for; tiny tasks in float64."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll import LocalEngine, Report, Task, Training, create, federate
from atoll.algorithms import list_methods, list_pairs
from atoll.models import BodyAndHead, build
from atoll.runtime.engines.measuring import one_thread_each
from atoll.testing.conformance.methods import shorten

SIZES = (13, 1, 12, 5, 6)  # samples of each client; the fourth has one class only
NEWCOMERS = (7, 2)
RECOMMENDERS = ("item-factors", "neural-items")  # models that score items
FEATURES, CLASSES, ITEMS, PUBLIC, CENTRAL = 12, 3, 9, 11, 7
SQUARE = (1, 4, 3)  # the same features as an image


@dataclass(frozen=True)
class Case:
    """A run: a method on a task, asked for in words."""

    method: str
    task: str = "plain"
    strategy: str = "loop"
    how: str = "in memory"  # or: in a folder, resumed
    settings: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False  # whether another run shows nearly the same, so this one is left out by `make test`


def play(case: Case) -> Report:
    """Run a case."""
    method = shorten(create(case.method))
    task = build_task(method.items_by or case.task)
    rounds = 1 if method.one_shot else max(2, method.least_rounds)
    settings = {"rounds": rounds, "eval_every": 1, **case.settings}
    with quiet(), one_thread_each(), TemporaryDirectory() as place:
        folder = None if case.how == "in memory" else Path(place, "run")
        engine = LocalEngine(device="cpu", strategy=case.strategy, compile=False, dtype=torch.float64, remember=False)
        run = functools.partial(federate, task, method, engine=engine, progress=False, **settings)
        if folder is None:
            return run()
        if case.how == "in a folder":
            return run(folder=folder)
        stop = threading.Event()
        try:
            run(folder=folder, stop=stop, on_round=lambda line: stop.set())
        except KeyboardInterrupt:
            return run(folder=folder, resume=True)
        raise AssertionError("a run that is resumed must have stopped")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out warnings of tasks that are too small."""
    before = logging.getLogger("atoll").level
    logging.getLogger("atoll").setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger("atoll").setLevel(before)


# -- tasks -------------------------------------------------------------------------------------------------------------


def draw_models(kind: str) -> list[nn.Module]:
    """Make the networks of a task, with values that no library draws."""
    wide, narrow = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 5)
    layers: dict[str, Callable[[], Sequence[nn.Module]]] = {
        "plain": lambda: [BodyAndHead(nn.Sequential(wide, nn.Tanh()), nn.Linear(8, CLASSES))],
        "batchnorm": lambda: [
            BodyAndHead(nn.Sequential(wide, nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU()), nn.Linear(8, CLASSES))
        ],
        "convolutions": lambda: [
            BodyAndHead(
                nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()),
                nn.Linear(48, CLASSES),
            )
        ],
        "amounts": lambda: [nn.Sequential(wide, nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))],
        "two architectures": lambda: [
            BodyAndHead(nn.Sequential(wide, nn.Tanh()), nn.Linear(8, CLASSES)),
            BodyAndHead(nn.Sequential(narrow, nn.Tanh()), nn.Linear(5, CLASSES)),
        ],
    }
    models = [*layers[kind]()] if kind in layers else [build(kind, (FEATURES,), ITEMS, rank=3)]
    for model in models:
        draw = np.random.Generator(np.random.PCG64(1))
        with torch.no_grad():
            for leaf in model.double().parameters():
                leaf.copy_(torch.from_numpy(np.asarray(0.4 * draw.normal(size=tuple(leaf.shape)))))
    return models


@functools.cache
def build_task(kind: str) -> Task:
    """Make a task: classes, amounts or, for a method that recommends, items."""
    models = draw_models(kind)
    items = kind in RECOMMENDERS
    draw = np.random.Generator(np.random.PCG64(0))
    classes = ITEMS if items else CLASSES
    centers = draw.normal(size=(classes, FEATURES))

    def samples(y: np.ndarray) -> tuple[Tensor, Tensor]:
        x = centers[y] + draw.normal(size=(len(y), FEATURES))
        targets = centers[y, 0] + 0.1 * draw.normal(size=len(y)) if kind == "amounts" else y
        return torch.from_numpy(x.reshape(-1, *SQUARE) if kind == "convolutions" else x), torch.from_numpy(targets)

    everybody = (*SIZES, *NEWCOMERS)
    owned = [
        np.zeros(size, np.int64) if number == 3 else draw.integers(classes, size=size)
        for number, size in enumerate(everybody)
    ]
    data = {f"client {number}": samples(y) for number, y in enumerate(owned)}
    given: dict[str, Any] = {"loss": squared, "score": negative} if kind == "amounts" else {"classes": classes}
    training = Training(lr=0.1, batch_size=4)
    task = Task.of_clients(data, models if len(models) > 1 else models[0], name="golden", training=training, **given)
    public, central = (samples(draw.integers(classes, size=size)) for size in (PUBLIC, CENTRAL))
    task = replace(task, recommends=items, public=None if items else public, central=None if items else central)
    if task.architecture is not None:
        return replace(task.of(np.arange(len(SIZES))), central=None)
    new = np.arange(len(SIZES), len(everybody))
    return replace(task.of(np.arange(len(SIZES))), unseen=None if items else task.of(new))


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def negative(output: Tensor, target: Tensor) -> Tensor:
    return -(output - target).square()


# -- cases -------------------------------------------------------------------------------------------------------------

LATE = {"rounds": 4, "late": 0.5, "delay": 2, "cohort": 4}
PARTIAL = {"rounds": 3, "cohort": 2, "drop": 0.2}
ADAPTIVE = {"rounds": 3, "cohort": "poisson:0.6", "dp": "client:noise=1,clip=adaptive"}
CLIENT = "client:epsilon=8,delta=1e-3,clip=0.5"

PIECES = (
    "fedper+prox", "ditto+sam", "fedavg+asam", "ditto+fsa", "fedavg+dpsgd:noise=0.5", "fedavg+partial",
    "scaffold+tune", "fedper+gate", "fedprox+sam+tune",
)  # fmt: skip
PAIRS_WITH_PIECES = (
    "fafi+bank/features+refined", "fafi+queue+hard/margins", "fafi+frame/ensemble", "fafi+reference/margins",
    "fafi+conflict/margins", "fafi+balance/margins", "fafi+stages/margins",
)  # fmt: skip
IN_CLUSTERS = (
    "ditto@ifca", "fedper@ifca", "fedrep@ifca", "fedprox@cfl", "local@flhc", "fedprox+sam@ifca",
)  # fmt: skip
RULES = (
    "median", "trimmed:1", "krum:1", "multi-krum:1", "geometric", "centered-clip", "norm-bound:0.5", "fltrust",
    "nnm+trimmed:1", "bucket+median", "meamed:1",
)  # fmt: skip
ATTACKS = (
    "sign-flip:0.2", "ipm:0.2", "gaussian:0.2", "scaling:0.2", "alie:0.2", "min-max:0.2", "mimic:0.2",
    "free-rider:0.2", "label-flip:0.2", "backdoor:0.2",
)  # fmt: skip
COMPRESSED = ("topk:0.2", "randk:0.5", "qsgd:4", "sign", "lowrank:1")


def list_cases() -> dict[str, Case]:
    """List all golden runs by name."""
    methods = [*list_methods()]
    pairs = [name for name in list_pairs() if name not in methods]
    cases = {name: Case(name) for name in (*methods, *PIECES, *PAIRS_WITH_PIECES, *IN_CLUSTERS)}
    cases |= {name: Case(name, slow=True) for name in pairs}  # methods with a file have every half

    def add(name: str, method: str, *, often: bool = True, **more: Any) -> None:
        kinds = {one: more.pop(one) for one in ("task", "strategy", "how") if one in more}
        cases[f"{method}, {name}"] = Case(method, **kinds, settings=more, slow=not often)

    for method in ("fedavg", "scaffold", "ditto", "fedora", "feddyn", "fedavg+fsa", "ditto@ifca"):
        often = method not in ("fedora", "feddyn", "ditto@ifca")
        add("late", method, often=often, **LATE)
        add("partial", method, often=often, **PARTIAL)
    for method in ("fedavg", "scaffold", "ditto", "fedper", "fedora"):
        for words in COMPRESSED if method == "fedavg" else COMPRESSED[:3]:
            add(f"compress={words}", method, often=method in ("fedavg", "scaffold"), compress=words, rounds=3)
    for words in RULES:
        add(f"aggregate={words}", "fedavg", often=words in RULES[::3], aggregate=words)
    for method in ("scaffold", "ditto", "fedper"):
        add("aggregate=nnm+trimmed:1", method, aggregate="nnm+trimmed:1", attack="sign-flip:0.2")
    for words in ATTACKS:
        add(f"attack={words}", "fedavg", often=words in ATTACKS[::3], attack=words)
    for method in ("fedavg", "ditto", "fedper", "scaffold"):
        add("dp=client", method, dp=CLIENT, rounds=3)
        add("secure=masks", method, secure="masks", rounds=3)
        add("secure=sums", method, often=False, secure="sums", rounds=3)
    add("dp=adaptive", "fedavg", often=False, **ADAPTIVE)
    add("dp=local", "fedavg", dp="local:epsilon=8,delta=1e-3,clip=0.5")
    add("dp and masks", "fedavg", dp=CLIENT, secure="masks", rounds=3)
    add("dp=client", "fedcgs", dp=CLIENT)
    add("dp=local", "oneshot-avg", dp="local:epsilon=8,delta=1e-3,clip=0.5")
    for words in ("power-of-choice:3", "oort", "ucb", "turns"):
        add(f"select={words}", "fedavg", select_clients=words, cohort=2, rounds=3)
    for words in ("random:0.7", "diurnal:3", "turnover:0.4"):
        add(f"participation={words}", "ditto", participation=words, rounds=4, cohort=3)
    for method in ("fedavg", "ditto", "fedbn", "mtfl", "fedrep", "fedora", "scaffold", "fafi", "knn-per"):
        add("batchnorm", method, often=method in ("ditto", "fedbn", "fafi"), task="batchnorm")
    for method in ("fedavg", "ditto", "fedbabu", "fedpac", "oneshot-margins", "pfedhn", "fedavg+fsa"):
        add("convolutions", method, often=method in ("fedavg", "oneshot-margins"), task="convolutions")
    for method in ("fedavg", "ditto", "apfl", "fedper", "mocha", "local", "ifca"):
        add("amounts", method, often=method in ("ditto", "fedper"), task="amounts")
    for method in ("local", "fedavg", "feddf", "fedmd", "fml", "kt-pfl"):
        add("two architectures", method, task="two architectures")
    for method in ("fedavg", "ditto", "fedrep", "scaffold", "apfl", "fedora", "ifca", "pfedme", "maml", "fedbabu"):
        add("whole", method, often=method in ("ditto", "scaffold", "ifca"), strategy="whole")
    for method in ("fedavg", "ditto", "fafi"):
        add("chunks", method, strategy="chunk:2")
    for method in ("ditto", "scaffold", "fedora", "ditto@ifca", "fedavg+fsa", "fcf"):
        add("in a folder", method, often=False, how="in a folder", rounds=3)
        add("resumed", method, often=method in ("ditto", "scaffold", "ditto@ifca"), how="resumed", rounds=3)
    add("resumed", "fedavg", how="resumed", **LATE)
    add("resumed, compressed", "ditto", how="resumed", compress="topk:0.2", rounds=3)
    add("resumed, adaptive clip", "fedavg", how="resumed", **ADAPTIVE)
    add("metric=f1", "ditto", metric="f1")
    add("metric=auroc", "fedavg", metric="auroc")
    add("sample", "ditto", evaluation="sample:3")
    add("curve", "fafi:epochs=2", curve=(1, 2))
    add("seed=1", "ditto", seed=1)
    return cases
