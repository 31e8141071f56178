"""Closed forms of meta-learning on quadratics, f_k(w) = 1/2 (w - c_k)^T H_k (w - c_k), with full-batch steps.

A client's own step leads to c_k + A_k (w - c_k) with A_k = I - alpha H_k. What it then loses is a quadratic with the
curvature A_k H_k A_k; first-order methods follow H_k A_k instead.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from theory.tools import ALIKE, EYE, SAMPLES, SIZE, balance, deployed, each, losses_as_outputs, optima_and_curvatures
from torch import Tensor

from atoll import Algorithm, Batch, Cohort, Params, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.maml import MAML
from atoll.algorithms.perfedavg import PerFedAvg
from atoll.algorithms.reptile import Reptile
from atoll.kernel.randomness import generator
from atoll.testing.conformance import Quadratic, play, quadratics

Order = Literal["fo", "hf", "full"]
BETA, ALPHA = 0.4, 0.2
EXACT = {"rtol": 0.0, "atol": 1e-11}

C, H = optima_and_curvatures(3)
START = torch.ones(SIZE, dtype=torch.float64)
A = EYE - ALPHA * H


def clients(start: Tensor | None = None) -> Task:
    return quadratics(C, H, samples=SAMPLES, start=start, lr=BETA)


def shared(algorithm: Algorithm, rounds: int = 1, start: Tensor | None = START) -> Tensor:
    return play(clients(start), algorithm, rounds).server["w"]


def pulls(order: Order, steps: int = 1) -> Tensor:
    """M_k of the meta-gradient M_k (w - c_k)."""
    after = torch.linalg.matrix_power(A, steps)
    return H @ after if order == "fo" else after @ H @ after


def at_rest(matrices: Tensor) -> Tensor:
    """Where the clients' pulls are in balance; all clients count alike."""
    return balance(matrices, C, ALIKE)


# -- Per-FedAvg ----------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("perfedavg")
@pytest.mark.parametrize("order", ["fo", "hf", "full"])
def test_perfedavg_round_follows_the_meta_gradient(order: Order) -> None:
    w_k = START - BETA * each(pulls(order), START - C)
    torch.testing.assert_close(shared(PerFedAvg(alpha=ALPHA, order=order)), w_k.mean(0), **EXACT)


@pytest.mark.closed_form("perfedavg")
@pytest.mark.parametrize("order", ["fo", "hf", "full"])
def test_perfedavg_converges_to_the_minimiser_of_its_order(order: Order) -> None:
    w = shared(PerFedAvg(alpha=ALPHA, order=order), rounds=110)
    torch.testing.assert_close(w, at_rest(pulls(order)), **EXACT)


@pytest.mark.closed_form("perfedavg")
def test_the_minimisers_of_both_orders_and_of_fedavg_are_different_points() -> None:
    points = [at_rest(pulls("fo")), at_rest(pulls("full")), at_rest(H)]
    assert torch.pdist(torch.stack(points)).min() > 0.005


@pytest.mark.closed_form("perfedavg")
@pytest.mark.parametrize("delta", [1e-3, 0.7])
def test_hessian_free_is_second_order_on_quadratics_for_any_delta(delta: float) -> None:
    exact = shared(PerFedAvg(alpha=ALPHA, order="full", epochs=3), rounds=2)
    free = shared(PerFedAvg(alpha=ALPHA, order="hf", delta=delta, epochs=3), rounds=2)
    torch.testing.assert_close(free, exact, rtol=0, atol=1e-10)


@pytest.mark.closed_form("perfedavg")
def test_hessian_free_takes_each_factor_from_a_batch_of_its_own(make_cohort: Callable[..., Cohort]) -> None:
    # One sample per batch, each a quadratic h / 2 (w - c)^2 of its own: w <- w - beta (1 - alpha h'') h' (u - c') with
    # u = w - alpha h (w - c). catches: curvature on the batch of the step, or on that of the loss after it.
    draw = generator(0, "samples")
    h, c = (torch.from_numpy(draw.uniform(0.5, 2.0, size=(6, 1))), torch.from_numpy(draw.normal(size=(6, 1))))
    data = {"one": (torch.cat([c, h], 1), torch.zeros(6, dtype=torch.float64))}
    task = losses_as_outputs(data, Quadratic(START[:1]), lr=BETA)
    task = replace(task, training=replace(task.training, batch_size=1))

    def step(w: Params, batches: tuple[Batch, ...], given: None) -> Params:
        (c_main, h_main), (c_step, h_step), (_, h_curve) = (batch.x[0].unbind() for batch in batches)
        u = w["w"] - ALPHA * h_step * (w["w"] - c_step)
        return Params.of(w=w["w"] - BETA * (1 - ALPHA * h_curve) * h_main * (u - c_main))

    start = Params.of(w=START[0])
    expected = make_cohort(task).scan(step, start, epochs=2, stream=("main", "step", "curvature"))
    found = play(task, PerFedAvg(alpha=ALPHA, order="hf", epochs=2)).server["w"]
    torch.testing.assert_close(found, expected["w"], **EXACT)


@pytest.mark.limit("perfedavg")
def test_perfedavg_without_a_step_of_its_own_is_fedavg_with_step_beta() -> None:
    mine, theirs = shared(PerFedAvg(alpha=0.0, epochs=3), 4), shared(FedAvg(epochs=3, weighting="uniform"), 4)
    assert torch.equal(mine, theirs)


@pytest.mark.closed_form("perfedavg")
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_clients_deploy_what_their_own_steps_lead_to(steps: int) -> None:
    # At the fixed point w stays, so that all adapt from there.
    w = at_rest(pulls("fo"))
    report = play(clients(w), PerFedAvg(alpha=ALPHA, adapt_steps=steps))
    v = C + each(torch.linalg.matrix_power(A, steps), w - C)
    torch.testing.assert_close(deployed(report), v, **EXACT)


@pytest.mark.purpose("perfedavg")
def test_the_minimiser_serves_clients_better_after_their_step_than_that_of_fedavg() -> None:
    def loss_after_a_step(w: Tensor) -> Tensor:
        apart = each(A, w - C)
        return torch.einsum("ki,kij,kj->", apart, H, apart)

    assert loss_after_a_step(at_rest(pulls("full"))) < loss_after_a_step(at_rest(H))


# -- MAML ----------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("maml")
@pytest.mark.parametrize("order", ["fo", "full"])
@pytest.mark.parametrize("steps", [1, 2])
def test_maml_round_is_a_step_along_the_mean_meta_gradient(order: Literal["fo", "full"], steps: int) -> None:
    g = each(pulls(order, steps), START - C).mean(0)
    algorithm = MAML(alpha=ALPHA, beta=0.3, order=order, adapt_steps=steps)
    torch.testing.assert_close(shared(algorithm), START - 0.3 * g, **EXACT)


@pytest.mark.closed_form("maml")
@pytest.mark.parametrize("steps", [1, 2])
def test_maml_converges_to_the_minimiser_after_its_steps(steps: int) -> None:
    w = shared(MAML(alpha=ALPHA, beta=1.0, adapt_steps=steps), rounds=90)
    torch.testing.assert_close(w, at_rest(pulls("full", steps)), **EXACT)


@pytest.mark.limit("maml", "perfedavg")
@pytest.mark.parametrize("order", ["fo", "full"])
def test_uploading_the_gradient_is_perfedavg_with_one_step(order: Literal["fo", "full"]) -> None:
    gradient, model = MAML(alpha=ALPHA, beta=BETA, order=order), PerFedAvg(alpha=ALPHA, order=order)
    torch.testing.assert_close(shared(gradient, 5), shared(model, 5), **EXACT)


@pytest.mark.limit("maml")
def test_maml_without_a_step_of_its_own_is_gradient_descent() -> None:
    plain = shared(FedAvg(weighting="uniform"), 5)
    torch.testing.assert_close(shared(MAML(alpha=0.0, beta=BETA), 5), plain, **EXACT)


# -- Reptile -------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("reptile")
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_reptile_round_goes_a_part_of_the_way(beta: float) -> None:
    w_k = C + each(torch.linalg.matrix_power(EYE - BETA * H, 3), START - C)
    expected = START + beta * (w_k.mean(0) - START)
    torch.testing.assert_close(shared(Reptile(beta=beta, epochs=3)), expected, **EXACT)


@pytest.mark.limit("reptile")
def test_reptile_with_beta_one_is_fedavg_and_with_zero_stays() -> None:
    assert torch.equal(shared(Reptile(beta=1.0, epochs=3), 4), shared(FedAvg(epochs=3, weighting="uniform"), 4))
    assert torch.equal(shared(Reptile(beta=0.0), 4), START)


@pytest.mark.closed_form("reptile")
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_reptile_converges_to_the_same_point_for_every_beta(beta: float) -> None:
    fixed = at_rest(EYE - torch.linalg.matrix_power(EYE - BETA * H, 3))
    torch.testing.assert_close(shared(Reptile(beta=beta, epochs=3), rounds=60), fixed, **EXACT)
