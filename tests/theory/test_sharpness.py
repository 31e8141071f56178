"""Sharpness-aware methods: identities with simpler ones, and closed forms on quadratics.

On f_k(w) = 1/2 (w - c_k)^T H_k (w - c_k), with gradient g, the sharpness-aware one is g + rho H_k g / ||g||.
"""

from collections.abc import Callable

import pytest
import torch
from theory.tools import ALIKE, SAMPLES, SIZE, P, balance, each, optima_and_curvatures
from torch import Tensor

from atoll import Algorithm, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddyn import FedDyn
from atoll.algorithms.fedfsa import FedFSA
from atoll.algorithms.fedsam import FedSAM
from atoll.algorithms.fedsmoo import FedSMOO
from atoll.algorithms.fedspeed import FedSpeed
from atoll.algorithms.mofedsam import MoFedSAM
from atoll.testing.conformance import personal_models, play, quadratics

C, H = optima_and_curvatures(5)
ETA, RHO = 0.2, 0.3
NEAR = {"rtol": 0.0, "atol": 1e-6}  # 1e-7 is added to the norm of a gradient
EXACT = {"rtol": 0.0, "atol": 1e-12}


def clients(start: Tensor | None = None) -> Task:
    return quadratics(C, H, samples=SAMPLES, start=start, lr=ETA)


def sharp(w: Tensor, rho: float = RHO) -> Tensor:
    """Every client's sharpness-aware gradient at its row of w."""
    g = each(H, w - C)
    return each(H, w - C + rho * g / g.norm(dim=1, keepdim=True))


# -- identities ----------------------------------------------------------------------------------------------------

SAME: dict[str, tuple[Algorithm, Algorithm]] = {
    "fedsam at radius 0": (FedSAM(rho=0.0, epochs=2), FedAvg(epochs=2)),
    "fedsam at radius 0, adaptive": (FedSAM(rho=0.0, adaptive=True), FedAvg()),
    "mofedsam without momentum": (MoFedSAM(alpha=1.0, rho=RHO, epochs=2), FedSAM(rho=RHO, epochs=2)),
    "fedfsa without chosen layers": (FedFSA(top_c=0, head_epochs=0, epochs=2), MoFedSAM(epochs=2)),
    "fedfsa with one radius": (FedFSA(rho_larger=0.1, head_epochs=0), MoFedSAM()),
    "fedfsa with nothing": (FedFSA(rho=0.0, rho_larger=0.0, alpha=1.0, head_epochs=0), FedAvg()),
    "fedspeed at radius 0": (FedSpeed(rho=0.0, epochs=2), FedDyn(epochs=2)),
    "fedsmoo at radius 0": (FedSMOO(rho=0.0, epochs=2), FedDyn(epochs=2)),
}


@pytest.mark.limit("fedfsa", "fedsam", "fedsmoo", "fedspeed", "mofedsam")
@pytest.mark.parametrize("name", SAME)
def test_with_some_values_a_method_is_a_simpler_one(name: str, make_task: Callable[..., Task]) -> None:
    # Four unequal clients of which three are asked, batches of four, momentum, weight decay and clipping.
    task = make_task(dtype=torch.float64, momentum=0.5, weight_decay=0.01, clip=1.0)
    mine, other = (personal_models(play(task, one, rounds=4, cohort=3)) for one in SAME[name])
    assert all(torch.equal(a[leaf], b[leaf]) for a, b in zip(mine, other, strict=True) for leaf in a)


@pytest.mark.limit("fedfsa", "fedsam", "fedsmoo", "fedspeed", "mofedsam")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FedSAM(rho=0.3), FedAvg()),
        (MoFedSAM(alpha=0.5), FedSAM()),
        (FedFSA(head_epochs=0), MoFedSAM()),
        (FedSpeed(), FedDyn()),
        (FedSMOO(), FedSpeed()),
    ],
)
def test_with_others_it_is_not(one: Algorithm, other: Algorithm, make_task: Callable[..., Task]) -> None:
    task = make_task(sizes=(8, 12, 9), dtype=torch.float64)
    mine, theirs = (personal_models(play(task, method, rounds=3))[0] for method in (one, other))
    assert (mine - theirs).norm() > 1e-5


# -- FedSAM --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedsam")
@pytest.mark.parametrize("steps", [1, 3])
def test_fedsam_follows_the_gradient_uphill(steps: int) -> None:
    w = torch.ones(SIZE, dtype=torch.float64)
    v = w.expand_as(C)
    for _ in range(steps):
        v = v - ETA * sharp(v)
    found = play(clients(start=w), FedSAM(rho=RHO, epochs=steps)).server["w"]
    torch.testing.assert_close(found, P @ v, **NEAR)


@pytest.mark.closed_form("fedsam")
def test_asam_follows_the_gradient_in_scaled_coordinates() -> None:
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    g = each(H, w - C)
    eps = RHO * w**2 * g / (w.abs() * g).norm(dim=1, keepdim=True)
    found = play(clients(start=w), FedSAM(rho=RHO, adaptive=True)).server["w"]
    torch.testing.assert_close(found, w - ETA * P @ each(H, w - C + eps), **NEAR)


@pytest.mark.closed_form("fedsam")
@pytest.mark.parametrize(("eta", "h", "rho"), [(0.5, 1.0, 0.2), (0.3, 2.0, 0.1)])
def test_in_one_dimension_sam_ends_in_a_cycle_of_two_points(eta: float, h: float, rho: float) -> None:
    # At distance x beyond the optimum a step leads to x - eta h (x + rho) = -x: x = eta h rho / (2 - eta h).
    c = torch.tensor([[1.0]], dtype=torch.float64)
    task = quadratics(c, torch.tensor([[[h]]], dtype=torch.float64), lr=eta)
    apart = [play(task, FedSAM(rho=rho, epochs=steps)).server["w"].item() - 1.0 for steps in (100, 101)]
    amplitude = eta * h * rho / (2 - eta * h)
    assert sorted(apart) == pytest.approx([-amplitude, amplitude], abs=1e-6)


# -- MoFedSAM ------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("mofedsam")
def test_momentum_is_the_mean_of_all_gradients_that_fades() -> None:
    # One local step a round: m <- alpha g(w) + (1 - alpha) m, w <- w - eta m.
    alpha, w, m = 0.3, torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(6):
        m = alpha * P @ sharp(w.expand_as(C)) + (1 - alpha) * m
        w = w - ETA * m
    server = play(clients(), MoFedSAM(rho=RHO, alpha=alpha), rounds=6).server
    torch.testing.assert_close(server.w["w"], w, **NEAR)
    torch.testing.assert_close(server.momentum["w"], m, **NEAR)


@pytest.mark.closed_form("mofedsam")
def test_without_a_radius_momentum_ends_at_the_optimum() -> None:
    server = play(clients(), MoFedSAM(rho=0.0, alpha=0.5), rounds=140).server
    torch.testing.assert_close(server.w["w"], balance(H, C, P), **EXACT)
    torch.testing.assert_close(server.momentum["w"], torch.zeros_like(C[0]), **EXACT)


# -- FedSpeed ------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedspeed")
@pytest.mark.parametrize("steps", [1, 3])
def test_fedspeed_ends_where_sharpness_aware_gradients_cancel(steps: int) -> None:
    # For any number of local steps, and all clients alike; not at the optimum of the plain losses.
    report = play(clients(), FedSpeed(alpha=0.5, rho=RHO, epochs=steps), rounds=200)
    w = report.server.w["w"]
    torch.testing.assert_close(ALIKE @ sharp(w.expand_as(C)), torch.zeros_like(w), **NEAR)
    q = report.population.memory.save(round=200)["kept"]["w"]
    torch.testing.assert_close(q, sharp(w.expand_as(C)), **NEAR)
    assert (w - balance(H, C, ALIKE)).norm() > 0.005


# -- FedSMOO -------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedsmoo")
def test_fedsmoo_perturbs_within_its_radius_and_leaves_feddyn_its_dual_variables() -> None:
    report = play(clients(), FedSMOO(alpha=0.5, rho=RHO, epochs=2), rounds=20)
    assert report.server.s["w"].norm().item() == pytest.approx(RHO, abs=1e-6)
    q = report.population.memory.save(round=20)["kept"].q["w"]
    torch.testing.assert_close(report.server.feddyn.h["w"], q.mean(0), **EXACT)
