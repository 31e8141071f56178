"""FedBABU, by hand."""

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedbabu import FedBABU
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play


def test_one_round_by_hand(body_and_head: Task) -> None:
    # The head stays at 0; bodies move to 0.5, 1.5. Tuning then moves body and head by (c_k - 1.25) / 2.
    report = play(body_and_head, FedBABU(tune_epochs=1))
    first, second = personal_models(report)
    assert report.server["body.value"] == pytest.approx(1.25)
    assert report.server["head.value"] == 0
    assert (first["body.value"], first["head.value"]) == (pytest.approx(1.125), pytest.approx(-0.125))
    assert (second["body.value"], second["head.value"]) == (pytest.approx(2.125), pytest.approx(0.875))


def test_the_head_stays_as_it_was_made_and_never_travels(body_and_head: Task) -> None:
    report = play(body_and_head, FedBABU(), rounds=3)
    body = body_and_head.network.initial.part("body")
    assert torch.equal(report.server["head.value"], body_and_head.network.initial["head.value"])
    assert report.ledger.bytes("down") == 3 * 2 * len(to_bytes(body))
    assert report.ledger.by_kind()["up", "model"] == 3 * 2 * len(to_bytes(body))


def test_the_second_round_begins_at_the_mean_body(body_and_head: Task) -> None:
    # From u = 1.25 under h = 0: 1.125, 2.125.
    server = play(body_and_head, FedBABU(), rounds=2).server
    assert server["body.value"] == pytest.approx((1 * 1.125 + 3 * 2.125) / 4)


def test_tuning_may_be_of_the_head_only_and_is_neither_sent_nor_kept(body_and_head: Task) -> None:
    report = play(body_and_head, FedBABU(tune="head", tune_epochs=1))
    first, second = personal_models(report)
    assert first["body.value"] == second["body.value"] == pytest.approx(1.25)
    assert second["head.value"] == pytest.approx((3 - 1.25) / 2)
    assert report.population.memory.save(round=1) is None


def test_the_model_for_everybody_is_the_body_under_the_random_head(body_and_head: Task) -> None:
    report = play(body_and_head, FedBABU())
    assert set(report.algorithm.shared(report.server) or ()) == {"body.value", "head.value"}
