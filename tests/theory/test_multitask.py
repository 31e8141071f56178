"""Closed forms and identities of MTFL, MTFL-Adam, MTL-Reg and MOCHA."""

from collections.abc import Callable

import pytest
import torch
from theory.tools import (
    CLIENTS,
    SAMPLES,
    P,
    bodies_and_heads,
    body_and_head,
    deployed,
    each,
    losses_as_outputs,
    optima_and_curvatures,
    personal,
)
from torch import Tensor, nn

from atoll import Task
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.algorithms.mocha import Mocha
from atoll.algorithms.mtfl import MTFL
from atoll.algorithms.mtfl_adam import MTFLAdam
from atoll.algorithms.mtl_reg import MTLReg
from atoll.kernel.randomness import default_generator
from atoll.testing.conformance import personal_models, play, quadratics

ETA = 0.4
EXACT = {"rtol": 0.0, "atol": 1e-12}

C, H = optima_and_curvatures(5)


def clients() -> Task:
    return quadratics(C, H, samples=SAMPLES, lr=ETA)


# -- MTFL ----------------------------------------------------------------------------------------------------------


@pytest.mark.limit("mtfl")
@pytest.mark.parametrize("private", ["yb", "us", "usyb"])
def test_mtfl_without_batch_norm_is_fedavg(make_task: Callable[..., Task], private) -> None:
    task = make_task(dtype=torch.float64)
    mine, theirs = (personal_models(play(task, one, rounds=3)) for one in (MTFL(private=private), FedAvg()))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


class Shifted(nn.Module):
    """Batch norm of x with scale fixed at 1, then its distance to a target of 0: the shift has a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, eps=0.0)
        self.goal = nn.Parameter(torch.zeros(1))
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.norm(x[:, :1]) + self.goal - x[:, 1:]).square().sum(1)


@pytest.mark.closed_form("mtfl")
def test_private_shifts_fit_clients_that_shared_ones_cannot() -> None:
    # A normalised batch has mean 0, so that f_k = 1/2 (beta + g - b_k)^2 + constant: with private shifts everybody
    # reaches beta_k + g = b_k, with shared ones beta + g = mean of b_k.
    b = [1.0, 5.0]
    spread = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    data = {str(k): (torch.stack([spread, torch.full((4,), b[k])], 1), torch.zeros(4)) for k in range(2)}
    task = losses_as_outputs(data, Shifted(), lr=0.2).to(torch.device("cpu"), torch.float64)
    for method, reached in ((MTFL(private="yb"), b), (MTFL(private="us"), [3.0, 3.0]), (FedAvg(), [3.0, 3.0])):
        models = personal_models(play(task, method, rounds=120))
        found = [(model["norm.bias"] + model["goal"]).item() for model in models]
        assert found == pytest.approx(reached, abs=1e-9)


# -- MTL-Reg -------------------------------------------------------------------------------------------------------


@pytest.mark.limit("ditto", "mtl-reg")
@pytest.mark.parametrize("lam", [0.0, 0.2, 0.5])
def test_mtl_reg_with_everything_private_is_ditto_with_twice_the_lam(lam: float) -> None:
    mine = MTLReg(lam=lam, private="all", epochs=2)
    assert torch.equal(
        personal(clients(), mine, 4), personal(clients(), Ditto(lam=2 * lam, epochs=2, personal_epochs=2), 4)
    )
    assert torch.equal(play(clients(), mine, 4).server["w"], play(clients(), FedAvg(epochs=2), 4).server["w"])


@pytest.mark.closed_form("mtl-reg")
@pytest.mark.parametrize("lam", [0.0, 0.3, 2.0])
def test_mtl_reg_shrinks_private_leaves_towards_their_mean(lam: float) -> None:
    # f(r, q) = 1/2 (r - a)^2 + 1/2 (q - b - r)^2 has q = r + mean b, q_k = r + (b_k + 2 lam mean b) / (1 + 2 lam).
    # The gaps q_k - b_k - r cancel in the mean: r = mean a.
    a, b = C[:, 0], C[:, 1]
    report = play(body_and_head(a, b, lr=0.3), MTLReg(lam=lam), rounds=250)
    r, mean = P @ a, P @ b
    torch.testing.assert_close(report.server["body.value"], r[None], **EXACT)
    torch.testing.assert_close(report.server["head.value"], (r + mean)[None], **EXACT)
    torch.testing.assert_close(bodies_and_heads(report)[1], r + (b + 2 * lam * mean) / (1 + 2 * lam), **EXACT)


# -- MOCHA ---------------------------------------------------------------------------------------------------------


def relationship(w: Tensor, floor: float) -> Tensor:
    """Omega of models in the rows of w, from the singular values of w."""
    u, s, _ = torch.linalg.svd(w, full_matrices=False)
    root = u @ torch.diag(s) @ u.T
    return torch.linalg.inv(len(w) * root / root.trace() + floor * torch.eye(len(w), dtype=w.dtype))


@pytest.mark.closed_form("mocha")
@pytest.mark.parametrize("lam", [0.1, 0.5])
def test_mocha_converges_to_a_stationary_point_of_its_objective(lam: float) -> None:
    # H_k (w_k - c_k) + lam sum_j Omega_kj w_j = 0 for all clients at once, with Omega that of these models.
    report = play(clients(), Mocha(lam=lam), rounds=100)
    w = deployed(report)
    omega = relationship(w, floor=0.1)
    torch.testing.assert_close(report.server.omega, omega, rtol=0, atol=1e-10)
    torch.testing.assert_close(report.server.w["w"], w, **EXACT)  # what the server knows is what clients have
    residual = each(H, w - C) + lam * omega @ w
    torch.testing.assert_close(residual, torch.zeros_like(residual), rtol=0, atol=1e-10)
    assert (w - C).norm() > 0.1  # catches: PFLlib's FedMTL, which would be at the own optima


@pytest.mark.closed_form("mocha")
def test_mocha_on_one_line_is_a_ridge() -> None:
    # In one dimension W^T W has rank one and Omega w = w / (N + floor): w = c / (1 + lam / (N + floor)).
    c = C[:, :1]
    found = personal(quadratics(c, lr=ETA), Mocha(lam=0.7, floor=0.2), rounds=80)
    torch.testing.assert_close(found, c / (1 + 0.7 / (CLIENTS + 0.2)), **EXACT)


@pytest.mark.closed_form("mocha")
def test_mocha_finds_orthogonal_clients_unrelated() -> None:
    # W^T W is diagonal: with equal lengths Omega = I / (1 + floor), and nobody is drawn to anybody.
    c = 2 * torch.eye(3, dtype=torch.float64)
    report = play(quadratics(c, lr=ETA), Mocha(lam=0.7, floor=0.2), rounds=80)
    found = deployed(report)
    torch.testing.assert_close(found, c / (1 + 0.7 / 1.2), **EXACT)
    assert report.algorithm.mixing(report.server).abs().max() < 1e-12


@pytest.mark.purpose("mocha")
def test_mocha_draws_planted_groups_together() -> None:
    # Two groups in orthogonal directions, with noise: related within, unrelated across, and nearer than alone.
    with default_generator(0):
        noise = 0.1 * torch.randn(6, 30, dtype=torch.float64)
    c = torch.eye(30, dtype=torch.float64)[[0, 1, 0, 1, 0, 1]] * 2 + noise
    report = play(quadratics(c, lr=ETA), Mocha(lam=0.3), rounds=100)
    mixing = report.algorithm.mixing(report.server)
    within, across = mixing[0::2, 0::2], mixing[0::2, 1::2]
    assert within.sum(1).min() > 0.7
    assert across.abs().max() < within[~torch.eye(3, dtype=torch.bool)].min()
    w = deployed(report)
    assert w[0::2].std(0).norm() < 0.7 * c[0::2].std(0).norm()


@pytest.mark.limit("mocha")
def test_mocha_without_a_relationship_is_local() -> None:
    assert torch.equal(personal(clients(), Mocha(lam=0.0, epochs=2), 4), personal(clients(), Local(epochs=2), 4))


@pytest.mark.closed_form("mtfl-adam")
@pytest.mark.parametrize("clients", [1, 3])
def test_clients_of_one_mind_train_by_adam_whatever_the_rounds(clients: int) -> None:
    # catches: moments that begin anew in every round, or that are added where they should be averaged.
    task = quadratics(torch.full((clients, 1), 2.0, dtype=torch.float64))
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([w], lr=0.1)
    for _ in range(10):
        optimiser.zero_grad()
        (0.5 * (w - 2) ** 2).sum().backward()
        optimiser.step()
    report = play(task, MTFLAdam(adam_lr=0.1, epochs=2), rounds=5)
    (found,) = report.server.w.values()
    assert found.flatten().tolist() == pytest.approx(w.tolist(), abs=1e-12)
