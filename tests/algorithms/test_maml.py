"""MAML with gradient upload, by hand."""

from typing import Literal

import pytest
import torch
from torch import nn

from atoll import Task
from atoll.algorithms.maml import MAML
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play


@pytest.mark.parametrize(
    ("order", "steps", "share"),
    # alpha = 0.5: a step leads from 0 to c / 2, where the gradient is -c / 2; the curvature halves it. Two steps lead
    # to 3 c / 4 with the gradient -c / 4; differentiated through both, a quarter of it.
    [("fo", 1, 1 / 2), ("full", 1, 1 / 4), ("fo", 2, 1 / 4), ("full", 2, 1 / 16)],
)
def test_one_round_by_hand(two_clients: Task, order: Literal["fo", "full"], steps: int, share: float) -> None:
    # The mean of c = 1, 3 is 2; the server's step is 0.2.
    report = play(two_clients, MAML(alpha=0.5, beta=0.2, order=order, adapt_steps=steps))
    assert report.server["w"] == pytest.approx(0.2 * 2 * share)


def test_weights_by_samples(two_clients: Task) -> None:
    report = play(two_clients, MAML(alpha=0.5, beta=1.0, order="fo", weighting="samples"))
    assert report.server["w"] == pytest.approx((1 * 1 + 3 * 3) / 4 / 2)


def test_the_step_is_the_servers(two_clients: Task) -> None:
    report = play(two_clients, MAML(alpha=0.5, beta=0.0), rounds=2)
    assert report.server["w"] == 0


def test_clients_adapt_by_as_many_steps_as_in_training(two_clients: Task) -> None:
    # w = 0 with beta = 0; two steps leave a quarter of the distance to c = 1, 3.
    first, second = personal_models(play(two_clients, MAML(alpha=0.5, beta=0.0, adapt_steps=2)))
    assert first["w"] == pytest.approx(0.75)
    assert second["w"] == pytest.approx(2.25)


def test_one_gradient_travels_and_no_model(two_clients: Task) -> None:
    report = play(two_clients, MAML(), rounds=3)
    gradient = len(to_bytes(two_clients.network.initial.trained))
    up = [message.field for message in report.ledger.messages() if message.direction == "up"]
    assert set(up) == {"gradient", "weight"}
    assert report.ledger.by_kind()["up", "model"] == 3 * 2 * gradient
    assert report.population.memory.save(round=3) is None


def test_the_gradient_is_over_all_samples_once(make_task, make_cohort) -> None:
    # alpha = 0: the meta-gradient is the gradient; the short last batch weighs as much as it has samples.
    task = make_task(lambda: nn.Linear(4, 3), dtype=torch.float64)
    sent = MAML(alpha=0.0).local(task.network.initial, make_cohort(task)).send["gradient"]
    start = task.splits["train"].offsets
    for client in range(task.clients):
        mine = task.splits["train"].order[start[client] : start[client + 1]]
        module = nn.Linear(4, 3).double()
        module.load_state_dict(dict(task.network.initial))
        nn.functional.cross_entropy(module(task.x[mine]), task.y[mine]).backward()
        for name, leaf in module.named_parameters():
            torch.testing.assert_close(sent[name][client], leaf.grad, rtol=0, atol=1e-12)


def test_statistics_of_batch_norm_travel_beside_the_gradient(make_task) -> None:
    task = make_task(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), dtype=torch.float64)
    server = play(task, MAML()).server
    assert server["1.num_batches_tracked"] == 3  # of the client with three batches
    assert not torch.equal(server["1.running_mean"], task.network.initial["1.running_mean"])


def test_a_new_client_adapts_the_shared_model(two_clients: Task, make_cohort) -> None:
    found = MAML(alpha=0.5).welcome(two_clients.network.initial, make_cohort(two_clients))
    assert found["w"].flatten().tolist() == pytest.approx([0.5, 1.5])
