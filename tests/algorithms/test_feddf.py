"""FedDF, by hand, and what it may read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from samples import biased
from torch import nn

from atoll import Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddf import FedDF
from atoll.kernel.errors import HyperparameterError, TaskError
from atoll.kernel.randomness import default_generator, generator
from atoll.models import BodyAndHead
from atoll.testing.conformance import personal_models, play, quadratics

Target = Literal["avg_logits", "avg_probs", "per_teacher"]
FEW = 12


def with_public(task: Task, samples: int = FEW, classes: int = 3) -> Task:
    draw = generator(1, "public")
    x, y = draw.normal(size=(samples, *task.x.shape[1:])), draw.integers(classes, size=samples)
    return replace(task, public=(torch.from_numpy(x).to(task.x.dtype), torch.from_numpy(y)))


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(dtype=torch.float64))


def test_one_round_by_hand() -> None:
    # From w = 0 the clients get the logits (2, -2) and (-2, 2); weighted by 1 and 3 these are (-1, 1), their mean is 0.
    task = biased((1, 0), (3, 1), public=0)
    assert play(task, FedAvg()).server["b"].tolist() == pytest.approx([-1.0, 1.0])
    # Adam's first step goes by its size towards the wanted (1/2, 1/2): annealing has not begun.
    report = play(task, FedDF(server_epochs=1, server_lr=0.25))
    assert report.server["b"].tolist() == pytest.approx([-0.75, 0.75], abs=1e-6)
    # Long enough, the student answers as the ensemble does, whatever its start.
    report = play(task, FedDF(server_epochs=400, server_lr=0.05))
    assert report.server["b"].tolist() == pytest.approx([0.0, 0.0], abs=1e-3)


@pytest.mark.parametrize("target", get_args(Target))
def test_labels_of_public_samples_are_not_read(task: Task, target: Target) -> None:
    assert task.public is not None
    x, y = task.public
    other = replace(task, public=(x, (y + 1) % 3))
    mine, theirs = (play(one, FedDF(target=target), rounds=2).server for one in (task, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("label", [0, 1])
def test_with_validation_the_first_best_student_is_kept(label: int) -> None:
    # Two small clients outvote a large one of class 1: the average, (-2/3, 2/3), becomes their mean, (2/3, -2/3).
    task = biased((1, 0), (1, 0), (4, 1), public=label)
    settings = {"server_epochs": 100, "server_lr": 0.05}
    plain = play(task, FedDF(**settings)).server["b"]
    assert plain.tolist() == pytest.approx([2 / 3, -2 / 3], abs=0.05)
    # The judge knows only the class of its samples: the average is right on 1, students from the middle on on 0.
    kept = play(task, FedDF(validation=0.5, patience=100, **settings)).server["b"]
    assert int(kept.argmax()) == label
    assert kept.abs().max() < (0.05 if label == 0 else 2 / 3)
    # A judge without patience stops before a student can be right on class 0.
    hasty = play(task, FedDF(validation=0.5, patience=3, **settings)).server["b"]
    assert int(hasty.argmax()) == 1


def test_validation_samples_are_not_distilled_on(task: Task) -> None:
    # Without the judge's samples the student is another one, and they are the same in every round.
    algorithm = FedDF(validation=0.25)
    seen = []

    class Watched(FedDF):
        def divide(self, bench):  # type: ignore[no-untyped-def]
            seen.append(super().divide(bench))
            return seen[-1]

    play(task, Watched(**vars(algorithm)), rounds=2)
    (x, labelled), (again, same) = seen
    assert len(x) == FEW * 3 // 4
    assert labelled is not None
    assert same is not None
    assert torch.equal(x, again)
    assert torch.equal(labelled[0], same[0])
    both = torch.cat([x, labelled[0]])
    assert task.public is not None
    assert np.array_equal(np.sort(both.numpy(), 0), np.sort(task.public[0].numpy(), 0))
    place = int((task.public[0] == labelled[0][0]).all(1).nonzero())
    assert labelled[1][0] == task.public[1][place]


def test_zero_server_epochs_are_fedavg(task: Task) -> None:
    mine, theirs = (play(task, one, rounds=3).server for one in (FedDF(server_epochs=0), FedAvg()))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_it_sends_what_fedavg_sends(task: Task) -> None:
    mine, theirs = (play(task, one, rounds=2).ledger.entries for one in (FedDF(), FedAvg()))
    assert mine == theirs


def test_a_client_that_did_not_reply_is_no_teacher(task: Task) -> None:
    report = play(task, FedDF(), faults=lambda round, clients: clients == 2)
    rows = {
        name: (task.x[own], task.y[own])
        for k, name in enumerate(task.names or ())
        if k != 2 and len(own := task.splits["train"].order[slice(*task.splits["train"].offsets[k : k + 2])])
    }
    alone = Task.of_clients(rows, task.network._original, classes=3, training=task.training, shares=(1.0, 0.0, 0.0))
    assert alone.clients == task.clients - 1
    # Batches are drawn by a client's number, so that only full batches would agree to the bit; one batch each does.
    full = Training(lr=0.1, batch_size=12)
    with_all, without = (replace(one, training=full, public=task.public) for one in (task, alone))
    lost = play(with_all, FedDF(), faults=lambda round, clients: clients == 2).server
    never = play(without, FedDF()).server
    for name, leaf in lost.items():
        torch.testing.assert_close(leaf, never[name], rtol=0, atol=1e-9)
    assert report.history[0]["replied"] == 3


def test_everybody_deploys_the_student(task: Task) -> None:
    report = play(task, FedDF(), faults=lambda round, clients: clients == 1)
    assert all(torch.equal(model["head.bias"], report.server["head.bias"]) for model in personal_models(report))


def test_batchnorm_follows_the_public_samples() -> None:
    with default_generator(0):
        body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
        model = BodyAndHead(body, nn.Linear(5, 3)).double()
        x = torch.randn(20, 4, dtype=torch.float64)
    task = Task.of_clients({"0": (x, torch.arange(20) % 3)}, model, classes=3, training=Training(lr=0.1, batch_size=20))
    task = with_public(task)
    before, after = (play(task, FedDF(server_epochs=n, server_batch=FEW)).server for n in (0, 1))
    assert after["body.1.num_batches_tracked"] == before["body.1.num_batches_tracked"] + 1
    assert not torch.equal(after["body.1.running_mean"], before["body.1.running_mean"])


def test_public_samples_are_asked_for(make_task: Callable[..., Task]) -> None:
    with pytest.raises(TaskError, match=r"FedDF needs public data"):
        play(make_task(), FedDF())


def test_public_samples_of_another_shape_are_refused(make_task: Callable[..., Task]) -> None:
    with pytest.raises(TaskError, match=r"samples of shape \(4,\), .*Got 3 samples of shape \(7,\) and 3 targets"):
        make_task().with_public(torch.zeros(3, 7), torch.zeros(3))


def test_a_task_without_classes_is_refused() -> None:
    task = quadratics(torch.ones(2, 1, dtype=torch.float64))
    with pytest.raises(TaskError, match="has no classes"):
        play(replace(task, public=(task.x, task.y)), FedDF())


def test_validation_must_leave_something(task: Task) -> None:
    with pytest.raises(TaskError, match="takes all 12 public ones"):
        play(task, FedDF(validation=0.99))
    with pytest.raises(HyperparameterError, match=r"in \[0, 1\)"):
        FedDF(validation=1.0)


def test_samples_that_are_made_up_need_no_public_ones() -> None:
    # The logits of a bias do not depend on samples, so the student ends at their mean on any, as on public ones.
    task = replace(biased((1, 0), (3, 1), public=0), public=None)
    few = FedDF(on="generated", generated=4, generator_steps=2, server_epochs=400, server_lr=0.05)
    assert play(task, few).server["b"].tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
    assert not few.needs_public_data
    assert FedDF().needs_public_data


def test_samples_are_made_anew_in_every_round(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    make_up = FedDF.make_up
    monkeypatch.setattr(FedDF, "make_up", lambda self, teachers: made.append(make_up(self, teachers)) or made[-1])
    play(replace(task, public=None), FedDF(on="generated", generated=6, generator_steps=3, server_epochs=1), rounds=2)
    first, second = made
    assert first.shape == (6, *task.x.shape[1:])
    assert not torch.equal(first, second)


def test_more_steps_make_samples_on_which_teachers_are_surer(task: Task) -> None:
    """catches: samples that are drawn and never learned."""
    sure = []
    for steps in (1, 200):
        method, answered = FedDF(on="generated", generated=8, generator_steps=steps, generator_lr=0.05), []
        make_up = method.make_up

        def keep(teachers, answered=answered, make_up=make_up):
            x = make_up(teachers)
            bench, trained, _ = teachers[0]
            answered.append(bench.answers(trained, x).mean(0).softmax(1).amax(1).mean())
            return x

        object.__setattr__(method, "make_up", keep)
        play(replace(task, public=None), method)
        sure.append(float(answered[0]))
    assert sure[1] > sure[0] + 0.1


def test_labels_of_samples_that_are_made_up_are_not_to_be_had() -> None:
    with pytest.raises(HyperparameterError, match="validation"):
        FedDF(on="generated", validation=0.2)
