"""Closed forms of APFL, FedAMP and interpolation on f_k(w) = 1/2 (w - c_k)^T H_k (w - c_k) with full-batch steps."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from scipy.optimize import brentq
from theory.tools import ALIKE, CLIENTS, EYE, SIZE, balance, each, kept, optima_and_curvatures, personal
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from atoll import Algorithm, Task
from atoll.algorithms.apfl import APFL
from atoll.algorithms.apfl_survey import APFLSurvey
from atoll.algorithms.fedamp import FedAMP
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.interp import Interp
from atoll.algorithms.local import Local
from atoll.kernel.randomness import default_generator
from atoll.testing.conformance import personal_models, play, quadratics

ETA = 0.4
EXACT = {"rtol": 0.0, "atol": 1e-12}

C, H = optima_and_curvatures(3)
OPTIMUM = balance(H, C, ALIKE)  # of sum_k f_k: FedAvg with one step rests there


def clients(start: Tensor | None = None) -> Task:
    return quadratics(C, H, start=start, lr=ETA)


def slope(w: Tensor) -> Tensor:
    """The gradient of f_k at w_k, for every client."""
    return each(H, w - C)


# -- APFL ----------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("apfl")
@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_is_gradient_descent_on_the_mixture(adaptive: bool) -> None:
    # Three steps in one round, written out by autograd: d f(a v + (1 - a) w) / dv and / da. Nothing is left out.
    start = torch.ones(SIZE, dtype=torch.float64)
    w, v, a = start.expand(CLIENTS, SIZE), start.expand(CLIENTS, SIZE), torch.full((CLIENTS,), 0.6, dtype=torch.float64)
    for _ in range(3):
        at = [leaf.clone().requires_grad_() for leaf in (v, a)]
        mixture = at[1][:, None] * at[0] + (1 - at[1][:, None]) * w
        f = 0.5 * torch.einsum("ki,kij,kj->", mixture - C, H, mixture - C)
        g_v, g_a = torch.autograd.grad(f, at)
        w, v = w - ETA * slope(w), v - ETA * g_v
        a = (a - ETA * g_a).clamp(0, 1) if adaptive else a
    report = play(clients(start), APFL(alpha=0.6, adaptive=adaptive, epochs=3))
    torch.testing.assert_close(kept(report).v["w"], v, **EXACT)
    torch.testing.assert_close(kept(report).alpha, a, **EXACT)
    torch.testing.assert_close(report.server["w"], w.mean(0), **EXACT)


@pytest.mark.closed_form("apfl")
@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_apfl_reaches_the_own_optimum_with_any_share(alpha: float) -> None:
    # a v + (1 - a) w -> c_k, a step contracts by I - eta a^2 H_k; what w is does not matter.
    # catches: fluke (v gets no gradient), PFLlib (gradient at v: then v -> c_k, and the mixture does not).
    found = personal(clients(start=OPTIMUM), APFL(alpha=alpha), rounds=300 if alpha == 0.5 else 80)
    torch.testing.assert_close(found, C, **EXACT)


@pytest.mark.closed_form("apfl-survey")
def test_the_survey_apfl_rests_at_its_fixed_point() -> None:
    # v = a (w - eta H (w - c)) + (1 - a) (v - eta H (v - c)), with w at rest.
    a = 0.3
    step = each(EYE - ETA * H, OPTIMUM - C) + C  # w after its step
    fixed = torch.linalg.solve(EYE - (1 - a) * (EYE - ETA * H), a * step + (1 - a) * ETA * each(H, C))
    torch.testing.assert_close(
        personal(clients(start=OPTIMUM), APFLSurvey(alpha=a, adaptive=False), rounds=60), fixed, **EXACT
    )
    assert (fixed - C).norm() > 0.1  # unlike the published form, it does not reach the own optimum


@pytest.mark.limit("apfl-survey")
def test_the_survey_apfl_with_the_shared_part_only_deploys_what_fedavg_sends() -> None:
    v = personal(clients(start=OPTIMUM), APFLSurvey(alpha=1.0, adaptive=False, epochs=2))
    w = OPTIMUM - ETA * slope(OPTIMUM.expand(CLIENTS, SIZE))
    torch.testing.assert_close(v, w - ETA * slope(w), **EXACT)


def simulate(
    task: Task, module: nn.Module, alpha: float, rounds: int
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """What clients with one batch deploy after rounds of APFL, and w: written out in plain torch."""
    x, y, split, lr = task.x, task.y, task.splits["train"], task.training.lr
    own = [split.order[start:end] for start, end in pairwise(split.offsets)]
    trained = {name for name, _ in module.named_parameters()}

    def descend(at: dict[str, Tensor], k: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradient at a model, and the statistics after the pass."""
        at = {name: leaf.clone().requires_grad_(name in trained) for name, leaf in at.items()}
        loss = cross_entropy(functional_call(module, at, (x[own[k]],)), y[own[k]])
        slopes = torch.autograd.grad(loss, [at[name] for name in sorted(trained)])
        statistics = {name: leaf.detach() for name, leaf in at.items() if name not in trained}
        return dict(zip(sorted(trained), slopes, strict=True)), statistics

    def mix(w: dict[str, Tensor], v: dict[str, Tensor]) -> dict[str, Tensor]:
        """The mixture, with the statistics that it has found itself."""
        return v | {name: alpha * v[name] + (1 - alpha) * w[name] for name in trained}

    w = dict(task.network.initial)
    vs = [w for _ in own]
    for _ in range(rounds):
        ws = []
        for k, v in enumerate(vs):
            g, after = descend(w, k)
            ws.append(w | {name: w[name] - lr * g[name] for name in trained} | after)
            g, after = descend(mix(w, v), k)
            vs[k] = v | {name: v[name] - lr * alpha * g[name] for name in trained} | after
        shares = [len(rows) / sum(map(len, own)) for rows in own]
        w = {name: sum(share * one[name] for share, one in zip(shares, ws, strict=True)) for name in w}
    return [mix(w, v) for v in vs], w


@pytest.mark.closed_form("apfl")
def test_apfl_deploys_the_mixture_with_statistics_of_its_own(make_task: Callable[..., Task]) -> None:
    # catches: statistics of the mixture's passes that are dropped, or averaged with those of w.
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double()
    task = make_task(lambda: module, sizes=(5, 8, 12), dtype=torch.float64, lr=0.5, batch_size=12)
    expected, w = simulate(task, module.train(), alpha=0.3, rounds=3)
    found = personal_models(play(task, APFL(alpha=0.3), rounds=3))
    for mine, theirs in zip(found, expected, strict=True):
        assert (theirs["1.running_var"] - w["1.running_var"]).abs().max() > 1e-3
        for name, leaf in mine.floating.items():
            torch.testing.assert_close(leaf, theirs[name], **EXACT)


@pytest.mark.limit("apfl")
@pytest.mark.parametrize(("alpha", "other"), [(0.0, FedAvg()), (1.0, Local())])
def test_apfl_ends_in_fedavg_and_local_with_batchnorm_too(
    make_task: Callable[..., Task], alpha: float, other: Algorithm
) -> None:
    layers = lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))  # noqa: E731
    task = make_task(layers, dtype=torch.float64)
    mine, theirs = (personal_models(play(task, one, rounds=3)) for one in (APFL(alpha=alpha), other))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


# -- interpolation -------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("interp")
def test_interpolation_takes_the_best_share_of_the_grid() -> None:
    # f along the segment is a parabola with its minimum at <v - w, H (c - w)> / <v - w, H (v - w)>, cut to [0, 1].
    task = clients(start=OPTIMUM)
    task = replace(task, splits={**task.splits, "val": task.splits["train"]})
    v = C + each(EYE - ETA * H, OPTIMUM - C)
    apart = v - OPTIMUM
    best = torch.einsum("ki,kij,kj->k", apart, H, C - OPTIMUM) / torch.einsum("ki,kij,kj->k", apart, H, apart)
    share = (best.clamp(0, 1) * 10).round() / 10
    torch.testing.assert_close(personal(task, Interp(adapt="grid")), OPTIMUM + share[:, None] * apart, **EXACT)


@pytest.mark.limit("interp")
@pytest.mark.parametrize(("share", "other"), [(0.0, FedAvg(epochs=3)), (1.0, Local(epochs=3))])
def test_interpolation_ends_in_fedavg_and_local(share: float, other: Algorithm) -> None:
    assert torch.equal(personal(clients(), Interp(share=share, epochs=3), 4), personal(clients(), other, 4))


# -- FedAMP --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedamp")
@pytest.mark.parametrize("algorithm", [FedAMP(), FedAMP(alpha=0.1, sigma=2.0), FedAMP(variant="heur", sharpness=3.0)])
def test_attention_is_a_distribution(algorithm: FedAMP) -> None:
    xi = play(clients(), algorithm, rounds=3).server.xi
    torch.testing.assert_close(xi.sum(1), torch.ones(CLIENTS, dtype=torch.float64), **EXACT)
    assert xi.min() >= 0


@pytest.mark.limit("fedamp")
@pytest.mark.parametrize("algorithm", [FedAMP(sigma=1e-9), FedAMP(variant="heur", self_weight=1.0)])
def test_who_attends_to_nobody_receives_its_own_model(algorithm: FedAMP) -> None:
    # The proximal point of the own model: w <- w - eta H (w - c) in the first step, whatever lam is.
    found = personal(clients(), replace(algorithm, lam=1.2), rounds=4)
    torch.testing.assert_close(found, personal(clients(), Local(), rounds=4), **EXACT)


@pytest.mark.limit("fedamp")
@pytest.mark.parametrize("variant", ["amp", "heur"])
def test_identical_models_are_what_their_mixture_is(variant) -> None:
    task = quadratics(C[:1].expand(4, SIZE), H[:1].expand(4, SIZE, SIZE), lr=ETA)
    torch.testing.assert_close(personal(task, FedAMP(variant=variant), 4), personal(task, Local(), 4), **EXACT)


@pytest.mark.limit("fedamp")
def test_with_a_weak_pull_every_client_reaches_its_own_optimum() -> None:
    found = personal(clients(), FedAMP(lam=1e-9), rounds=80)
    torch.testing.assert_close(found, C, rtol=0, atol=1e-7)


@pytest.mark.closed_form("fedamp")
@pytest.mark.parametrize(("lam", "sigma"), [(0.2, 4.0), (1.0, 3.0)])
def test_two_opposite_clients_meet_where_pull_and_loss_balance(lam: float, sigma: float) -> None:
    # c = 1, -1. By symmetry w = x, -x with apart^2 = 4 x^2; the gradient of the objective is 0 where
    # (x - 1) + 2 lam x exp(-4 x^2 / sigma) / sigma = 0. It does not depend on alpha.
    # catches: PFLlib's FedAMP, which would end at 1.
    task = quadratics(torch.tensor([[1.0], [-1.0]], dtype=torch.float64), start=torch.zeros(1).double(), lr=ETA)
    x = brentq(lambda x: x - 1 + 2 * lam * x * math.exp(-4 * x * x / sigma) / sigma, 0, 1)
    for alpha in (0.5, 1.0):
        found = personal(task, FedAMP(lam=lam, alpha=alpha, sigma=sigma), rounds=100)
        torch.testing.assert_close(found.flatten(), torch.tensor([x, -x], dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.purpose("fedamp")
def test_planted_groups_attend_to_each_other() -> None:
    # Two groups of three around +-2: within a group attention, across none.
    with default_generator(0):
        noise = 0.1 * torch.randn(6, SIZE, dtype=torch.float64)
    groups = torch.tensor([2.0, -2.0], dtype=torch.float64).repeat(3)[:, None] + noise
    report = play(quadratics(groups, lr=ETA), FedAMP(alpha=1e6, sigma=1.0), rounds=10)
    across = report.server.xi[0::2, 1::2]
    within = report.server.xi[0::2, 0::2]
    assert across.max() < 1e-6
    assert (within - torch.diag(within.diagonal())).sum(1).min() > 0.5
