"""Frozen features: whose they are, what of them is added up, and how a head on them answers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from samples import own
from torch import nn

from atoll import Batch, Cohort, Predictor, Task
from atoll.algorithms.afl import AFL
from atoll.kernel.errors import ModelError, TaskError
from atoll.kernel.network import Variant
from atoll.models.split import BodyAndHead
from atoll.testing.conformance import play, quadratics
from atoll.toolbox.server.frozen import moments
from atoll.toolbox.server.triangles import symmetric

SIZE = 6


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    made = make_task(dtype=torch.float64)
    return replace(made, public=(made.x[:9] + 0.1, made.y[:9]))


def batch_of(task: Task, count: int = 7) -> Batch:
    return Batch(task.x[:count], task.y[:count], None, None, task.network, Variant(train=False))


def test_moments_are_those_of_each_client(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    cohort = make_cohort(task)
    sums = moments(cohort, AFL().training.phi(cohort.task))
    for k in range(task.clients):
        x, y = own(task, k)
        z = Batch(x, y, None, None, task.network, Variant(train=False)).features(task.network.initial)
        assert sums["count"][k].tolist() == torch.bincount(y, minlength=3).tolist()
        for label in range(3):
            torch.testing.assert_close(sums["sum"][k, label], z[y == label].sum(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(symmetric(sums["square"][k]), z.T @ z, rtol=0, atol=1e-12)


def test_sums_are_exact_on_models_of_single_precision(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    cohort = make_cohort(make_task())
    assert {leaf.dtype for leaf in moments(cohort, AFL().training.phi(cohort.task)).values()} == {torch.float64}


def test_features_of_public_samples_are_trained_and_sent(task: Task) -> None:
    report = play(task, AFL(features="public", public_epochs=3))
    body, head = (report.server.answer.without_part("head"), task.network.initial.without_part("head"))
    assert any(not torch.equal(body[name], head[name]) for name in body)
    numbers = sum(leaf.numel() for leaf in body.values())
    down = report.ledger.bytes("down") / task.clients
    assert numbers * 8 <= down < numbers * 8 + 300
    still = play(task, AFL(features="public", public_epochs=0)).server.answer
    initial = play(task, AFL()).server.answer
    assert all(torch.equal(still[name], initial[name]) for name in initial)


def test_the_initial_network_is_not_sent(task: Task) -> None:
    ledger = play(task, AFL()).ledger
    assert ledger.bytes("down") == 0
    assert set(ledger.by_kind()) == {("up", "statistic")}


def test_features_of_public_samples_need_some(make_task: Callable[..., Task]) -> None:
    with pytest.raises(TaskError, match="needs public data"):
        play(make_task(dtype=torch.float64), AFL(features="public"))


def test_random_features_answer_beside_the_network(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    algorithm = AFL(width=11)
    report = play(task, algorithm)
    deployed = algorithm.shared(report.server)
    assert isinstance(deployed, Predictor)
    beside, batch = deployed.beside, batch_of(task)
    assert beside["directions"].shape == (SIZE, 11)
    phi = torch.relu(batch.features(task.network.initial) @ beside["directions"])
    answers = deployed.answer(deployed.model, beside, batch)
    torch.testing.assert_close(answers, phi @ beside["weight"].T + beside["bias"], rtol=0, atol=1e-12)
    assert algorithm.personalize(report.server, make_cohort(task)).answer is deployed.answer
    other = play(task, algorithm, seed=1).server.answer["directions"]
    assert not torch.equal(other, beside["directions"])


def test_a_run_with_random_features_is_evaluated(task: Task) -> None:
    some = Task.of_clients(
        {str(k): own(task, k) for k in (0, 2, 3)}, task.network._original, classes=3, training=task.training,
        shares=(0.5, 0.0, 0.5),
    )  # fmt: skip
    report = play(some, AFL(width=11), evaluation="all")
    assert report.scores().shape == (3,)


def test_without_replies_the_network_stays_as_it_is(task: Task) -> None:
    for algorithm in (AFL(), AFL(width=5)):
        report = play(task, algorithm, faults=lambda r, clients: clients >= 0)
        assert algorithm.shared(report.server) is report.server.start.model


def deep_head() -> nn.Module:
    return BodyAndHead(nn.Flatten(), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))


def no_bias() -> nn.Module:
    return BodyAndHead(nn.Flatten(), nn.Linear(4, 3, bias=False))


@pytest.mark.parametrize("model", [deep_head, no_bias])
def test_another_head_than_a_linear_one_is_refused_or_replaced(
    make_task: Callable[..., Task], model: Callable[[], nn.Module]
) -> None:
    task = make_task(model, dtype=torch.float64)
    with pytest.raises(ModelError, match="linear layer with a bias, from 4 features to 3 classes") as refused:
        play(task, AFL())
    assert "width" in str(refused.value)
    assert "directions" in play(task, AFL(width=8)).server.answer


def test_tasks_without_a_class_per_sample_are_refused() -> None:
    with pytest.raises(TaskError, match="frozen needs samples of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), AFL())
