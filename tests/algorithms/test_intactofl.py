"""IntactOFL: experts stay whole, the gate learns where it may. Its formulas: theory/test_oneshot_generated."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from samples import answers, with_public

from atoll import Task
from atoll.algorithms.answers.intactofl import Gate, spread
from atoll.algorithms.intactofl import IntactOFL
from atoll.algorithms.oneshot_avg import OneShotAvg
from atoll.kernel.batch import Batch
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.testing.conformance import Check, checks, personal_models, play

SMALL: dict[str, Any] = {"server_epochs": 2, "generator_steps": 2, "server_batch": 6, "noise": 4, "width": 4}
CHECKS = ("order-of-clients-does-not-matter", "clients-may-drop-out", "batchnorm-and-dropout-work")


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(dtype=torch.float64))


class InPublic(IntactOFL):
    """With public samples, by its defaults."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**({"data": "public"} | more))


@pytest.mark.parametrize("check", [one for one in checks() if one.name in CHECKS], ids=lambda one: one.name)
def test_the_gate_on_public_samples_conforms_too(check: Check) -> None:
    check.run(InPublic)


def test_experts_are_the_models_that_clients_sent(task: Task) -> None:
    server = play(task, IntactOFL(**SMALL)).server
    assert server.answer.models.clients == task.clients
    assert server.answer.gate["weight"].shape == (task.clients, 4)
    assert server.answer.gate["weight"].abs().max() > 0
    expected = play(task, OneShotAvg()).ledger.entries
    assert play(task, IntactOFL(**SMALL)).ledger.entries == expected


@pytest.mark.parametrize("gate", get_args(Gate))
def test_what_is_deployed_by_hand(task: Task, gate: Gate) -> None:
    report = play(task, IntactOFL(**SMALL, data="public", gate=gate))
    values, models = report.server.answer.gate, report.server.answer.models
    found = answers(task, report.algorithm.shared(report.server), task.x)
    said = task.x @ values["weight"].T + values["bias"]
    g = said.softmax(1) if gate == "softmax" else said / task.clients
    each = torch.stack([answers(task, models.client(k), task.x) for k in range(task.clients)], 1)
    torch.testing.assert_close(found, (g[:, :, None] * each).sum(1), rtol=0, atol=1e-12)


def test_everybody_deploys_experts_and_gate(task: Task) -> None:
    models = personal_models(play(task, IntactOFL(**SMALL)))
    assert {"beside.weight", "beside.bias"} <= set(models[0])
    assert all(torch.equal(one[name], models[0][name]) for one in models for name in models[0])


def test_generated_samples_need_no_public_ones_and_leave_them_alone(task: Task, make_task: Callable[..., Task]) -> None:
    alone = make_task(dtype=torch.float64)
    one, other = (play(some, IntactOFL(**SMALL)).server.answer.gate for some in (task, alone))
    assert torch.equal(one["weight"], other["weight"])
    with pytest.raises(TaskError, match="needs public data"):
        play(alone, IntactOFL(data="public"))


def test_experts_that_are_used_alike_give_the_gate_no_direction() -> None:
    # catches: the slope of a standard deviation at 0, which is not a number.
    x = torch.zeros(3, 2, dtype=torch.float64)
    batch = Batch(x, x, None, None, None, Variant())  # type: ignore[arg-type]
    use = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(spread(use, batch), use)
    assert torch.equal(slope, torch.zeros_like(slope))
