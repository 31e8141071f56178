"""Students are taught, and the best of them is found without asking for more than needed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from samples import Shaken

from atoll import LocalEngine, Task
from atoll.kernel.params import Params
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.toolbox.server.distillation import best_of, divergence, lessons, students


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
    found = list(students(bench, start, task.x, wanted, epochs=80, batch_size=15, lr=1e-2))
    assert len(found) == 80
    # Adam's first step has the length lr in every direction that has a gradient.
    first = (found[0]["head.bias"] - start["head.bias"]).abs()
    torch.testing.assert_close(first, torch.full_like(first, 1e-2), rtol=1e-4, atol=0)
    last = (found[-1] - found[-2]).norm()
    assert last < 0.01 * (found[1] - found[0]).norm()  # annealed

    def apart(student: Params) -> float:
        return float(divergence(bench.answers(student, task.x), wanted).mean())

    assert apart(found[-1]) < 0.1 * apart(start)


def test_a_student_sees_what_its_teachers_answered_for(make_task: Callable[..., Task]) -> None:
    # catches: a student that sees samples augmented, and is taught what teachers answer to them as they are.
    task = replace(make_task(sizes=(6, 9), dtype=torch.float64), augment=Shaken())
    bench = Workbench(Population(task, RamMemory(2), seed=3), LocalEngine(dtype=torch.float64), round=1)
    w = task.network.initial
    wanted = bench.answers(w, task.x).softmax(1)
    server = lessons(bench, task.x, wanted, batch_size=4)._host._population.task
    assert server.augment is None
    assert torch.equal(server.x, task.x)
    # A tiny step of Adam divides rounding errors by 1e-8; one along a gradient that is not 0 has its length.
    for student in students(bench, w, task.x, wanted, epochs=3, batch_size=4, lr=1e-8):
        for name, leaf in student.items():
            torch.testing.assert_close(leaf, w[name], rtol=0, atol=1e-12)
