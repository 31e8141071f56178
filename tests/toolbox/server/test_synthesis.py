"""What a server imagines: samples of low cost, a pool that grows, and what is learned from it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll import LocalEngine, Task
from atoll.kernel.batch import Batch
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, stack
from atoll.kernel.randomness import Keys, default_generator
from atoll.models import BodyAndHead
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.toolbox.server.synthesis import (
    LONGEST,
    RULE,
    Given,
    Learner,
    Pool,
    Teachers,
    alike,
    answers,
    answers_and_distance,
    diversify,
    imagine,
    learn,
)


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def bench_of(task: Task, round: int = 0) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=round)


def far_from_three(batch: Batch, given: Any) -> Tensor:
    return (batch.x - 3).square().mean()


def asks_the_model(batch: Batch, given: Any) -> Tensor:
    return -batch.outputs(given["w"]).gather(1, batch.y[:, None]).mean()


def made(bench: Workbench, cost=far_from_three, given: Any = None, **more) -> tuple[Tensor, Tensor]:
    asked = {"turn": 0, "samples": 12, "steps": 40, "lr": 0.02, "noise": 5, "width": 8} | more
    return imagine(bench, cost, given, **asked)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_samples_are_made_for_what_they_cost(task: Task) -> None:
    early, late = (far_from_three_of(made(bench_of(task), steps=steps)[0]) for steps in (1, 200))
    assert late < 0.1 * early


def far_from_three_of(x: Tensor) -> float:
    return float((x - 3).square().mean())


def test_models_are_asked_as_they_would_be_deployed(task: Task) -> None:
    w = task.network.initial
    x, y = made(bench_of(task), asks_the_model, {"w": w}, steps=60)
    sure = bench_of(task).answers(w, x).gather(1, y[:, None]).mean()
    before = bench_of(task).answers(w, made(bench_of(task), asks_the_model, {"w": w}, steps=1)[0])
    assert sure > before.gather(1, y[:, None]).mean()


def test_the_samples_that_cost_least_are_kept(task: Task) -> None:
    """With steps that are far too long, the first samples stay the best."""
    first, last = (made(bench_of(task), steps=steps, lr=1e3)[0] for steps in (1, 5))
    assert torch.equal(first, last)


def test_draws_depend_on_turn_and_round_alone(task: Task) -> None:
    (x, y), (same, _), (turned, _) = (made(bench_of(task), turn=turn) for turn in (0, 0, 1))
    later = made(bench_of(task, round=1))[0]
    assert torch.equal(x, same)
    assert not torch.equal(x, turned)
    assert not torch.equal(x, later)
    assert set(y.tolist()) <= {0, 1, 2}


def test_a_pool_holds_what_was_added_and_shows_nothing_else(task: Task) -> None:
    pool = Pool(bench_of(task), 3, 4)
    for value in (1.0, 2.0):
        pool.add(torch.full((4, 4), value, dtype=torch.float64), torch.full((4,), int(value)))

    def look(seen: Params, batch: Batch, given: None) -> Params:
        return Params.of(x=seen["x"] + batch.x.sum(), y=seen["y"] + batch.y.sum(), n=seen["n"] + batch.count)

    seen = pool.cohort().scan(look, Params.of(x=0.0, y=0.0, n=0.0)).client(0)
    assert {name: float(leaf) for name, leaf in seen.items()} == {"x": 4 * 4 * 3.0, "y": 12.0, "n": 8.0}


# -- learning ----------------------------------------------------------------------------------------------------------


def test_a_learner_takes_clipped_steps_with_momentum_and_decay() -> None:
    slope = torch.tensor([30.0, -40.0], dtype=torch.float64)  # of norm 50

    def lesson(w: Params, batch: Batch, given: Any) -> tuple[Tensor, Params]:
        return w["w"] @ slope, w

    x = torch.zeros(1, 1, dtype=torch.float64)
    batch = Batch(x, x, None, None, Network(nn.Identity()), Variant())
    w = Params.of(w=torch.tensor([1.0, 2.0], dtype=torch.float64))
    state, given = Learner(w, w.zeros()), Given(alike(stack([w]), w), torch.tensor(0.1, dtype=torch.float64))
    for _ in range(2):
        state = learn(state, batch, given, lesson=lesson)
    expected, velocity = w["w"], torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        g = slope + RULE.weight_decay * expected
        velocity = RULE.momentum * velocity + g * LONGEST / g.norm()
        expected = expected - 0.1 * velocity
    torch.testing.assert_close(state.w["w"], expected, rtol=0, atol=1e-10)


def test_moved_samples_go_one_step_along_the_sign() -> None:
    """For a linear model of two classes the direction is known: that of u_0 - u_1, times the row difference."""
    weight = torch.tensor([[1.0, -2.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[0.3, 0.1, 5.0], [-0.2, 0.4, 1.0]], dtype=torch.float64)
    keys = Keys(torch.tensor(3), torch.tensor(4))
    batch = Batch(x, torch.zeros(2), None, keys, Network(nn.Linear(3, 2).double()), Variant())
    moved = diversify(batch, lambda shown: shown.x @ weight.T, 0.25, 4.0).x
    u = 2 * batch.uniform("direction", 2, 2) - 1
    expected = x + 0.25 * ((u[:, :1] - u[:, 1:]) * (weight[0] - weight[1])).sign()
    assert torch.equal(moved, expected)
    assert torch.equal(moved[:, 2], x[:, 2])  # where nothing depends on it


# -- BatchNorm ---------------------------------------------------------------------------------------------------------


def normed(task: Task) -> tuple[Network, Params]:
    with default_generator(0):
        body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
        network = Network(BodyAndHead(body, nn.Linear(5, 3)).double())
    return network, network.initial


def test_the_distance_is_zero_for_the_statistics_that_are_remembered(task: Task) -> None:
    network, w = normed(task)
    entering = torch.nn.functional.linear(task.x, w["body.0.weight"], w["body.0.bias"])
    remembered = {"running_mean": entering.mean(0), "running_var": entering.var(0, correction=0)}
    same = w | Params({f"body.1.{name}": value for name, value in remembered.items()})
    batch = Batch(task.x, task.y, None, None, network, Variant(train=False))
    both = stack([same, w])
    outputs, distance = answers_and_distance(Params(both, both.layout), batch)
    far = (entering.mean(0)).norm() + (entering.var(0, correction=0) - 1).norm()
    torch.testing.assert_close(distance, far / 2)  # averaged over the models, and 0 for the first
    torch.testing.assert_close(outputs, torch.stack([batch.outputs(same), batch.outputs(w)]))
    alone = Params(stack([same]), both.layout)
    assert answers_and_distance(alone, batch)[1] < 1e-12


def test_the_statistics_of_images_are_those_of_their_channels() -> None:
    images = torch.randn(5, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = Network(nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(24, 2)).double())
    several = stack([network.initial])
    batch = Batch(images, images[:, 0, 0, 0], None, None, network, Variant(train=False))
    _, distance = answers_and_distance(Params(several, several.layout), batch)
    mean, variance = images.mean((0, 2, 3)), images.var((0, 2, 3), correction=0)
    torch.testing.assert_close(distance, mean.norm() + (variance - 1).norm())


def test_the_distance_leaves_no_hooks_behind(task: Task) -> None:
    network, w = normed(task)
    batch = Batch(task.x, task.y, None, None, network, Variant(train=False))
    several = stack([w])
    answers_and_distance(Params(several, several.layout), batch)
    with pytest.raises(RuntimeError):
        answers_and_distance(Params(several, several.layout), replace(batch, x=batch.x[:, :2]))
    module = network.module(batch.variant).module
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_models_without_batchnorm_have_no_distance(task: Task) -> None:
    several = stack([task.network.initial] * 2)
    batch = Batch(task.x, task.y, None, None, task.network, Variant(train=False))
    outputs, distance = answers_and_distance(Params(several, several.layout), batch)
    assert distance == 0
    assert torch.equal(outputs, answers(Params(several, several.layout), batch))


def test_the_distance_can_be_lowered(task: Task) -> None:
    network, w = normed(task)
    several = stack([w])
    given = alike(several, w)

    def cost(batch: Batch, given: Teachers) -> Tensor:
        return answers_and_distance(given.models, batch)[1]

    bench = bench_of(replace(task, network=network))
    far, near = (made(bench, cost, given, steps=steps)[0] for steps in (1, 150))

    def distance(x: Tensor) -> float:
        return float(cost(Batch(x, x, None, None, network, Variant(train=False)), given))

    assert math.isfinite(distance(far))
    assert distance(near) < 0.5 * distance(far)
