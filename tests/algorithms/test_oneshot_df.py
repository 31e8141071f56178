"""FedDF in one shot, by hand: what is taught, where the student begins, and what is read."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from samples import Shaken, answers, with_public
from torch import nn

from atoll import Task
from atoll.algorithms.answers.feddf import nearest
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.oneshot_avg import OneShotAvg
from atoll.algorithms.oneshot_df import OneShotDF
from atoll.algorithms.oneshot_margins import OneShotMargins
from atoll.kernel.errors import ModelError, TaskError
from atoll.kernel.params import Params, stack
from atoll.models import MLP
from atoll.testing.conformance import play
from atoll.toolbox.oneshot import ClassVotes

STUDENTS = ("average", "best", "fresh")


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(dtype=torch.float64))


@pytest.mark.parametrize("weighting", ["uniform", "classes"])
def test_a_long_taught_student_answers_as_the_ensemble(make_task: Callable[..., Task], weighting: ClassVotes) -> None:
    task = with_public(make_task(lambda: MLP((4,), 3, hidden=(32,)), dtype=torch.float64), samples=6)
    assert task.public is not None
    x, _ = task.public
    report = play(task, Ensemble(epochs=20, weighting=weighting))
    wanted = answers(task, report.algorithm.shared(report.server), x).softmax(1)
    student = OneShotDF(epochs=20, weighting=weighting, server_epochs=200, server_batch=6, server_lr=0.02)
    found = answers(task, play(task, student).server.answer, x).softmax(1)
    untaught = answers(task, play(task, OneShotAvg(epochs=20)).server.answer, x).softmax(1)
    assert (found - wanted).abs().max() < 0.1 * (untaught - wanted).abs().max()


def test_margins_can_be_taught(make_task: Callable[..., Task]) -> None:
    task = with_public(make_task(lambda: MLP((4,), 3, hidden=(32,)), dtype=torch.float64), samples=6)
    assert task.public is not None
    x, _ = task.public
    report = play(task, OneShotMargins(epochs=20))
    wanted = answers(task, report.algorithm.shared(report.server), x).softmax(1)
    student = OneShotDF(epochs=20, of="margins", server_epochs=400, server_batch=6, server_lr=0.02)
    taught = play(task, student)
    found = answers(task, taught.server.answer, x).softmax(1)
    untaught = answers(task, play(task, OneShotAvg(epochs=20)).server.answer, x).softmax(1)
    assert (found - wanted).abs().max() < 0.1 * (untaught - wanted).abs().max()
    assert taught.ledger.bytes("up") == report.ledger.bytes("up")


def test_margins_need_features(make_task: Callable[..., Task]) -> None:
    task = with_public(make_task(lambda: nn.Linear(4, 3), dtype=torch.float64))
    play(task, OneShotDF(epochs=1, server_epochs=1))
    with pytest.raises(ModelError, match="features"):
        play(task, OneShotDF(of="margins"))


def test_students_begin_where_they_are_told(task: Task) -> None:
    begun = {one: play(task, OneShotDF(epochs=2, student=one, server_epochs=0)).server.answer for one in STUDENTS}
    average = play(task, OneShotAvg(epochs=2)).server.answer
    models = play(task, Ensemble(epochs=2)).server.answer.models
    for name, leaf in task.network.initial.items():
        assert torch.equal(begun["fresh"][name], leaf)
        assert torch.equal(begun["average"][name], average[name])
    rows = [all(torch.equal(models[name][k], leaf) for name, leaf in begun["best"].items()) for k in range(4)]
    assert sum(rows) == 1


def test_the_nearest_model() -> None:
    models = stack([Params.of(number=float(k)) for k in range(3)])
    wanted = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    outputs = torch.stack([wanted.flip(1), wanted, torch.full_like(wanted, 0.5)]).log()
    assert nearest(models, outputs, wanted)["number"] == 1.0


def test_labels_of_public_samples_are_not_read(task: Task) -> None:
    assert task.public is not None
    x, y = task.public
    other = replace(task, public=(x, (y + 1) % 3))
    mine, theirs = (play(one, OneShotDF(epochs=1, server_epochs=2)).server.answer for one in (task, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_public_samples_are_asked_for(task: Task) -> None:
    with pytest.raises(TaskError, match="OneShotDF needs public data"):
        play(replace(task, public=None), OneShotDF())


@pytest.mark.parametrize("of", ["logits", "probs"])
def test_a_student_of_itself_stays_where_samples_are_augmented(make_task: Callable[..., Task], of: str) -> None:
    # catches: teachers that answer for samples as they are, and a student that sees them augmented.
    task = replace(with_public(make_task(sizes=(9,), dtype=torch.float64)), augment=Shaken())
    start, end = (
        play(task, OneShotDF(of=of, epochs=2, server_epochs=n, server_lr=1e-8)).server.answer  # type: ignore[arg-type]
        for n in (0, 3)
    )
    for name, leaf in start.items():
        torch.testing.assert_close(end[name], leaf, rtol=0, atol=1e-12)
