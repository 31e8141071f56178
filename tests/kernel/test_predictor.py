"""Deploying something that answers by another rule than the network."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll import Algorithm, Batch, Cohort, LocalEngine, Params, Predictor, Recipe, Stack, Task, Update, federate
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.knn_per import KNNPer
from atoll.compose import create
from atoll.kernel.network import Variant
from atoll.kernel.predictor import answer_one_by_one, predictor_of
from atoll.metrics.evaluation import evaluate
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.serialise import from_bytes, to_bytes
from atoll.testing.conformance import personal_models, play

CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Guess(Algorithm):
    """Client k answers class k, modulo 3, however its network answers."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        return Update(send={"delta": cohort.stacked(w) - w})

    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        return Predictor(w, Stack.of(favourite=cohort.ids % CLASSES), guess)


def guess(model: Params, beside: Params, batch: Batch) -> Tensor:
    assert batch.outputs(model).shape == (len(batch.x), CLASSES)  # the network itself is there, too
    return 9 * F.one_hot(beside["favourite"], CLASSES).to(batch.x.dtype).expand(len(batch.x), -1)


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(sizes=(9, 20, 14, 8), shares=(0.5, 0.0, 0.5), dtype=torch.float64)


@pytest.mark.parametrize("strategy", ["whole", "chunk:3", "loop"])
def test_evaluation_asks_the_rule_and_gives_it_each_clients_own_values(task: Task, strategy: str) -> None:
    population = Population(task, RamMemory(task.clients), 0)
    engine = LocalEngine(dtype=torch.float64, strategy=strategy)
    found = evaluate(engine, population, Guess(), task.network.initial, round=1, splits=("test",))["test"]
    split = task.splits["test"]
    own = [task.y[split.order[split.offsets[k] : split.offsets[k + 1]]] for k in range(task.clients)]
    right = [float((y == k % CLASSES).double().mean()) for k, y in enumerate(own)]
    assert 0 < np.mean(right) < 1
    np.testing.assert_allclose(found.score, right, rtol=0, atol=1e-12)
    logits = 9 * torch.eye(CLASSES, dtype=torch.float64)
    losses = [float(F.cross_entropy(logits[k % CLASSES].expand(len(y), -1), y)) for k, y in enumerate(own)]
    np.testing.assert_allclose(found.loss, losses, rtol=0, atol=1e-12)


def test_the_shared_model_answers_as_its_network(task: Task) -> None:
    population = Population(task, RamMemory(task.clients), 0)
    engine = LocalEngine(dtype=torch.float64)
    kinds = [
        evaluate(engine, population, Guess(), task.network.initial, round=1, model=model, splits=("test",))["test"]
        for model in ("shared", "personal")
    ]
    assert not np.allclose(kinds[0].loss, kinds[1].loss)


def test_new_clients_deploy_predictors_and_tune_the_model_by_itself(make_task: Callable[..., Task]) -> None:
    task = make_task(sizes=(12, 9, 20, 14), shares=(0.5, 0.25, 0.25), dtype=torch.float64).hold_out(0.5)
    report = play(task, KNNPer(lam=0.9), evaluation="all")
    found = report.evaluations[-1]["evaluation"]["newcomers"]
    tuned = play(task, FedAvg(), evaluation="all").evaluations[-1]["evaluation"]["newcomers"]
    assert found["labelled"]["0"]["losses"] != tuned["labelled"]["0"]["losses"]
    assert found["labelled"]["5"]["losses"] == tuned["labelled"]["5"]["losses"]
    assert found["unlabelled"]["way"] == "shared"  # a store needs labels


def test_predictors_work_inside_clusters(task: Task) -> None:
    models = personal_models(play(task, create("knn-per@ifca:cluster_rounds=1"), rounds=2))
    assert all("beside.features" in model for model in models)


def test_values_hold_everything_and_survive_serialisation(task: Task) -> None:
    models = personal_models(play(task, Guess()))
    assert [int(model["beside.favourite"]) for model in models] == [0, 1, 2, 0]
    assert set(models[1]) == {*task.network.initial, "beside.favourite"}
    again = from_bytes(to_bytes(models[1]), models[1].layout)
    assert all(torch.equal(again[name], leaf) for name, leaf in models[1].items())


def test_a_model_by_itself_answers_as_its_network(task: Task) -> None:
    plain = predictor_of(task.network.initial)
    assert plain.values.keys() == task.network.initial.keys()
    assert predictor_of(plain) is plain


@pytest.mark.parametrize("strategy", ["whole", "loop"])
def test_what_a_client_must_hold_is_counted(task: Task, strategy: str) -> None:
    """A model; a model with a number beside it; all models of an ensemble, with 3 counts of classes for each."""
    engine, model = LocalEngine(dtype=torch.float64, strategy=strategy), predictor_of(task.network.initial).bytes
    assert model == sum(8 * leaf.numel() for leaf in task.network.initial.values())

    def deployed(method: Algorithm, **more: str) -> float:
        evaluation = federate(task, method, rounds=1, engine=engine, **more).history[-1]["evaluation"]
        return float(evaluation["deployed"])

    assert deployed(FedAvg()) == model
    assert deployed(Guess()) == model + 8
    assert deployed(Ensemble(epochs=1)) == task.clients * (model + 8 * CLASSES)


def test_without_clients_it_is_the_size_of_what_is_shared(make_task: Callable[..., Task]) -> None:
    task = make_task()
    task = replace(task, central=(task.x, task.y))
    report = federate(task, FedAvg(), rounds=2, evaluation="central")
    found = [line["evaluation"].get("deployed") for line in report.history]
    assert found == [None, predictor_of(task.network.initial).bytes]  # known once: after the last round


def test_samples_are_answered_one_by_one_at_once_also_where_images_are_laid_out_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "atoll.engine")
    task = Recipe("digits", clients=2, model="resnet18", samples=20).build()
    network, x = task.network, task.x[:3]
    beside = network.initial.only([])

    def outputs(model: Params, _: Params, batch: Batch) -> Tensor:
        return batch.outputs(model)

    found = []
    for channels_last in (False, True):
        variant = Variant(train=True, channels_last=channels_last)
        network.prepare(variant)
        found.append(answer_one_by_one(outputs, network.initial, beside, Batch(x, x, None, None, network, variant)))
    assert torch.equal(*found)
    assert "one sample after another" not in caplog.text
