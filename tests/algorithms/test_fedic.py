"""FEDIC in one shot, by hand: the teacher, what is fitted on what, and the student's step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import Shaken, answers, with_public
from torch import Tensor

from atoll import Batch, LocalEngine, Params, Task
from atoll.algorithms.answers.fedic import (
    Calibrated,
    Given,
    Labelled,
    divide,
    initial_calibration,
    learn,
    teacher,
    teacher_inputs,
)
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.fedic import FEDIC
from atoll.algorithms.oneshot_avg import OneShotAvg
from atoll.algorithms.trainings.ce import CrossEntropy
from atoll.kernel.errors import HyperparameterError, TaskError
from atoll.kernel.network import Variant
from atoll.kernel.randomness import Keys, default_generator, generator
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import play
from atoll.toolbox.pairs import Pair
from atoll.toolbox.server.adam import no_past
from atoll.toolbox.server.distillation import Student

PUBLIC = 20


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(dtype=torch.float64), PUBLIC)


def said(clients: int = 3, samples: int = 5, classes: int = 4, features: int = 2) -> Params:
    with default_generator(0):
        return Params.of(
            logits=torch.randn(clients, samples, classes, dtype=torch.float64),
            tuned=torch.randn(samples, classes, dtype=torch.float64),
            features=torch.randn(samples, features, dtype=torch.float64),
        )


def test_the_teacher_by_hand() -> None:
    heard = said()
    with default_generator(1):
        c = initial_calibration(heard).map(torch.randn_like)
    for n in range(5):
        logits = heard["logits"][:, n]
        a = [1 / (1 + torch.exp(-(c["u"] @ one + c["b"]))) for one in logits]
        together = sum(part * one for part, one in zip(a, logits, strict=True)) / sum(a)
        g = 1 / (1 + torch.exp(-(c["v"] @ heard["features"][n] + c["gate"])))
        expected = g * (c["s"] * together + c["t"]) + (1 - g) * heard["tuned"][n]
        torch.testing.assert_close(teacher(c, heard)[n], expected, rtol=0, atol=1e-12)


class Watching(Calibrated):
    """Remembers what its steps were given."""

    seen: ClassVar[dict[str, Any]] = {}

    def tune(self, bench, w, known):  # type: ignore[no-untyped-def]
        self.seen.update(bench=bench, average=w, known=known, tuned=super().tune(bench, w, known))
        return self.seen["tuned"]

    def fit_calibration(self, bench, said, y):  # type: ignore[no-untyped-def]
        self.seen.update(said=said, fitted=super().fit_calibration(bench, said, y))
        return self.seen["fitted"]

    def teach(self, bench, w, unlabelled, known):  # type: ignore[no-untyped-def]
        self.seen.update(start=w, unlabelled=unlabelled)
        return super().teach(bench, w, unlabelled, known)


@dataclass(frozen=True, kw_only=True)
class Watched(Pair, training=CrossEntropy, answering=Watching):
    """FEDIC under the eyes of a test."""


def test_labelled_samples_fit_and_the_others_teach(task: Task) -> None:
    play(task, Watched(epochs=3, fit_epochs=30, server_epochs=1))
    seen = Watching.seen
    x, y = seen["known"]
    assert len(y) == PUBLIC / 5
    assert task.public is not None
    both = torch.cat([x, seen["unlabelled"][0]])
    assert np.array_equal(np.sort(both.numpy(), 0), np.sort(task.public[0].numpy(), 0))
    average = play(task, OneShotAvg(epochs=3)).server.answer
    assert all(torch.equal(seen["average"][name], leaf) for name, leaf in average.items())
    before, after = (F.cross_entropy(answers(task, w, x), y) for w in (average, seen["tuned"]))
    assert after < before
    start = initial_calibration(seen["said"])
    before, after = (F.cross_entropy(teacher(c, seen["said"]), y) for c in (start, seen["fitted"]))
    assert after < before
    assert all(torch.equal(seen["start"][name], leaf) for name, leaf in task.network.initial.items())


def test_wanted_answers_are_those_of_the_teacher(task: Task) -> None:
    play(task, Watched(epochs=1, fit_epochs=2, server_epochs=0, temperature=4.0, student="average"))
    seen = Watching.seen
    x, wanted = seen["unlabelled"]
    models = play(task, Ensemble(epochs=1)).server.answer.models
    expected = teacher(seen["fitted"], teacher_inputs(seen["bench"], models, seen["tuned"], x))
    torch.testing.assert_close(wanted, (expected / 4).softmax(1), rtol=0, atol=1e-12)
    assert all(torch.equal(seen["start"][name], leaf) for name, leaf in seen["average"].items())


@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)])
def test_a_step_of_the_student_by_hand(task: Task, mask: Tensor | None) -> None:
    # The first step of Adam goes by lr against the sign of each gradient: all labelled samples are the same one here.
    x, known = task.x[:5], Params.of(x=task.x[5:6].repeat(3, 1), y=torch.tensor([2, 2, 2]))
    wanted = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64).repeat(5, 1)
    batch = Batch(x, wanted, mask, Keys(torch.tensor(3), torch.tensor(4)), task.network, Variant())
    w = task.network.initial
    given = Given(torch.tensor(0.01), Labelled(known, size=2, steps=9, temperature=2.0))
    end = learn(Student(w, no_past(w)), batch, given).w
    module = task.network._original.requires_grad_(True)
    real = torch.ones(5, dtype=torch.float64) if mask is None else mask
    apart = F.kl_div((module(x) / 2).log_softmax(1), wanted, reduction="none").sum(1)
    loss = (apart * real).sum() / real.sum() / 2 + F.cross_entropy(module(known["x"]), known["y"]) / 2
    for (name, leaf), g in zip(end.items(), torch.autograd.grad(loss, list(module.parameters())), strict=True):
        expected = w[name] - 0.01 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-9)


def test_the_labelled_samples_are_as_many_of_every_class(make_task: Callable[..., Task]) -> None:
    # Of a rare class all there are; others fill up. catches: a share of the public samples as they come.
    task = with_public(make_task(dtype=torch.float64), 60)
    assert task.public is not None
    x, _ = task.public
    frequent = torch.tensor([0] * 45 + [1] * 13 + [2] * 2)
    bench = bench_of(replace(task, public=(x, frequent)))
    for share, expected in ((0.1, [2, 2, 2]), (0.2, [5, 5, 2]), (0.5, [15, 13, 2])):
        others, (known, labels) = divide(bench, share)
        assert torch.bincount(labels).tolist() == expected
        assert len(others) == 60 - sum(expected)
        assert torch.equal(torch.cat([others, known]).sort(0).values, x.sort(0).values)
    _, (_, seven) = divide(bench, 7 / 60)
    assert sorted(torch.bincount(seven).tolist()) == [2, 2, 3]


def bench_of(task: Task) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=0)


def test_students_see_what_the_teacher_answered_for(task: Task) -> None:
    # catches: a student that sees samples augmented, and is taught what the teacher answers to them as they are.
    found = [
        play(one, FEDIC(epochs=0, fit_epochs=0, server_epochs=3)) for one in (task, replace(task, augment=Shaken()))
    ]
    for name, leaf in found[0].server.answer.items():
        assert torch.equal(found[1].server.answer[name], leaf)


def test_labels_of_the_others_are_read_to_choose_alone(task: Task) -> None:
    # Samples that come after all that were chosen could have any label: the same ones would have been chosen.
    assert task.public is not None
    x, y = task.public
    play(task, Watched(epochs=1, fit_epochs=1, server_epochs=1))
    _, (known, _) = divide(Watching.seen["bench"], 0.2)
    labelled = (x[:, None] == known[None]).all(2).any(1)
    order = generator(Watching.seen["bench"].task.seed, "server labels").permutation(PUBLIC)
    last = max(place for place, row in enumerate(order) if labelled[row])
    later = torch.zeros_like(labelled).index_fill(0, torch.from_numpy(order[last + 1 :]), 1)
    assert later.any()
    mine = play(task, FEDIC(epochs=1, server_epochs=2)).server.answer
    for changed, same in ((labelled, False), (later, True)):
        other = replace(task, public=(x, torch.where(changed, (y + 1) % 3, y)))
        theirs = play(other, FEDIC(epochs=1, server_epochs=2)).server.answer
        assert all(torch.equal(mine[name], theirs[name]) for name in mine) == same


def test_the_labelled_share_must_leave_something(task: Task) -> None:
    with pytest.raises(TaskError, match="`labelled` takes all 20 public"):
        play(task, FEDIC(epochs=0, labelled=0.99))
    with pytest.raises(HyperparameterError, match=r"in \(0, 1\)"):
        FEDIC(labelled=1.0)
