"""Co-Boosting: when votes change, and what the student is shown. Its formulas: theory/test_oneshot_generated."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from atoll import LocalEngine, Task
from atoll.algorithms.answers.coboosting import BoostedStudent
from atoll.algorithms.coboosting import CoBoosting
from atoll.algorithms.dense import Dense
from atoll.kernel.params import stack
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import play
from atoll.toolbox.server.synthesis import Pool, Teachers

SMALL: dict[str, Any] = {"server_epochs": 3, "generator_steps": 2, "server_batch": 6, "noise": 4, "width": 4}


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def bench_of(task: Task) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=0)


def votes_of_epochs(task: Task, **more: float) -> list[torch.Tensor]:
    """The votes of three models in every epoch."""
    seen: list[torch.Tensor] = []

    class Watched(BoostedStudent):
        def votes(self, pool: Pool, given: Teachers, epoch: int) -> torch.Tensor:
            votes = super().votes(pool, given, epoch)
            seen.append(votes)
            return votes

    models = stack([task.network.initial * factor for factor in (1.0, -1.0, 3.0)])
    Watched(**SMALL, **more).learn(bench_of(task), task.network.initial, models)
    return seen


def test_votes_begin_alike_and_change_once_there_is_something_to_go_by(task: Task) -> None:
    seen = votes_of_epochs(task, vote_lr=0.1, vote_decay=0.5)
    alike = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(seen[0], alike)
    steps = [(after - before).abs() for before, after in pairwise(seen)]
    torch.testing.assert_close(steps[0], torch.full((3,), 0.05, dtype=torch.float64))  # one batch, in epoch 1
    assert (steps[1] <= 2 * 0.025 + 1e-12).all()  # two batches, in epoch 2
    assert all(((votes >= 0) & (votes <= 1)).all() for votes in seen)


def test_a_step_of_the_votes_that_is_too_long_is_cut(task: Task) -> None:
    seen = votes_of_epochs(task, vote_lr=50.0)
    assert set(torch.stack(seen[1:]).unique().tolist()) <= {0.0, 1.0, seen[0][0].item()}


def test_it_is_not_dense(task: Task) -> None:
    mine, theirs = (play(task, one).server.answer for one in (CoBoosting(**SMALL), Dense(**SMALL)))
    assert (mine - theirs).norm() > 0
