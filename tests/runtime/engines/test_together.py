"""Runs side by side: their clients share lanes, and no run notices."""

import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from atoll import LocalEngine, federate
from atoll.compose import create
from atoll.kernel.errors import EngineError
from atoll.kernel.params import flatten
from atoll.runtime.engines import figures, together
from atoll.runtime.engines.together import Together

SIZES = ((40, 3, 17, 4, 9, 25), (5, 31, 8, 12, 4, 20))


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


def make_tasks(make_task, *model):
    """Two tasks of one architecture, with other samples and other initial values."""
    first, second = (make_task(*model, sizes=sizes, shares=(0.8, 0.1, 0.1), dtype=torch.float64) for sizes in SIZES)
    other = first.network.beginning_at(first.network.initial * 0.5)
    return [first, replace(second, x=-second.x, network=other)]


@pytest.fixture
def tasks(make_task):
    return make_tasks(make_task)


@pytest.fixture
def groups(monkeypatch):
    """How many folds were run as one, each time."""
    found = []
    run = together.run_joined

    def spy(folds, programs, width):
        found.append(len(folds))
        return run(folds, programs, width)

    monkeypatch.setattr(together, "run_joined", spy)
    return found


def make_engine(strategy="whole traced"):
    return LocalEngine(device="cpu", dtype=torch.float64, strategy=strategy)


def state_of(report):
    kept = report.population.memory.save(round=len(report.history))
    return [*flatten(report.server)[0], *flatten(kept)[0]]


def run_both_ways(runs, **settings):
    """Run (task, method, seed) side by side and one after another; return both lists of reports."""
    engine = make_engine()

    def work(task, method, seed):
        return lambda: federate(task, create(method), engine=engine, seed=seed, **settings)

    works = [work(*run) for run in runs]
    beside = engine.run_together([task for task, _, _ in runs], works)
    errors = [one for one in beside if isinstance(one, BaseException)]
    assert not errors, errors
    return beside, [
        federate(task, create(method), engine=make_engine(), seed=seed, **settings) for task, method, seed in runs
    ]


def require_same(beside, alone):
    for one, other in zip(beside, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state_of(one), state_of(other), strict=True))
        np.testing.assert_array_equal(one.scores(), other.scores())
        assert [line.gradients for line in one.history] == [line.gradients for line in other.history]
        assert [line.bytes for line in one.history] == [line.bytes for line in other.history]
        assert [line.loss for line in one.history] == [line.loss for line in other.history]


@pytest.mark.parametrize(
    "method",
    ["fedavg", "ditto", "scaffold", "fedavg+sam", "fedper@ifca:cluster_rounds=1"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("apfl", "pfedme", "perfedavg")],
)
def test_seeds_do_side_by_side_what_they_do_alone(tasks, groups, method):
    runs = [(task, method, seed) for seed, task in enumerate([*tasks, tasks[0]])]
    beside, alone = run_both_ways(runs, rounds=3, cohort=5, late=0.3)
    require_same(beside, alone)
    assert max(groups) == 3


def test_methods_whose_steps_agree_share_lanes(tasks, groups):
    runs = [(tasks[0], method, 0) for method in ("local", "fedavg", "fedper", "ditto", "fedprox:mu=0.1")]
    beside, alone = run_both_ways(runs, rounds=3)
    require_same(beside, alone)
    assert groups.count(4) == 3  # in every round, all but FedProx


def test_networks_with_statistics_and_dropout_share_lanes(make_task, groups):
    tasks = make_tasks(make_task, with_batchnorm)
    beside, alone = run_both_ways([(task, "ditto", seed) for seed, task in enumerate(tasks)], rounds=3, drop=0.3)
    require_same(beside, alone)
    assert max(groups) == 2


def test_step_sizes_share_lanes(tasks, groups):
    several = [replace(tasks[0], training=replace(tasks[0].training, lr=lr)) for lr in (0.05, 0.1, 0.2)]
    beside, alone = run_both_ways([(task, "ditto", 0) for task in several], rounds=2)
    require_same(beside, alone)
    assert max(groups) == 3


def test_a_run_that_fails_leaves_the_others_alone(tasks, groups):
    def fail():
        raise ValueError("no such luck")

    engine = make_engine()
    work = lambda seed: lambda: federate(tasks[seed], create("fedavg"), engine=engine, seed=seed, rounds=2)  # noqa: E731
    first, error, second = engine.run_together(tasks, [work(0), fail, work(1)])
    assert isinstance(error, ValueError)
    require_same(
        [first, second], [federate(tasks[k], "fedavg", engine=make_engine(), seed=k, rounds=2) for k in (0, 1)]
    )
    assert engine.together is None


def test_a_client_that_fails_is_lost_in_its_own_run(tasks, groups):
    """One run's clients diverge; the other's do not notice."""
    engine = make_engine()
    broken = tasks[0].x.clone()
    broken[tasks[0].splits["train"].order[:1]] = torch.nan
    bad = replace(tasks[0], x=broken)
    works = [
        lambda: federate(bad, "fedavg", engine=engine, rounds=2),
        lambda: federate(tasks[1], "fedavg", engine=engine, rounds=2),
    ]
    first, second = engine.run_together([bad, tasks[1]], works)
    assert [line.lost for line in first.history] == [{"not finite": 1}] * 2
    require_same([second], [federate(tasks[1], "fedavg", engine=make_engine(), rounds=2)])


def test_ctrl_c_ends_all_threads(tasks):
    engine, before = make_engine(), set(threading.enumerate())

    def stop(line):
        raise KeyboardInterrupt

    def interrupted():
        return federate(tasks[0], "fedavg", engine=engine, rounds=3)

    caught = Together(engine.programs, tasks, engine.device, engine.dtype)
    caught._run_next_group = lambda waiting: stop(None)
    engine.together = caught
    with pytest.raises(KeyboardInterrupt):
        caught.run([interrupted, interrupted])
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
    assert set(threading.enumerate()) <= before


def test_runs_side_by_side_pay_for_a_compilation_together(tasks, monkeypatch):
    """What one run would not pay for, three do: all of their work lies ahead of the program that they share."""
    ahead = []
    measured = figures.Measured.ahead
    monkeypatch.setattr(figures.Measured, "ahead", lambda one, part: ahead.append(part.runs) or measured(one, part))
    engine = LocalEngine(device="cpu", strategy="whole", remember=False)
    works = [lambda seed=seed: federate(tasks[0], "fedavg", engine=engine, seed=seed, rounds=2) for seed in range(3)]
    engine.run_together([tasks[0]], works)
    assert set(ahead) == {3}
    one = figures.Measured(None, seconds=2.0, steps=5.0)
    part = SimpleNamespace(job=SimpleNamespace(calls=10), runs=3)
    assert measured(one, part) == 300.0


def test_seconds_are_shared_by_steps(tasks):
    beside, _ = run_both_ways([(task, "fedavg", seed) for seed, task in enumerate(tasks)], rounds=2)
    assert all(line.seconds["round"] > 0 for report in beside for line in report.history)


def test_a_timeout_is_refused(tasks):
    engine = LocalEngine(device="cpu", timeout=1.0)
    with pytest.raises(EngineError, match="no `timeout`"):
        engine.run_together(tasks, [])


def test_each_run_has_a_log_of_its_own(tasks, tmp_path):
    engine = make_engine()

    def work(seed):
        def run():
            logging.getLogger("atoll.mine").warning("seed %d is here", seed)
            return federate(
                tasks[seed],
                "fedavg",
                engine=engine,
                seed=seed,
                rounds=2,
                folder=tmp_path / f"{seed}",
                on_round=lambda line: logging.getLogger("atoll.mine").info("seed %d: %d", seed, line.round),
            )

        return run

    level = logging.getLogger("atoll").level
    engine.run_together(tasks, [work(0), work(1)])
    for seed in (0, 1):
        text = (tmp_path / f"{seed}" / "run.log").read_text()
        assert f"seed {seed}: 2" in text
        assert f"seed {1 - seed}:" not in text
    assert logging.getLogger("atoll").level == level
