"""FAFI with a queue: what is in it, and for whom it changes nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from atoll import Cohort, Task
from atoll.algorithms.fafi import FAFI
from atoll.algorithms.fafi_queue import FAFIQueue
from atoll.kernel.params import Params
from atoll.testing.conformance import play
from atoll.toolbox.objectives.prototypical import Carry, Given
from atoll.toolbox.objectives.terms import follow

WEIGHT = "head.weight"


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(sizes=(16, 12), dtype=torch.float64)


@pytest.mark.limit("fafi-queue")
def test_of_one_class_a_queue_has_no_negatives_unless_it_is_blind(task: Task) -> None:
    # catches: the published queue, which pushes samples of one class apart, most where clients have few classes.
    alike = replace(task, y=torch.zeros_like(task.y))
    plain = play(alike, FAFI(epochs=4)).server.answer.models
    aware = play(alike, FAFIQueue(queue=8, epochs=4)).server.answer.models
    assert all(torch.equal(leaf, aware[name]) for name, leaf in plain.items())
    blind = play(alike, FAFIQueue(queue=8, queue_same="blind", epochs=4)).server.answer.models
    assert not torch.equal(plain[WEIGHT], blind[WEIGHT])


def test_nothing_changes_until_the_queue_is_full(task: Task) -> None:
    # A quarter of 16 samples is 4, and of 12 it is 3: with one batch per epoch, no step sees it full.
    for batch_size, same in ((16, True), (4, False)):
        small = replace(task, training=replace(task.training, batch_size=batch_size))
        plain, queue = (
            play(small, algorithm).server.answer.models[WEIGHT] for algorithm in (FAFI(epochs=1), FAFIQueue(epochs=1))
        )
        assert torch.equal(plain, queue) is same


def test_a_queue_lasts_for_all_of_training(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    cohort = make_cohort(task)
    step = FAFIQueue(queue=64).training.step(cohort)
    given = Given(cohort.lr, epoch=None, total=None, own=None)
    end = cohort.scan(step, step.start(cohort, cohort.initial), given=given, epochs=3)
    queue = end.own.queue
    assert queue["room"].tolist() == [4, 3]
    assert queue["age"][0, :4].tolist() == [0] * 4
    assert (queue["age"][0, 4:] < 0).all()
    torch.testing.assert_close(queue["features"][0, :4].norm(dim=1), torch.ones(4).double())


def test_a_second_encoder_by_hand() -> None:
    w = Params.of(body=torch.tensor([4.0]), head=torch.tensor([9.0]))
    slow = Params.of(body=torch.tensor([1.0]))
    assert follow(slow, w, 0.75, torch.tensor(0.0))["body"].tolist() == [4.0]  # it begins where the client does
    after = follow(slow, w, 0.75, torch.tensor(3.0))
    assert after["body"].tolist() == [0.75 * 1 + 0.25 * 4]
    assert "head" not in after


@pytest.mark.parametrize("momentum", [0.5, 1.0])
def test_what_is_queued_is_what_the_second_encoder_makes(
    task: Task, make_cohort: Callable[..., Cohort], momentum: float
) -> None:
    """catches: a second encoder that is carried and never asked, or one that is the client's own."""
    cohort = make_cohort(task)

    def train(m: float) -> Carry:
        step = FAFIQueue(queue=64, queue_momentum=m).training.step(cohort)
        given = Given(cohort.lr, epoch=None, total=None, own=None)
        return cohort.scan(step, step.start(cohort, cohort.initial), given=given, epochs=3)

    end, plain = train(momentum), train(0.0)
    name = next(name for name in end.own.slow if name.endswith("weight"))
    assert torch.equal(end.own.slow[name][0], cohort.initial[name]) is (momentum == 1.0)
    assert not torch.equal(end.own.slow[name][0], end.w[name][0])
    assert not torch.equal(plain.own.queue["features"], end.own.queue["features"])
    assert plain.own.slow is None
