"""What oracles build on: a tiny federation of unequal clients, its draws, and the same run by Atoll.

An oracle is a method written once more from its paper, in plain loops. Of Atoll it reads the draws only: the initial
model, the order of batches, who is asked in a round and whose reply is late. All arithmetic is its own.

    @oracle("fedprox", mu=0.3, epochs=2)
    def fedprox(fed: Federation, mu: float, epochs: int) -> Outcome:
        ...

registers `fedprox:mu=0.3,epochs=2` with its oracle; a second decorator adds other values. Models are flat vectors.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as mean_cross_entropy

from atoll import Task, Training
from atoll.compose import create
from atoll.data.batches import Split, batch_table
from atoll.federation.report import Report
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.job import AtTheEnd, Job
from atoll.kernel.params import Params, Tree
from atoll.kernel.predictor import predictor_of
from atoll.kernel.randomness import Keys, default_generator, generator, number
from atoll.models import BodyAndHead
from atoll.runtime.engines.measuring import one_thread_each
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.playing import run_job

FEATURES, HIDDEN, CLASSES = 4, 3, 3
SIZES = {"train": (3, 11, 6, 8, 7), "val": (4, 6, 3, 5, 2), "test": (2, 3, 2, 4, 3)}  # samples of each client
BATCH = 4
TRAINING = Training(lr=0.2, batch_size=BATCH, lr_decay=0.9)
SEED = 5  # of a run's draws
PROBES, PUBLIC = 5, 7  # samples that predictors answer to, and that everybody may see

Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a model on a batch x, y

# Where the numbers of the plain model stand in its vector: W1 [3, 4], b1 [3], W2 [3, 3], b2 [3].
BODY, HEAD = slice(0, 15), slice(15, 27)

CASES: Mapping[str, Mapping[str, Any]] = {
    "everybody": {},
    "some": {"cohort": 3},
    "late": {"late": 0.4, "delay": 2},
}


# -- the task --------------------------------------------------------------------------------------------------------
def make_network(kind: str = "plain") -> nn.Module:
    """Make a tiny network in float64: `plain` (tanh), or with BatchNorm (`norm`), before which a bias means nothing."""
    with default_generator(0):
        layers = {
            "plain": lambda: [nn.Linear(FEATURES, HIDDEN), nn.Tanh()],
            "norm": lambda: [nn.Linear(FEATURES, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN), nn.Tanh()],
        }[kind]()
        return BodyAndHead(nn.Sequential(*layers), nn.Linear(HIDDEN, CLASSES)).double()


@functools.cache
def make_task(kind: str = "plain", training: Training = TRAINING) -> Task:
    """Make five clients of unequal sizes and labels; the first has two classes, and its own idea of what they are."""
    draw = generator(0, "oracles")
    centers = draw.normal(size=(CLASSES, FEATURES))

    def samples(y: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(centers[y] + draw.normal(size=(len(y), FEATURES))), torch.from_numpy(y)

    sizes = np.array([*SIZES.values()])
    data = {}
    for client, size in enumerate(sizes.sum(axis=0)):
        y = draw.choice(CLASSES, p=[0.5, 0.5, 0.0] if client == 0 else draw.dirichlet([1.0] * CLASSES), size=size)
        x, y = samples(y)
        data[f"client {client}"] = (x, 1 - y) if client == 0 else (x, y)
    task = Task.of_clients(data, make_network(kind), classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))
    ends = np.cumsum(np.concatenate([np.zeros_like(sizes[:1]), sizes]), axis=0)
    begins = np.cumsum([0, *sizes.sum(axis=0)])
    splits = {
        name: deal([torch.arange(begins[k] + ends[part][k], begins[k] + ends[part + 1][k]) for k in range(len(data))])
        for part, name in enumerate(SIZES)
    }
    return replace(task, splits=splits, public=samples(draw.integers(CLASSES, size=PUBLIC)))


def deal(parts: Sequence[Tensor]) -> Split:
    """Make the split in which each client has these samples."""
    return Split(torch.cat([*parts]), np.cumsum([0, *map(len, parts)]).astype(np.int64))


@functools.cache
def make_probes(shape: tuple[int, ...] = (FEATURES,)) -> Tensor:
    """Make the samples that all clients' predictors answer to."""
    return torch.from_numpy(generator(0, "probes").normal(size=(PROBES, *shape)))


# -- the plain model: z = W2 tanh(W1 x + b1) + b2 ----------------------------------------------------------------------
def features(w: Tensor, x: Tensor) -> Tensor:
    """Return what enters the head of a model."""
    return torch.tanh(x @ w[:12].reshape(HIDDEN, FEATURES).T + w[12:15])


def head(w: Tensor, z: Tensor) -> Tensor:
    """Return what the head of a model makes of features."""
    return z @ w[15:24].reshape(CLASSES, HIDDEN).T + w[24:27]


def logits(w: Tensor, x: Tensor) -> Tensor:
    """Return what a model answers."""
    return head(w, features(w, x))


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of a model."""
    return mean_cross_entropy(logits(w, x), y)


def gradient(of: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of a function of a vector."""
    point = at.detach().clone().requires_grad_()
    return torch.autograd.grad(of(point), point)[0]


def grad(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient g(w; batch) of the loss, by hand."""
    z = features(w, x)
    apart = (head(w, z).softmax(1) - torch.eye(CLASSES, dtype=w.dtype)[y]) / len(x)
    before = apart @ w[15:24].reshape(CLASSES, HIDDEN) * (1 - z**2)
    return torch.cat([(before.T @ x).flatten(), before.sum(0), (apart.T @ z).flatten(), apart.sum(0)])


def sgd(w: Tensor, batches: Iterable[tuple[Tensor, Tensor]], lr: float, gradient: Gradient = grad) -> Tensor:
    """Take a step w <- w - lr g(w; batch) on every batch."""
    for x, y in batches:
        w = w - lr * gradient(w, x, y)
    return w


# -- a federation as an oracle sees it -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reply:
    """What arrived from a client: its fields are attributes."""

    client: int
    late: int  # rounds
    fields: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def discount(self) -> float:
        """How much it counts in a mean, beside its weight: 1 / sqrt(1 + rounds that it is late)."""
        return 1 / math.sqrt(1 + self.late)


@dataclass
class Round:
    """A round: who is asked; what clients `send`, and the `replies` that arrive in it."""

    fed: Federation
    number: int
    asked: list[int]
    new: list[int]  # those of them who were never asked before

    @property
    def lr(self) -> float:
        """The step size."""
        return self.fed.lr_in(self.number)

    def batches(self, client: int, epochs: int = 1, **how: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the batches of a client, in the order in which it sees them."""
        return self.fed.batches(client, self.number, epochs, **how)

    def send(self, client: int, **fields: Any) -> None:
        """Put a reply on its way; who else reads it finds what the client was sent in it, if the oracle puts it in."""
        late = int(self.fed.delays(self.number)[client])
        self.fed.post.append((self.number + late, Reply(client, late, fields)))

    @property
    def replies(self) -> list[Reply]:
        """The replies that arrive in this round."""
        return [reply for due, reply in self.fed.post if due == self.number]

    def server_draws(self, purpose: str) -> np.random.Generator:
        """Return the generator from which the server draws for a purpose in this round."""
        return generator(self.fed.settings.seed, f"server, {purpose}", self.number)

    def server_batches(self, samples: int, size: int, stream: str, epochs: int = 1) -> list[Tensor]:
        """Return which of so many samples the server, as if it were a client, draws batch by batch."""
        own, first = Split(torch.arange(samples), np.array([0, samples])), np.array([0])
        keys = Keys.of(
            torch.from_numpy(first), number(self.fed.settings.seed, "server"), "batches", self.number, stream
        )
        table = batch_table(own, first, keys, batch_size=size, epochs=epochs, limit=None)
        valid = [slice(None)] * len(table.index) if table.valid is None else table.valid[:, 0]
        return [rows[real] for rows, real in zip(table.index[:, 0], valid, strict=True)]

    def draws(self, client: int | None, purpose: str, steps: int, size: int, stream: str) -> Tensor:
        """Return numbers from [0, 1) that a client, or the server, draws in each step of a stream, [step, size]."""
        seed = self.fed.settings.seed if client is not None else number(self.fed.settings.seed, "server")
        keys = Keys.of(torch.tensor([client or 0]), seed, "dropout", self.number, stream)
        purpose_key = number(0, purpose) & 0xFFFFFFFF
        count = torch.arange(size)
        drawn = [keys.fold(step).fold(purpose_key).uniform(count, torch.float64) for step in range(steps)]
        return torch.stack(drawn) if drawn else torch.zeros(0, size, dtype=torch.float64)

    def mean(self, name: str, weighting: str = "samples", among: Sequence[Reply] | None = None) -> Tensor:
        """Return the mean of a field over replies: by training samples or uniform, and late ones count less."""
        replies = self.replies if among is None else among
        n = self.fed.n
        p = [(n[one.client] if weighting == "samples" else 1) * one.discount for one in replies]
        return sum(share * one.fields[name] for share, one in zip(p, replies, strict=True)) / sum(p)


@functools.cache
def draw_batches(
    task: Task, seed: int, client: int, when: int, epochs: int, stream: str, split: str, size: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a client; methods that train on the same ones share them."""
    who = np.array([client])
    keys = Keys.of(torch.from_numpy(who), seed, "batches", when, stream)
    table = batch_table(task.splits[split], who, keys, batch_size=size, epochs=epochs, limit=None)
    rows = table.index[:, 0]
    real = torch.ones_like(rows, dtype=torch.bool) if table.valid is None else table.valid[:, 0]
    return [(task.x[some[there]], task.y[some[there]]) for some, there in zip(rows, real, strict=True)]


@dataclass
class Federation:
    """Clients, their data, and the draws of a run."""

    task: Task
    settings: Settings
    post: list[tuple[int, Reply]] = field(default_factory=list)

    @property
    def clients(self) -> range:
        """The numbers of all clients."""
        return range(self.task.clients)

    @property
    def w0(self) -> Tensor:
        """The initial model."""
        return flatten(self.task.network.initial)

    @property
    def n(self) -> list[int]:
        """How many training samples each client has."""
        return [int(size) for size in np.diff(self.task.splits["train"].offsets)]

    @property
    def probes(self) -> Tensor:
        """The samples that clients answer at the end."""
        return make_probes(tuple(self.task.x.shape[1:]))

    @property
    def end(self) -> Round:
        """The moment after the last round, when clients make what they deploy."""
        return Round(self, self.settings.rounds, [], [])

    def lr_in(self, number: int) -> float:
        """Return the step size of a round."""
        return self.task.training.lr * self.task.training.lr_decay**number

    def data(self, client: int, split: str = "train") -> tuple[Tensor, Tensor]:
        """Return all samples of a client."""
        own = self.task.splits[split]
        rows = own.order[own.offsets[client] : own.offsets[client + 1]]
        return self.task.x[rows], self.task.y[rows]

    @property
    def public(self) -> tuple[Tensor, Tensor]:
        """The samples that everybody may see."""
        return self.task.public_for("an oracle")

    def batches(
        self,
        client: int,
        when: int,
        epochs: int = 1,
        *,
        stream: str = "main",
        split: str = "train",
        size: int | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the batches that a client draws in a round from a stream."""
        size = size or self.task.training.batch_size
        return draw_batches(self.task, self.settings.seed, client, when, epochs, stream, split, size)

    def delays(self, number: int) -> np.ndarray:
        """Draw how many rounds late each client's reply of a round is."""
        if not self.settings.late:
            return np.zeros(len(self.clients), dtype=np.int64)
        draw, size = generator(self.settings.seed, "late", number), len(self.clients)
        late = draw.random(size) < self.settings.late
        return np.where(late, draw.integers(1, self.settings.delay, size, endpoint=True), 0)

    @property
    def rounds(self) -> Iterator[Round]:
        """The rounds: a client whose reply is on its way is not asked."""
        met: set[int] = set()
        for round in range(self.settings.rounds):
            busy = np.array([reply.client for due, reply in self.post if due >= round], dtype=np.int64)
            asked = [int(k) for k in self.settings.choose(len(self.clients), round, busy)]
            yield Round(self, round, asked, [k for k in asked if k not in met])
            met |= set(asked)


# -- what comes out --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What a run leaves: each client's own model or what it answers to the probes, and the model for everybody."""

    models: Sequence[Tensor] | None = None
    shared: Tensor | None = None
    answers: Sequence[Tensor] | None = None


def largest_difference(found: Outcome, expected: Outcome) -> float:
    """Return the largest difference of any model or answer, relative to its largest number."""
    largest = 0.0
    for part in ("models", "shared", "answers"):
        theirs, ours = getattr(expected, part), getattr(found, part)
        if theirs is None:
            continue
        if ours is None or len(ours) != len(theirs):
            return math.inf
        pairs = [(ours, theirs)] if part == "shared" else zip(ours, theirs, strict=True)
        for one, other in pairs:
            if one.shape != other.shape or not torch.isfinite(other).all() or not torch.isfinite(one).all():
                return math.inf
            scale = max(float(other.abs().max()), 1e-300)
            largest = max(largest, float((one - other).abs().max()) / scale)
    return largest


def flatten(w: Mapping[str, Tensor]) -> Tensor:
    """Return all numbers of a model as one vector."""
    return torch.cat([leaf.detach().flatten().double() for leaf in w.values()])


@dataclass(frozen=True)
class _Answer(AtTheEnd):
    """Clients answer to the probes with what they would deploy."""

    name: ClassVar[str] = "answer probes"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Tree:
        deployed = predictor_of(method.personalize(received, cohort))
        probes = make_probes(tuple(cohort.task.sample.shape))

        def step(carry: Params, batch: Batch, given: tuple[Params, Params]) -> Params:
            answers = deployed.answer(*given, replace(batch, x=probes, mask=None))
            return Params.of(answers=carry["answers"] * 0 + answers)

        start = Params.of(answers=torch.zeros(PROBES, cohort.task.classes or 1, dtype=torch.float64))
        given = (deployed.model, deployed.beside)
        return cohort.scan(step, start, given=given, shuffle=False, train=False, labels=False)


def run_atoll(method: Algorithm, task: Task, settings: Settings, wanted: Outcome) -> Outcome:
    """Run a method by Atoll; return what is `wanted` of it, and its shared model in any case."""
    settings_of_run = {name: getattr(settings, name) for name in ("seed", "cohort", "late", "delay", "aggregate")}
    report = play(task, method, settings.rounds, strategy="whole", **settings_of_run)
    shared = method.shared(report.server)
    return Outcome(
        models=None if wanted.models is None else [flatten(one) for one in personal_models(report)],
        shared=flatten(shared) if isinstance(shared, Params) else None,
        answers=None if wanted.answers is None else [one["answers"] for one in _run(report, _Answer())],
    )


def _run(report: Report, phase: AtTheEnd) -> list[Tree]:
    everybody = np.arange(report.task.clients)
    job = Job(phase, report.algorithm, report.server, everybody, report.settings.rounds)
    return run_job(report.engine, job, report.population)


# -- the oracles -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Oracle:
    """A method with its values, and what it must come to."""

    method: str
    values: Mapping[str, Any]
    write: Callable[..., Outcome]
    task: Callable[[], Task]
    rounds: int
    cases: Sequence[str]
    note: str
    aggregate: str = "mean"

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.words} ({self.note})" if self.note else self.words

    @property
    def words(self) -> str:
        """The method as it is written on the command line."""
        values = ",".join(f"{name}={value}" for name, value in self.values.items())
        return f"{self.method}:{values}" if values else self.method

    def settings(self, case: str) -> Settings:
        """Return the settings of a case."""
        return Settings(rounds=self.rounds, seed=SEED, aggregate=self.aggregate, **CASES[case])

    @functools.cache  # noqa: B019 - oracles live as long as the process
    def expect(self, case: str) -> Outcome:
        """Return what the oracle says."""
        with one_thread_each():  # as Atoll's own run
            return self.write(Federation(self.task(), self.settings(case)), **self.values)

    def compare(self, case: str) -> float:
        """Return the largest difference between Atoll and the oracle."""
        method, settings, expected = create(self.words), self.settings(case), self.expect(case)
        found = run_atoll(method, self.task(), settings, expected)
        assert found.shared is None or expected.shared is not None, f"{self.name}: its shared model is not compared"
        return largest_difference(found, expected)

    def __hash__(self) -> int:
        return hash(self.name)


ORACLES: dict[str, Oracle] = {}


def oracle(
    method: str,
    *,
    task: Callable[[], Task] = make_task,
    rounds: int = 4,
    cases: Sequence[str] = tuple(CASES),
    note: str = "",
    aggregate: str = "mean",
    **values: Any,
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Register an oracle of a method with these values."""

    def register(write: Callable[..., Outcome]) -> Callable[..., Outcome]:
        one = Oracle(method, values, write, task, rounds, cases, note, aggregate)
        assert one.name not in ORACLES, f"two oracles of {one.name}"
        ORACLES[one.name] = one
        return write

    return register


def load_oracles() -> dict[str, Oracle]:
    """Import all files of this folder; return all oracles by name."""
    here = Path(__file__).parent
    for file in sorted(here.glob("*.py")):
        if file.stem not in ("__main__", "conftest", "tools") and not file.stem.startswith("test_"):
            importlib.import_module(f"oracles.{file.stem}")
    return ORACLES
