import io
import json
import math

import numpy as np
import pytest
from rich.console import Console
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from atoll.data import statistics as module
from atoll.data.partition import Dirichlet
from atoll.data.statistics import Statistics, statistics
from atoll.kernel.errors import DataError
from atoll.report.partition import statistics_table

LABELS = np.array([0, 0, 1, 1, 1, 1, 2, 0])
PARTS = [np.array([0, 1, 2, 3]), np.array([4, 5]), np.array([7, 6])]


def rng(seed=0):
    return np.random.default_rng(seed)


def printed(table, width=160):
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_by_hand():
    found = statistics(LABELS, PARTS, 3)
    assert found.clients == 3
    assert found.samples.tolist() == [4, 2, 2]
    assert found.counts.tolist() == [[2, 2, 0], [0, 2, 0], [1, 0, 1]]
    assert found.present.tolist() == [2, 1, 2]
    assert found.entropy.tolist() == [1.0, 0.0, 1.0]
    assert found.evenness == pytest.approx([1 / math.log2(3), 0, 1 / math.log2(3)])
    # all together: 3/8, 4/8, 1/8
    assert found.variation == pytest.approx([1 / 8, 1 / 2, 1 / 2])
    assert found.feature_distance is None
    assert found.target_mean is None


def test_labels_against_scipy():
    labels = rng().integers(7, size=3000)
    parts = Dirichlet(0.2).split(labels, 20, rng())
    found = statistics(labels, parts, 7)
    p = found.counts / found.counts.sum(1, keepdims=True)
    q = np.bincount(labels, minlength=7) / len(labels)
    assert found.entropy == pytest.approx(entropy(p, base=2, axis=1))
    assert found.divergence == pytest.approx([jensenshannon(row, q, base=2) ** 2 for row in p])
    assert found.variation == pytest.approx(np.abs(p - q).sum(1) / 2)


def test_only_what_was_dealt_counts():
    found = statistics(np.array([0, 1, 2, 2, 2]), [np.array([0]), np.array([1])], 3)
    assert found.counts.sum() == 2
    assert found.variation == pytest.approx([0.5, 0.5])


def test_the_same_labels_everywhere_do_not_diverge():
    found = statistics(np.tile([0, 1, 2], 4), np.split(np.arange(12), 4), 3)
    assert np.all(found.divergence == 0)
    assert np.all(found.variation == 0)
    assert found.evenness == pytest.approx(np.ones(4))


def test_one_label_per_place():
    found = statistics(np.array([[0, 1, 1], [2, 2, -1]]), [np.array([0]), np.array([1])], 3)
    assert found.counts.tolist() == [[1, 2, 0], [0, 0, 2]]
    assert found.samples.tolist() == [1, 1]


def test_a_client_without_samples_has_no_values():
    found = statistics(LABELS, [*PARTS, np.array([], dtype=np.int64)], 3, features=np.arange(8.0))
    assert found.samples[3] == 0
    for name in ("entropy", "divergence", "variation", "feature_distance"):
        assert np.isnan(getattr(found, name)).tolist() == [False, False, False, True]
    assert found.summary["divergence"] == pytest.approx(np.mean(found.divergence[:3]))
    numbers = statistics(np.arange(3.0), [np.arange(3), np.array([], dtype=np.int64)], None)
    assert np.isnan(numbers.target_mean).tolist() == [False, True]


def test_numbers_by_hand():
    found = statistics(np.array([1.0, 3.0, 5.0, 7.0]), [np.array([0, 1]), np.array([2, 3])], None)
    assert found.target_mean.tolist() == [2, 6]
    assert found.target_std.tolist() == [1, 1]
    assert found.target_shift == pytest.approx([-2 / math.sqrt(5), 2 / math.sqrt(5)])
    assert found.summary["target_shift"] == pytest.approx(2 / math.sqrt(5))
    assert found.entropy is None
    constant = statistics(np.ones(4), [np.arange(2), np.arange(2, 4)], None)
    assert constant.target_shift.tolist() == [0, 0]


@pytest.mark.parametrize("block", [1, 2**24])
def test_features_by_hand(block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    # dimension 0: means 1 and 3 around 2, std 1; dimension 1: means 0 and 0; dimension 2 never varies
    features = np.array([[1.0, -1, 9], [1, 1, 9], [3, -1, 9], [3, 1, 9]], dtype=np.float32).reshape(4, 3, 1)
    found = statistics(np.zeros(4, dtype=int), [np.array([1, 0]), np.array([2, 3])], 1, features)
    assert found.feature_distance == pytest.approx([math.sqrt(1 / 2)] * 2)


def test_features_that_never_vary():
    found = statistics(np.zeros(4, dtype=int), [np.arange(2), np.arange(2, 4)], 1, np.ones((4, 2)))
    assert found.feature_distance.tolist() == [0, 0]


def test_chance_moves_the_mean_sample_by_one_over_the_root():
    features = rng().normal(size=(10_000, 50))
    found = statistics(np.zeros(10_000, dtype=int), np.split(np.arange(10_000), 100), 1, features)
    assert found.feature_distance.mean() == pytest.approx(0.1, rel=0.05)


def test_summary():
    found = statistics(LABELS, PARTS, 3)
    # Gini of (2, 2, 4): sum over pairs |a - b| = 8, over 2 * 9 * 8/3
    assert found.summary["gini"] == pytest.approx(8 / 48)
    assert found.summary["effective_classes"] == pytest.approx((2 + 1 + 2) / 3)
    assert {name: found.summary[name] for name in ("clients", "samples", "smallest", "median", "largest")} == {
        "clients": 3, "samples": 8, "smallest": 2, "median": 2, "largest": 4,
    }  # fmt: skip


def test_sentences():
    found = statistics(LABELS, PARTS, 3)
    assert found.sentence == (
        "3 clients with 2 to 4 samples each (median 2, Gini 0.17). On average a client has 1.7 of 3 classes (1.7 "
        "effective) and diverges in its labels from all clients by 0.24 bits of at most 1."
    )
    numbers = statistics(np.array([1.0, 3.0, 5.0, 7.0]), [np.array([0, 1]), np.array([2, 3])], None)
    assert numbers.sentence == (
        "2 clients with 2 to 2 samples each (median 2, Gini 0.00). On average a client has its mean target 0.89 "
        "standard deviations from that of all."
    )


def test_table():
    found = statistics(LABELS, PARTS, 3, features=np.arange(8.0), groups=[0, 1, 0], names=["a", "[b]", "c"])
    lines = printed(statistics_table(found)).splitlines()
    head = " ".join(lines[:2])
    for word in ("client", "group", "samples", "of 3", "divergence", "distance"):
        assert word in head
    assert any(line.split()[:4] == ["[b]", "1", "2", "1"] for line in lines)
    assert any(line.startswith("mean of 3") for line in lines)


def test_a_table_of_many_clients_is_short():
    found = statistics(rng().integers(3, size=500), np.split(np.arange(500), 100), 3)
    text = printed(statistics_table(found))
    assert "mean of 100" in text
    assert "…" in text
    assert len(text.splitlines()) < 40


def test_json_and_back():
    labels = [*PARTS, np.array([], dtype=np.int64)]
    found = statistics(LABELS, labels, 3, features=rng().normal(size=(8, 2)), groups=[0, 1, 0, 1], names="abcd")
    again = Statistics.of_json(json.loads(json.dumps(found.as_json(), allow_nan=False)))
    assert again.classes == 3
    assert again.names == ("a", "b", "c", "d")
    for name in ("samples", "counts", "present", "entropy", "divergence", "variation", "feature_distance", "groups"):
        first, second = getattr(found, name), getattr(again, name)
        assert first.dtype == second.dtype
        assert second == pytest.approx(first, abs=1e-6, nan_ok=True)
    assert again.target_mean is None


def test_very_many_counts_stay_out_of_json(monkeypatch):
    found = statistics(LABELS, PARTS, 3)
    assert "counts" in found.as_json()
    monkeypatch.setattr(module, "MOST_COUNTS", 8)
    again = Statistics.of_json(found.as_json())
    assert again.counts is None
    assert again.entropy is not None


@pytest.mark.parametrize("parts", [[], [np.array([], dtype=np.int64)]])
def test_nothing_has_no_statistics(parts):
    with pytest.raises(DataError, match=f"at least 1 client with a sample. Got {len(parts)} clients and no samples"):
        statistics(LABELS, parts, 3)
