"""Distances, trees of merges and where they are cut, starts that are far apart."""

import json

import numpy as np
import pytest
import torch

from atoll.kernel.clusters import Clusters
from atoll.kernel.network import Network
from atoll.kernel.params import Layout, Params, Stack
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP
from atoll.toolbox.server.clustering import (
    Linkage,
    Metric,
    center,
    choose_far_apart,
    cut,
    distance_to,
    distances,
    merges,
    mixing_within,
    nearest,
    reshuffle,
    tree_of_some,
    tree_of_splits,
)

POINTS = [[0.0, 3.0], [4.0, 0.0], [0.0, -3.0]]


def points(values: list[list[float]]) -> Stack:
    """Points in the leaves a and b, with a buffer that must not count."""
    layout = Layout({"a": "trained", "b": "trained", "seen": "buffer"})
    table = torch.tensor(values, dtype=torch.float64)
    return Stack({"a": table[:, 0], "b": table[:, 1:], "seen": torch.arange(len(table)) * 100.0}, layout)


@pytest.mark.parametrize(("metric", "expected"), [("l1", [0, 7, 6]), ("l2", [0, 5, 6]), ("cosine", [0, 1, 2])])
def test_distances_by_hand(metric: Metric, expected: list[float]) -> None:
    there = points(POINTS)
    assert distance_to(there, there.client(0), metric).tolist() == pytest.approx(expected)
    table = distances(there, metric)
    assert table[0].tolist() == pytest.approx(expected)
    assert (table == table.T).all()


def test_an_update_of_nothing_has_a_distance() -> None:
    assert np.isfinite(distances(points([[0.0, 0.0], [1.0, 0.0]]), "cosine")).all()


def test_nearest_and_center() -> None:
    there = points(POINTS)
    middle = center(there)
    assert {name: leaf.flatten().tolist() for name, leaf in middle.items()} == {"a": [pytest.approx(4 / 3)], "b": [0.0]}
    centers = Stack.of(a=torch.tensor([8.0, 0.0, 0.0]), b=torch.tensor([[0.0], [2.0], [2.0]]))
    assert nearest(there, centers, "l2").tolist() == [1, 0, 1]  # the lower of two equals


def tree(values: list[float], linkage: str = "complete") -> np.ndarray:
    return merges(np.abs(np.subtract.outer(values, values)).astype(float), linkage)  # type: ignore[arg-type]


def test_a_tree_is_cut_into_so_many_clusters_or_at_a_height_or_below_its_largest_jump() -> None:
    made = tree([10, 0, 11, 1, 20])  # merges at 1, 1, 10 (10 with 20) and 20
    assert cut(made, clusters=2).tolist() == [0, 1, 0, 1, 0]
    assert cut(made, clusters=3).tolist() == [0, 1, 0, 1, 2]
    assert cut(made, threshold=0.5).tolist() == [0, 1, 2, 3, 4]
    assert cut(made, threshold=1e9).tolist() == [0] * 5
    assert cut(made).tolist() == [0, 1, 0, 1, 0]
    three = np.array([0, 0, 1, 1, 2])
    table = np.where(np.equal.outer(three, three), 1.0, 100.0) * (1 - np.eye(5))
    assert cut(merges(table, "average")).tolist() == three.tolist()


@pytest.mark.parametrize("linkage", ["complete", "single", "average"])
@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
def test_a_tree_with_equal_heights_is_cut_into_as_many_clusters_as_asked(linkage: Linkage, clusters: int) -> None:
    tree = merges(np.ones((4, 4)) - np.eye(4), linkage)
    assert len(np.unique(cut(tree, clusters=clusters))) == clusters


@pytest.mark.parametrize("clients", [1, 2])
def test_few_clients_are_one_cluster_unless_more_are_asked_for(clients: int) -> None:
    made = tree([0.0, 5.0][:clients])
    assert cut(made).tolist() == [0] * clients
    assert cut(made, clusters=clients).tolist() == list(range(clients))


def test_single_linkage_follows_a_chain_that_complete_linkage_breaks() -> None:
    chain = [0.0, 1.0, 2.1, 3.3, 20.0]
    assert cut(tree(chain, "single"), clusters=2).tolist() == [0, 0, 0, 0, 1]
    assert cut(tree(chain, "complete"), threshold=2.5).tolist() == [0, 0, 1, 1, 2]


def test_a_tree_of_some_clients_has_their_numbers() -> None:
    made = tree_of_some(
        tree([0.0, 1.0, 10.0]), np.array([1, 4, 6]), clients=8
    )  # places 0 and 1 first, then place 2 with them
    assert made.tolist() == [[1, 4, 1, 2], [6, 8, 10, 3]]
    assert tree_of_some(tree([0.0]), np.array([3]), clients=8).shape == (0, 4)


def test_splits_are_undone_from_the_last_to_the_first() -> None:
    # All clients, then 1, 3 and 4 were split from 0 and 2, then 4 from 1 and 3.
    rows = tree_of_splits(np.array([0, 1, 0, 1, 2]), splits=[0, 1]).tolist()
    assert rows == [[0, 2, 0, 2], [1, 3, 0, 2], [6, 4, 1, 3], [5, 7, 2, 5]]
    assert cut(np.array(rows), clusters=3).tolist() == [0, 1, 0, 1, 2]  # scipy reads it, too


def test_clusters_survive_json() -> None:
    found = Clusters(np.array([0, 2, -1, 0]), np.array([[0.0, 3.0, 0.5, 2.0]]), "l2")
    back = Clusters.of_json(json.loads(json.dumps(found.as_json())))
    assert back.number == 2
    assert back.of_client.tolist() == [0, 2, -1, 0]
    assert back.merges is not None
    assert back.merges.tolist() == [[0, 3, 0.5, 2]]
    assert back.height == "l2"
    assert Clusters.of_json(Clusters(np.array([0])).as_json()).merges is None
    assert Clusters.of_json(Clusters(np.array([0]), np.zeros((0, 4))).as_json()).merges.shape == (0, 4)  # type: ignore[union-attr]


def test_starts_are_far_apart() -> None:
    table = np.abs(np.subtract.outer(*[np.array([0.0, 0.1, 0.2, 50.0, 50.1, 90.0])] * 2))
    groups = np.array([0, 0, 0, 1, 1, 2])
    for number in range(20):
        chosen = choose_far_apart(table, 3, 5, generator(number, "test"))
        assert sorted(groups[chosen]) == [0, 1, 2]


def test_starts_among_clients_that_are_all_the_same_are_any_of_them() -> None:
    assert len(choose_far_apart(np.zeros((4, 4)), 3, 1, generator(0, "test"))) == 3


def test_another_initial_model_has_the_same_values_in_another_order() -> None:
    with default_generator(0):
        initial = Network(MLP((4,), 3, hidden=(6,))).initial
    one, two = reshuffle(initial, 1), reshuffle(initial, 2)
    for name, leaf in initial.items():
        assert sorted(leaf.flatten().tolist()) == sorted(one[name].flatten().tolist())
    for other in (initial, two):
        assert not torch.equal(one["body.1.weight"], other["body.1.weight"])
    assert all(torch.equal(leaf, reshuffle(initial, 1)[name]) for name, leaf in one.items())


def test_buffers_are_not_shuffled() -> None:
    w = Params({"a": torch.arange(50.0), "mean": torch.arange(50.0)}, Layout({"a": "trained", "mean": "buffer"}))
    assert torch.equal(reshuffle(w, 1)["mean"], w["mean"])


def test_members_of_a_cluster_learn_from_each_other_by_weight() -> None:
    matrix = mixing_within(torch.tensor([0, 1, 0, -1, 1]), torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0]))
    expected = [
        [0.25, 0, 0.75, 0, 0],
        [0, 1, 0, 0, 0],
        [0.25, 0, 0.75, 0, 0],
        [1 / 6, 1 / 3, 1 / 2, 0, 0],
        [0, 1, 0, 0, 0],
    ]
    torch.testing.assert_close(matrix, torch.tensor(expected))
    assert mixing_within(torch.tensor([-1, -1]), torch.zeros(2)).tolist() == [[0.5, 0.5]] * 2  # nobody has replied yet
