"""FedSMOO, by hand, with alpha = 1 and rho = 1/2."""

import pytest
import torch
from theory.tools import body_and_head

from atoll import Task
from atoll.algorithms.feddyn import FedDyn
from atoll.algorithms.fedsmoo import FedSMOO
from atoll.testing.conformance import personal_models, play

NEAR = {"abs": 1e-6}  # 1e-7 is added to the norm of a gradient
METHOD = FedSMOO(alpha=1.0, rho=0.5)


def duals(report) -> dict[str, torch.Tensor]:
    kept = report.population.memory.save(round=report.settings.rounds)["kept"]
    return {name: -value for name, value in kept.against.items()}


def test_one_round_by_hand(two_clients: Task) -> None:
    # Gradients at -0.5: theta = 0.75, 1.75, mean 1.25. h = -1.25, w = 2.5. Both climbed to the left: s = -0.5.
    report = play(two_clients, METHOD)
    assert report.server.feddyn.w["w"].item() == pytest.approx(2.5, **NEAR)
    assert report.server.feddyn.h["w"].item() == pytest.approx(-1.25, **NEAR)
    assert report.server.s["w"].item() == pytest.approx(-0.5, **NEAR)
    assert duals(report)["w"].flatten().tolist() == pytest.approx([-0.5, -0.5], **NEAR)


def test_then_perturbations_are_drawn_to_the_common_one(two_clients: Task) -> None:
    # From 2.5: gradients 1.5, -0.5; minus mu_k and s: 2.5, 0.5. The second client now climbs to the right, too.
    # Gradients at 3: 2 and 0; minus q_k = -0.75, -1.75: steps -1.375, -0.875, mean -1.125. h = -0.125, w = 1.5.
    # mu_k = -0.5 + 0.5 + 0.5.
    report = play(two_clients, METHOD, rounds=2)
    assert report.server.feddyn.w["w"].item() == pytest.approx(1.5, **NEAR)
    assert report.server.feddyn.h["w"].item() == pytest.approx(-0.125, **NEAR)
    assert report.server.s["w"].item() == pytest.approx(0.5, **NEAR)
    assert duals(report)["w"].flatten().tolist() == pytest.approx([0.5, 0.5], **NEAR)


def test_the_dual_variable_goes_on_in_every_step(two_clients: Task) -> None:
    # s is 0 in the first round. Client 2 climbs to the left twice, against -mu = 0.5 the second time: mu = -1.
    # Client 1: from 0.75, -0.25 + 0.5 points to the right, and back to mu = 0.
    report = play(two_clients, FedSMOO(alpha=1.0, rho=0.5, epochs=2))
    assert duals(report)["w"].flatten().tolist() == pytest.approx([0.0, -1.0], **NEAR)


def test_every_leaf_has_its_own_part_of_the_dual_variable() -> None:
    # Catches: a vector cut into tensors without advancing, so that all leaves but the first get wrong values.
    # At 0 the gradient is (b - a, -b); one step, so that mu_k is the perturbation.
    a, b = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, 2.0, -1.0, 0.5], [3.0, -1.0, 2.0, 1.0]))
    report = play(body_and_head(a, b, lr=0.3), METHOD)
    g = torch.stack([b - a, -b], 1)
    mu = 0.5 * g / g.norm(dim=1, keepdim=True)
    found, s = duals(report), report.server.s
    torch.testing.assert_close(torch.cat([found["body.value"], found["head.value"]], 1), mu, rtol=0, atol=1e-6)
    mean = mu.mean(0)
    torch.testing.assert_close(
        torch.cat([s["body.value"], s["head.value"]]), 0.5 * mean / mean.norm(), rtol=0, atol=1e-6
    )


def test_two_models_travel_each_way(two_clients: Task) -> None:
    mine, plain = (play(two_clients, one, rounds=2) for one in (METHOD, FedDyn()))
    sent = mine.ledger.by_kind()
    assert sent["up", "model"] == sent["up", "state"] == plain.ledger.by_kind()["up", "model"]
    assert mine.ledger.bytes("down") > 1.9 * plain.ledger.bytes("down")
    assert [line["gradients"] for line in mine.history] == [2 * line["gradients"] for line in plain.history]


def test_everybody_deploys_the_shared_model(two_clients: Task) -> None:
    report = play(two_clients, METHOD)
    assert [model["w"].item() for model in personal_models(report)] == [report.server.feddyn.w["w"].item()] * 2
    assert report.algorithm.shared(report.server) is report.server.feddyn.w
