"""FedLPA: factors by hand, what the server makes of them, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from samples import own

from atoll import Cohort, Task
from atoll.algorithms.answers import fedlpa
from atoll.algorithms.answers.fedlpa import most_likely
from atoll.algorithms.fedlpa import FedLPA
from atoll.kernel.errors import EngineError
from atoll.models.cnn import LeNet
from atoll.models.linear import Linear
from atoll.testing.conformance import play
from atoll.toolbox.client.layers import matrix
from atoll.toolbox.server.triangles import symmetric


@pytest.fixture
def linear(make_task: Callable[..., Task]) -> Task:
    return make_task(lambda: Linear((4,), 3), dtype=torch.float64)


def test_the_factors_of_a_linear_model_by_hand(linear: Task, make_cohort: Callable[..., Cohort]) -> None:
    algorithm = FedLPA(epochs=2)
    sent = algorithm.local(linear.network.initial, make_cohort(linear)).send
    for k in range(linear.clients):
        x, y = own(linear, k)
        rows = torch.cat([x, torch.ones(len(x), 1)], 1)
        g = (rows @ matrix(sent["model"].client(k), "head").T).softmax(1) - F.one_hot(y, 3)
        a, b = (symmetric(sent[side]["head"][k]) for side in ("inputs", "gradients"))
        torch.testing.assert_close(a, rows.T @ rows / len(x), rtol=0, atol=1e-12)
        torch.testing.assert_close(b, g.T @ g / len(x), rtol=0, atol=1e-12)


def test_every_layer_of_a_network_satisfies_its_system(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(lambda: LeNet((1, 16, 16), 3), shape=(1, 16, 16), dtype=torch.float64)
    algorithm = FedLPA(epochs=1, damping=0.01)
    sent = algorithm.local(task.network.initial, make_cohort(task)).send
    found = play(task, algorithm).server.answer
    n = torch.tensor([5.0, 1.0, 12.0, 7.0], dtype=torch.float64)[:, None, None]
    assert set(sent["inputs"]) == {"body.0", "body.3", "body.7", "body.9", "head"}
    for layer in sent["inputs"]:
        a, b = (algorithm.answering.damp(sent[side][layer]) for side in ("inputs", "gradients"))
        left, right = ((n * (b @ m @ a)).sum(0) for m in (matrix(found, layer), matrix(sent["model"], layer)))
        assert float((left - right).norm() / right.norm()) < 1e-9


def test_too_few_iterations_stop_between_the_mean_and_the_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    models, a, b = (torch.randn(3, size, 4, generator=generator, dtype=torch.float64) for size in (5, 4, 5))
    a, b = a @ a.mT + 0.1 * torch.eye(4), b @ b.mT + 0.1 * torch.eye(5)
    p = torch.full((3,), 1 / 3, dtype=torch.float64)
    end = most_likely(models, a, b, p, iterations=500)
    away = [float((most_likely(models, a, b, p, iterations=n) - end).norm()) for n in (1, 4, 40)]
    assert away[0] > away[1] > away[2]
    assert away[2] < 1e-6 * away[0]


def test_factors_that_would_not_fit_are_refused(linear: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def full(needed: int, *_: object, hint: str) -> None:
        asked.append(needed)
        raise EngineError("too large", hint=hint)

    monkeypatch.setattr(fedlpa, "require_bytes", full)
    with pytest.raises(EngineError, match="regmean"):
        FedLPA().start(replace(linear, name="large").public_facts())
    assert asked == [8 * (3**2 + 5**2) * 4]


def test_model_and_factors_travel(linear: Task) -> None:
    ledger = play(linear, FedLPA()).ledger
    kinds = ledger.by_kind()
    assert set(kinds) == {("up", "model"), ("up", "statistic"), ("down", "model")}
    statistic = kinds["up", "statistic"] / linear.clients
    assert (15 + 6 + 1) * 8 <= statistic < (15 + 6 + 1) * 8 + 500
