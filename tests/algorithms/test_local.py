"""Local, by hand: every epoch halves a client's distance to its optimum."""

import pytest

from atoll import Task
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play


def test_one_round_by_hand(two_clients: Task) -> None:
    # w = 0, c = 1, 3, step 0.5: v_k = c_k / 2.
    first, second = personal_models(play(two_clients, Local()))
    assert first["w"] == pytest.approx(0.5)
    assert second["w"] == pytest.approx(1.5)


def test_clients_go_on_from_where_they_stopped(two_clients: Task) -> None:
    # Two rounds of one epoch: v_k = c_k (1 - 1/4), the same as one round of two.
    for epochs, rounds in ((1, 2), (2, 1)):
        first, second = personal_models(play(two_clients, Local(epochs=epochs), rounds))
        assert first["w"] == pytest.approx(0.75)
        assert second["w"] == pytest.approx(2.25)


def test_nothing_is_sent(two_clients: Task) -> None:
    report = play(two_clients, Local(), rounds=2)
    assert report.server is None
    assert report.ledger.entries == []


def test_a_client_that_never_took_part_has_the_initial_model(two_clients: Task) -> None:
    report = play(two_clients, Local(), faults=lambda round, clients: clients == 1)
    first, second = personal_models(report)
    assert first["w"] == pytest.approx(0.5)
    assert second["w"] == 0
