"""FedRep, by hand."""

import pytest

from atoll import Settings, Task
from atoll.algorithms.fedrep import FedRep
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play

ONE_EACH = FedRep(head_epochs=1, final_epochs=0)


def test_one_round_by_hand(body_and_head: Task) -> None:
    # From u = h = 0 the heads move by c_k / 2 to 0.5, 1.5; then the bodies by (c_k - h_k) / 2 to 0.25, 0.75.
    # catches: training both at once (that is FedPer, u = 1.25), or the body under the old head.
    report = play(body_and_head, ONE_EACH)
    first, second = personal_models(report)
    assert report.server["body.value"] == pytest.approx((1 * 0.25 + 3 * 0.75) / 4)
    assert first["head.value"] == pytest.approx(0.5)
    assert second["head.value"] == pytest.approx(1.5)


def test_the_second_round_begins_with_the_shared_body_and_the_own_head(body_and_head: Task) -> None:
    # u = 0.625; h moves by (c - u - h) / 2 to 0.4375, 1.9375; then u by (c - u - h) / 2.
    report = play(body_and_head, ONE_EACH, rounds=2)
    first, second = personal_models(report)
    assert first["head.value"] == pytest.approx(0.4375)
    assert second["head.value"] == pytest.approx(1.9375)
    moved = [(1 - 0.625 - 0.4375) / 2, (3 - 0.625 - 1.9375) / 2]
    assert report.server["body.value"] == pytest.approx(0.625 + (1 * moved[0] + 3 * moved[1]) / 4)


def test_many_epochs_fit_the_head_before_the_body_moves(body_and_head: Task) -> None:
    # Each epoch halves the gap: after 60 of them there is none left for the body.
    report = play(body_and_head, FedRep(head_epochs=60, epochs=3))
    assert report.server["body.value"] == pytest.approx(0, abs=1e-12)
    assert [model["head.value"].item() for model in personal_models(report)] == pytest.approx([1, 3])


def test_after_the_last_round_every_client_fits_its_head(body_and_head: Task) -> None:
    # The second client is there and never asked: u = 0.25 from the first one; its head goes half the way to 3 - u.
    seed = next(seed for seed in range(9) if Settings(cohort=1, seed=seed).choose(2, 0).tolist() == [0])
    report = play(body_and_head, FedRep(head_epochs=1, final_epochs=1), cohort=1, seed=seed)
    first, second = personal_models(report)
    assert report.server["body.value"] == pytest.approx(0.25)
    assert first["head.value"] == pytest.approx(0.5 + (1 - 0.25 - 0.5) / 2)
    assert second["head.value"] == pytest.approx((3 - 0.25) / 2)


def test_a_lost_client_keeps_its_old_head(body_and_head: Task) -> None:
    report = play(body_and_head, ONE_EACH, rounds=2, faults=lambda round, clients: (clients == 1) & (round == 1))
    assert personal_models(report)[1]["head.value"] == pytest.approx(1.5)


def test_the_head_never_leaves_the_client(body_and_head: Task) -> None:
    report = play(body_and_head, FedRep(), rounds=2)
    body = body_and_head.network.initial.part("body")
    assert list(report.server) == ["body.value"]
    assert report.ledger.bytes("down") == 2 * 2 * len(to_bytes(body))
    assert report.ledger.by_kind()["up", "model"] == 2 * 2 * len(to_bytes(body))


def test_a_new_client_fits_a_head_to_the_shared_body(body_and_head: Task, make_cohort) -> None:  # type: ignore[no-untyped-def]
    server = play(body_and_head, ONE_EACH).server
    models = FedRep(final_epochs=1).welcome(server, make_cohort(body_and_head, clients=[1]))
    assert models["body.value"] == pytest.approx(0.625)
    assert models["head.value"] == pytest.approx((3 - 0.625) / 2)
