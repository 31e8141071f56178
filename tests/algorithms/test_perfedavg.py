"""Per-FedAvg, by hand: with alpha = 0.5 and steps of 0.5 everything halves a distance."""

from typing import Literal

import pytest
import torch
from torch import nn

from atoll import Algorithm, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.perfedavg import PerFedAvg
from atoll.models import MLP
from atoll.runtime.engines.plan import Plan
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.client import adapt, sgd
from atoll.toolbox.client.meta import first_order

Order = Literal["fo", "hf", "full"]


def values(task: Task, algorithm: Algorithm, rounds: int = 1) -> list[float]:
    return [model["w"].item() for model in personal_models(play(task, algorithm, rounds))]


@pytest.mark.parametrize(
    ("order", "share"),
    # From w = 0 the client's step leads to c / 2, where the gradient is -c / 2. Along it w_k = c / 4. The curvature
    # halves the gradient: w_k = c / 8. The mean over c = 1, 3 is 2, because clients count alike.
    [("fo", 1 / 4), ("hf", 1 / 8), ("full", 1 / 8)],
)
def test_one_round_by_hand(two_clients: Task, order: Order, share: float) -> None:
    # Catches: training twice per round, which would leave another share.
    report = play(two_clients, PerFedAvg(alpha=0.5, order=order))
    assert report.server["w"] == pytest.approx(2 * share)


def test_the_second_round_begins_at_the_mean(two_clients: Task) -> None:
    # From w = 0.5: w_k = w + (c - w) / 4 = 0.625, 1.125.
    assert play(two_clients, PerFedAvg(alpha=0.5), rounds=2).server["w"] == pytest.approx(0.875)


def test_weights_by_samples(two_clients: Task) -> None:
    report = play(two_clients, PerFedAvg(alpha=0.5, weighting="samples"))
    assert report.server["w"] == pytest.approx((1 * 0.25 + 3 * 0.75) / 4)


@pytest.mark.parametrize(("steps", "left"), [(0, 1.0), (1, 0.5), (2, 0.25)])
def test_clients_adapt_by_gradient_steps_from_w(two_clients: Task, steps: int, left: float) -> None:
    # w = 0.5; each step leaves half of the distance to c = 1, 3.
    found = values(two_clients, PerFedAvg(alpha=0.5, adapt_steps=steps))
    assert found == pytest.approx([1 - left * 0.5, 3 - left * 2.5])


def test_adaptation_is_neither_sent_nor_kept(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (PerFedAvg(), FedAvg()))
    assert mine.ledger.entries == plain.ledger.entries
    assert mine.population.memory.save(round=2) is None


@pytest.mark.parametrize(("order", "times"), [("fo", 2), ("hf", 4), ("full", 2)])
def test_gradients_per_step(two_clients: Task, order: Order, times: int) -> None:
    # Catches: training twice per round.
    report = play(two_clients, PerFedAvg(order=order, epochs=3))
    assert report.history[0]["gradients"] == 2 * 3 * times


def test_without_a_step_of_its_own_it_is_fedavg_with_uniform_weights(make_task) -> None:
    task = make_task(dtype=torch.float64)
    mine, theirs = (
        play(task, one, rounds=3).server
        for one in (PerFedAvg(alpha=0.0, epochs=2), FedAvg(epochs=2, weighting="uniform"))
    )
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_statistics_are_those_of_the_models_that_were_scored(make_task) -> None:
    # With alpha = 0 these are FedAvg's: the passes for the step and for the curvature leave no trace.
    task = make_task(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), dtype=torch.float64)
    plain = play(task, FedAvg(weighting="uniform")).server
    for order in ("fo", "hf", "full"):
        mine = play(task, PerFedAvg(alpha=0.0, order=order)).server
        assert mine["1.num_batches_tracked"] == plain["1.num_batches_tracked"]
        torch.testing.assert_close(mine["1.running_mean"], plain["1.running_mean"], rtol=0, atol=1e-12)


def test_the_step_and_its_score_see_different_batches(make_task, make_cohort) -> None:
    task = make_task(dtype=torch.float64)
    w = task.network.initial
    sent = PerFedAvg(alpha=0.5).local(w, make_cohort(task, seed=1)).send["delta"]
    same = sgd(
        make_cohort(task, seed=1), w, epochs=1, gradient=lambda v, batch: first_order(v, (batch, batch), alpha=0.5)
    )
    differs = [(sent - (same - w)).client(k).norm().item() > 1e-6 for k in range(4)]
    assert differs == [True, False, True, True]  # the second client has one sample


@pytest.mark.parametrize("order", ["hf", "full"])
@pytest.mark.parametrize("strategy", ["chunk:2", "loop", "traced"])
def test_every_order_gives_the_same_bits_in_every_strategy(make_task, order: Order, strategy: str) -> None:
    task, algorithm = make_task(dtype=torch.float64), PerFedAvg(alpha=0.3, order=order)
    whole, other = (play(task, algorithm, 2, strategy=one).server for one in ("whole", strategy))
    assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_second_order_is_the_same_with_plain_autograd(make_task, make_cohort) -> None:
    # In single precision a client alone is differentiated without `torch.func`, where an inner gradient is easily lost.
    task = make_task(lambda: MLP((4,), 3, hidden=(6,)))
    w = task.network.initial
    full, first = PerFedAvg(alpha=1.0, order="full"), PerFedAvg(alpha=1.0)
    together = full.local(w, make_cohort(task)).send["delta"]
    alone = full.local(w, make_cohort(task, Plan("loop"), [2])).send["delta"]
    without = first.local(w, make_cohort(task, Plan("loop"), [2])).send["delta"]
    assert all(torch.allclose(together[name][2], alone[name][0], atol=1e-5) for name in w)
    assert not all(torch.allclose(without[name], alone[name], atol=1e-4) for name in w)


def test_adaptation_counts_every_sample_once(make_task, make_cohort) -> None:
    # Batches of 4: the last of 5 samples is a batch of its own, and weighs as one sample.
    task = make_task(dtype=torch.float64)
    w, start = task.network.initial, task.splits["train"].offsets
    found = adapt(make_cohort(task), w, alpha=0.5, steps=1)
    for client in range(task.clients):
        mine = task.splits["train"].order[start[client] : start[client + 1]]
        module = MLP((4,), 3, hidden=(6,)).double()
        module.load_state_dict(dict(w))
        nn.functional.cross_entropy(module(task.x[mine]), task.y[mine]).backward()
        for name, leaf in module.named_parameters():
            torch.testing.assert_close(found[name][client], w[name] - 0.5 * leaf.grad, rtol=0, atol=1e-12)


def test_a_new_client_adapts_the_shared_model(two_clients: Task, make_cohort) -> None:
    w = two_clients.network.initial
    found = PerFedAvg(alpha=0.5).welcome(w, make_cohort(two_clients))
    assert found["w"].flatten().tolist() == pytest.approx([0.5, 1.5])
