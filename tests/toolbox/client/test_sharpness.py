"""Sharpness-aware gradients: where they are taken, what they leave alone, and what they cost."""

from functools import partial

import pytest
import torch
from torch import nn

from atoll.kernel.batch import Batch
from atoll.kernel.params import Params, Stack
from atoll.testing.conformance import quadratics
from atoll.toolbox.client import proximal, sgd
from atoll.toolbox.client.sharpness import ascent, sharp_gradient

EXACT = {"rtol": 0, "atol": 1e-12}
RHO = 0.3


def gradients(cohort, w, function) -> Stack:
    """`function(w, batch)` of every client's only batch."""

    def step(carry: Params, batch: Batch, given: Params) -> Params:
        return function(given, batch)[0]

    return cohort.scan(step, w.zeros(), given=w, batch_size=100, shuffle=False)


@pytest.fixture
def task(make_task):
    return make_task(dtype=torch.float64, batch_size=100)


def test_the_gradient_is_that_at_the_end_of_the_climb(task, make_cohort) -> None:
    cohort, w = make_cohort(task), task.network.initial
    g = gradients(cohort, w, lambda w, batch: batch.gradient(w))
    sharp = gradients(cohort, w, partial(sharp_gradient, radius=RHO))
    for k in range(task.clients):
        one = g.client(k)
        there = gradients(cohort, w + one * (RHO / one.norm()), lambda w, batch: batch.gradient(w)).client(k)
        for name in w:
            torch.testing.assert_close(sharp.client(k)[name], there[name], rtol=0, atol=1e-6)  # 1e-7 in the norm
    assert (sharp - g).norm().min() > 1e-4


def test_a_part_climbs_along_its_own_gradient_and_all_is_differentiated(task, make_cohort) -> None:
    cohort, w = make_cohort(task), task.network.initial
    head = frozenset(w.part("head"))
    g = gradients(cohort, w, lambda w, batch: batch.gradient(w))
    sharp = gradients(cohort, w, partial(sharp_gradient, radius=RHO, of=head))
    for k in range(task.clients):
        one = g.client(k).only(head)
        there = gradients(cohort, w.moved(one, RHO / one.norm()), lambda w, batch: batch.gradient(w)).client(k)
        for name in w:
            torch.testing.assert_close(sharp.client(k)[name], there[name], rtol=0, atol=1e-6)
    assert (sharp - g).without(head).norm().min() > 1e-4  # the body feels where the head was moved to


def test_the_climb_is_as_long_as_the_radius_over_all_leaves_together(task) -> None:
    w = task.network.initial
    eps = ascent(w, w.map(torch.ones_like), RHO)
    assert eps.norm() == pytest.approx(RHO)
    assert len({float(leaf.flatten()[0]) for leaf in eps.values()}) == 1  # not normalised leaf by leaf


def test_adaptive_scales_twice_by_the_weights() -> None:
    w, g = (
        Params.of(a=torch.tensor([2.0, -1.0]), b=torch.tensor([0.0])),
        Params.of(a=torch.tensor([1.0, 2.0]), b=torch.tensor([5.0])),
    )
    # |w| g = (2, 2, 0), of length sqrt(8); w^2 g = (4, 2, 0).
    eps = ascent(w, g, RHO, adaptive=True)
    torch.testing.assert_close(eps["a"], RHO * torch.tensor([4.0, 2.0]) / 8**0.5)
    assert eps["b"].item() == 0.0


def test_every_leaf_may_have_its_own_radius() -> None:
    g = Params.of(a=torch.tensor([3.0]), b=torch.tensor([4.0]))
    eps = ascent(g, g, Params.of(a=1.0, b=0.5))
    assert [eps["a"].item(), eps["b"].item()] == pytest.approx([0.6, 0.4])


def test_a_gradient_of_zero_climbs_nowhere() -> None:
    zero = Params.of(a=torch.zeros(3))
    assert ascent(zero, zero, RHO)["a"].tolist() == [0.0, 0.0, 0.0]


def test_radius_zero_is_plain_descent_at_its_price(make_task, make_cohort) -> None:
    task = make_task(dtype=torch.float64)
    cohorts = [make_cohort(task) for _ in range(3)]
    plain, none, sharp = (
        sgd(cohort, task.network.initial, epochs=2, radius=radius)
        for cohort, radius in zip(cohorts, (0.0, 0, RHO), strict=True)
    )
    usual = sgd(make_cohort(task), task.network.initial, epochs=2)
    assert all(torch.equal(plain[name], usual[name]) and torch.equal(none[name], usual[name]) for name in usual)
    assert (sharp - usual).norm().min() > 1e-4
    taken = [cohort._host.tally.gradients for cohort in cohorts]
    assert taken == [taken[0], taken[0], 2 * taken[0]]  # both gradients of a step are counted


def test_statistics_and_loss_are_those_of_the_first_pass(make_task, make_cohort) -> None:
    task = make_task(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), dtype=torch.float64, batch_size=100
    )
    plain, sharp = make_cohort(task), make_cohort(task)
    usual = sgd(plain, task.network.initial, epochs=1)
    mine = sgd(sharp, task.network.initial, epochs=1, radius=RHO)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(mine[name], usual[name])
    assert (mine["0.weight"] - usual["0.weight"]).abs().max() > 1e-4
    assert torch.equal(sharp.notes["loss/main"], plain.notes["loss/main"])


def test_a_penalty_is_neither_climbed_nor_taken_uphill(make_cohort) -> None:
    # f = (w - 1)^2 / 2 and lam/2 (w - 5)^2 at w = 0: the climb follows f alone, to -0.3. A step is then
    # 0.5 ((0.3 + 1) + 2 * 5); the sum's gradient, too, points down from -0.3, but has lam 5.3 in it.
    task = quadratics(torch.tensor([[1.0]], dtype=torch.float64), lr=0.5)
    w = task.network.initial
    center = w.map(lambda leaf: torch.full_like(leaf, 5.0))
    end = sgd(make_cohort(task), w, epochs=1, penalty=proximal(2.0, center=center), radius=RHO)
    assert end["w"].item() == pytest.approx(0.5 * (1.3 + 10.0), abs=1e-6)


def test_leaves_that_are_not_trained_are_not_perturbed(make_cohort, make_task) -> None:
    task = make_task(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), dtype=torch.float64, batch_size=100)
    cohort, w = make_cohort(task), task.network.initial
    head = ["1.weight", "1.bias"]
    g = gradients(cohort, w, lambda w, batch: batch.gradient(w))
    mine = sgd(cohort, w, epochs=1, only=head, radius=RHO)
    for k in range(task.clients):
        eps = ascent(w, g.client(k).only(head), RHO)
        there = gradients(cohort, w + eps, lambda w, batch: batch.gradient(w)).client(k)
        torch.testing.assert_close(mine.client(k)["1.weight"], w["1.weight"] - 0.1 * there["1.weight"], **EXACT)
        assert torch.equal(mine.client(k)["0.weight"], w["0.weight"])
