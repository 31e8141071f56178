"""Students are taught, and the best of them is found without asking for more than needed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from samples import Shaken
from torch import Tensor

from atoll import LocalEngine, Task
from atoll.cohort import Population
from atoll.local.distillation import VIEWS, Lessons, best_of, divergence, students
from atoll.memory import RamMemory
from atoll.params import Params
from atoll.workbench import Workbench


def test_divergence_is_torchs() -> None:
    wanted, outputs = torch.rand(4, 3, dtype=torch.float64).softmax(1), torch.rand(4, 3, dtype=torch.float64)
    mine = torch.distributions.Categorical(probs=wanted)
    theirs = torch.distributions.Categorical(logits=outputs)
    torch.testing.assert_close(divergence(outputs, wanted), torch.distributions.kl_divergence(mine, theirs))


def test_divergence_of_certain_answers_is_finite() -> None:
    assert torch.isfinite(divergence(torch.randn(1, 2), torch.tensor([[1.0, 0.0]]))).all()


def test_tokens_are_averaged() -> None:
    wanted, outputs = torch.rand(2, 3, 5).softmax(1), torch.rand(2, 3, 5)
    each = torch.stack([divergence(outputs[..., place], wanted[..., place]) for place in range(5)])
    torch.testing.assert_close(divergence(outputs, wanted), each.mean(0))


def models(scores: list[float], made: list[float]) -> Iterator[Params]:
    for score in scores:
        made.append(score)
        yield Params.of(score=score)


@pytest.mark.parametrize(
    ("scores", "patience", "best", "count"),
    [
        ([1, 2, 3], 1, 3, 3),
        ([1, 3, 2, 1, 4], 2, 3, 4),  # the fifth is never made
        ([1, 3, 2, 3, 4], 3, 4, 5),  # as good is not better, but patience lasts
        ([2, 2, 2, 2], 3, 2, 4),
    ],
)
def test_the_best_is_found(scores: list[float], patience: int, best: float, count: int) -> None:
    made: list[float] = []
    found = best_of(models(scores, made), lambda model: float(model["score"]), patience)
    assert found is not None
    assert found["score"] == best
    assert len(made) == count


def test_there_may_be_none() -> None:
    assert best_of([], lambda model: 0.0, 1) is None


def test_the_first_step_is_one_of_adam_and_the_last_students_hardly_move(make_task: Callable[..., Task]) -> None:
    task = make_task(sizes=(6, 9), dtype=torch.float64)
    bench = Workbench(Population(task, RamMemory(2), seed=3), LocalEngine(dtype=torch.float64), round=1)
    start = task.network.initial
    wanted = bench.answers(start * 3.0, task.x).softmax(1)
    found = list(students(bench, start, Lessons(task.x, lambda _: wanted), epochs=80, batch_size=15, lr=1e-2))
    assert len(found) == 80
    # Adam's first step has the length lr in every direction that has a gradient.
    first = (found[0]["head.bias"] - start["head.bias"]).abs()
    torch.testing.assert_close(first, torch.full_like(first, 1e-2), rtol=1e-4, atol=0)
    last = (found[-1] - found[-2]).norm()
    assert last < 0.01 * (found[1] - found[0]).norm()  # annealed

    def apart(student: Params) -> float:
        return float(divergence(bench.answers(student, task.x), wanted).mean())

    assert apart(found[-1]) < 0.1 * apart(start)


# -- augmented samples -----------------------------------------------------------------------------------------------


@pytest.fixture
def shaken(make_task: Callable[..., Task]) -> Workbench:
    task = replace(make_task(sizes=(6, 9), dtype=torch.float64), augment=Shaken())
    return Workbench(Population(task, RamMemory(2), seed=3), LocalEngine(dtype=torch.float64), round=1)


def test_teachers_answer_for_what_the_student_sees(shaken: Workbench) -> None:
    # catches: teachers that answer for samples as they are while the student sees them augmented, or augmented twice.
    x, asked = shaken.population.task.x, list[Tensor]()

    def answer(seen: Tensor) -> Tensor:
        asked.append(seen)
        return seen.sum(1, keepdim=True)

    lessons = Lessons(x, answer)
    for number in range(VIEWS + 2):
        server = lessons.cohort(shaken, number, batch_size=4).population.task
        assert server.augment is None
        assert torch.equal(server.y, server.x.sum(1, keepdim=True))
        assert torch.equal(server.x, asked[number % VIEWS])
        assert not torch.equal(server.x, x)
    assert len(asked) == VIEWS  # views come again, and teachers have answered
    assert not torch.equal(asked[0], asked[1])


def test_samples_that_are_not_augmented_are_answered_once(make_task: Callable[..., Task]) -> None:
    task = make_task(sizes=(6, 9), dtype=torch.float64)
    bench = Workbench(Population(task, RamMemory(2), seed=3), LocalEngine(dtype=torch.float64), round=1)
    asked = list[Tensor]()
    lessons = Lessons(task.x, lambda seen: asked.append(seen) or seen)  # type: ignore[func-returns-value]
    for number in range(3):
        assert torch.equal(lessons.cohort(bench, number).population.task.x, task.x)
    assert len(asked) == 1


def test_a_student_that_is_its_own_teacher_stays_also_where_samples_are_augmented(shaken: Workbench) -> None:
    # A tiny step of Adam divides rounding errors by 1e-8; one along a gradient that is not 0 has its length.
    w = shaken.network.initial
    lessons = Lessons(shaken.population.task.x, lambda seen: shaken.answers(w, seen).softmax(1))
    for student in students(shaken, w, lessons, epochs=3, batch_size=4, lr=1e-8):
        for name, leaf in student.items():
            torch.testing.assert_close(leaf, w[name], rtol=0, atol=1e-12)
