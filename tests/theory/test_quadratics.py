"""Closed forms on quadratics, f_k(w) = 1/2 (w - c_k)^T H_k (w - c_k), with full-batch steps of size eta.

A step contracts a client towards its optimum, w <- c_k + (I - eta H_k)(w - c_k); everything below follows from that.
"""

import pytest
import torch
from theory.tools import (
    EYE,
    SAMPLES,
    SIZE,
    P,
    balance,
    bodies_and_heads,
    body_and_head,
    deployed,
    each,
    optima_and_curvatures,
    personal,
)
from torch import Tensor

from atoll import Algorithm, Task
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedavg_ft import FedAvgFT
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.fedprox import FedProx
from atoll.algorithms.local import Local
from atoll.testing.conformance import play, quadratics

ETA = 0.4
EXACT = {"rtol": 0.0, "atol": 1e-12}
MANY = 60  # steps after which a client is at its optimum: (1 - 0.4)^60 < 1e-13

C, H = optima_and_curvatures(1)


def clients(start: Tensor | None = None, samples: list[int] = SAMPLES) -> Task:
    return quadratics(C, H, samples=samples, start=start, lr=ETA)


def shared(task: Task, algorithm: Algorithm, rounds: int = 1) -> Tensor:
    return play(task, algorithm, rounds).server["w"]


def after(steps: int) -> Tensor:
    """A_k = (I - eta H_k)^steps."""
    return torch.linalg.matrix_power(EYE - ETA * H, steps)


OPTIMUM = balance(H, C, P)  # of sum_k p_k f_k


# -- FedAvg --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedavg")
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_fedavg_round_is_the_mean_of_contractions(epochs: int) -> None:
    w = torch.ones(SIZE, dtype=torch.float64)
    one = torch.einsum("k,ki->i", P, C + each(after(epochs), w - C))
    torch.testing.assert_close(shared(clients(start=w), FedAvg(epochs=epochs)), one, **EXACT)


@pytest.mark.closed_form("fedavg")
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_fedavg_converges_to_its_fixed_point(epochs: int) -> None:
    fixed = balance(EYE - after(epochs), C, P)
    torch.testing.assert_close(shared(clients(), FedAvg(epochs=epochs), rounds=70), fixed, **EXACT)


@pytest.mark.closed_form("fedavg")
def test_fedavg_with_one_step_reaches_the_global_optimum() -> None:
    torch.testing.assert_close(shared(clients(), FedAvg(epochs=1), rounds=70), OPTIMUM, **EXACT)


@pytest.mark.closed_form("fedavg")
def test_fedavg_with_many_steps_drifts_to_the_mean_of_the_optima() -> None:
    w = shared(clients(), FedAvg(epochs=MANY))
    torch.testing.assert_close(w, P @ C, **EXACT)
    assert (w - OPTIMUM).norm() > 0.01  # which is another point


# -- fine-tuning ---------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedavg-ft")
@pytest.mark.parametrize("epochs", [0, 1, 3, MANY])
def test_fine_tuning_contracts_towards_the_own_optimum(epochs: int) -> None:
    # At the optimum FedAvg with one step stays where it is, so that every client tunes from there.
    v = C + each(after(epochs), OPTIMUM - C)
    found = personal(clients(start=OPTIMUM), FedAvgFT(tune_epochs=epochs))
    torch.testing.assert_close(found, v, **EXACT)


# -- FedProx -------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedprox")
@pytest.mark.parametrize("mu", [0.01, 0.3])
def test_fedprox_solved_exactly_converges_to_its_fixed_point(mu: float) -> None:
    pull = torch.linalg.solve(H + mu * EYE, H)  # B_k = (H_k + mu I)^-1 H_k
    w = shared(clients(), FedProx(mu=mu, epochs=MANY), rounds=22)
    torch.testing.assert_close(w, balance(pull, C, P), **EXACT)


@pytest.mark.limit("fedprox")
def test_fedprox_lies_between_the_mean_of_the_optima_and_the_global_optimum() -> None:
    # mu -> 0 gives the drift of FedAvg with many steps, mu -> inf none.
    weak, strong = (balance(torch.linalg.solve(H + mu * EYE, H), C, P) for mu in (1e-9, 1e9))
    torch.testing.assert_close(weak, P @ C, rtol=0, atol=1e-8)
    torch.testing.assert_close(strong, OPTIMUM, rtol=0, atol=1e-8)
    near = shared(clients(start=weak), FedProx(mu=1e-9, epochs=MANY))
    torch.testing.assert_close(near, weak, rtol=0, atol=1e-10)


@pytest.mark.closed_form("fedprox")
def test_fedprox_takes_gradient_steps_on_the_penalised_loss() -> None:
    # Two steps by hand: the first feels no penalty, the second mu (v - w).
    mu, w = 0.5, torch.ones(SIZE, dtype=torch.float64)
    v = w - ETA * each(H, w - C)
    v = v - ETA * (each(H, v - C) + mu * (v - w))
    torch.testing.assert_close(shared(clients(start=w), FedProx(mu=mu, epochs=2)), P @ v, **EXACT)


# -- Ditto ---------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("ditto")
@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0])
def test_ditto_solved_exactly_is_the_papers_minimiser(lam: float) -> None:
    v = torch.linalg.solve(H + lam * EYE, each(H, C) + lam * OPTIMUM)
    found = personal(clients(start=OPTIMUM), Ditto(lam=lam, personal_epochs=MANY))
    torch.testing.assert_close(found, v, **EXACT)


@pytest.mark.closed_form("ditto")
def test_ditto_converges_together_with_its_shared_model() -> None:
    lam = 0.5
    report = play(clients(), Ditto(lam=lam), rounds=80)
    v = torch.linalg.solve(H + lam * EYE, each(H, C) + lam * OPTIMUM)
    torch.testing.assert_close(report.server["w"], OPTIMUM, **EXACT)
    torch.testing.assert_close(deployed(report), v, **EXACT)


@pytest.mark.limit("ditto")
@pytest.mark.parametrize("lam", [0.0, 0.3, 2.0])
def test_the_shared_model_of_ditto_is_that_of_fedavg(lam: float) -> None:
    assert torch.equal(
        shared(clients(), Ditto(lam=lam, epochs=2), rounds=5), shared(clients(), FedAvg(epochs=2), rounds=5)
    )


# -- Local ---------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("local")
def test_local_contracts_towards_the_own_optimum_over_all_rounds() -> None:
    # Three rounds of two epochs are six steps from 0.
    v = C - each(after(6), C)
    torch.testing.assert_close(personal(clients(), Local(epochs=2), rounds=3), v, **EXACT)


# -- FedPer --------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("fedper")
def test_fedper_minimises_over_the_shared_body_and_all_heads() -> None:
    # min over u and h_k: every head closes its gap, h_k = b_k + u, which leaves u = sum_k p_k a_k.
    a, b = C[:, 0], C[:, 1]
    report = play(body_and_head(a, b, lr=0.5), FedPer(), rounds=160)
    u = P @ a
    torch.testing.assert_close(report.server["body.value"], u[None], **EXACT)
    assert list(report.server) == ["body.value"]  # no head ever reached the server
    torch.testing.assert_close(bodies_and_heads(report)[1], b + u, **EXACT)


# -- weights and symmetries ----------------------------------------------------------------------------------------

SHARED = [FedAvg(epochs=3), FedProx(epochs=3, mu=0.2), Ditto(epochs=3)]


@pytest.mark.closed_form("ditto", "fedavg", "fedprox")
@pytest.mark.parametrize("algorithm", SHARED, ids=lambda one: type(one).__name__)
def test_a_client_that_comes_twice_counts_double(algorithm: Algorithm) -> None:
    twice = quadratics(torch.cat([C, C[:1]]), torch.cat([H, H[:1]]), lr=ETA)
    double = clients(samples=[2, 1, 1, 1])
    torch.testing.assert_close(shared(twice, algorithm, 3), shared(double, algorithm, 3), **EXACT)


@pytest.mark.limit("ditto", "fedavg", "fedper", "fedprox")
@pytest.mark.parametrize("method", [FedAvg, FedProx, Ditto, FedPer])
def test_weights_are_uniform_when_all_clients_have_equally_many_samples(method: type[Algorithm]) -> None:
    task = clients(samples=[2, 2, 2, 2])
    by_samples, uniform = (shared(task, method(weighting=kind), 3) for kind in ("samples", "uniform"))
    torch.testing.assert_close(by_samples, uniform, **EXACT)


@pytest.mark.closed_form("fedavg")
def test_weights_matter_when_clients_have_unequally_many_samples() -> None:
    by_samples, uniform = (shared(clients(), FedAvg(weighting=kind), 3) for kind in ("samples", "uniform"))
    assert (by_samples - uniform).norm() > 0.01


@pytest.mark.limit("ditto", "fedavg", "fedavg-ft", "fedper", "fedprox")
@pytest.mark.parametrize(
    "algorithm", [*SHARED, FedAvgFT(epochs=3), FedPer(epochs=3)], ids=lambda one: type(one).__name__
)
def test_identical_clients_do_what_one_of_them_does_alone(algorithm: Algorithm) -> None:
    # The mean of identical models is that model.
    one, many = (quadratics(C[:1].expand(n, SIZE), H[:1].expand(n, SIZE, SIZE), lr=ETA) for n in (1, 4))
    torch.testing.assert_close(shared(many, algorithm, 3), shared(one, algorithm, 3), **EXACT)
    assert len(personal(many, algorithm, 3).unique(dim=0)) == 1


@pytest.mark.limit("fedavg", "local")
def test_fedavg_among_identical_clients_is_local() -> None:
    same = quadratics(C[:1].expand(4, SIZE), H[:1].expand(4, SIZE, SIZE), lr=ETA)
    torch.testing.assert_close(personal(same, FedAvg(epochs=3), 3), personal(same, Local(epochs=3), 3), **EXACT)


@pytest.mark.limit("ditto", "fedavg", "fedprox")
def test_at_the_common_optimum_nothing_moves() -> None:
    task = quadratics(C[:1].expand(4, SIZE), H, samples=SAMPLES, start=C[0], lr=ETA)
    for algorithm in (FedAvg(epochs=3), FedProx(epochs=3), Ditto(epochs=3)):
        assert torch.equal(shared(task, algorithm, 2), C[0])
