"""Distances to a reference, against their definitions and on distributions whose distance is known."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.alignment import (
    Distance,
    by_class,
    coral,
    direction_loss,
    fading_share,
    mmd,
    moments,
    off_direction,
    sliced_distance,
    weigh_as_client,
)
from atoll.toolbox.objectives.etf import simplex_etf


def normal(*shape: int, purpose: str = "x") -> Tensor:
    return torch.from_numpy(generator(0, purpose).normal(size=shape))


DIRECTIONS = normal(16, 3, purpose="directions")


def by_moments(x: Tensor, r: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return coral(moments(x, a), moments(r, b))


def by_slices(x: Tensor, r: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    return sliced_distance(x, r, DIRECTIONS, a, b)


DISTANCES = pytest.mark.parametrize("distance", [mmd, by_moments, by_slices])


# -- each against its definition -------------------------------------------------------------------------------------
def test_mmd_is_the_mean_over_pairs_of_different_rows() -> None:
    x, r = normal(5, 3), 1 + normal(4, 3, purpose="r")
    both = [*x, *r]
    apart = sorted(float((u - v).square().sum()) for i, u in enumerate(both) for v in both[:i])
    median = apart[(len(apart) - 1) // 2]

    def kernel(u: Tensor, v: Tensor) -> float:
        return sum(math.exp(-float((u - v).square().sum()) / (median * factor)) for factor in (0.25, 0.5, 1, 2, 4))

    def within(rows: Tensor) -> float:
        n = len(rows)
        return sum(kernel(rows[i], rows[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))

    between = sum(kernel(u, v) for u in x for v in r) / 20
    assert mmd(x, r).item() == pytest.approx(within(x) + within(r) - 2 * between)


def test_mmd_is_nought_in_expectation_for_one_distribution_and_positive_for_two() -> None:
    rows = normal(200, 2, 8, 3)
    same = torch.stack([mmd(x, r) for x, r in rows])
    assert abs(same.mean()) < 3 * same.std() / 200**0.5
    assert (same < 0).any()
    shifted = torch.stack([mmd(x, r + 1) for x, r in rows])
    assert shifted.mean() > 3 * same.std()


def test_the_slope_of_mmd_is_that_of_finite_differences_where_the_width_stays() -> None:
    # Of 21 pairs, the 10 of rows of r and the one of two close rows of x are nearer than the others, so that the pair
    # in the middle is the widest one of r, which x does not move.
    x, r = 0.1 * normal(2, 3), 5 + normal(5, 3, purpose="r")
    assert (x[0] - x[1]).norm() < torch.pdist(r).max() < (x[:, None] - r).norm(dim=2).min()
    a = torch.tensor([1.0, 0.5]).double()
    assert torch.autograd.gradcheck(lambda x: mmd(x, r, a), (x.requires_grad_(),))


def test_no_slope_flows_through_the_width() -> None:
    x, r = normal(5, 3), 1 + normal(4, 3, purpose="r")
    torch.testing.assert_close(mmd(2 * x, 2 * r), mmd(x, r))
    stretch = torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(mmd(stretch * x, stretch * r), stretch)
    assert abs(slope.item()) > 1e-3


def test_moments_are_mean_and_covariance() -> None:
    x = normal(7, 3)
    mean, covariance = moments(x)
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(covariance, x.T.cov())


def test_coral_is_nought_for_equal_moments_and_measures_shift_and_spread() -> None:
    x = normal(7, 3)
    signs = torch.cat([x.mean(0) - (x - x.mean(0))])  # reflected: other rows with the same moments
    assert by_moments(x, signs).item() == pytest.approx(0, abs=1e-15)
    shift = torch.tensor([1.0, 2.0, 2.0]).double()
    assert by_moments(x + shift, x).item() == pytest.approx(9 / 3)
    mean, covariance = moments(x)
    eye = torch.eye(3, dtype=torch.float64)
    assert coral((mean, covariance + eye), (mean, covariance)).item() == pytest.approx(3 / (4 * 9))


def test_slices_of_equally_many_rows_are_sorted_and_compared() -> None:
    x, r = normal(6, 3), normal(6, 3, purpose="r")
    along = DIRECTIONS / DIRECTIONS.norm(dim=1, keepdim=True)
    mine, theirs = ((rows @ along.T).sort(0).values for rows in (x, r))
    torch.testing.assert_close(by_slices(x, r), (mine - theirs).square().mean())
    torch.testing.assert_close(by_slices(x, r), by_slices(r, x))
    assert by_slices(x, x[torch.tensor([3, 1, 5, 0, 2, 4])]).item() == pytest.approx(0, abs=1e-28)


def test_slices_of_other_numbers_of_rows_are_as_if_all_were_repeated() -> None:
    x, r = normal(4, 3), normal(6, 3, purpose="r")
    repeated = by_slices(x.repeat_interleave(3, 0), r.repeat_interleave(2, 0))
    torch.testing.assert_close(by_slices(x, r), repeated)
    times = torch.tensor([1, 2, 3, 1])
    torch.testing.assert_close(by_slices(x, r, times), by_slices(x.repeat_interleave(times, 0), r))


def test_slices_of_a_shift_are_its_square_over_the_dimensions() -> None:
    x, shift, size = normal(10, 8), normal(8, purpose="shift"), 8
    directions = normal(20000, size, purpose="many")
    assert sliced_distance(x + shift, x, directions).item() == pytest.approx(float(shift @ shift) / size, rel=0.03)


# -- all of them -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("distance", [by_moments, by_slices])
def test_their_slopes_are_those_of_finite_differences(distance: Callable[..., Tensor]) -> None:
    x, r = normal(5, 3).requires_grad_(), normal(4, 3, purpose="r").requires_grad_()
    a = torch.tensor([1.0, 1, 1, 0.5, 0]).double()
    assert torch.autograd.gradcheck(lambda x, r: distance(x, r, a), (x, r))


@DISTANCES
def test_order_and_padding_do_not_matter(distance: Distance) -> None:
    x, r = normal(6, 3), normal(5, 3, purpose="r")
    a, b = torch.tensor([1.0, 0, 1, 1, 0, 1]).double(), torch.tensor([0.0, 1, 1, 0, 1]).double()
    found = distance(x, r, a, b)
    torch.testing.assert_close(distance(x[a > 0].flip(0), r[b > 0], a[a > 0], b[b > 0]), found)
    x = (100 * x).where(a[:, None] == 0, x).requires_grad_()  # whatever padding is
    torch.testing.assert_close(distance(x, r, a, b), found)
    (slope,) = torch.autograd.grad(distance(x, r, a, b), x)
    assert not slope[a == 0].any()


@DISTANCES
def test_rows_all_alike_or_one_or_none_stay_finite(distance: Distance) -> None:
    for rows, a in (
        (torch.zeros(3, 3), torch.ones(3)),
        (normal(3, 3), torch.eye(3)[0]),
        (normal(3, 3), torch.zeros(3)),
    ):
        x = rows.double().requires_grad_()
        value = distance(x, torch.zeros(4, 3, dtype=torch.float64), a.double(), torch.ones(4).double())
        (slope,) = torch.autograd.grad(value, x)
        assert torch.isfinite(value)
        assert torch.isfinite(slope).all()


@DISTANCES
def test_clients_at_once_and_traced_are_clients_one_by_one(distance: Distance) -> None:
    x, r = normal(3, 6, 3), normal(5, 3, purpose="r")
    a = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0, 1, 1, 0, 0, 0]]).double()

    def one(x: Tensor, a: Tensor, r: Tensor) -> Tensor:
        own, theirs = torch.stack([a, 1 - a], 1), torch.ones(5, 2).double()
        return distance(x, r, a, weigh_as_client(torch.arange(5) % 2, a[:2])) + by_class(distance, x, r, own, theirs)

    many = vmap(one, in_dims=(0, 0, None))
    found = many(x, a, r)
    torch.testing.assert_close(found, torch.stack([one(*row, r) for row in zip(x, a, strict=True)]))
    torch.testing.assert_close(make_fx(many)(x, a, r)(x, a, r), found)
    slopes = vmap(grad(one), in_dims=(0, 0, None))(x, a, r)
    for row, weights, slope in zip(x, a, slopes, strict=True):
        own = row.clone().requires_grad_()
        torch.testing.assert_close(slope, *torch.autograd.grad(one(own, weights, r), own))


# -- label skew ------------------------------------------------------------------------------------------------------
@DISTANCES
def test_a_client_of_few_classes_is_not_far_from_the_reference_that_is_weighted_as_it_is(distance: Distance) -> None:
    # The encoder is an oracle: features of a class have the reference's distribution.
    centres, labels = 4 * normal(4, 3, purpose="centres"), torch.arange(4).repeat_interleave(50)
    reference = centres[labels] + normal(200, 3, purpose="reference")
    y = torch.tensor([0] * 90 + [2] * 30)
    z = centres[y] + normal(120, 3, purpose="client")
    marginal = distance(z, reference, None, None)
    assert (
        distance(z, reference, None, weigh_as_client(labels, torch.bincount(y, minlength=4).double())) < marginal / 10
    )
    own, theirs = ((rows[:, None] == torch.arange(4)).double() for rows in (y, labels))
    assert by_class(distance, z, reference, own, theirs) < marginal / 10
    moved = by_class(distance, z + 2, reference, own, theirs)
    assert moved > 10 * by_class(distance, z, reference, own, theirs).abs()


def test_weights_of_a_reference_add_up_to_the_shares_of_the_client() -> None:
    labels, counts = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([6.0, 0.0, 2.0])
    weights = weigh_as_client(labels, counts)
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.25, 0.25, 0.0, 0.125, 0.125]))


def test_class_by_class_is_the_mean_over_classes_of_both() -> None:
    x, r = normal(7, 3), normal(6, 3, purpose="r")
    y, labels = torch.tensor([0, 0, 0, 1, 1, 2, 3]), torch.tensor([0, 0, 1, 1, 2, 2])  # one row of class 2, none of 3
    own, theirs = ((rows[:, None] == torch.arange(4)).double() for rows in (y, labels))
    wanted = (mmd(x[:3], r[:2]) + mmd(x[3:5], r[2:4])) / 2
    torch.testing.assert_close(by_class(mmd, x, r, own, theirs), wanted)
    assert by_class(mmd, x, r, own * 0, theirs) == 0


# -- anchors ---------------------------------------------------------------------------------------------------------
def test_the_anchor_loss_is_one_minus_cosine_and_leaves_lengths_free() -> None:
    anchors = simplex_etf(4, 6, generator(0, "frame"))
    z, y = normal(5, 6).requires_grad_(), torch.tensor([0, 2, 2, 0, 1])
    mask, counts = torch.tensor([1.0, 1, 1, 1, 0]).double(), torch.tensor([5.0, 0.0, 9.0, 0.0])
    prototypes = normal(4, 6, purpose="prototypes").requires_grad_()
    found = direction_loss(z, y, mask, prototypes, anchors, counts)

    def cosine(u: Tensor, v: Tensor) -> Tensor:
        return u @ v / (u.norm() * v.norm())

    wanted = sum(1 - cosine(prototypes[c], anchors[c]) for c in (0, 2)) / 2
    wanted = wanted + sum(1 - cosine(z[i], anchors[y[i]]) for i in range(4)) / 4
    torch.testing.assert_close(found, wanted)
    of_z, of_prototypes = torch.autograd.grad(found, (z, prototypes))
    assert not of_z[4].any()
    assert not of_prototypes[[1, 3]].any()
    torch.testing.assert_close((of_z * z).sum(1), torch.zeros(5).double())  # nothing along the row itself
    longer = direction_loss(3 * z, y, mask, 22.6 * prototypes, anchors, counts)
    torch.testing.assert_close(longer, found)
    torch.testing.assert_close(direction_loss(anchors[y], y, None, anchors, anchors, counts), torch.zeros(()).double())


def test_off_direction_is_half_the_squared_distance_of_unit_rows() -> None:
    z, t = normal(5, 3), normal(5, 3, purpose="t")
    apart = torch.nn.functional.normalize(z, dim=1) - torch.nn.functional.normalize(t, dim=1)
    torch.testing.assert_close(off_direction(z, t), apart.square().sum(1) / 2)
    assert torch.autograd.gradcheck(off_direction, (z.requires_grad_(), t))


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_weight_fades_over_the_whole_of_training_however_it_is_cut(shape) -> None:
    epochs = 12
    whole = fading_share(torch.arange(epochs + 1, dtype=torch.float64), epochs, shape)
    assert whole[0] == 1
    assert whole[-1].abs() < 1e-15
    assert (whole.diff() < 0).all()
    assert whole[6].item() == pytest.approx(0.5)
    for rounds in (1, 3, 12):  # a carried counter goes on from round to round
        steps = torch.zeros((), dtype=torch.float64)
        seen = []
        for _ in range(rounds):
            for _ in range(epochs // rounds):
                seen.append(fading_share(steps, torch.tensor(epochs), shape))
                steps = steps + 1
        torch.testing.assert_close(torch.stack(seen), whole[:-1])
