"""Clients that were never seen: the model they get, and how fast they make it their own.

After the last round a task's `unseen` clients are welcomed: with their labels, and then tuned for some epochs on their
training samples; and without labels, from their samples alone. The federation is over: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.data.batches import Split
from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Engine
from atoll.kernel.errors import LabelsNeeded, TaskError, unknown
from atoll.kernel.job import EVERYTHING, AtTheEnd, Done, Job, Phase
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import predictor_of
from atoll.kernel.randomness import number
from atoll.metrics.evaluation import ClientSums, Scoring
from atoll.metrics.measures import OWN
from atoll.runtime.memory import open_memory
from atoll.runtime.population import Population
from atoll.toolbox.client import sgd

EPOCHS = (0, 1, 5, 10)  # of tuning


@dataclass(frozen=True)
class Labelled(AtTheEnd):
    """New clients with labels take the model they are welcomed by and tune it."""

    testing: Scoring

    splits: ClassVar[frozenset[str]] = EVERYTHING
    name: ClassVar[str] = "newcomers labelled"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> dict[str, Stack]:
        """Return each client's sums on its test samples, by epochs of tuning."""
        cohort = replace(cohort, exact=method.solved)
        learner = cohort.without("test")
        deployed = method.welcome(received, learner)
        found = {"0": self.testing.scan(cohort, deployed)}
        # Whatever stands beside the model is not tuned, and is left out then.
        model = given = learner.stacked(predictor_of(deployed).model)
        for before, after in pairwise(EPOCHS):
            if not model:  # an ensemble, for example: there is no single model to tune
                found[str(after)] = found["0"]
                continue
            epochs, stream = after - before, f"tune {after}"
            own_way = method.tune_newcomer(given, model, learner, epochs=epochs, stream=stream)
            model = sgd(learner, start=model, epochs=epochs, stream=stream) if own_way is None else own_way
            found[str(after)] = self.testing.scan(cohort, model)
        return found


@dataclass(frozen=True)
class Unlabelled(AtTheEnd):
    """New clients without labels are welcomed by their samples alone."""

    testing: Scoring

    splits: ClassVar[frozenset[str]] = EVERYTHING
    name: ClassVar[str] = "newcomers unlabelled"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> dict[str, Stack]:
        """Return each client's sums on its test samples."""
        cohort = replace(cohort, exact=method.solved)
        learner = cohort.without("test", "labels")
        return {"unlabelled": self.testing.scan(cohort, method.welcome(received, learner))}


@dataclass(frozen=True)
class GivenShared(AtTheEnd):
    """New clients take the shared model."""

    testing: Scoring

    splits: ClassVar[frozenset[str]] = EVERYTHING
    name: ClassVar[str] = "newcomers shared"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> dict[str, Stack]:
        """Return each client's sums on its test samples."""
        model = method.shared(received)
        assert model is not None
        return {"unlabelled": self.testing.scan(replace(cohort, exact=method.solved), model)}


@dataclass(frozen=True)
class Welcome(AtTheEnd):
    """One new client is welcomed, with labels or without."""

    labelled: bool

    name: ClassVar[str] = "newcomer"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Stack:
        """Return the values of the model that the client deploys."""
        learner = cohort if self.labelled else cohort.without("labels")
        return learner.stacked(predictor_of(method.welcome(received, learner)).values)


def evaluate_newcomers(
    engine: Engine, algorithm: Algorithm, server: Tree, newcomers: Task, *, seed: int, round: int, metric: str = OWN
) -> dict[str, Any]:
    """Score new clients on their test samples: `labelled`, by epochs of tuning, and `unlabelled`.

    A method that needs labels gives clients without them its shared model, if it has one; `way` says which they got.
    """
    own_seed = number(seed, "newcomers") % 2**31  # their batches are not those of the clients with the same numbers
    population = Population(newcomers, open_memory("ram", newcomers.clients, None), own_seed)
    everybody, testing = np.arange(newcomers.clients), Scoring("test", metric=metric)
    sums = {name: ClientSums(newcomers, "test", everybody, metric) for name in [*map(str, EPOCHS), "unlabelled"]}

    def run(phase: Phase) -> None:
        job = Job(phase, algorithm, server, everybody, round)
        for outcome in engine.run(job, population):
            if isinstance(outcome, Done):
                for name, found in outcome.result.items():
                    sums[name].add(outcome.clients, found)

    run(Labelled(testing))
    way = "welcome"
    try:
        run(Unlabelled(testing))
    except LabelsNeeded:
        way = "shared" if algorithm.shared(server) is not None else "none"
        if way == "shared":
            run(GivenShared(testing))
    without = {} if way == "none" else sums.pop("unlabelled").scores().as_json()
    labelled = {str(epochs): sums[str(epochs)].scores().as_json() for epochs in EPOCHS}
    return {"labelled": labelled, "unlabelled": {"way": way, **without}}


def population_of_newcomer(task: Task, x: Any, y: Any = None, *, seed: int) -> Population:
    """Return one new client of a finished federation by itself, from its samples and, if it has them, targets."""
    samples = _as_numbers("samples", x).to(task.x.device, task.x.dtype)
    if samples.shape[1:] != task.x.shape[1:] or len(samples) == 0:
        raise TaskError(
            f"A new client's samples must have the shape of the others', {tuple(task.x.shape[1:])}, and be at least 1. "
            f"Got {tuple(samples.shape)}."
        )
    targets = _targets(task, y, len(samples))
    everything = Split(torch.arange(len(samples), device=task.x.device), np.array([0, len(samples)]))
    nothing = Split(everything.order[:0], np.array([0, 0]))
    newcomer = replace(
        task, x=samples, y=targets, splits={"train": everything, "val": nothing, "test": nothing},
        names=None, groups=None, architecture=None, unseen=None,
    )  # fmt: skip
    return Population(newcomer, open_memory("ram", 1, None), number(seed, "newcomer") % 2**31)


def welcome(
    engine: Engine, algorithm: Algorithm, server: Tree, task: Task, x: Any, y: Any = None, *, seed: int, round: int
) -> Params:
    """Return the model of one new client of a finished federation, from its samples and, if it has them, targets."""
    population = population_of_newcomer(task, x, y, seed=seed)
    job = Job(Welcome(labelled=y is not None), algorithm, server, np.arange(1), round)
    for outcome in engine.run(job, population):
        if isinstance(outcome, Done):
            model: Params = outcome.result.client(0)
            return model
    raise TaskError("The new client's work failed; see the log.")


def _as_numbers(what: str, values: Any) -> Tensor:
    """Return values as a tensor; raise TaskError if they are words or something else that is no number."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        example = np.asarray(values, dtype=object).ravel()[:1]
        hint = "give class numbers, from 0, as the task has them." if what == "labels" else "turn them into numbers."
        raise TaskError(
            f"A new client's {what} must be numbers. Got {', '.join(map(repr, example)) or 'nothing'}.", hint=hint
        ) from error


def _number_words(labels: Any, names: Sequence[str]) -> Any:
    """Return the numbers of labels that are names of classes; numbers as they are."""
    words = np.asarray(labels, dtype=object) if not isinstance(labels, Tensor) else np.empty(0)
    if not any(isinstance(word, str) for word in words.ravel()):
        return labels
    places = {name: place for place, name in enumerate(names)}
    for word in words.ravel():
        if word not in places:
            raise unknown("label", str(word), names)
    return np.vectorize(places.__getitem__, otypes=[np.int64])(words)


def _targets(task: Task, y: Any, samples: int) -> Tensor:
    if y is None:
        return torch.zeros((samples, *task.y.shape[1:]), dtype=task.y.dtype, device=task.y.device)
    names = task.facts.get("class_names")
    y = _number_words(y, names) if names else y
    targets = _as_numbers("labels" if task.classes else "targets", y).to(task.y.device)
    if targets.shape != (samples, *task.y.shape[1:]):
        raise TaskError(f"There must be one target per sample, {samples}. Got {tuple(targets.shape)}.")
    if task.classes is not None and not bool(((targets >= 0) & (targets < task.classes)).all()):
        strange = sorted({*targets.tolist()} - {*range(task.classes)})
        raise TaskError(
            f"A new client's labels must be among the {task.classes} classes of the others. Got {strange[:5]}.",
            hint="a model cannot learn a class that it has no output for: begin a new federation with it.",
        )
    return targets.to(task.y.dtype)
