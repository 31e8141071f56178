"""How much better one model is than another on a client's validation data, in standard errors."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from atoll import Task
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.objective import accuracy
from atoll.kernel.params import Params
from atoll.kernel.predictor import Predictor
from atoll.models import MLP
from atoll.runtime.engines.plan import Plan
from atoll.toolbox.client.paired import lead

BOTH, ONE, OTHER = (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)  # who is right about a sample
CLIENTS = {
    "never apart": ([BOTH] * 3, 0.0),
    "one sample": ([ONE, BOTH], 1.0),
    "four samples": ([ONE] * 4, 2.0),
    "three against one": ([ONE, OTHER, ONE, ONE, BOTH], 1.0),  # (3 - 1) / sqrt(4)
    "worse": ([OTHER, OTHER], -math.sqrt(2)),
}


def _task(clients: list[list[tuple[float, float]]], **more: object) -> Task:
    """Samples that say which of the two models is right about them; all are of class 1, and for validation."""
    data = {str(k): (torch.tensor(rows).double(), torch.ones(len(rows)).long()) for k, rows in enumerate(clients)}
    task = Task.of_clients(data, MLP((2,), 2, hidden=()).double(), classes=2, shares=(1.0, 0.0, 0.0), **more)
    return replace(task, splits={**task.splits, "val": task.splits["train"]})


def _answer(column: int) -> Callable[[Params, Params, Batch], Tensor]:
    return lambda model, beside, batch: torch.stack([1 - batch.x[:, column], batch.x[:, column]], 1)


def _models(task: Task) -> list[Predictor]:
    return [Predictor(task.network.initial, Params({}), _answer(column)) for column in (0, 1)]


@pytest.mark.parametrize("plan", [Plan(), Plan("loop")])
def test_it_is_mcnemars_statistic(make_cohort: Callable[..., Cohort], plan: Plan) -> None:
    """Clients of unequal sizes, so that padding must not count."""
    task = _task([rows for rows, _ in CLIENTS.values()])
    found = lead(make_cohort(task, plan), *_models(task), "score")
    assert found.tolist() == pytest.approx([expected for _, expected in CLIENTS.values()], abs=1e-12)


def test_by_the_loss_and_by_a_score_that_is_better_when_lower(make_cohort: Callable[..., Cohort]) -> None:
    rows = [ONE, OTHER, ONE]
    losses = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log_softmax(1)
    apart = float(losses[0, 1] - losses[1, 1]) * torch.tensor([1.0, -1.0, 1.0])
    expected = float(apart.sum() / apart.norm())
    task = _task([rows])
    assert lead(make_cohort(task), *_models(task), "loss").item() == pytest.approx(expected)
    lower = _task([rows], score=replace(accuracy, higher_is_better=False))
    assert lead(make_cohort(lower), *_models(lower), "score").item() == pytest.approx(-1 / math.sqrt(3))


def test_nobody_leads_without_validation_samples(make_task: Callable[..., Task], make_cohort) -> None:
    task = make_task()
    w = task.network.initial
    assert lead(make_cohort(task), w, w.moved(w, 1.0), "score").tolist() == [0.0] * 4
