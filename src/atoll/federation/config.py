"""What a run was asked to do, resolved: config.json in its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from atoll.compose import from_record, to_record, upgrade_record
from atoll.data.recipe import Recipe
from atoll.data.task import Task
from atoll.federation import participation
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import RunError, UnknownName
from atoll.kernel.fingerprints import Unstable, portable
from atoll.metrics.measures import measure_of
from atoll.protect.rehearsal import promises_samples, rehearse
from atoll.records.files import read_record
from atoll.records.runs import Run
from atoll.records.schema import Record, SchemaError
from atoll.records.trust import remember, require_trusted


@dataclass(frozen=True, eq=False, kw_only=True)
class Metric(Record):
    """What a score is."""

    name: str = "accuracy"
    higher_is_better: bool = True
    share: bool = True  # of 1, shown in per cent
    mean: bool = True  # over samples

    @property
    def title(self) -> str:
        """The name at the beginning of a sentence."""
        return f"{self.name[0].upper()}{self.name[1:]}"


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskFacts(Record):
    """What a run says about its task."""

    name: str
    clients: int
    metric: Metric = field(default_factory=Metric)
    data: str | None = None  # the fingerprint of all samples
    augment: str | None = None
    recipe: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise SchemaError if there are no clients."""
        if self.clients < 1:
            raise SchemaError(f"clients must be at least 1. It is {self.clients}")


@dataclass(frozen=True, eq=False, kw_only=True)
class AlgorithmSpec(Record):
    """A method by its name, the file of a user's own, and the values of its hyperparameters."""

    name: str
    file: str | None
    values: dict[str, Any]  # type: ignore[assignment] # the name of a mapping's method, which nobody needs here

    @classmethod
    def upgrade(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Move values of older runs, which stand beside the name, to their place."""
        return upgrade_record(value) if "name" in value else value

    @classmethod
    def of(cls, algorithm: Algorithm) -> Self:
        """Write a method down."""
        return cls(**to_record(algorithm))

    def create(self, *, trust: bool = False) -> Algorithm:
        """Make the method; a file is run only if this user has run it before, or with `trust`."""
        if self.file is not None:
            require_trusted(Path(self.file), trust=trust)
        try:
            return from_record(self)
        except TypeError as error:
            raise RunError(
                f"The hyperparameters of a run must be those of its method, {self.name}: {error}."
            ) from error


@dataclass(frozen=True, eq=False, kw_only=True)
class RunConfig(Record):
    """The resolved configuration of a run, and where it was begun."""

    task: TaskFacts
    training: dict[str, Any] = field(default_factory=dict)
    algorithm: AlgorithmSpec
    settings: Settings
    schedule: dict[str, str] = field(default_factory=dict)  # a digest of a file of participation
    model: dict[str, Any] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)  # over private samples, by each of the method's hooks
    computes: dict[str, str] | None  # a digest of what the model computes; None where nobody can tell
    engine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] | None = None
    machine: dict[str, Any] | None = None
    command: str | None = None

    @property
    def recipe(self) -> Recipe:
        """The task in words, where it was built from them."""
        try:
            return Recipe.of_config(self)
        except (TypeError, UnknownName) as error:
            raise RunError(f"The recipe of a run must be one of this Atoll: {error}.") from error

    @classmethod
    def of_run(cls, run: Run) -> Self:
        """Read what a run was asked to do."""
        return read_record(run.folder / "config.json", cls)

    def check(self) -> None:
        """Raise SchemaError if there are no rounds."""
        if self.settings.rounds < 1:
            raise SchemaError(f"settings.rounds must be at least 1. It is {self.settings.rounds}")


def describe(task: Task, algorithm: Algorithm, settings: Settings) -> RunConfig:
    """Return the resolved configuration of a run."""
    return RunConfig(
        task=TaskFacts(
            name=task.name,
            clients=task.clients,
            metric=Metric.of_json(measure_of(settings.metric, task.network).facts),
            data=task.fingerprint,
            augment=None if task.augment is None else repr(task.augment),
            recipe=task.facts.get("recipe"),
            more={name: fact for name, fact in task.facts.items() if name != "recipe"},
        ),
        training=asdict(task.training),
        algorithm=AlgorithmSpec.of(algorithm),
        settings=settings,
        schedule=participation.fingerprint(settings.participation),
        model={
            "name": ", ".join(one.name for one in task.networks or (task.network,)),
            "parameters": [one.parameters for one in task.networks] or task.network.parameters,
        },
        passes={**rehearse(algorithm, task)} if promises_samples(algorithm) else {},
        computes=digest_models(task),
    )


def digest_models(task: Task) -> dict[str, str] | None:
    """Digest what the models of a task compute, by all their attributes; None where nobody can tell.

    Of code only names count: a script may be edited before it is run again.
    """
    try:
        functions = [portable(network.function, code=False) for network in task.networks or (task.network,)]
    except Unstable:
        return None
    digest = hashlib.sha256(repr(functions).encode()).hexdigest()[:16]
    return {"torch": torch.__version__, "digest": digest}  # layers of another version may have other attributes


def is_another_model(config: Mapping[str, Any], task: Task) -> bool:
    """Return whether the models of a run are known to differ from those of a task."""
    before, now = config.get("computes"), digest_models(task)
    return bool(before and now and before.get("torch") == now["torch"] and before.get("digest") != now["digest"])


def begin_run(folder: Path | str, config: Mapping[str, Any]) -> Run:
    """Make the folder of a run. A file of the user's own is remembered as run."""
    written = RunConfig.of_json(config)
    run = Run.create(folder, written)
    if written.algorithm.file is not None:
        remember(Path(written.algorithm.file))
    return run
