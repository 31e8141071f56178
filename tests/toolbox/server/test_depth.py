"""How alike clients are, block by block, and how many blocks they share."""

import math

import pytest
import torch
from torch import Tensor

from atoll.kernel.randomness import generator
from atoll.toolbox.server import depth


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(generator(seed, "depth").normal(size=shape))


COUNTS = torch.tensor([[5, 5, 0], [10, 10, 0], [0, 0, 7], [1, 2, 3]], dtype=torch.float64)


def test_divergence_is_a_distance_from_0_to_ln_2() -> None:
    apart = depth.divergence(COUNTS)
    assert torch.equal(apart, apart.T)
    assert apart[0, 1] == 0  # as frequent, however many
    assert float(apart[0, 2]) == pytest.approx(math.log(2))  # nothing in common
    assert bool(((apart >= 0) & (apart <= math.log(2))).all())
    h, g = COUNTS[0] / 10, COUNTS[3] / 6
    middle = (h + g) / 2
    expected = (torch.xlogy(h, h / middle) + torch.xlogy(g, g / middle)).sum() / 2
    torch.testing.assert_close(apart[0, 3], expected)


def test_label_similarity_is_1_for_the_same_and_0_for_nothing_in_common() -> None:
    same = depth.label_similarity(COUNTS)
    assert same[0, 1] == 1
    assert float(same[0, 2]) == pytest.approx(0, abs=1e-12)


def test_feature_similarity_by_hand() -> None:
    mean = torch.tensor([[0.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
    deviation = torch.tensor([[1.0, 3.0], [2.0, 3.0]], dtype=torch.float64)
    # Mean variances 2.5 and 9: d^2 = (2^2 + 1^2) / 2.5 = 2, by a width of 2.
    found = depth.feature_similarity(mean, deviation)
    torch.testing.assert_close(found, torch.tensor([[1.0, math.exp(-1)], [math.exp(-1), 1.0]], dtype=torch.float64))


def test_what_never_varies_does_not_tell_clients_apart() -> None:
    mean = torch.tensor([[0.3, 0.0], [0.1 + 0.2, 0.0]], dtype=torch.float64)  # equal up to rounding
    assert mean[0, 0] != mean[1, 0]
    assert bool((depth.feature_similarity(mean, torch.zeros_like(mean)) > 1 - 1e-9).all())


def affinities(seed: int, weight: float = 0.5) -> Tensor:
    blocks = [depth.feature_similarity(drawn(4, 6, seed=seed + n), drawn(4, 6, seed=seed - n).exp()) for n in range(5)]
    return depth.affinity(blocks, depth.label_similarity(COUNTS), weight)


def test_affinity_never_grows_with_the_blocks() -> None:
    u = affinities(7)
    assert u.shape == (4, 5)
    assert bool((u.diff(dim=1) <= 0).all())
    assert bool((u.diff(dim=1) < 0).any())


def test_affinity_is_the_mean_over_others() -> None:
    labels = depth.label_similarity(COUNTS)
    u = depth.affinity([torch.ones(4, 4).double()], labels, 0.25)
    expected = 0.25 + 0.75 * (labels[0, 1] + labels[0, 2] + labels[0, 3]) / 3
    torch.testing.assert_close(u[0, 0], expected)


def test_labels_count_more_the_deeper_a_block_lies() -> None:
    # catches: a label term that is the same for all blocks, by which clients share everything or nothing.
    alike, strangers = torch.ones(2, 2).double(), torch.eye(2).double()
    u = depth.affinity(
        [alike] * 4, strangers, 0.5
    )  # features say the same in every block, labels have nothing in common
    torch.testing.assert_close(u[0], torch.tensor([0.875, 0.75, 0.625, 0.5], dtype=torch.float64))
    assert depth.depth(u >= 0.6).tolist() == [3, 3]


def test_a_stricter_threshold_shares_no_more() -> None:
    u, before = affinities(7), torch.full((4,), 5)
    for theta in torch.linspace(0, 1, 21):
        now = depth.depth(u >= theta)
        assert bool((now <= before).all())
        before = now
    assert before.tolist() == [0, 0, 0, 0]


def test_the_same_clients_share_everything_and_one_alone_nothing() -> None:
    same = [torch.ones(3, 3).double()] * 4
    assert depth.depth(depth.affinity(same, torch.ones(3, 3).double(), 0.5) >= 0.999).tolist() == [4, 4, 4]
    alone = depth.affinity([torch.ones(1, 1)], torch.ones(1, 1), 0.5)
    assert alone.tolist() == [[0.0]]


def test_depth_counts_the_first_that_are_good() -> None:
    good = torch.tensor([[True, True, False, True], [False, True, True, True], [True, True, True, True]])
    assert depth.depth(good).tolist() == [2, 0, 4]


def test_pays_weighs_bias_against_variance_by_hand() -> None:
    mean, deviation = torch.tensor([[0.0], [0.2]]).double(), torch.tensor([[1.0], [1.0]]).double()
    # Between: shares 1/5 and 4/5, their mean 0.16: 0.2 * 0.16^2 + 0.8 * 0.04^2 = 0.0064. Within 1; 1/n_k - 1/n.
    assert depth.pays(mean, deviation, torch.tensor([100.0, 400.0]).double()).tolist() == [True, False]
    assert 1 / 100 - 1 / 500 > 0.0064 > 1 / 400 - 1 / 500


def test_cka_does_not_see_rotations_factors_and_offsets() -> None:
    x = drawn(30, 6)
    rotation, _ = torch.linalg.qr(drawn(6, 6, seed=1))
    found = depth.cka(torch.stack([x, 3 * x @ rotation + 5, drawn(30, 6, seed=2)]))
    torch.testing.assert_close(found[0, 1], torch.ones(()).double())
    torch.testing.assert_close(found.diagonal(), torch.ones(3).double())
    assert 0 <= found[0, 2] < 0.9


def test_cka_by_its_definition() -> None:
    x, y = (one - one.mean(0) for one in (drawn(8, 3), drawn(8, 3, seed=1)))
    expected = (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())
    torch.testing.assert_close(depth.cka(torch.stack([x, y]))[0, 1], expected)


def test_a_network_that_says_the_same_about_all_samples_is_like_no_other() -> None:
    assert depth.cka(torch.stack([torch.ones(5, 2), drawn(5, 2).float()]))[0].tolist() == [0.0, 0.0]


def test_the_mean_of_pairs() -> None:
    likeness = torch.tensor([[1.0, 0.2, 0.4], [0.2, 1.0, 0.9], [0.4, 0.9, 1.0]])
    assert float(depth.mean_of_pairs(likeness)) == pytest.approx(0.5)
    assert float(depth.mean_of_pairs(torch.ones(1, 1))) == 1.0


def test_evenness_is_one_for_even_classes_and_zero_for_one() -> None:
    counts = torch.tensor([[5.0, 5, 5], [9, 0, 0], [4, 4, 0], [0, 0, 0]], dtype=torch.float64)
    assert depth.evenness(counts).tolist() == pytest.approx([1, 0, math.log(2) / math.log(3), 0])


def test_what_a_client_wants_falls_with_depth_unless_its_classes_are_even() -> None:
    found = depth.wanted(torch.tensor([1.0, 0.4, 0.0], dtype=torch.float64), 4)
    expected = [[1, 1, 1, 1], [0.85, 0.7, 0.55, 0.4], [0.75, 0.5, 0.25, 0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
