import math

import pytest
from sklearn.metrics import adjusted_rand_score

from atoll.kernel.randomness import generator
from atoll.metrics.groups import Grouping, adjusted_rand, by_group, groups_of, terciles

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "thirds"),
    [
        ([30, 10, 20], [2, 0, 1]),
        ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 2]),
        ([1, 2, 3, 4, 5], [0, 0, 1, 2, 2]),
        ([4, 4, 4, 4], [1, 1, 1, 1]),
        ([1, 1, 1, 9], [1, 1, 1, 2]),  # equal ones stay together
        ([NAN, 10, 30, NAN, 20], [-1, 0, 2, -1, 1]),
        ([7], [1]),
        ([NAN], [-1]),
        ([], []),
    ],
)
def test_terciles(values, thirds):
    assert terciles(values).tolist() == thirds


def test_groups_have_names():
    groups = groups_of([50, 10, 90], entropy=[0.1, 2.0, 1.0], planted=[4, 0, 4])
    assert {name: [grouping.names[index] for index in grouping.member] for name, grouping in groups.items()} == {
        "size": ["medium", "small", "large"],
        "label entropy": ["low", "high", "medium"],
        "planted": ["group 4", "group 0", "group 4"],
    }
    assert list(groups_of([1, 2], [1, 2], [1, 2])) == ["size", "label entropy", "label divergence"]


def test_by_group_leaves_out_who_has_no_score():
    grouping = groups_of([10, 20, 30, 40, 50, 60])["size"]
    scores = by_group([0.25, 0.75, NAN, NAN, 0.5, NAN], grouping)
    assert scores == {"small": (0.5, 0.25, 2), "large": (0.5, 0.5, 1)}
    assert scores["small"].clients == 2
    assert by_group([1.0, 3.0, *[NAN] * 4], grouping, higher_is_better=False)["small"].worst == 3.0


def test_a_client_that_is_in_no_group_counts_in_none():
    grouping = Grouping(("low", "medium", "high"), terciles([NAN, 1, 2]))
    assert by_group([0.9, 0.5, 0.7], grouping) == {"low": (0.5, 0.5, 1), "high": (0.7, 0.7, 1)}


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [
        ([0, 0, 1, 1], [7, 7, 2, 2], 1.0),  # names do not matter
        ([0, 0, 1, 1], [0, 0, 1, 2], 4 / 7),  # 1 pair in both, 2 and 1 of 6: (1 - 1/3) / (3/2 - 1/3)
        ([0, 0, 1, 1], [0, 1, 0, 1], -1 / 2),  # none in both, 2 and 2 of 6: (0 - 2/3) / (2 - 2/3)
        ([0, 0, 0, 0], [0, 0, 1, 1], 0.0),
        ([0, 0, 1, 1, -1], [3, 3, 5, 5, 3], 1.0),  # who is in none is left out
        ([0, 0, 0], [4, 4, 4], 1.0),
        ([0, 1, 2], [2, 0, 1], 1.0),
        ([-1, -1], [0, 1], 1.0),
    ],
)
def test_agreement_of_partitions(one, other, index):
    assert adjusted_rand(one, other) == pytest.approx(index, abs=1e-15)
    assert adjusted_rand(other, one) == pytest.approx(index, abs=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_agreement_is_that_of_scikit_learn(seed):
    one, other = generator(seed, "test").integers(6, size=(2, 40))
    assert adjusted_rand(one, other) == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)
