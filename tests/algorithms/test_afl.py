"""AFL, by hand: one feature, and what travels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from atoll import Cohort, Params, Task, Training, Update
from atoll.algorithms.afl import AFL
from atoll.algorithms.answers.afl import regression
from atoll.models.linear import Linear
from atoll.testing.conformance import ConformanceError, checks, personal_models, play


def test_one_feature_by_hand() -> None:
    # Samples 1 of class 0 and 3 of class 1 under the ridge 1: G = (10 4; 4 2) + I, Q = (1 3; 1 1), and so
    # W = (3 -4; -4 11) Q / 17.
    sums = Params.of(count=torch.tensor([1.0, 1.0]), sum=torch.tensor([[1.0], [3.0]]), square=torch.tensor([10.0])).map(
        torch.Tensor.double
    )
    weight, bias = regression(sums, gamma=1.0)
    assert weight[:, 0].tolist() == pytest.approx([-1 / 17, 5 / 17])
    assert bias.tolist() == pytest.approx([7 / 17, -1 / 17])


def test_clients_with_one_class_each_tell_all_apart() -> None:
    x = torch.eye(3, dtype=torch.float64)
    data = {str(k): (x[k].repeat(2, 1), torch.full((2,), k)) for k in range(3)}
    task = Task.of_clients(data, Linear((3,), 3).double(), classes=3, training=Training(), shares=(1.0, 0.0, 0.0))
    for w in personal_models(play(task, AFL(gamma=0.01))):
        answers = x @ w["head.weight"].T + w["head.bias"]
        torch.testing.assert_close(answers, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.01)


def test_a_class_that_nobody_has_is_answered_with_0(make_task: Callable[..., Task]) -> None:
    task = make_task(classes=4, dtype=torch.float64)
    head = play(replace(task, y=task.y.clamp(max=2)), AFL()).server.answer.part("head")
    assert not head["head.weight"][3].any()
    assert head["head.bias"][3] == 0
    assert head["head.weight"][2].any()


def test_only_sums_travel(make_task: Callable[..., Task]) -> None:
    task = make_task()
    ledger = play(task, AFL()).ledger
    numbers = 3 + 3 * 6 + 6 * 7 // 2  # counts, class sums, the upper triangle of squares
    up = ledger.bytes("up") / task.clients
    assert numbers * 8 <= up < numbers * 8 + 300
    assert ledger.bytes("down") == 0


@dataclass(frozen=True, kw_only=True)
class DependsOnTheOrder(AFL):
    """A closed form only by name: it looks at the seed."""

    closed_form: ClassVar[bool] = True

    def local(self, body: Params | None, cohort: Cohort) -> Update:
        update = super().local(body, cohort)
        sent = {name: stack * (1.0 + cohort.task.seed) for name, stack in update.send.items()}
        return replace(update, send=sent)


def test_the_battery_catches_a_closed_form_that_depends_on_the_seed() -> None:
    check = next(one for one in checks() if one.name == "same-seed-same-bits")
    check.run(AFL)
    with pytest.raises(ConformanceError, match="must not depend on the order of batches"):
        check.run(DependsOnTheOrder)
