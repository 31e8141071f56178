"""DENSE: what travels, what the student is made of, what is refused. Its formulas: theory/test_oneshot_generated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll import LocalEngine, Task
from atoll.algorithms.dense import Dense
from atoll.algorithms.oneshot_avg import OneShotAvg
from atoll.kernel.errors import TaskError
from atoll.kernel.params import stack
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.toolbox.server.synthesis import Learner, alike, combine_logits

SMALL: dict[str, Any] = {"server_epochs": 2, "generator_steps": 2, "server_batch": 6, "noise": 4, "width": 4}


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def bench_of(task: Task) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=0)


def test_clients_train_and_send_as_in_every_one_shot_method(task: Task) -> None:
    mine, theirs = (play(task, one).ledger.entries for one in (Dense(**SMALL), OneShotAvg()))
    assert mine == theirs


def test_everybody_deploys_the_student(task: Task) -> None:
    report = play(task, Dense(**SMALL))
    for model in personal_models(report):
        assert all(torch.equal(model[name], leaf) for name, leaf in report.server.answer.items())
    assert (report.server.answer - task.network.initial).norm() > 0


def test_the_student_learns_of_all_models_alike() -> None:
    """A vote is a share: a common factor on all votes changes nothing."""
    logits = torch.tensor([[[2.0, 0.0]], [[0.0, 4.0]]], dtype=torch.float64)
    for each, expected in (([0.5, 0.5], [[1.0, 2.0]]), ([3.0, 3.0], [[1.0, 2.0]]), ([1.0, 0.0], [[2.0, 0.0]])):
        votes = torch.tensor(each, dtype=torch.float64)
        torch.testing.assert_close(combine_logits(logits, votes), torch.tensor(expected, dtype=torch.float64))


def test_votes_that_are_all_0_stay_finite() -> None:
    logits = torch.ones(2, 1, 2, dtype=torch.float64)
    votes = torch.zeros(2, dtype=torch.float64)
    assert torch.equal(combine_logits(logits, votes), torch.zeros(1, 2, dtype=torch.float64))


def test_the_step_size_falls_to_nothing(task: Task) -> None:
    """The last of two epochs takes steps half as long as the first: a cosine from 1 to 0."""
    method, bench = Dense(**SMALL, server_lr=0.1), bench_of(task)
    models = stack([task.network.initial * 2.0])
    w, given = task.network.initial, alike(models, task.network.initial)
    moved = []
    for epoch in range(2):
        cohort = bench.cohort(task.x, task.y, batch_size=len(task.x))
        state = method.answering.pass_over(Learner(w, w.zeros()), given, cohort, epoch)
        moved.append((state.w.client(0) - w).norm())
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-6, atol=0)


def test_images_are_made_by_convolutions(make_task: Callable[..., Task]) -> None:
    images = make_task(sizes=(6, 5), shape=(1, 6, 6), dtype=torch.float64)
    student = play(images, Dense(**SMALL)).server.answer
    assert all(torch.isfinite(leaf).all() for leaf in student.values())
    assert (student - images.network.initial).norm() > 0


def test_tasks_whose_samples_cannot_be_made_up_are_refused() -> None:
    with pytest.raises(TaskError, match="of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), Dense())
    embedded = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Flatten(), torch.nn.Linear(6, 2))
    words = Task.of_clients({"0": (torch.zeros(4, 3, dtype=torch.int64), torch.arange(4) % 2)}, embedded)
    with pytest.raises(TaskError, match="samples of numbers"):
        play(words, Dense())
