"""LG-FedAvg, by hand."""

import pytest

from atoll import Task
from atoll.algorithms.lg_fedavg import LGFedAvg
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play


def test_one_round_by_hand(body_and_head: Task) -> None:
    # From u = h = 0 both move by c_k / 2. The heads 0.5, 1.5 are averaged with weights 1, 3; the bodies are not.
    report = play(body_and_head, LGFedAvg())
    first, second = personal_models(report)
    assert report.server["head.value"] == pytest.approx(1.25)
    assert first["head.value"] == second["head.value"] == pytest.approx(1.25)
    assert first["body.value"] == pytest.approx(0.5)
    assert second["body.value"] == pytest.approx(1.5)


def test_the_second_round_begins_with_the_own_body_and_the_shared_head(body_and_head: Task) -> None:
    report = play(body_and_head, LGFedAvg(), rounds=2)
    first, second = personal_models(report)
    assert first["body.value"] == pytest.approx(0.5 - 0.375)
    assert second["body.value"] == pytest.approx(1.5 + 0.125)
    assert report.server["head.value"] == pytest.approx((1 * (1.25 - 0.375) + 3 * (1.25 + 0.125)) / 4)


def test_the_body_never_leaves_the_client(body_and_head: Task) -> None:
    report = play(body_and_head, LGFedAvg(), rounds=2)
    head = body_and_head.network.initial.part("head")
    assert list(report.server) == ["head.value"]
    assert report.ledger.bytes("down") == 2 * 2 * len(to_bytes(head))
    assert report.ledger.by_kind()["up", "model"] == 2 * 2 * len(to_bytes(head))


def test_a_client_that_never_took_part_has_the_initial_body(body_and_head: Task) -> None:
    report = play(body_and_head, LGFedAvg(), faults=lambda round, clients: clients == 1)
    second = personal_models(report)[1]
    assert second["body.value"] == 0
    assert second["head.value"] == pytest.approx(0.5)


def test_there_is_no_model_for_everybody(body_and_head: Task) -> None:
    report = play(body_and_head, LGFedAvg())
    assert report.algorithm.shared(report.server) is None
