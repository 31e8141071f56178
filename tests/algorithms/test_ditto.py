"""Ditto, by hand."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play


def test_one_round_by_hand(two_clients: Task) -> None:
    # Both models begin at 0, where the pull is nothing: v_k = w_k = 0.5, 1.5, and w is the mean with weights 1, 3.
    report = play(two_clients, Ditto(lam=0.5))
    first, second = personal_models(report)
    assert report.server["w"] == pytest.approx(1.25)
    assert first["w"] == pytest.approx(0.5)
    assert second["w"] == pytest.approx(1.5)


def test_the_second_round_pulls_towards_the_received_model(two_clients: Task) -> None:
    # v_k <- v_k - 0.5 ((v_k - c_k) + 0.5 (v_k - 1.25)); the anchor is the w that was received, not the next one.
    report = play(two_clients, Ditto(lam=0.5), rounds=2)
    first, second = personal_models(report)
    assert first["w"] == pytest.approx(0.5 - 0.5 * ((0.5 - 1) + 0.5 * (0.5 - 1.25)))
    assert second["w"] == pytest.approx(1.5 - 0.5 * ((1.5 - 3) + 0.5 * (1.5 - 1.25)))
    assert report.server["w"] == pytest.approx((1 * 1.125 + 3 * 2.125) / 4)


def test_both_models_have_epochs_of_their_own(two_clients: Task) -> None:
    # lam = 0: w_k after one epoch, v_k after three, which leave 1/2 and 1/8 of the distance.
    report = play(two_clients, Ditto(lam=0.0, epochs=1, personal_epochs=3))
    first, second = personal_models(report)
    assert report.server["w"] == pytest.approx(1.25)
    assert first["w"] == pytest.approx(1 * 7 / 8)
    assert second["w"] == pytest.approx(3 * 7 / 8)


def test_lam_zero_is_training_alone(two_clients: Task) -> None:
    ditto, local = (personal_models(play(two_clients, one, rounds=3)) for one in (Ditto(lam=0.0), Local()))
    assert all(torch.equal(mine["w"], theirs["w"]) for mine, theirs in zip(ditto, local, strict=True))


def test_the_shared_model_does_not_depend_on_lam(two_clients: Task) -> None:
    shared = [play(two_clients, one, rounds=3).server["w"] for one in (Ditto(lam=0.0), Ditto(lam=1.5), FedAvg())]
    assert torch.equal(shared[0], shared[1])
    assert torch.equal(shared[0], shared[2])


def test_personal_model_stays_on_the_client(two_clients: Task) -> None:
    ditto, plain = (play(two_clients, one, rounds=2) for one in (Ditto(), FedAvg()))
    assert ditto.ledger.entries == plain.ledger.entries


def test_a_client_that_never_took_part_uses_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, Ditto(), rounds=2, faults=lambda round, clients: clients == 1)
    assert torch.equal(personal_models(report)[1]["w"], report.server["w"])


def test_a_lost_client_keeps_its_old_model(two_clients: Task) -> None:
    report = play(two_clients, Ditto(), rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    assert personal_models(report)[1]["w"] == pytest.approx(1.5)
