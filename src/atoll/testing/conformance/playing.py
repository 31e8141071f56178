"""Runs of a method, and what they leave: the server's state, what clients keep, models and their answers."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from atoll.data.task import Task
from atoll.federation.loop import federate
from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm, Deployed
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.engine import Engine
from atoll.kernel.job import EVERYTHING, AtTheEnd, Done, Job
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.predictor import BESIDE, Answer, answer_one_by_one, answer_samples, predictor_of
from atoll.runtime.engines.measuring import one_thread_each
from atoll.runtime.memory import Memory, RamMemory
from atoll.runtime.population import Population
from atoll.testing.conformance.engines import find_any_engine
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.tasks import build_task, task_for
from atoll.testing.conformance.trees import copy_tree, require_finite, take_row

ROUNDS = 2  # of short runs, which are played in many ways
LONG = 12  # rounds in which whatever shows late is looked for


def play(task: Task, algorithm: Algorithm, rounds: int = 1, *, strategy: str = "thrifty", **more: Any) -> Report:
    """Run a method in float64 without evaluation; no client may fail. `more` goes to `federate`."""
    with one_thread_each():  # these models are so small that a second thread only costs
        more = {"evaluation": "none", **more}
        report = federate(task, algorithm, engine=find_any_engine(strategy), rounds=rounds, **more)
    failed = {reason for line in report.history for reason in line["lost"]} - {"dropped out"}
    if failed:
        raise ConformanceError(f"Every client must be able to train. Some failed: {'; '.join(sorted(failed))}")
    return report


def train(
    algorithm: Algorithm, task: Task | None = None, *, rounds: int = ROUNDS, strategy: str = "whole", **more: Any
) -> Report:
    """Run a method for a few rounds on a few clients, or for many rounds on more of them."""
    return play(
        task or (task_for(algorithm) if rounds >= LONG else build_task(items_by=algorithm.items_by)),
        algorithm,
        1 if algorithm.one_shot else rounds,
        strategy=strategy,
        **more,
    )


def gather_outcome(report: Report) -> Tree:
    """Return all that a run leaves: the server's state, what clients keep, and their models."""
    kept = read_kept(report.population.memory)
    return copy_tree({"server": report.server, "kept": kept, "personal": personal_models(report)})


def read_kept(memory: Memory) -> dict[str, Tree]:
    """Return what each client keeps, by itself and in the memories beside."""
    saved = memory.save(round=0)
    return {} if saved is None else split_by_client(saved)


def split_by_client(saved: Tree) -> dict[str, Tree]:
    """Give each client its part of a saved memory."""
    kept: dict[str, Tree] = {
        str(int(client)): {"": take_row(saved["kept"], k)} for k, client in enumerate(saved["clients"])
    }
    for place, apart in saved["beside"].items():
        for client, tree in split_by_client(apart).items():
            kept.setdefault(client, {})[place] = tree
    return kept


def personal_models(report: Report) -> list[Params]:
    """Return each client's own model after a run, made without its test data."""
    return [each["model"] for each in deploy(report, "model")]


def require_sound(report: Report, when: str) -> None:
    """Raise unless a run leaves finite numbers, and clients have models that answer with finite numbers."""
    require_finite(gather_outcome(report), when)
    require_finite(deploy(report, "answers"), when)


@dataclass(frozen=True)
class Deploy(AtTheEnd):
    """Clients make what they would deploy, and show its values or what it answers."""

    part: str

    name: ClassVar[str] = "conformance"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Tree:
        """Return what is asked for."""
        show = {"model": read_values, "answers": sum_answers}[self.part]
        return {self.part: show(cohort, method.personalize(received, cohort))}


@dataclass(frozen=True)
class Join(AtTheEnd):
    """New clients are welcomed, and show their models and what these answer."""

    labelled: bool

    @property
    def name(self) -> str:
        """What logs call it."""
        return f"welcome {self.labelled}"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Tree:
        """Return the models and their answers."""
        learner = cohort if self.labelled else cohort.without("labels")
        deployed = predictor_of(method.welcome(received, learner))
        model = learner.stacked(deployed.model or deployed.values)
        return {"model": model, "answers": sum_answers(learner, deployed)}


def deploy(report: Report, part: str) -> list[Tree]:
    """Return what each client deploys after a run: its `model`, or its `answers`."""
    algorithm, server = report.algorithm, report.server
    everybody, groups = np.arange(report.task.clients), algorithm.groups(server)
    job = Job(Deploy(part), algorithm, server, everybody, report.settings.rounds, groups)
    return run_job(report.engine, job, report.population)


def read_values(cohort: Cohort, deployed: Deployed) -> Stack:
    """Return all numbers of what clients deploy."""
    return cohort.stacked(predictor_of(deployed).values)


def sum_answers(cohort: Cohort, deployed: Deployed) -> Stack:
    """Sum what clients answer to their training samples: a number, if all answers are numbers."""
    one = predictor_of(deployed)
    step, given = functools.partial(add_answers, one.answer), (one.model, one.beside)
    summed: Stack = cohort.scan(step, Params.of(sum=0.0), given=given, shuffle=False, train=False, labels=False)
    return summed


def add_answers(answer: Answer, carry: Params, batch: Batch, given: tuple[Params, Params]) -> Params:
    """Add the answers to one batch."""
    return Params.of(sum=carry["sum"] + answer_samples(answer, *given, batch).sum())


@dataclass(frozen=True)
class Answers(AtTheEnd):
    """Clients answer their test samples: all at once, or one at a time."""

    alone: bool

    splits: ClassVar[frozenset[str]] = EVERYTHING

    @property
    def name(self) -> str:
        """What logs call it."""
        return f"answers {self.alone}"

    def run(self, method: Algorithm, received: Tree, cohort: Cohort) -> Stack:
        """Return a row for each sample; of small clients, zeros after the last."""
        one, facts = predictor_of(method.personalize(received, cohort.without("test"))), cohort.task
        largest = max(1, facts.largest["test"])
        assert facts.classes is not None
        answered: Stack = cohort.scan(
            functools.partial(take_answers, one.answer, self.alone),
            Params.of(answers=torch.zeros(largest, facts.classes)),
            given=(one.model, one.beside), split="test", batch_size=largest, shuffle=False, train=False, exact=True,
        )  # fmt: skip
        return answered


def take_answers(answer: Answer, alone: bool, carry: Params, batch: Batch, given: tuple[Params, Params]) -> Params:
    """Return the answers to one batch, which holds all samples of a client."""
    ask = answer_one_by_one if alone else answer_samples
    answers = ask(answer, *given, batch)
    answers = answers if batch.mask is None else answers * batch.mask[:, None]
    rows = len(carry["answers"])
    return Params.of(answers=torch.cat([answers, answers.new_zeros(rows - len(answers), answers.shape[1])]))


def answer_tests(report: Report, *, alone: bool = False, task: Task | None = None) -> list[Tree]:
    """Return what each client answers to its test samples after a run; `task` may have other labels."""
    algorithm, server, population = report.algorithm, report.server, report.population
    population = population if task is None else replace(population, task=task)
    everybody, groups = np.arange(report.task.clients), algorithm.groups(server)
    job = Job(Answers(alone), algorithm, server, everybody, report.settings.rounds, groups)
    return run_job(report.engine, job, population)


def welcome(report: Report, newcomers: Task, *, labelled: bool = True, strategy: str = "whole") -> list[Tree]:
    """Return the models of new clients after a run, and their answers."""
    network = newcomers.network.initial
    population = Population(newcomers, RamMemory(newcomers.clients), seed=1)
    job = Job(Join(labelled), report.algorithm, report.server, np.arange(newcomers.clients), 0)
    welcomed = run_job(find_any_engine(strategy), job, population)
    for client, model in enumerate(one["model"] for one in welcomed):
        if any(name.startswith(BESIDE) for name in model):  # no single model: an ensemble, for example
            continue
        if {name: leaf.shape for name, leaf in model.items()} != {name: leaf.shape for name, leaf in network.items()}:
            raise ConformanceError(f"A new client must get a whole model, {network}. Client {client} got {model}.")
    return welcomed


def run_job(engine: Engine, job: Job, population: Population) -> list[Tree]:
    """Return what each client made in a job."""
    made: dict[int, Tree] = {}
    reason = ""
    with one_thread_each():
        for outcome in engine.run(job, population):
            if isinstance(outcome, Done):
                made |= {int(client): take_row(outcome.result, k) for k, client in enumerate(outcome.clients)}
            else:
                reason = f" The others: {outcome.reason}"
    if len(made) < len(job.clients):
        raise ConformanceError(f"Every client must get a model. Only {sorted(made)} of {len(job.clients)} did.{reason}")
    return [made[client] for client in range(len(made))]


def format_metrics(report: Report) -> str:
    """Return the log without times; as text, in which a score that does not exist equals itself."""
    varying = ("seconds", "memory")  # of the machine
    return json.dumps([{key: value for key, value in line.items() if key not in varying} for line in report.history])


def close_memory(report: Report) -> None:
    """Close the file of a memory that has one."""
    close = getattr(report.population.memory, "close", None)
    if close is not None:
        close()
