"""FedProto in one shot, by hand: prototypes of owners, fused features, and what is sent."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from samples import answers, own
from torch import Tensor

from atoll import Batch, Params, Task
from atoll.algorithms.local import Local
from atoll.algorithms.oneshot_proto import OneShotProto
from atoll.kernel.network import Variant
from atoll.kernel.params import stack
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.oneshot import average_models

CLASSES = 4  # nobody has the last one
SHARE = torch.tensor([5, 1, 12, 7], dtype=torch.float64) / 25


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    made = make_task(classes=CLASSES, dtype=torch.float64)
    return replace(made, y=made.y % (CLASSES - 1))


def features_of(task: Task, w: Params, x: Tensor) -> Tensor:
    return Batch(x, x[:, :0], None, None, task.network, Variant(train=False)).features(w)


def by_hand(task: Task, models: list[Params], weighting: str) -> Tensor:
    """The prototypes of the classes that somebody has."""
    rows = []
    for label in range(CLASSES - 1):
        parts = []
        for k, model in enumerate(models):
            x, y = own(task, k)
            if (y == label).any():
                parts.append((features_of(task, model, x[y == label]).mean(0), int((y == label).sum())))
        mass = [1 if weighting == "uniform" else count for _, count in parts]
        rows.append(sum(m * mean for m, (mean, _) in zip(mass, parts, strict=True)) / sum(mass))
    return torch.stack(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("encoder", ["ensemble", "average"])
@pytest.mark.parametrize("prototypes", ["uniform", "samples"])
def test_answers_by_hand(
    task: Task, encoder: Literal["ensemble", "average"], prototypes: Literal["uniform", "samples"]
) -> None:
    report = play(task, OneShotProto(epochs=2, encoder=encoder, prototypes=prototypes))
    found = answers(task, report.algorithm.shared(report.server), task.x)
    models = personal_models(play(task, Local(epochs=2)))
    if encoder == "average":
        fused = features_of(task, average_models(stack(models), SHARE), task.x)
    else:
        fused = sum(p * features_of(task, one, task.x) for p, one in zip(SHARE, models, strict=True))
    expected = -(fused[:, None] - by_hand(task, models, prototypes)).square().mean(2)
    torch.testing.assert_close(found[:, :-1], expected, rtol=0, atol=1e-12)
    assert (found[:, -1] < found[:, :-1].amin(1) - 10).all()


def test_means_and_counts_are_sent_with_the_model(task: Task) -> None:
    report = play(task, OneShotProto(epochs=1))
    fields = {one.field for one in report.ledger.messages() if one.direction == "up"}
    assert fields == {"model", "labels", "prototypes"}
    _, y = own(task, 0)
    assert torch.equal(report.server.answer.counts[0], torch.bincount(y, minlength=CLASSES).to(torch.float64))
