"""Closed forms and identities of FEDORA on f_k(v) = h/2 ||v - c_k||^2, and its smoke test on rotated blobs."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll import Cohort, Report, Stack, Task, Training, federate
from atoll.algorithms.fedora import Fedora
from atoll.algorithms.fedprox import FedProx
from atoll.algorithms.local import Local
from atoll.kernel.randomness import default_generator, generator
from atoll.metrics.significance import standard_error
from atoll.runtime.engines.local import LocalEngine
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.toolbox.server.similarity import propagation

CLIENTS, SIZE, CURVATURE, LAM, ETA = 5, 3, 1.5, 0.7, 0.4
EXACT = {"rtol": 0.0, "atol": 1e-12}

with default_generator(11):
    C = torch.randn(CLIENTS, SIZE, dtype=torch.float64)
H = CURVATURE * torch.eye(SIZE, dtype=torch.float64).expand(CLIENTS, SIZE, SIZE)


@dataclass(frozen=True, kw_only=True)
class Same(Fedora):
    """FEDORA with one lambda for all clients and rounds."""

    lam: float = LAM

    def strength(self, v: Stack, G: Stack, cohort: Cohort) -> Tensor:
        return torch.full((len(cohort),), self.lam, dtype=torch.float64)


def clients() -> Task:
    return quadratics(C, H, lr=ETA)


def models(report: Report) -> Tensor:
    return torch.stack([model["w"] for model in personal_models(report)])


def equilibrium(P: Tensor) -> Tensor:
    """V = h ((h + lam) I - lam P)^-1 C: nobody gains by moving alone."""
    eye = torch.eye(CLIENTS, dtype=torch.float64)
    return CURVATURE * torch.linalg.solve((CURVATURE + LAM) * eye - LAM * P, C)


# -- convergence ---------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedora")
@pytest.mark.parametrize("epochs", [1, 3])
def test_it_converges_to_the_equilibrium(epochs: int) -> None:
    # catches: sums instead of means of neighbours, P applied transposed, a pull of twice or half the strength.
    report = play(clients(), Same(epochs=epochs), rounds=40)
    P = report.server.P
    assert not torch.allclose(P, P.T)  # else the transposed one would do
    torch.testing.assert_close(models(report), equilibrium(P), **EXACT)


@pytest.mark.closed_form("fedora")
def test_it_contracts_by_lam_over_h_plus_lam() -> None:
    # With local problems solved, V <- (h C + lam P V) / (h + lam), a contraction in the largest norm.
    runs = [play(clients(), Same(epochs=20), rounds=rounds) for rounds in range(1, 5)]
    apart = [(models(one) - equilibrium(one.server.P)).abs().max() for one in runs]
    factor = LAM / (CURVATURE + LAM)
    assert all(after <= factor * before + 1e-12 for before, after in pairwise(apart))
    assert apart[-1] > 1e-3 * apart[0]  # it is not there at once, either
    # And exactly, for the same P: V - V* <- factor P (V - V*).
    first, second = (models(one) - equilibrium(one.server.P) for one in runs[:2])
    torch.testing.assert_close(second, factor * runs[0].server.P @ first, rtol=0.0, atol=1e-9)


# -- identities ----------------------------------------------------------------------------------------------------


@pytest.mark.limit("fedora")
def test_alone_with_one_lambda_the_first_round_is_fedprox() -> None:
    # Its clients' models: those of federations of one.
    each = [play(quadratics(C[k : k + 1], H[k : k + 1], lr=ETA), FedProx(mu=LAM, epochs=4)) for k in range(CLIENTS)]
    mine = models(play(clients(), Same(alpha=0.0, epochs=4)))
    torch.testing.assert_close(mine, torch.stack([one.server["w"] for one in each]), **EXACT)


@pytest.mark.closed_form("fedora")
def test_links_to_all_alike_give_the_mean() -> None:
    # alpha -> 1 with equal links to all others: every walk is everywhere in the end.
    report = play(clients(), Fedora(topk=CLIENTS, temperature=0.0, alpha=1 - 1e-9), rounds=2)
    G = report.algorithm.unicast(report.server, np.arange(CLIENTS))
    torch.testing.assert_close(G["w"], models(report).mean(0).expand(CLIENTS, SIZE), rtol=0.0, atol=1e-7)


@pytest.mark.limit("fedora")
@pytest.mark.parametrize("algorithm", [Same(lam=0.0), Fedora(lam_max=0.0), Fedora(alpha=0.0)], ids=["0", "max", "P=I"])
def test_without_pull_or_neighbours_it_is_local(make_task: Callable[..., Task], algorithm: Fedora) -> None:
    # catches: the released gate, which opens at equality, so that P = I holds every client back.
    task = make_task(dtype=torch.float64, sizes=(15, 9, 20, 12), shares=(0.6, 0.4, 0.0))
    mine, theirs = (personal_models(play(task, one, rounds=4)) for one in (algorithm, Local()))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


@pytest.mark.limit("fedora")
def test_the_official_gate_holds_back_even_without_neighbours(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64, sizes=(15, 9, 20, 12), shares=(0.6, 0.4, 0.0))
    mine, theirs = (personal_models(play(task, one)) for one in (Fedora(alpha=0.0, gate="official"), Local()))
    initial = task.network.initial
    assert all((a - initial).norm() < 0.99 * (b - initial).norm() for a, b in zip(mine, theirs, strict=True))


@pytest.mark.closed_form("fedora")
def test_a_new_node_leaves_old_rows_and_has_the_row_of_its_links() -> None:
    # [1 - a] e_new + a r P: without a model of its own, what is left to renormalise is r P.
    alpha, r = 0.8, torch.tensor([0.0, 0.3, 0.7], dtype=torch.float64)
    S = torch.tensor([[0.0, 1.0, 0.0], [0.4, 0.0, 0.6], [0.9, 0.1, 0.0]], dtype=torch.float64)
    grown = torch.zeros(4, 4, dtype=torch.float64)
    grown[:3, :3], grown[3, :3] = S, r
    P, larger = propagation(S, alpha), propagation(grown, alpha)
    torch.testing.assert_close(larger[:3, :3], P)
    assert not larger[:3, 3].any()
    torch.testing.assert_close(larger[3], torch.cat([alpha * r @ P, torch.tensor([1 - alpha]).double()]))
    rest = larger[3, :3] / larger[3, :3].sum()
    torch.testing.assert_close(rest, r @ P)


# -- does it help? -------------------------------------------------------------------------------------------------


def rotated_blobs() -> Task:
    """12 clients, 15 degrees apart, see the same three blobs in 2 dimensions, from 9 samples each."""
    draw, data = generator(4, "rotated blobs"), {}
    means = np.array([[4.0, -1.5], [4.0, 1.5], [6.5, 0.0]])
    for client in range(12):
        angle = np.deg2rad(15 * client)
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        y = np.arange(250) % 3
        data[str(client)] = ((means[y] + draw.normal(size=(250, 2))) @ turn, y)
    with default_generator(0):
        model = nn.Linear(2, 3).double()
    return Task.of_clients(data, model, classes=3, training=Training(lr=0.1, batch_size=9), shares=(0.036, 0.16, 0.804))


@pytest.mark.purpose("fedora")
def test_on_rotated_blobs_clients_gain_and_hardly_any_is_harmed() -> None:
    task, engine = rotated_blobs(), LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy="whole")
    mine, local = (
        federate(task, one, rounds=60, eval_every=60, engine=engine).history[-1]["evaluation"]["personal"]["test"]
        for one in (Fedora(), Local())
    )
    gains = np.subtract(mine["clients"], local["clients"])
    errors = standard_error(mine["variances"], local["variances"], mine["samples"])
    assert gains.mean() > 0
    assert (gains < -errors).sum() <= 1
