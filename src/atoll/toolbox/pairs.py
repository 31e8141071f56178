"""One shot is a pair: how clients train, and how the server answers. `ce/ensemble`, `fafi/margins`, `etf/rga`.

    training    w_k = train(what everybody was sent, the client's samples)
    answer      upload(w_k, the client's samples),  once;  then  deploy(conclude(all uploads))

A `LocalTraining` says what clients do and knows nothing of servers. So clients that were trained once are found again
by every answer. A `ServerAnswer` says what clients send of their models, and what server and clients answer with that.
What is added to either is a `Piece` (`fafi+bank/margins`, `fafi/features+refined`). All are small values with
hyperparameters, each in a file of its own in `atoll.algorithms.trainings` and `atoll.algorithms.answers`.

A `Pair` is a method that calls both halves. Its hyperparameters are those of its parts. A name that two parts have is
one value if type and default agree, or if the class of the pair has the name itself; otherwise the later part's begins
with what that part is called: `margins_scale`. `fixed` values cannot be chosen in a pair::

    @dataclass(frozen=True, kw_only=True)
    class Ensemble(Pair, training=CrossEntropy, answering=Together): ...

Not every pair makes sense. A training says what it `offers`, a piece and an answer what they need of it.

The server's state has two parts, one of each half: what clients `start` with and, once they replied, the `answer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from types import new_class
from typing import Any, ClassVar, get_origin, get_type_hints

from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Predictor, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Workbench
from atoll.kernel.errors import AtollError, HyperparameterError
from atoll.kernel.hyperparameters import hyperparameters
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import Answer
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.kernel.wrapper import title_of
from atoll.toolbox.client.labels import label_counts, require_classes
from atoll.toolbox.client.private import release
from atoll.toolbox.oneshot import count_labels, uploads
from atoll.toolbox.references import bibtex

# What a training may offer, and an answer or a piece may need.
OUTPUTS = "models that answer by their own outputs"
FEATURES = "features of each client"
PROTOTYPES = "prototypes"
FRAME = "a frame"
FROZEN = "features in common"
DECODERS = "decoders"
UNKNOWN = "an output for unknown samples"


@record
class Start:
    """What clients begin with; a training that needs more has a record with more fields."""

    model: Params


@record
class Models:
    """An answer that keeps the models of all clients, one row each; one that needs more has a record of its own."""

    models: Stack
    counts: Tensor  # samples of each class that a client has, [client, class]


@record
class State:
    """The server's state."""

    start: Any  # a `Start`
    answer: Any = None  # what the server made of the uploads: one model, `Models` or more; None while nobody replied


@dataclass(frozen=True, kw_only=True)
class Part:
    """Base of the parts of a pair; a bad hyperparameter raises when the part is made."""

    called: ClassVar[str] = ""  # in the name of a pair; what has no name of its own is not found
    needs: ClassVar[frozenset[str]] = frozenset()  # what the training must offer
    needs_public_data: ClassVar[bool] = False
    cites: ClassVar[str] = ""  # a key of references.bib

    def __post_init__(self) -> None:
        for hyperparameter in hyperparameters(type(self)):
            hyperparameter.check(self.title, getattr(self, hyperparameter.name))

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.called or type(self).__name__


class LocalTraining(Part):
    """How clients train alone."""

    offers: ClassVar[frozenset[str]] = frozenset({OUTPUTS, FEATURES})
    trains_by_sgd: ClassVar[bool] = True
    follows_samples: ClassVar[bool] = True

    @property
    def deploys_a_model(self) -> bool:
        """Whether one of its models answers as its network does."""
        return OUTPUTS in self.offers

    def start(self, task: Facts) -> Start:
        """Return what clients begin with, of a task with classes."""
        require_classes(self, task)
        return Start(task.network.initial)

    def equip(self, start: Any, bench: Workbench) -> Any:
        """Return what clients begin with after what the server does alone before anybody is asked."""
        return start

    def broadcast(self, start: Any) -> Tree:
        """Return what all clients are sent: the model that they begin with."""
        return start.model

    def train(self, received: Any, cohort: Cohort) -> Any:
        """Return each client's model after training, stacked."""
        raise NotImplementedError(f"{type(self).__name__} must define train().")

    # -- how its models answer -----------------------------------------------------------------------------------
    @property
    def read(self) -> Answer:
        """What one model answers to a batch, with what stands beside it."""
        return own_outputs

    def beside(self, start: Any) -> Params:
        """Return what `read` needs beside a model."""
        return Params({})

    def outputs(self, bench: Workbench, start: Any, models: Stack, x: Tensor) -> Tensor:
        """Return what each of several models answers to samples, [model, sample, class]."""
        return bench.answers(models, x)

    def deploy(self, start: Any, w: Params) -> Params | Predictor:
        """Return one model for all as it answers."""
        return w if self.deploys_a_model else Predictor(w, self.beside(start), self.read)


def own_outputs(model: Params, beside: Params, batch: Batch) -> Tensor:  # noqa: ARG001
    """Return what a network answers."""
    return batch.outputs(model)


class ServerAnswer(Part):
    """What clients send of their models, and what everybody answers with that: with one model, or with all."""

    sends: ClassVar[dict[str, str]] = {"model": "model", "labels": "statistic"}
    releases: ClassVar[frozenset[str]] = frozenset({"labels"})
    needs: ClassVar[frozenset[str]] = frozenset({FEATURES})
    sums_suffice: ClassVar[bool] = False
    solved: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    reads_validation: ClassVar[bool] = False

    @property
    def transductive(self) -> bool:
        """Whether the answer to a sample depends on the others of its batch."""
        return False

    def deploys_a_model(self, training: LocalTraining) -> bool:
        """Return whether one model comes out that answers as its network does."""
        return training.deploys_a_model

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless the task has what the answer needs."""

    def upload(self, training: LocalTraining, w: Any, cohort: Cohort) -> Update:
        """Return what clients send: the model, and how many samples of each class it saw."""
        return Update(send={"model": w, "labels": release(cohort, "labels", label_counts, {"counts": 0})})

    def conclude(self, training: LocalTraining, start: Any, replies: Replies) -> Any:
        """Return what the server makes of the uploads: one model, or a record that `deploy` reads."""
        raise NotImplementedError(f"{type(self).__name__} must define conclude().")

    def deploy(self, training: LocalTraining, start: Any, answer: Any) -> Params | Predictor:
        """Return what everybody deploys: by default the one model, as the clients' models answer."""
        return training.deploy(start, answer)


def keep_models(replies: Replies) -> Models:
    """Return all models, and how many samples of each class they saw."""
    return Models(uploads(replies, "model"), count_labels(replies))


class Piece(Part):
    """What can be added to one half of a pair."""

    sends: ClassVar[dict[str, str]] = {}  # what more leaves a client
    reads_validation: ClassVar[bool] = False

    @property
    def adds(self) -> bool:
        """Whether it changes anything with these values."""
        return True

    def add_to(self, half: Any) -> Any:
        """Return the training, or the answer, with the piece in it."""
        raise NotImplementedError(f"{type(self).__name__} must define add_to().")


class TrainingPiece(Piece):
    """What can be added to a training: it stands before the slash, `fafi+bank/margins`."""


class AnswerPiece(Piece):
    """What can be added to an answer: it stands after it, `fafi/features+refined`."""


@dataclass(frozen=True, kw_only=True)
class Pair(Algorithm):
    """A one-shot method: a training and an answer."""

    one_shot: ClassVar[bool] = True
    full_name: ClassVar[str] = ""  # of a pair without a file: "fafi+bank/margins"
    client_parts: ClassVar[tuple[type[Part], ...]] = ()  # the training and its pieces
    server_parts: ClassVar[tuple[type[Part], ...]] = ()  # the answer and its pieces
    values_of: ClassVar[Mapping[type[Part], Mapping[str, str]]] = {}  # the hyperparameter behind each field of a part
    fixed: ClassVar[Mapping[str, Any]] = {}  # values of fields that are no hyperparameters here
    is_plain: ClassVar[bool] = False  # nothing but its parts, as they are

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a pair without a file by its halves: no module has its class."""
        if not self.full_name:
            return super().__reduce__()
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return _remake, (self.client_parts, self.server_parts, values)

    def __init_subclass__(
        cls,
        *,
        training: type[Part] | tuple[type[Part], ...] = (),
        answering: type[Part] | tuple[type[Part], ...] = (),
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        """Give the class the hyperparameters and the facts of its parts, before it becomes a dataclass."""
        super().__init_subclass__()
        if not training or not answering:  # a pair with other defaults, or the like
            return
        cls.client_parts = training if isinstance(training, tuple) else (training,)
        cls.server_parts = answering if isinstance(answering, tuple) else (answering,)
        cls.fixed = dict(fixed or {})
        require_sense(*cls.client_parts, *cls.server_parts)
        own = vars(cls).get("__annotations__", {}).values()
        cls.is_plain = not cls.fixed and all(get_origin(hint) is ClassVar for hint in own)
        _take_fields(cls)
        for name, value in _facts(*cls.client_parts, *cls.server_parts).items():
            if name not in vars(cls):
                setattr(cls, name, value)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training, self.answering  # noqa: B018  # both raise for values that do not fit together

    @cached_property
    def training(self) -> LocalTraining:
        """How clients train."""
        made: LocalTraining = self.put_together(self.client_parts)
        return made

    @cached_property
    def answering(self) -> ServerAnswer:
        """How the server answers."""
        made: ServerAnswer = self.put_together(self.server_parts)
        return made

    def put_together(self, parts: Sequence[type[Part]]) -> Any:
        """Return a half with those of its pieces that add something, with the values that were chosen for all."""
        made: Any = None
        for kind in parts:
            chosen = {field: getattr(self, name) for field, name in self.values_of[kind].items()}
            fixed = {one.name: self.fixed[one.name] for one in fields(kind) if one.name in self.fixed}
            part = kind(**chosen, **fixed)
            if not isinstance(part, Piece):
                made = part
            elif part.adds:
                made = part.add_to(made)
        return made

    @property
    def trains_by_sgd(self) -> bool:
        """Whether clients train by `sgd`."""
        return self.training.trains_by_sgd

    @property
    def follows_samples(self) -> bool:
        """Whether clients step along the gradient of samples' own losses."""
        return self.training.follows_samples

    @property
    def deploys_a_model(self) -> bool:
        """Whether one model comes out that answers as its network does."""
        return self.answering.deploys_a_model(self.training)

    @property
    def transductive(self) -> bool:
        """Whether the answer to a sample depends on the others of its batch."""
        return self.answering.transductive

    def start(self, task: Facts) -> State:
        """Return the initial state, of a task that both halves can work on."""
        with self._naming_parts():
            self.answering.require(self.training, task)
            return State(self.training.start(task))

    @contextlib.contextmanager
    def _naming_parts(self) -> Iterator[None]:
        """Say in errors of a part which pair it is a part of, where the user wrote the pair's own name."""
        try:
            yield
        except AtollError as error:
            if self.full_name or title_of(self) in str(error):
                raise
            parts = "/".join("+".join(part.called for part in half) for half in (self.client_parts, self.server_parts))
            raise type(error)(f"{title_of(self)} is {parts}. {error.args[0]}", hint=error.hint) from error

    def equip(self, server: State, workbench: Workbench) -> State:
        """Do what the server does before training."""
        return State(self.training.equip(server.start, workbench))

    def broadcast(self, server: State) -> Tree:
        """Return what clients begin with."""
        return self.training.broadcast(server.start)

    def local(self, received: Tree, cohort: Cohort) -> Update:
        """Train alone; send what the answer asks for."""
        return self.answering.upload(self.training, self.training.train(received, cohort), cohort)

    def aggregate(self, server: State, replies: Replies) -> State:
        """Conclude from the uploads."""
        return replace(server, answer=self.answering.conclude(self.training, server.start, replies))

    def shared(self, server: State) -> Params | Predictor:
        """Return what everybody deploys, new clients as well: the initial model if nobody replied."""
        if server.answer is None:
            initial: Params = server.start.model
            return initial
        return self.answering.deploy(self.training, server.start, server.answer)


def require_sense(training: type[Part], *others: type[Part]) -> None:
    """Raise unless the training offers what its pieces and the answer need."""
    offers: frozenset[str] = getattr(training, "offers", frozenset())
    for other in others:
        if missing := other.needs - offers:
            kind = "piece" if issubclass(other, Piece) else "answer"
            raise HyperparameterError(
                f"For the {kind} `{other.called}`, clients must train {' and '.join(sorted(missing))}. The training "
                f"`{training.called}` gives {', '.join(sorted(offers))}.",
                hint=f"take another training or another {kind}: `atoll list pairs` shows what goes together.",
            )


@cache
def make_pair(client_parts: tuple[type[Part], ...], server_parts: tuple[type[Part], ...]) -> type[Pair]:
    """Return the pair of a training with its pieces and an answer, which has no file of its own."""
    name = "/".join("+".join(part.called for part in parts) for parts in (client_parts, server_parts))
    cites = dict.fromkeys(part.cites for part in (*client_parts, *server_parts) if part.cites)
    facts = {
        "full_name": name,
        "cites": "\n\n".join(map(bibtex, cites)),
        "__module__": __name__,
        "__doc__": " / ".join((part.__doc__ or "").split("\n")[0] for part in (client_parts[0], server_parts[0])),
    }
    halves = {"training": client_parts, "answering": server_parts}
    made = new_class(name, (Pair,), halves, lambda space: space.update(facts))
    pair: type[Pair] = dataclass(frozen=True, kw_only=True)(made)
    return pair


def _remake(client_parts: tuple[type[Part], ...], server_parts: tuple[type[Part], ...], values: dict[str, Any]) -> Pair:
    """Make a pair that has no file of its own, in a process that it was sent to."""
    return make_pair(client_parts, server_parts)(**values)


def _facts(*parts: type[Part]) -> dict[str, Any]:
    """Return what a method declares, from what its parts do."""
    (answer,) = (part for part in parts if issubclass(part, ServerAnswer))
    pieces = [part for part in parts if issubclass(part, Piece)]
    return {
        "sends": {**answer.sends, **{name: kind for piece in pieces for name, kind in piece.sends.items()}},
        "releases": answer.releases,
        "sums_suffice": answer.sums_suffice,
        "solved": answer.solved,
        "closed_form": answer.closed_form,
        "reads_validation": answer.reads_validation or any(piece.reads_validation for piece in pieces),
        "needs_public_data": any(part.needs_public_data for part in parts),
    }


def _take_fields(pair: type[Pair]) -> None:
    """Make the fields of all parts fields of the pair; what the pair's own class says of a name goes for all parts."""
    own = dict(vars(pair).get("__annotations__", {}))
    taken: dict[str, tuple[Any, Any]] = {}
    values_of: dict[type[Part], dict[str, str]] = {}
    for part in (*pair.client_parts, *pair.server_parts):
        hints = get_type_hints(part, include_extras=True)
        values_of[part] = {}
        for field in fields(part):
            if field.name in pair.fixed:
                continue
            kind = (hints[field.name], field.default)
            clashes = field.name not in own and taken.get(field.name, kind) != kind
            name = f"{part.called.replace('-', '_')}_{field.name}" if clashes else field.name
            taken[name] = kind
            values_of[part][field.name] = name
    pair.values_of = values_of
    pair.__annotations__ = {name: hint for name, (hint, _) in taken.items()} | own
    for name, (_, default) in taken.items():
        if name not in vars(pair):
            setattr(pair, name, default)
