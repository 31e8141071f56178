"""MTL-Reg, by hand: F_k(u, h) = (u + h - c_k)^2 / 2 with c = 1, 3, all 0 at first, steps of 0.5, weights 1 and 3."""

import pytest
import torch

from atoll import Algorithm, Report, Task
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.mtl_reg import MTLReg
from atoll.testing.conformance import personal_models, play


def values(report: Report, name: str) -> list[float]:
    return [model[f"{name}.value"].item() for model in personal_models(report)]


def test_one_round_by_hand(body_and_head: Task) -> None:
    # Own pass: u and h move by c_k / 2. Shared pass: the copy q moves by c_k / 2 under the received u = 0.
    report = play(body_and_head, MTLReg(lam=0.25))
    assert report.server["body.value"] == pytest.approx(1.25)
    assert report.server["head.value"] == pytest.approx(1.25)
    assert values(report, "body") == pytest.approx([1.25, 1.25])
    assert values(report, "head") == pytest.approx([0.5, 1.5])


def test_the_second_round_pulls_heads_to_their_shared_copy_and_leaves_the_body(body_and_head: Task) -> None:
    # u = 1.25, h = 0.5, 1.5, q = 1.25: u + h - c = 0.75, -0.25. The pull 2 lam (h - q) acts on h alone, so that a
    # penalty that reached the body (towards 0 or towards anything) would show. For q: u + q - c = 1.5, -0.5.
    report = play(body_and_head, MTLReg(lam=0.25), rounds=2)
    assert values(report, "head") == pytest.approx(
        [0.5 - 0.5 * (0.75 + 0.5 * (0.5 - 1.25)), 1.5 - 0.5 * (-0.25 + 0.5 * (1.5 - 1.25))]
    )
    assert report.server["body.value"] == pytest.approx(1.25 - 0.5 * (1 * 0.75 + 3 * -0.25) / 4)
    assert report.server["head.value"] == pytest.approx(1.25 - 0.5 * (1 * 1.5 + 3 * -0.5) / 4)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (MTLReg(lam=0.0, epochs=2), FedPer(epochs=2)),
        (MTLReg(lam=0.3, private="all", epochs=2), Ditto(lam=0.6, epochs=2, personal_epochs=2)),
        (MTLReg(lam=0.3, private="none", epochs=2), FedAvg(epochs=2)),
    ],
)
def test_what_it_is_at_its_ends(body_and_head: Task, mine: Algorithm, other: Algorithm) -> None:
    ours, theirs = (play(body_and_head, one, rounds=3) for one in (mine, other))
    for a, b in zip(personal_models(ours), personal_models(theirs), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    assert all(torch.equal(ours.server[name], theirs.server[name]) for name in theirs.server)


def test_a_client_that_never_took_part_uses_the_shared_copy(body_and_head: Task) -> None:
    report = play(body_and_head, MTLReg(), rounds=2, faults=lambda round, clients: clients == 1)
    assert values(report, "head")[1] == report.server["head.value"].item() != 0


def test_a_whole_model_travels_and_own_copies_stay(body_and_head: Task) -> None:
    report, plain = (play(body_and_head, one, rounds=2) for one in (MTLReg(), FedAvg()))
    assert report.ledger.entries == plain.ledger.entries
    assert set(report.population.memory.save(round=2)["kept"]) == {"head.value"}


def test_a_pull_that_overshoots_is_named() -> None:
    assert MTLReg(lam=3.0).pulls(lr=0.5) == {"2 * lr * lam": pytest.approx(3.0)}
