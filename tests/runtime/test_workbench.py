"""A server answers with models and trains on samples as one client would."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from marks import needs_compiler

from atoll import LocalEngine
from atoll.data.augment import CropAndFlip
from atoll.kernel.errors import TaskError
from atoll.kernel.network import NO_NETWORK
from atoll.kernel.params import Stack, stack
from atoll.runtime.engines.programs import WORTHWHILE_CALLS
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.toolbox.client import sgd


@pytest.fixture
def task(make_task):
    return make_task(sizes=(6, 9), dtype=torch.float64)


@pytest.fixture
def workbench(task) -> Workbench:
    return Workbench(Population(task, RamMemory(2), seed=3), LocalEngine(dtype=torch.float64), round=1)


@pytest.mark.parametrize("alone", [False, True])
def test_answers_are_those_of_the_network(task, workbench, monkeypatch, alone: bool) -> None:
    monkeypatch.setattr("atoll.runtime.workbench.ANSWERS_AT_ONCE", 4)
    monkeypatch.setattr(LocalEngine, "best_alone", lambda self, task: alone)
    w = task.network.initial
    expected = task.network._original(task.x)
    torch.testing.assert_close(workbench.answers(w, task.x), expected)
    several = workbench.answers(stack([w, 2.0 * w]), task.x)
    assert several.shape == (2, *expected.shape)
    torch.testing.assert_close(several[0], expected)
    torch.testing.assert_close(several[1], workbench.answers(2.0 * w, task.x))
    features = workbench.answers(stack([w, 2.0 * w]), task.x, features=True)
    torch.testing.assert_close(features[0], task.network._original.features(task.x))


def test_it_trains_as_a_client_with_these_samples_would(task, workbench) -> None:
    """One step on all samples is one step along the gradient of their mean loss."""
    cohort = workbench.cohort(task.x, task.y, batch_size=len(task.x))
    trained = sgd(cohort, start=task.network.initial, epochs=1)
    assert isinstance(trained, Stack)
    module = task.network._original
    loss = torch.nn.functional.cross_entropy(module(task.x), task.y)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    for (name, parameter), gradient in zip(module.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(trained[name][0], parameter - task.training.lr * gradient)


def test_another_loss_and_other_targets(task, workbench) -> None:
    """Distillation: the server learns what other models answer."""

    def apart(outputs, targets):
        return (outputs - targets).square().mean(1)

    wanted = workbench.answers(-1.0 * task.network.initial, task.x)
    cohort = workbench.cohort(task.x, wanted, network=task.network.with_loss(apart), batch_size=5)
    before = apart(workbench.answers(task.network.initial, task.x), wanted).mean()
    w = sgd(cohort, start=task.network.initial, epochs=200).client(0)
    assert apart(workbench.answers(w, task.x), wanted).mean() < 0.1 * before


@needs_compiler
@pytest.mark.parametrize(
    ("asked", "epochs", "made"), [(True, 2, "compiled"), (True, 1, "traced"), (False, 2, "traced")]
)
def test_long_work_is_compiled_where_compiling_was_asked_for(
    task, workbench, monkeypatch, asked: bool, epochs: int, made: str
) -> None:
    monkeypatch.setitem(WORTHWHILE_CALLS, "compiled", 6)  # three batches of five in a pass
    engine = LocalEngine(strategy=f"loop {'compiled' if asked else 'traced'}", dtype=torch.float64)
    other = replace(workbench, _engine=engine)
    found, expected = (
        sgd(bench.cohort(task.x, task.y, batch_size=5), start=task.network.initial, epochs=epochs)
        for bench in (other, workbench)
    )
    assert [mode for mode, _ in engine.programs._made] == [made]
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-12) for name in expected)


def test_a_set_that_grows_is_read_as_far_as_it_is_there(task, workbench) -> None:
    grown = workbench.cohort(task.x, task.y, first=6)
    whole = workbench.cohort(task.x[:6], task.y[:6])
    one, other = (sgd(cohort, start=task.network.initial, epochs=2) for cohort in (grown, whole))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert int(grown.samples) == 6


def test_samples_of_another_shape_are_not_augmented(make_task) -> None:
    # catches: noise that a generator begins with, taken for images that are too small to be cropped.
    images = replace(make_task(shape=(1, 8, 8), sizes=(6, 9)), augment=CropAndFlip())
    bench = Workbench(Population(images, RamMemory(2), seed=3), LocalEngine(), round=1)
    assert bench.cohort(images.x, images.y)._host._population.task.augment == CropAndFlip()
    noise = torch.zeros(4, 5)
    assert bench.cohort(noise, noise[:, 0], network=NO_NETWORK)._host._population.task.augment is None


def test_its_draws_are_not_those_of_the_first_client(task, workbench) -> None:
    mine = workbench.cohort(task.x, task.y)
    assert mine.task.seed != workbench.task.seed
    assert len(mine) == 1
    np.testing.assert_array_equal(mine._host._population.task.splits["train"].offsets, [0, len(task.x)])


def test_public_data_must_be_there(workbench) -> None:
    with pytest.raises(TaskError, match=r"needs public data.*\n.*`public=0.1`"):
        _ = workbench.public


def test_draws_depend_on_the_purpose_and_the_round(workbench) -> None:
    draws = [one.normal() for one in (workbench.generator("noise"), workbench.generator("labels"))]
    later = replace(workbench, round=2).generator("noise").normal()
    assert len({*draws, later}) == 3
    assert draws[0] == workbench.generator("noise").normal()
