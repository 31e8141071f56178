"""Equations, and answers that are computed from what they gave, are in fp32, whatever the precision of training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import Work, with_public

from atoll import Task, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.compose import create
from atoll.kernel.batch import Batch
from atoll.kernel.job import Job
from atoll.kernel.network import Variant
from atoll.kernel.params import Params, flatten
from atoll.metrics import evaluate, evaluate_central
from atoll.models import MLP
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population


class Shifted(MLP):
    """Features that have most of their length in common, as those of deep networks: bf16 loses what differs."""

    def __init__(self) -> None:
        super().__init__((4,), 3, hidden=(6,))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The usual ones, far from 0."""
        return super().features(x) + 100.0


@pytest.fixture
def task(make_task) -> Task:
    task = with_public(make_task(Shifted, sizes=(30, 40, 50), shares=(0.6, 0.2, 0.2)))
    return replace(task, central=(task.x[:20], task.y[:20]))


def run(task: Task, method: str, precision: str, strategy: str = "whole"):
    engine = LocalEngine(device="cpu", precision=precision, strategy=strategy)
    return federate(task, create(method), rounds=1, engine=engine)


def bits(report) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(report.server)[0] if torch.is_tensor(leaf)]


def scores(report) -> dict:
    return {name: report.history[0]["evaluation"][name] for name in ("personal", "central")}


# Nothing is trained here, so that nothing may depend on the precision of training.
COMPUTED = [
    "fedcgs", "fedcgs:covariance=total", "fedcgs:width=8", "afl", "afl:width=8",
    "regmean:epochs=0", "fedlpa:epochs=0", "oneshot-margins:epochs=0", "oneshot-proto:epochs=0",
    "oneshot-proto:epochs=0,encoder=average", "rga:epochs=0,prototypes=means",
]  # fmt: skip


@pytest.mark.parametrize("method", COMPUTED)
def test_what_is_computed_is_the_same_in_every_precision(task, method):
    one, other = (run(task, method, precision) for precision in ("fp32", "bf16"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bits(one), bits(other), strict=True))
    assert scores(one) == scores(other)


def test_what_is_computed_is_the_same_where_steps_are_traced(task):
    one, other = (run(task, "fedcgs", precision, "whole traced") for precision in ("fp32", "bf16"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bits(one), bits(other), strict=True))
    assert scores(one) == scores(other)


@pytest.mark.parametrize("method", ["regmean:epochs=1", "fedpft", "oneshot-margins:epochs=1", "knn-per:lam=0.5"])
def test_a_model_that_was_computed_answers_the_same_in_every_precision(task, method):
    report = run(task, method, "bf16")
    population, algorithm = report.population, report.algorithm
    found = []
    for precision in ("fp32", "bf16"):
        engine = LocalEngine(device="cpu", precision=precision, strategy="whole")
        each = evaluate(engine, population, algorithm, report.server, round=1)["test"]
        shared = algorithm.shared(report.server)
        central = evaluate_central(engine.bench(population, 1), task.central, shared, exact=algorithm.solved)
        found.append((each.score.tolist(), each.loss.tolist(), central if algorithm.one_shot else None))
    assert found[0] == found[1]


def test_training_and_the_answers_of_trained_models_are_in_the_precision_that_was_asked_for(task):
    one, other = (run(task, "fedavg", precision) for precision in ("fp32", "bf16"))
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(bits(one), bits(other), strict=True))
    losses = []
    for precision in ("fp32", "bf16"):
        engine = LocalEngine(device="cpu", precision=precision, strategy="whole")
        losses.append(evaluate(engine, one.population, one.algorithm, one.server, round=1)["test"].loss.tolist())
    assert losses[0] != losses[1]


def test_an_exact_scan_is_in_fp32_and_other_scans_are_not(task):
    """What a step sees, whatever arithmetic the machine has."""
    seen = []

    def step(carry: Params, batch: Batch, given: None) -> Params:
        seen.append(batch.variant.precision)
        return carry

    def local(cohort):
        for exact in (False, True):
            cohort.scan(step, Params.of(a=0.0), train=False, exact=exact)
        solving = replace(cohort, exact=True)
        for train in (False, True):
            solving.scan(step, Params.of(a=0.0), train=train)
        return cohort.stacked(Params.of(a=0.0))

    engine = LocalEngine(device="cpu", precision="bf16", strategy="whole eager")
    job = Job(Work(local), FedAvg(), None, np.arange(3), 0)
    list(engine.run(job, Population(task, RamMemory(3), 0)))
    told = [precision for place, precision in enumerate(seen) if place == 0 or precision != seen[place - 1]]
    assert told == ["bf16", "fp32", "bf16"]


def test_a_head_of_features_that_are_much_alike_needs_fp32(task):
    """The fault that this is about: the same weights answer at random in bf16."""
    report = run(task, "fedcgs", "fp32")
    x, y = task.x, task.y
    model = report.server.answer

    def right(precision):
        batch = Batch(x, y, None, None, task.network, Variant(train=False, precision=precision))
        return float((batch.outputs(model).argmax(1) == y).float().mean())

    assert right("fp32") > right("bf16") + 0.05
