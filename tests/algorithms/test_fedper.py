"""FedPer, by hand."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.local import Local
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play


def test_one_round_by_hand(body_and_head: Task) -> None:
    # From u = h = 0 both move by c_k / 2. The bodies 0.5, 1.5 are averaged with weights 1, 3; the heads are not.
    report = play(body_and_head, FedPer())
    first, second = personal_models(report)
    assert report.server["body.value"] == pytest.approx(1.25)
    assert first["body.value"] == second["body.value"] == pytest.approx(1.25)
    assert first["head.value"] == pytest.approx(0.5)
    assert second["head.value"] == pytest.approx(1.5)


def test_the_second_round_begins_with_the_shared_body_and_the_own_head(body_and_head: Task) -> None:
    # u + h - c = 1.25 + 0.5 - 1 = 0.75 and 1.25 + 1.5 - 3 = -0.25; body and head both move by half of it.
    report = play(body_and_head, FedPer(), rounds=2)
    first, second = personal_models(report)
    assert first["head.value"] == pytest.approx(0.5 - 0.375)
    assert second["head.value"] == pytest.approx(1.5 + 0.125)
    assert report.server["body.value"] == pytest.approx((1 * (1.25 - 0.375) + 3 * (1.25 + 0.125)) / 4)


def test_the_head_never_leaves_the_client(body_and_head: Task) -> None:
    report = play(body_and_head, FedPer(), rounds=2)
    body = body_and_head.network.initial.part("body")
    assert list(report.server) == ["body.value"]
    assert report.ledger.bytes("down") == 2 * 2 * len(to_bytes(body))
    assert report.ledger.by_kind()["up", "model"] == 2 * 2 * len(to_bytes(body))


def test_a_client_that_never_took_part_has_the_initial_head(body_and_head: Task) -> None:
    report = play(body_and_head, FedPer(), faults=lambda round, clients: clients == 1)
    second = personal_models(report)[1]
    assert second["head.value"] == 0
    assert second["body.value"] == pytest.approx(0.5)


def test_nothing_private_is_fedavg_and_everything_is_local(body_and_head: Task) -> None:
    for private, other in (("none", FedAvg(epochs=2)), ("all", Local(epochs=2))):
        mine, theirs = (
            personal_models(play(body_and_head, one, rounds=3)) for one in (FedPer(private=private, epochs=2), other)
        )
        for a, b in zip(mine, theirs, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)


def test_there_is_no_model_for_everybody(body_and_head: Task) -> None:
    report = play(body_and_head, FedPer())
    assert report.algorithm.shared(report.server) is None
