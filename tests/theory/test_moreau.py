"""Closed forms of pFedMe, SCAFFOLD and FedDyn on quadratics, f_k(w) = 1/2 (w - c_k)^T H_k (w - c_k).

Steps are full-batch, so that batches play no part.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from theory.tools import ALIKE, CLIENTS, EYE, SAMPLES, SIZE, P, balance, deployed, each, kept, optima_and_curvatures
from torch import Tensor, nn

from atoll import Algorithm, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddyn import FedDyn
from atoll.algorithms.fedprox import FedProx
from atoll.algorithms.pfedme import PFedMe
from atoll.algorithms.pfedme_survey import PFedMeSurvey
from atoll.algorithms.reptile import Reptile
from atoll.algorithms.scaffold import Scaffold
from atoll.federation.report import Report
from atoll.testing.conformance import play, quadratics

ETA = 0.4
EXACT = {"rtol": 0.0, "atol": 1e-11}

C, H = optima_and_curvatures(2)


def clients(lr: float = ETA) -> Task:
    return quadratics(C, H, samples=SAMPLES, lr=lr)


def shared(report: Report) -> Tensor:
    model = report.algorithm.shared(report.server)
    assert model is not None
    return model["w"]


def gradients(w: Tensor) -> Tensor:
    return each(H, w - C)


def proximal_points(w: Tensor, lam: float) -> Tensor:
    return torch.linalg.solve(H + lam * EYE, each(H, C) + lam * w)


# -- pFedMe --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("pfedme")
@pytest.mark.parametrize("eta", [0.5, 1.0, 1.5])
def test_pfedme_converges_to_the_fixed_point_of_fedprox(eta: float) -> None:
    # With lam = 1 a step contracts theta by |1 - 0.4 (h + 1)| <= 0.2. Catches: a pull that is zero or not squared.
    lam = 1.0
    report = play(clients(), PFedMe(lam=lam, inner_steps=20, eta=eta), rounds=90 if eta < 1 else 40)
    w = balance(torch.linalg.solve(H + lam * EYE, H), C, P)
    torch.testing.assert_close(shared(report), w, **EXACT)
    torch.testing.assert_close(deployed(report), proximal_points(w, lam), **EXACT)
    assert (w - P @ C).norm() > 0.01  # neither the mean of the optima
    assert (w - balance(H, C, P)).norm() > 0.01  # nor the optimum of the mean


@pytest.mark.closed_form("pfedme")
def test_pfedme_carries_momentum_from_batch_to_batch_and_not_from_round_to_round() -> None:
    # catches: a velocity that begins anew with every batch, or one that outlives a round.
    lam, eta, momentum = 0.7, 0.5, 0.6
    task = clients(lr=0.2)
    task = replace(task, training=replace(task.training, momentum=momentum))
    w = torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(2):
        theta, velocity = w.expand(CLIENTS, SIZE), torch.zeros(CLIENTS, SIZE, dtype=torch.float64)
        w_k = theta
        for _ in range(3):  # batches: one in each epoch
            for _ in range(2):  # inner steps
                velocity = momentum * velocity + gradients(theta) + lam * (theta - w_k)
                theta = theta - 0.2 * velocity
            w_k = w_k - eta * lam * (w_k - theta)
        w = P @ w_k
    report = play(task, PFedMe(lam=lam, eta=eta, inner_steps=2, epochs=3), rounds=2)
    torch.testing.assert_close(deployed(report), theta, **EXACT)
    torch.testing.assert_close(shared(report), w, **EXACT)


@pytest.mark.limit("pfedme")
def test_pfedme_descends_on_the_sum_as_lam_grows_and_its_personal_models_become_the_shared_one() -> None:
    # eta lam (w - theta) -> eta grad f_k(w): one step of FedAvg. Steps on theta must shrink as 1 / lam.
    lam = 1e6
    report = play(clients(lr=1 / lam), PFedMe(lam=lam, inner_steps=4, eta=ETA), rounds=60)
    torch.testing.assert_close(shared(report), balance(H, C, P), rtol=0, atol=1e-5)
    torch.testing.assert_close(deployed(report), shared(report).expand(CLIENTS, SIZE), rtol=0, atol=1e-5)


@pytest.mark.limit("pfedme")
def test_pfedme_clients_reach_their_own_optima_as_lam_vanishes() -> None:
    report = play(clients(), PFedMe(lam=1e-9, inner_steps=60))
    torch.testing.assert_close(deployed(report), C, rtol=0, atol=1e-8)


@pytest.mark.limit("pfedme", "pfedme-survey")
def test_the_surveys_form_is_the_published_one_with_eta_lam_and_beta_one() -> None:
    lam, steps = 0.7, 4
    survey, published = (
        play(clients(), one, rounds=5)
        for one in (
            PFedMeSurvey(lam=lam, follow=1.0, weighting="samples", epochs=steps),
            PFedMe(lam=lam, inner_steps=steps, eta=1 / lam, beta=1.0),
        )
    )
    torch.testing.assert_close(published.server["w"], survey.server["w"], **EXACT)
    torch.testing.assert_close(deployed(published), deployed(survey), **EXACT)
    torch.testing.assert_close(survey.server["w"], P @ deployed(survey), **EXACT)  # the mean of theta


@pytest.mark.limit("pfedme")
@pytest.mark.parametrize(
    "frozen", [PFedMe(beta=0.0, lam=0.5), PFedMe(inner_steps=0), PFedMe(eta=0.0, lam=0.5)], ids=repr
)
def test_without_a_step_the_shared_model_stays(frozen: PFedMe) -> None:
    assert torch.equal(play(clients(), frozen, rounds=3).server["w"], torch.zeros(SIZE, dtype=torch.float64))


@pytest.mark.limit("pfedme-survey")
def test_the_surveys_form_has_the_server_of_fedprox() -> None:
    mine, theirs = (
        play(clients(), one, rounds=4).server["w"]
        for one in (PFedMeSurvey(lam=0.3, follow=1.0, weighting="samples", epochs=3), FedProx(mu=0.3, epochs=3))
    )
    assert torch.equal(mine, theirs)


# -- SCAFFOLD ------------------------------------------------------------------------------------------------------

OPTIMUM = balance(H, C, ALIKE)  # of the plain mean of the f_k


@pytest.mark.limit("scaffold")
def test_the_first_round_of_scaffold_is_fedavg() -> None:
    mine, theirs = (play(clients(), one) for one in (Scaffold(epochs=3), FedAvg(epochs=3, weighting="uniform")))
    assert torch.equal(shared(mine), shared(theirs))


@pytest.mark.closed_form("scaffold")
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_scaffold_converges_to_the_optimum_of_the_mean_for_any_number_of_steps(epochs: int) -> None:
    report = play(quadratics(C, H, samples=SAMPLES, lr=0.2), Scaffold(epochs=epochs), rounds=110)
    torch.testing.assert_close(shared(report), OPTIMUM, **EXACT)
    torch.testing.assert_close(kept(report)["w"], gradients(OPTIMUM), **EXACT)


@pytest.mark.closed_form("fedavg")
def test_fedavg_with_several_steps_does_not_reach_the_optimum_of_the_mean() -> None:
    report = play(quadratics(C, H, samples=SAMPLES, lr=0.2), FedAvg(epochs=3, weighting="uniform"), rounds=150)
    assert (shared(report) - OPTIMUM).norm() > 1e-3


def lost(round: int, asked: Tensor) -> Tensor:
    """One client is missing in every round, each in its turn; all of them were there in round 0."""
    return (asked == round % CLIENTS) & (round > 0)


@pytest.mark.closed_form("scaffold")
@pytest.mark.parametrize("faults", [None, lost])
def test_the_servers_variate_is_the_mean_of_the_clients(faults) -> None:  # type: ignore[no-untyped-def]
    # Also over clients that were absent. Catches: a mean over the cohort where the sum over N is meant.
    for rounds in (1, 2, 5):
        report = play(clients(), Scaffold(epochs=2), rounds=rounds, faults=faults)
        torch.testing.assert_close(report.server.c["w"], kept(report)["w"].mean(0), **EXACT)


# -- FedDyn --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("feddyn")
@pytest.mark.parametrize(("alpha", "epochs"), [(1.0, 1), (1.0, 3), (2.0, 2)])
def test_feddyn_converges_to_the_optimum_of_the_mean(alpha: float, epochs: int) -> None:
    report = play(quadratics(C, H, samples=SAMPLES, lr=0.2), FedDyn(alpha=alpha, epochs=epochs), rounds=170)
    torch.testing.assert_close(shared(report), OPTIMUM, **EXACT)
    torch.testing.assert_close(kept(report)["w"], gradients(OPTIMUM), **EXACT)


@pytest.mark.closed_form("feddyn")
def test_feddyn_in_its_other_form() -> None:
    # h_k += theta_k - w, gradients + alpha (theta - w + h_k), w = mean theta + mean h, solved exactly.
    alpha, w, h = 1.0, torch.zeros(SIZE, dtype=torch.float64), torch.zeros(CLIENTS, SIZE, dtype=torch.float64)
    for _ in range(4):
        pulled = each(H, C) + alpha * (w - h)
        theta = torch.linalg.solve(H + alpha * EYE, pulled)
        h = h + theta - w
        w = theta.mean(0) + h.mean(0)
    report = play(clients(), FedDyn(alpha=alpha, epochs=30), rounds=4)
    torch.testing.assert_close(shared(report), w, **EXACT)
    torch.testing.assert_close(kept(report)["w"], -alpha * h, **EXACT)


@pytest.mark.closed_form("feddyn")
@pytest.mark.parametrize("faults", [None, lost])
def test_the_servers_state_is_the_mean_of_the_clients(faults) -> None:  # type: ignore[no-untyped-def]
    for rounds in (1, 2, 5):
        report = play(clients(), FedDyn(alpha=0.5, epochs=2), rounds=rounds, faults=faults)
        torch.testing.assert_close(report.server.h["w"], kept(report)["w"].mean(0), **EXACT)


# -- statistics of BatchNorm ---------------------------------------------------------------------------------------


def normed(make_task: Callable[..., Task]) -> Task:
    """Clients with a BatchNorm layer in their network."""
    layers = lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))  # noqa: E731
    return make_task(layers, sizes=(5, 8, 12), dtype=torch.float64)


@pytest.mark.closed_form("pfedme", "reptile", "scaffold")
@pytest.mark.parametrize(
    ("once", "thrice"),
    [(PFedMe(), PFedMe(beta=3.0)), (Reptile(), Reptile(beta=3.0)), (Scaffold(), Scaffold(server_lr=3.0))],
    ids=["pfedme", "reptile", "scaffold"],
)
def test_a_longer_step_of_the_server_is_of_what_is_trained(
    make_task: Callable[..., Task], once: Algorithm, thrice: Algorithm
) -> None:
    # From the same start clients do the same: statistics are their mean with any step. catches: statistics that are
    # scaled, too, with which 1 + 3 (0.1 - 1) = -1.7 is a variance.
    task = normed(make_task)
    start = task.network.initial
    near, far = (one.algorithm.shared(one.server) for one in (play(task, once), play(task, thrice)))
    for name, leaf in near.buffers.items():
        assert torch.equal(far[name], leaf)
    for name, leaf in near.trained.items():
        torch.testing.assert_close(far[name] - start[name], 3 * (leaf - start[name]), **EXACT)


# -- symmetries ----------------------------------------------------------------------------------------------------


@pytest.mark.limit("feddyn", "pfedme", "scaffold")
@pytest.mark.parametrize("algorithm", [PFedMe(lam=1.0, eta=0.5), Scaffold(epochs=2), FedDyn()], ids=repr)
def test_at_a_common_optimum_nothing_moves(algorithm: Algorithm) -> None:
    task = quadratics(C[:1].expand(CLIENTS, SIZE), H, samples=SAMPLES, start=C[0], lr=ETA)
    models = deployed(play(task, algorithm, rounds=3))
    torch.testing.assert_close(models, C[:1].expand(CLIENTS, SIZE), **EXACT)
