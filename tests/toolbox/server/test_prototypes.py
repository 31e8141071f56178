"""Directions of classes: who counts how much, what the server makes of them, and when they are of no use."""

import pytest
import torch
from torch import Tensor

from atoll.kernel.errors import CohortError
from atoll.kernel.randomness import generator
from atoll.toolbox.server import prototypes

CLIENTS, CLASSES, SIZE = 5, 3, 7


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(generator(seed, "directions").normal(size=shape))


@pytest.fixture
def points() -> Tensor:
    return drawn(CLIENTS, CLASSES, SIZE)


@pytest.fixture
def counts() -> Tensor:
    # The third class has one owner, and one client that has too few samples of it.
    return torch.tensor([[9, 5, 0], [7, 0, 3], [30, 6, 0], [0, 8, 40], [5, 5, 0]], dtype=torch.float64)


# -- what a client is worth --------------------------------------------------------------------------------------------


def test_reliability_by_hand() -> None:
    correct = torch.tensor([[9.0, 1.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    tested = torch.tensor([[10.0, 10.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    # Balanced: 0.5 of 20 samples; all of 5, of one class; nothing held out.
    expected = torch.tensor([(20 * 0.5 + 10) / 40, (5 * 1 + 10) / 25, 0.5])
    torch.testing.assert_close(prototypes.reliability(correct, tested), expected)


def test_concentration_by_hand() -> None:
    assert float(prototypes.concentration(torch.tensor(0.5), 4)) == pytest.approx(0.5 * 3.75 / 0.75)
    assert torch.isfinite(prototypes.concentration(torch.tensor(1.0), 4))  # all samples alike


def test_a_handful_of_samples_does_not_look_infinitely_sure() -> None:
    # Ten clients with spread features, and one whose five samples are all the same: its concentration is cut.
    rows = prototypes.unit(drawn(10, 1, 20, SIZE) + 2)
    sums = torch.cat([rows.sum(2), 5 * rows[:1, :, 0]])
    counts = torch.tensor([[20.0]] * 10 + [[5.0]], dtype=torch.float64)
    lengths = (sums.norm(dim=-1) / counts).flatten()
    kappas = prototypes.concentration(lengths, SIZE)
    assert kappas[-1] > 100 * kappas[:-1].max()
    q = prototypes.confidence(sums, counts).flatten()
    torch.testing.assert_close(q[-1], torch.quantile(kappas, 0.9) * lengths[-1])
    assert q[-1] < 2 * q[:-1].max()


def test_confidence_of_no_samples_is_zero() -> None:
    assert prototypes.confidence(torch.zeros(2, 3, 4), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


def test_weights_of_each_class_sum_to_one_over_its_owners(points: Tensor, counts: Tensor) -> None:
    sums = prototypes.unit(points) * counts[..., None] * 0.7
    omega = prototypes.weights(counts, drawn(CLIENTS, seed=1).abs(), prototypes.confidence(sums, counts))
    torch.testing.assert_close(omega.sum(0), torch.ones(CLASSES, dtype=torch.float64))
    assert omega[counts < 5].abs().sum() == 0
    assert bool((omega[counts >= 5] > 0).all())


def test_weights_are_products_of_powers(counts: Tensor) -> None:
    r, q = drawn(CLIENTS).abs(), drawn(CLIENTS, CLASSES, seed=1).abs()
    omega = prototypes.weights(counts, r, q, powers=(0.5, 2.0, 3.0), least=1)
    expected = counts.sqrt() * r[:, None] ** 2 * q**3
    torch.testing.assert_close(omega, expected / expected.sum(0))


def test_without_powers_owners_count_the_same(counts: Tensor) -> None:
    omega = prototypes.weights(counts, drawn(CLIENTS, seed=1).abs(), powers=(0.0, 0.0, 0.0), least=1)
    owned = (counts > 0).double()
    torch.testing.assert_close(omega, owned / owned.sum(0))


def test_owners_that_are_worth_nothing_count_the_same(counts: Tensor) -> None:
    omega = prototypes.weights(counts, torch.zeros(CLIENTS).double())
    assert omega[:, 0].tolist() == [0.25, 0.25, 0.25, 0.0, 0.25]


def test_a_class_without_an_owner_has_no_weights() -> None:
    assert prototypes.weights(torch.tensor([[4.0], [0.0]])).tolist() == [[0.0], [0.0]]


# -- one direction per class -------------------------------------------------------------------------------------------


def test_equal_weights_are_the_mean(points: Tensor) -> None:
    omega = torch.full((CLIENTS, CLASSES), 1 / CLIENTS, dtype=torch.float64)
    expected = prototypes.unit(prototypes.unit(points).mean(0))
    torch.testing.assert_close(prototypes.fuse(points, omega), expected)


@pytest.mark.parametrize("robust", [False, True])
def test_the_length_of_prototypes_does_not_matter(points: Tensor, counts: Tensor, robust: bool) -> None:
    omega, lengths = prototypes.weights(counts), drawn(CLIENTS, CLASSES, 1, seed=1).abs() * 9 + 0.1
    one, other = (prototypes.fuse(some, omega, robust=robust) for some in (points, points * lengths))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("robust", [False, True])
def test_the_order_of_clients_does_not_matter(points: Tensor, counts: Tensor, robust: bool) -> None:
    omega = prototypes.weights(counts)
    one, other = (
        prototypes.fuse(points[order], omega[order], robust=robust) for order in (slice(None), [3, 1, 4, 0, 2])
    )
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("robust", [False, True])
def test_a_class_with_one_owner_has_its_direction(points: Tensor, counts: Tensor, robust: bool) -> None:
    fused = prototypes.fuse(points, prototypes.weights(counts), robust=robust)
    anchors = prototypes.unit(drawn(CLASSES, SIZE, seed=1))
    found = prototypes.shrink(fused, anchors, counts.sum(0), strength=0.0)
    torch.testing.assert_close(found[2], prototypes.unit(points[3, 2]))


def test_a_class_without_an_owner_has_its_anchor(points: Tensor) -> None:
    counts, anchors = torch.zeros(CLIENTS, CLASSES).double(), prototypes.unit(drawn(CLASSES, SIZE, seed=1))
    fused = prototypes.fuse(points, prototypes.weights(counts))
    for strength in (0.0, 20.0):
        torch.testing.assert_close(prototypes.shrink(fused, anchors, counts.sum(0), strength=strength), anchors)


def test_shrinkage_by_hand() -> None:
    shared, anchors = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    found = prototypes.shrink(shared, anchors, torch.tensor([60.0]), strength=20.0)  # rho = 1/4
    torch.testing.assert_close(found, torch.tensor([[3.0, 1.0]]) / 10**0.5)


def test_anchors_of_another_size_are_refused(points: Tensor) -> None:
    with pytest.raises(CohortError, match=r"\(3, 7\). Got \(3, 4\)"):
        prototypes.shrink(points[0], torch.zeros(CLASSES, 4), torch.ones(CLASSES))


def test_the_median_is_where_most_of_the_weight_is() -> None:
    # Three of five agree to within a hair; two point the other way, and move the mean but not the median.
    near = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) + 1e-3 * drawn(3, 3)
    far = torch.tensor([[-0.9, 0.5, 0.0], [-0.2, 1.0, 0.3]], dtype=torch.float64)
    points, omega = torch.cat([near, far])[:, None], torch.full((5, 1), 0.2, dtype=torch.float64)
    mean, median = (prototypes.fuse(points, omega, robust=robust)[0] for robust in (False, True))
    good = prototypes.unit(near.mean(0))
    assert mean @ good < 0.9
    assert median @ good > 0.99999


def test_the_median_minimises_the_sum_of_distances(points: Tensor, counts: Tensor) -> None:
    omega, rows = prototypes.weights(counts, least=1), prototypes.unit(points)
    median = prototypes.fuse(points, omega, robust=True)

    def total(p: Tensor) -> Tensor:
        return (omega * (p - rows).norm(dim=-1)).sum(0)

    for seed in range(5):
        nearby = prototypes.unit(median + 1e-3 * drawn(CLASSES, SIZE, seed=seed))
        assert bool((total(nearby) >= total(median) - 1e-12).all())


def test_personal_prototypes_lie_between_own_and_shared(points: Tensor) -> None:
    own, shared = points[0], prototypes.unit(points[1])
    counts = torch.tensor([0.0, 50.0, 1e12], dtype=torch.float64)
    near = prototypes.personal(own, shared, counts)
    torch.testing.assert_close(near[0], shared[0])  # eta = 0
    torch.testing.assert_close(near[1], prototypes.unit(prototypes.unit(own[1]) + shared[1]))  # eta = 1/2
    torch.testing.assert_close(near[2], prototypes.unit(own[2]))  # eta = 1
    several = prototypes.personal(points, shared, counts.expand(CLIENTS, -1))
    torch.testing.assert_close(several[0], near)


def test_a_client_without_samples_gets_the_shared_prototypes_whatever_the_strength(points: Tensor) -> None:
    shared = prototypes.unit(points[1])
    near = prototypes.personal(torch.zeros_like(shared), shared, torch.zeros(CLASSES).double(), strength=0.0)
    torch.testing.assert_close(near, shared)


def test_agreement_by_hand() -> None:
    east, north = [1.0, 0.0], [0.0, 2.0]
    points = torch.tensor([[east, east], [east, north], [north, north]])
    counts = torch.tensor([[9.0, 9.0], [9.0, 0.0], [9.0, 9.0]])
    # Class 0: cosines 1, 0, 0; class 1: clients 0 and 2 only, cosine 0.
    assert float(prototypes.agreement(points, counts)) == pytest.approx(1 / 4)
    assert float(prototypes.agreement(points[:1], counts[:1])) == 1.0
