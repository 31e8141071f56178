"""Interpolation, by hand: c = 1, 3, both models begin at 0, steps are 0.5, weights 1 and 3."""

from dataclasses import replace

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.interp import Interp
from atoll.algorithms.local import Local
from atoll.testing.conformance import personal_models, play


@pytest.fixture
def with_validation(two_clients: Task) -> Task:
    """All samples of a client are the same here, so that the training samples can also be the validation samples."""
    return replace(two_clients, splits={**two_clients.splits, "val": two_clients.splits["train"]})


def deployed(task: Task, algorithm: Interp, rounds: int = 1, **more) -> list[float]:
    return [model["w"].item() for model in personal_models(play(task, algorithm, rounds, **more))]


def test_one_round_by_hand(two_clients: Task) -> None:
    # v = 0.5, 1.5 and w = 1.25.
    assert deployed(two_clients, Interp(share=0.4)) == pytest.approx([0.4 * 0.5 + 0.6 * 1.25, 0.4 * 1.5 + 0.6 * 1.25])


def test_validation_data_choose_the_share(with_validation: Task) -> None:
    # 1.25 - 0.75 a is nearest to 1 at a = 0.3; 1.25 + 0.25 a is nearest to 3 at a = 1.
    assert deployed(with_validation, Interp()) == pytest.approx([1.25 - 0.75 * 0.3, 1.5])


def test_the_share_is_chosen_anew_when_the_shared_model_moves(with_validation: Task) -> None:
    # Only client 1 takes part in round 2: w = 1.125 + 1 = 2.125 while v_0 = 0.5 stays; 2.125 - 1.625 a = 1 near 0.7.
    gone = deployed(with_validation, Interp(), rounds=2, faults=lambda round, clients: (clients == 0) & (round == 1))
    assert gone[0] == pytest.approx(2.125 - 1.625 * 0.7)


def test_without_validation_data_the_shared_model_is_used(two_clients: Task) -> None:
    assert deployed(two_clients, Interp()) == pytest.approx([1.25, 1.25])


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_client_that_never_took_part_uses_the_shared_model(with_validation: Task, share: float | None) -> None:
    # The first client alone makes w = 0.75 in two rounds.
    models = deployed(with_validation, Interp(share=share), rounds=2, faults=lambda round, clients: clients == 1)
    assert models[1] == pytest.approx(0.75)


def test_the_ends_are_fedavg_and_local(two_clients: Task) -> None:
    for share, other in ((0.0, FedAvg(epochs=2)), (1.0, Local(epochs=2))):
        mine, theirs = (
            personal_models(play(two_clients, one, rounds=3)) for one in (Interp(share=share, epochs=2), other)
        )
        assert all(torch.equal(a["w"], b["w"]) for a, b in zip(mine, theirs, strict=True))


def test_one_model_travels(two_clients: Task) -> None:
    interp, plain = (play(two_clients, one, rounds=2) for one in (Interp(), FedAvg()))
    assert torch.equal(interp.server["w"], plain.server["w"])
    assert interp.ledger.entries == plain.ledger.entries
