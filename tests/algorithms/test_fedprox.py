"""FedProx, by hand."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedprox import FedProx
from atoll.testing.conformance import play


def test_one_round_by_hand(two_clients: Task) -> None:
    # Step 1 from w = 0 feels no pull: v = 0.5, 1.5. In step 2 with mu = 1 the gradients are
    # (0.5 - 1) + 1 * (0.5 - 0) = 0 and (1.5 - 3) + 1 * (1.5 - 0) = 0: nobody moves on.
    # A penalty without the factor 1/2 would pull twice as hard.
    assert play(two_clients, FedProx(mu=1.0, epochs=2)).server["w"] == pytest.approx((1 * 0.5 + 3 * 1.5) / 4)


def test_the_anchor_is_the_model_received_in_this_round(two_clients: Task) -> None:
    # Round 2 from w = 1.25: v = 1.125, 2.125 after one step, where the pull to 1.25 again cancels the loss.
    w = play(two_clients, FedProx(mu=1.0, epochs=2), rounds=2).server["w"]
    assert w == pytest.approx((1 * 1.125 + 3 * 2.125) / 4)


def test_mu_zero_is_fedavg(two_clients: Task) -> None:
    prox, plain = (
        play(two_clients, one, rounds=3).server["w"] for one in (FedProx(mu=0.0, epochs=2), FedAvg(epochs=2))
    )
    assert torch.equal(prox, plain)


def test_clients_move_less_as_mu_grows(two_clients: Task) -> None:
    moved = [play(two_clients, FedProx(mu=mu, epochs=3)).server["w"].item() for mu in (0.0, 0.5, 1.0)]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1]
