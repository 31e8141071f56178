import numpy as np
import pytest

from atoll.experiments.comparison import Comparison
from atoll.kernel.clusters import Clusters
from atoll.report.clusters import describe_clusters, order_clients
from atoll.report.summary import write_findings

SCORES = [0.5, 0.6, 0.7, 0.8]


def one(make, *numbers, groups=None):
    """Runs that found these clusters, one list per seed."""
    found = [
        make({"ifca": [SCORES] * (seed + 1)}, clusters=Clusters(np.array(of)), groups=groups).outcomes["ifca"][seed]
        for seed, of in enumerate(numbers)
    ]
    return Comparison({"ifca": found})


EXACT = ", in exact agreement with the planted groups (adjusted Rand 1.00)."
PART = "agreement with the planted groups is adjusted Rand {} (1 is full agreement, 0 chance)."


@pytest.mark.parametrize(
    ("numbers", "groups", "words"),
    [
        ([[0, 0, 1, 1]], None, "2 clusters."),
        ([[0, 0, 0, 0]], None, "1 cluster."),
        ([[2, 2, 0, 0]], [0, 0, 1, 1], f"2 clusters{EXACT}"),
        ([[0, 0, 1, 2]], [0, 0, 1, 1], f"3 clusters; {PART.format('0.57')}"),
        (
            [[0, 0, 1, 1], [0, 0, 1, 2]],
            [0, 0, 1, 1],
            f"2 to 3 clusters with 2 seeds; {PART.format('0.79 on average, 0.57 to 1.00')}",
        ),
        (
            [[0, 0, 1, 1], [1, -1, 0, -1]],
            [5, 5, 3, 3],
            f"2 clusters with each of 2 seeds{EXACT} 2 clients are in no cluster.",
        ),
    ],
)
def test_what_was_found_is_said(make, numbers, groups, words):
    found = one(make, *numbers, groups=groups)
    assert describe_clusters(found, "ifca", "IFCA") == f"IFCA found {words}"
    assert f"IFCA found {words}" in write_findings(found)


def test_a_method_that_seeks_none_says_nothing(make):
    found = make({"ditto": [SCORES]})
    assert describe_clusters(found, "ditto", "Ditto") is None
    assert not any("cluster" in words for words in write_findings(found))


def test_clients_are_drawn_by_cluster_and_planted_group():
    clusters = Clusters(np.array([1, 0, -1, 1, 0]))
    assert order_clients(clusters, None).tolist() == [1, 4, 0, 3, 2]
    assert order_clients(clusters, np.array([7, 1, 0, 3, 0])).tolist() == [4, 1, 3, 0, 2]


def test_branches_of_a_tree_do_not_cross():
    # 1 and 3 merge, then 0 with them; 2 is not in the tree.
    tree = np.array([[1.0, 3.0, 0.5, 2.0], [0.0, 4.0, 2.0, 3.0]])
    assert order_clients(Clusters(np.array([0, 1, 0, 1]), tree), None).tolist() == [0, 1, 3, 2]
