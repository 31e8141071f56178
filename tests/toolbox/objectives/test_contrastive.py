"""The contrastive loss, against loops over anchors and items, and its identities."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from atoll.kernel.randomness import generator
from atoll.toolbox.objectives.balance import class_mean
from atoll.toolbox.objectives.contrastive import (
    ContrastSet,
    between_prototypes,
    prototypes_of,
    supervised_contrast,
    weighted_contrast,
)
from atoll.toolbox.objectives.etf import simplex_etf

T = 0.3
Y = torch.tensor([0, 1, 0, 2, 1, 0, 3, 1])


def normal(*shape: int, purpose: str = "z") -> Tensor:
    return torch.from_numpy(generator(0, purpose).normal(size=shape))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def by_loops(z: Tensor, y: Tensor, extra: tuple[Tensor, Tensor, Tensor] | None = None, same: str = "ignored") -> Tensor:
    """The definition, one anchor and one item at a time."""
    losses = []
    for i in range(len(z)):
        total, positives = 0.0, []
        for a in range(len(z)):
            if a != i:
                total += math.exp(cosine(z[i], z[a]) / T)
                if y[a] == y[i]:
                    positives.append((1.0, cosine(z[i], z[a]) / T))
        for feature, label, weight in zip(*extra, strict=True) if extra else ():
            s, w = cosine(z[i], feature) / T, float(weight)
            if label != y[i] or same != "ignored":
                total += w * math.exp(s)
            if label == y[i] and same == "positives":
                positives.append((w, s))
        mass = sum(weight for weight, _ in positives)
        losses.append(sum(w * (math.log(total) - s) for w, s in positives) / mass if mass else 0.0)
    return torch.tensor(losses, dtype=torch.float64)


def test_it_is_the_definition() -> None:
    z = normal(8, 5)
    torch.testing.assert_close(supervised_contrast(z, Y, temperature=T), by_loops(z, Y))


@pytest.mark.parametrize("same", ["ignored", "positives", "negatives"])
def test_so_it_is_with_more_items(same) -> None:
    z, more = normal(8, 5), normal(6, 5, purpose="more")
    labels, weight = torch.tensor([0, 1, 1, 4, -1, 3]), torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.7]).double()
    extra = [ContrastSet(more, labels, weight, same)]
    found = supervised_contrast(z, Y, temperature=T, extra=extra)
    torch.testing.assert_close(found, by_loops(z, Y, (more, labels, weight), same))


def test_the_slope_is_that_of_finite_differences() -> None:
    more = ContrastSet(normal(4, 3, purpose="more"), torch.tensor([0, 1, 2, 5]), same="positives", mass=0.5)

    def loss(z: Tensor, items: Tensor) -> Tensor:
        extra = [ContrastSet(items, more.labels, same="positives", mass=0.5)]
        return supervised_contrast(z, Y, temperature=T, extra=extra, classes=6).mean()

    inputs = normal(8, 3).requires_grad_(), more.features.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs)


def test_order_length_and_a_common_rotation_do_not_matter() -> None:
    z, order = normal(8, 5), torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    found = supervised_contrast(z, Y, temperature=T)
    torch.testing.assert_close(supervised_contrast(z[order], Y[order], temperature=T), found[order])
    rotation = torch.linalg.qr(normal(5, 5, purpose="rotation"))[0]
    stretch = torch.arange(1.0, 9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(supervised_contrast(stretch * z @ rotation, Y, temperature=T), found)


def test_two_views_of_samples_that_all_differ_are_nt_xent() -> None:
    z = torch.nn.functional.normalize(normal(8, 5), dim=1)
    y = torch.arange(4).repeat(2)
    logits = (z @ z.T / T).fill_diagonal_(-torch.inf)
    wanted = torch.nn.functional.cross_entropy(logits, torch.arange(8).roll(4), reduction="none")
    torch.testing.assert_close(supervised_contrast(z, y, temperature=T), wanted)


def test_an_anchor_without_positives_has_no_loss_and_no_slope() -> None:
    for rows in (1, 4):  # one row has nothing to be contrasted with either
        z = normal(rows, 3).requires_grad_()
        found = supervised_contrast(z, torch.arange(rows), temperature=T)
        assert torch.equal(found, torch.zeros(rows, dtype=torch.float64))
        assert torch.equal(*torch.autograd.grad(found.sum(), z), torch.zeros_like(z))


def test_padding_is_neither_anchor_nor_contrast() -> None:
    z, mask = normal(8, 5).requires_grad_(), torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0]).double()
    extra = [ContrastSet(normal(4, 5, purpose="more"), torch.tensor([0, 1, 2, 3]), mass=1.0)]
    options = {"temperature": T, "extra": extra, "hardness": 1.0, "classes": 4}
    found = supervised_contrast(z, Y, mask, **options)
    torch.testing.assert_close(found[:5], supervised_contrast(z[:5], Y[:5], **options))
    assert torch.equal(found[5:], torch.zeros(3, dtype=torch.float64))
    (slope,) = torch.autograd.grad(found.sum(), z)
    assert torch.equal(slope[5:], torch.zeros(3, 5, dtype=torch.float64))


def test_a_set_of_weight_nought_or_of_the_own_label_only_changes_nothing() -> None:
    z, y = normal(8, 5), torch.zeros(8, dtype=torch.int64)
    plain = supervised_contrast(z, Y, temperature=T)
    more = normal(6, 5, purpose="more")
    for weight, mass in ((0.0, None), (0.0, 1.0), (1.0, 0.0)):
        idle = ContrastSet(more, torch.arange(6), weight, "positives", mass)
        torch.testing.assert_close(supervised_contrast(z, Y, temperature=T, extra=[idle]), plain)
        own = ContrastSet(more, torch.zeros(6, dtype=torch.int64), mass=mass)
        torch.testing.assert_close(
            supervised_contrast(z, y, temperature=T, extra=[own]), supervised_contrast(z, y, temperature=T)
        )


def test_a_mass_makes_the_number_of_items_irrelevant() -> None:
    z, more, labels = normal(8, 5), normal(6, 5, purpose="more"), torch.tensor([0, 1, 1, 4, -1, 3])

    def loss(times: int, mass: float | None) -> Tensor:
        extra = [ContrastSet(more.repeat(times, 1), labels.repeat(times), mass=mass)]
        return supervised_contrast(z, Y, temperature=T, extra=extra)

    torch.testing.assert_close(loss(50, 1.0), loss(1, 1.0))
    assert (loss(50, None) > loss(1, None) + 1)[Y < 2].all()
    # As many items as the batch has others, none of the anchor's label: their mass is their own.
    seven = [ContrastSet(normal(7, 5, purpose="seven"), mass=mass) for mass in (None, 1.0)]
    losses = [supervised_contrast(z, Y, temperature=T, extra=[one]) for one in seven]
    torch.testing.assert_close(losses[0], losses[1])


def test_a_client_of_one_class_is_contrasted_with_the_set() -> None:
    z, y = normal(8, 5), torch.zeros(8, dtype=torch.int64)
    extra = [ContrastSet(normal(6, 5, purpose="more"), torch.arange(6), mass=1.0)]
    plain = supervised_contrast(z, y, temperature=T)
    assert (supervised_contrast(z, y, temperature=T, extra=extra) > plain + 0.01).all()


def test_hardness_prefers_near_negatives_and_nought_is_the_plain_loss() -> None:
    z, more, labels = normal(8, 5), normal(6, 5, purpose="more"), torch.tensor([0, 1, 1, 4, -1, 3])
    extra = [ContrastSet(more, labels)]
    plain = supervised_contrast(z, Y, temperature=T, extra=extra)
    torch.testing.assert_close(supervised_contrast(z, Y, temperature=T, extra=extra, hardness=1e-9), plain)
    hard = supervised_contrast(z, Y, temperature=T, extra=extra, hardness=2.0)
    wanted = []
    for i in range(8):
        positive = [cosine(z[i], z[a]) for a in range(8) if a != i and Y[a] == Y[i]]
        negative = [cosine(z[i], z[a]) for a in range(8) if Y[a] != Y[i]]
        negative += [cosine(z[i], more[j]) for j in range(6) if labels[j] != Y[i]]
        tilt = [math.exp(2 * s) for s in negative]
        pushed = len(negative) * sum(q * math.exp(s / T) for q, s in zip(tilt, negative, strict=True)) / sum(tilt)
        total = math.log(pushed + sum(math.exp(s / T) for s in positive))
        wanted.append(sum(total - s / T for s in positive) / max(len(positive), 1))
    torch.testing.assert_close(hard, torch.tensor(wanted, dtype=torch.float64))
    assert (hard >= plain).all()


def test_no_slope_flows_through_the_hardness() -> None:
    z = normal(8, 3).requires_grad_()
    at = z.detach()

    def held(z: Tensor) -> Tensor:
        """The same loss with weights that stay as they are at `at`."""
        s, there = (torch.nn.functional.normalize(one, dim=1) for one in (z, at))
        s, there = s @ s.T, there @ there.T
        same = Y[:, None] == Y
        weight = (~same) * (2 * there).exp()
        weight = weight * (~same).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        positive = same.double() - torch.eye(8, dtype=torch.float64)
        return weighted_contrast(s / T, weight + positive, positive).sum()

    (wanted,) = torch.autograd.grad(held(z), z)
    (slope,) = torch.autograd.grad(supervised_contrast(z, Y, temperature=T, hardness=2.0).sum(), z)
    torch.testing.assert_close(slope, wanted)


def test_far_and_near_items_at_a_low_temperature_stay_finite() -> None:
    # In float32 exp(-2 / 0.005) is 0: what is far from an anchor must not be measured against the anchor itself.
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [-1.0, 1e-3]], requires_grad=True)
    found = supervised_contrast(z, torch.tensor([0, 0, 1]), temperature=0.005)
    assert found[0].item() == pytest.approx(math.log(2), abs=1e-2)
    assert torch.isfinite(torch.autograd.grad(found.sum(), z)[0]).all()


# -- balance ---------------------------------------------------------------------------------------------------------
def test_with_equal_classes_balance_is_a_constant() -> None:
    z, y = normal(12, 5), torch.arange(3).repeat(4)
    plain = supervised_contrast(z, y, temperature=T)
    balanced = supervised_contrast(z, y, temperature=T, classes=3, count_anchor=True)
    torch.testing.assert_close(balanced, plain - math.log(4))


def test_balanced_and_completed_contrast_is_the_definition() -> None:
    z, prototypes = normal(8, 5), normal(5, 5, purpose="prototypes")  # nobody is of class 4
    found = supervised_contrast(z, Y, temperature=T, extra=[prototypes_of(prototypes)], classes=5)
    wanted = []
    for i in range(8):
        total = 0.0
        for c in range(5):
            members = [z[a] for a in range(8) if a != i and Y[a] == c] + [prototypes[c]]
            total += sum(math.exp(cosine(z[i], one) / T) for one in members) / len(members)
        positive = [z[a] for a in range(8) if a != i and Y[a] == Y[i]] + [prototypes[Y[i]]]
        wanted.append(sum(math.log(total) - cosine(z[i], one) / T for one in positive) / len(positive))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_a_class_that_is_repeated_pushes_no_harder() -> None:
    z = normal(8, 5)
    anchor = slice(0, 1)
    others = Y != 0

    def loss(times: int, classes: int | None) -> Tensor:
        rows = torch.cat([z[~others], z[others].repeat(times, 1)])
        labels = torch.cat([Y[~others], Y[others].repeat(times)])
        return supervised_contrast(rows, labels, temperature=T, classes=classes)[anchor]

    torch.testing.assert_close(loss(5, 4), loss(1, 4))
    assert (loss(5, None) > loss(1, None) + 0.5).all()


def test_all_items_without_a_label_weigh_as_much_as_one_class() -> None:
    # catches: a pool of 4096 unlabelled items that outweighs ten classes by 400 to 1.
    z, pool = normal(8, 5), normal(6, 5, purpose="pool")
    found, repeated = (
        supervised_contrast(z, Y, temperature=T, extra=[ContrastSet(items)], classes=4)
        for items in (pool, pool.repeat(3, 1))
    )
    torch.testing.assert_close(found, repeated)
    for i in range(8):
        members = [[z[a] for a in range(8) if a != i and Y[a] == c] for c in range(4)]
        total = sum(
            sum(math.exp(cosine(z[i], one) / T) for one in group) / len(group)
            for group in (*members, pool)
            if len(group)
        )
        positive = members[Y[i]]
        wanted = sum(math.log(total) - cosine(z[i], one) / T for one in positive) / max(1, len(positive))
        assert found[i].item() == pytest.approx(wanted)


def test_its_mean_over_classes_counts_each_class_once() -> None:
    losses = supervised_contrast(normal(8, 5), Y, temperature=T)
    wanted = sum(losses[c == Y].mean() for c in range(4)) / 4
    torch.testing.assert_close(class_mean(losses, Y, None, 7), wanted)


# -- prototypes ------------------------------------------------------------------------------------------------------
def test_long_random_prototypes_are_apart_already_and_a_frame_is_at_its_bound() -> None:
    initial = normal(10, 512).float().requires_grad_()
    loss = between_prototypes(initial).mean()
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, initial)[0].any()
    for classes in (10, 100):
        frame = simplex_etf(classes, 128, generator(0, "frame"))
        bound = math.log(1 + (classes - 1) * math.exp(-classes / (classes - 1)))
        torch.testing.assert_close(between_prototypes(frame), torch.full((classes,), bound, dtype=torch.float64))


# -- many clients ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("masked", [False, True])
def test_clients_at_once_and_traced_are_clients_one_by_one(masked) -> None:
    z, more = normal(3, 8, 5), normal(3, 6, 5, purpose="more")
    y = torch.stack([Y, Y.roll(2), Y.flip(0)])
    mask = torch.tensor([[1] * 8, [1] * 6 + [0] * 2, [1] + [0] * 7]).double() if masked else None

    def loss(z: Tensor, more: Tensor, y: Tensor, *some: Tensor) -> Tensor:
        own = ContrastSet(z[:, None] + more[:2], same="negatives")
        extra = [ContrastSet(more, y[:6], mass=1.0), own, prototypes_of(more[:4])]
        return supervised_contrast(z, y, *some, temperature=T, extra=extra, hardness=0.5, classes=4)

    inputs = (z, more, y, mask) if masked else (z, more, y)
    found = vmap(loss)(*inputs)
    torch.testing.assert_close(found, torch.stack([loss(*row) for row in zip(*inputs, strict=True)]))
    torch.testing.assert_close(make_fx(vmap(loss))(*inputs)(*inputs), found)
    slopes = vmap(grad(lambda *row: loss(*row).sum()))(*inputs)
    for row, slope in zip(zip(*inputs, strict=True), slopes, strict=True):
        own = row[0].clone().requires_grad_()
        torch.testing.assert_close(slope, *torch.autograd.grad(loss(own, *row[1:]).sum(), own))
