import math

import numpy as np
import pytest
import torch
from torch.func import functional_call

from atoll import LocalEngine, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.data.partition import Natural
from atoll.data.synthetic import Linear
from atoll.data.task import Task, Training
from atoll.kernel.params import Stack
from atoll.metrics import calibration, evaluation
from atoll.metrics.evaluation import ClientScores, evaluate, evaluate_central
from atoll.models import MLP
from atoll.runtime.engines import scan
from atoll.runtime.engines.programs import WORTHWHILE_CALLS
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population

CPU64 = {"dtype": torch.float64}
SIZES = (31, 1, 12, 50, 7)  # the second has no sample for testing
SHARES = (0.5, 0.1, 0.4)


@pytest.fixture
def report(make_task):
    task = make_task(sizes=SIZES, shares=SHARES, dtype=torch.float64, lr=0.5)
    return federate(task, Ditto(lam=0.01), rounds=6, engine=LocalEngine(**CPU64), evaluation="none")


def scored(report, strategy="whole", **more):
    engine = LocalEngine(strategy=strategy, **CPU64)
    return evaluate(engine, report.population, report.algorithm, report.server, round=6, each=True, **more)


def forward(report, client, split="test"):
    """Logits and targets of a client's samples, by its own model alone."""
    task = report.population.task
    default = Stack({name: leaf.expand(5, *leaf.shape) for name, leaf in report.server.items()}, report.server.layout)
    mine = report.population.memory.recall(np.arange(5), default, before=99)
    rows = task.splits[split].order[task.splits[split].offsets[client] : task.splits[split].offsets[client + 1]]
    module = MLP((4,), 3, hidden=(6,)).double()
    with torch.no_grad():
        return functional_call(module, {name: mine[name][client] for name in mine}, (task.x[rows],)), task.y[rows]


# -- every sample ------------------------------------------------------------------------------------------------------


def test_lanes_that_have_nothing_left_to_do_write_nowhere(make_task, monkeypatch, caplog):
    """Two lanes share three clients, so one of them ends early and repeats its last step."""
    monkeypatch.setattr(evaluation, "LARGEST_BATCH", 3)
    monkeypatch.setitem(WORTHWHILE_CALLS, "traced", 0)
    monkeypatch.setattr(scan, "choose_width", lambda clients, evenness: 2)
    task = make_task(sizes=(20, 20, 20), shares=SHARES, dtype=torch.float64)
    report = federate(task, FedAvg(), rounds=1, engine=LocalEngine(**CPU64), evaluation="none")
    found, alone = (scored(report, strategy)["test"].each for strategy in ("whole traced", "loop eager"))
    assert not caplog.text  # nobody failed, to be scored alone
    np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("largest", [3, 256])
def test_every_sample_is_scored_by_its_clients_own_model_in_order(report, monkeypatch, largest):
    monkeypatch.setattr(evaluation, "LARGEST_BATCH", largest)
    found = scored(report)["test"]
    right = [(outputs.argmax(1) == y).double().numpy() for outputs, y in (forward(report, k) for k in range(5))]
    assert found.samples.tolist() == [len(one) for one in right] == [12, 0, 5, 20, 3]
    np.testing.assert_array_equal(found.each, np.concatenate(right))
    assert 0 < found.each.mean() < 1
    for client in (0, 2, 3, 4):
        assert found.score[client] == pytest.approx(right[client].mean(), abs=1e-12)
    assert math.isnan(found.score[1])


def test_single_samples_are_kept_only_when_asked_for(report):
    engine = LocalEngine(**CPU64)
    found = evaluate(engine, report.population, report.algorithm, report.server, round=6)
    assert found["test"].each is None
    assert scored(report)["val"].each is None


@pytest.mark.parametrize("split", ["val", "test"])
def test_losses_are_those_of_the_own_model(report, split):
    found = scored(report)[split]
    for client in np.flatnonzero(found.samples):
        outputs, y = forward(report, client, split)
        assert found.loss[client] == pytest.approx(torch.nn.functional.cross_entropy(outputs, y).item(), rel=1e-9)


def test_the_variance_of_an_accuracy(report):
    found = scored(report)["test"]
    there = found.samples > 0
    np.testing.assert_allclose(found.variance[there], (found.score * (1 - found.score))[there], atol=1e-12)
    assert math.isnan(found.variance[1])


def test_the_variance_of_an_error_is_that_of_its_samples():
    task = Task.build(Linear(clients=3, samples=30, dimensions=3).dataset(), Natural(), training=Training(lr=0.01))
    ran = federate(task, Ditto(), rounds=1, engine=LocalEngine(**CPU64), evaluation="none")
    found = scored(ran)["test"]
    assert found.bins is None
    assert not found.higher_is_better
    ends = np.cumsum(found.samples)[:-1]
    for client, mine in enumerate(np.split(found.each, ends)):
        assert found.score[client] == pytest.approx(mine.mean(), rel=1e-6)  # single ones are kept in single precision
        assert found.variance[client] == pytest.approx(mine.var(), rel=1e-5)


@pytest.mark.parametrize("largest", [3, 256])
def test_bins_of_confidence_and_their_error(report, monkeypatch, largest):
    monkeypatch.setattr(evaluation, "LARGEST_BATCH", largest)
    found = scored(report)["test"]
    gaps, total = [], np.zeros((3, calibration.BINS))
    for client in (0, 2, 3, 4):
        outputs, y = forward(report, client)
        confidence = outputs.softmax(1).amax(1).numpy()
        right = (outputs.argmax(1) == y).double().numpy()
        place = np.minimum(np.ceil(confidence * calibration.BINS).astype(int) - 1, calibration.BINS - 1)
        sums = np.stack(
            [np.bincount(place, values, calibration.BINS) for values in (np.ones(len(y)), confidence, right)]
        )
        np.testing.assert_allclose(found.bins[client], sums, rtol=1e-6, atol=1e-6)
        gaps.append(np.abs(sums[2] - sums[1]).sum() / len(y))
        total += sums
    figures = found.as_json()
    assert [figures["eces"][client] for client in (0, 2, 3, 4)] == pytest.approx(gaps, rel=1e-6)
    assert math.isnan(figures["eces"][1])
    assert figures["ece"] == pytest.approx(np.abs(total[2] - total[1]).sum() / found.samples.sum(), rel=1e-6)


@pytest.mark.parametrize("strategy", ["loop", "chunk:2", "threads"])
def test_every_strategy_scores_with_the_same_bits(report, monkeypatch, strategy):
    monkeypatch.setattr(evaluation, "LARGEST_BATCH", 4)
    whole, other = scored(report), scored(report, strategy)
    for split in ("val", "test"):
        for name in ("score", "loss", "variance", "bins"):
            np.testing.assert_array_equal(getattr(whole[split], name), getattr(other[split], name))
    np.testing.assert_array_equal(whole["test"].each, other["test"].each)


def test_the_shared_model_can_be_asked_for(report):
    found = scored(report, model="shared")["test"]
    own = scored(report)["test"]
    assert (found.each != own.each).sum() > 5
    assert found.samples.tolist() == own.samples.tolist()


def test_the_servers_test_set_is_scored_batch_by_batch(make_task):
    from dataclasses import replace

    task = make_task(sizes=SIZES, shares=SHARES, dtype=torch.float64)
    task = replace(task, central=(task.x[:25], task.y[:25]))
    w = federate(task, FedAvg(), rounds=1, engine=LocalEngine(**CPU64), evaluation="none").server
    with torch.no_grad():
        outputs = functional_call(MLP((4,), 3, hidden=(6,)).double(), dict(w), (task.x[:25],))
    bench = LocalEngine(**CPU64).bench(Population(task, RamMemory(task.clients), 0), 1)
    found = evaluate_central(bench, task.central, w, batch_size=4)
    assert found["score"] == pytest.approx((outputs.argmax(1) == task.y[:25]).double().mean().item(), abs=1e-12)
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(outputs, task.y[:25]).item(), rel=1e-9)


# -- figures -----------------------------------------------------------------------------------------------------------


def scores(values, samples, **more):
    return ClientScores(np.array(values), np.array(values), np.array(samples), **more)


def test_figures_by_hand():
    found = scores([0.5, 1.0, math.nan, 0.75], [10, 30, 0, 20])
    assert found.macro == pytest.approx(0.75)
    assert found.micro == pytest.approx((5 + 30 + 15) / 60)
    assert found.worst == found.bottom == 0.5
    assert found.spread == pytest.approx(np.std([0.5, 1.0, 0.75]))
    assert found.as_json()["samples"] == [10, 30, 0, 20]


def test_the_worst_tenth_is_rounded_up():
    values = np.arange(21) / 100  # three of 21
    assert scores(values, [1] * 21).bottom == pytest.approx(0.01)
    assert scores(values, [1] * 21, higher_is_better=False).bottom == pytest.approx(0.19)
    assert scores(values, [1] * 21, higher_is_better=False).worst == 0.2


def test_without_any_samples_nothing_is_known():
    found = scores([math.nan, math.nan], [0, 0])
    assert all(math.isnan(value) for value in (found.macro, found.micro, found.worst, found.bottom, found.spread))
    assert math.isnan(found.as_json()["loss"])
