import numpy as np
import pytest

from atoll.data.partition import Dirichlet, Iid, names, parse
from atoll.errors import PartitionError, UnknownName

LABELS = np.repeat(np.arange(10), 200)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.3), Dirichlet(0.1, balanced=True), Dirichlet(1e3)])
def test_every_sample_is_dealt_once(partition):
    parts = partition.split(LABELS, 20, rng())
    assert len(parts) == 20
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.3)])
def test_same_generator_same_parts(partition):
    first, second, other = (partition.split(LABELS, 10, rng(seed)) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, second))
    assert not all(map(np.array_equal, first, other))


def test_iid_sizes_differ_by_at_most_one():
    sizes = {len(part) for part in Iid().split(LABELS[:1003], 10, rng())}
    assert sizes == {100, 101}


def test_every_client_has_the_minimum():
    for seed in range(5):
        assert min(map(len, Dirichlet(0.1, min_samples=30).split(LABELS, 10, rng(seed)))) >= 30


def test_small_alpha_gives_few_classes_and_large_alpha_nearly_all():
    def classes(alpha):
        parts = Dirichlet(alpha, min_samples=1).split(LABELS, 10, rng())
        # effective number of classes: exp of the label entropy
        p = np.array([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])
        return np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum(1)).mean()

    assert classes(0.05) < 3
    assert classes(100.0) > 9.5


def test_shares_of_a_class_follow_the_dirichlet_law():
    # A share of Dir(a, ..., a) over K clients has mean 1/K and variance (1/K)(1 - 1/K)/(K a + 1).
    clients, alpha = 4, 0.5
    labels = np.zeros(10_000, dtype=np.int64)
    generator = rng()
    sizes = [
        [len(part) for part in Dirichlet(alpha, min_samples=0).split(labels, clients, generator)] for _ in range(2000)
    ]
    shares = np.array(sizes) / len(labels)
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=0.02)
    assert shares.var() == pytest.approx(0.25 * 0.75 / (4 * 0.5 + 1), rel=0.05)


def test_balanced_clients_stop_at_their_fair_share():
    loose = [len(part) for part in Dirichlet(0.1, min_samples=1).split(LABELS, 10, rng())]
    even = [len(part) for part in Dirichlet(0.1, min_samples=1, balanced=True).split(LABELS, 10, rng())]
    assert np.std(even) < np.std(loose)
    assert max(even) < 200 + 200  # the fair share, and at most one class more


def test_balanced_survives_a_tiny_alpha():
    parts = Dirichlet(1e-6, min_samples=0, balanced=True).split(LABELS, 10, rng())
    assert sum(map(len, parts)) == len(LABELS)


def test_labels_need_not_be_consecutive():
    parts = Dirichlet(1.0).split(np.repeat([3, 7], 100), 4, rng())
    assert sum(map(len, parts)) == 200


def test_impossible_minimum_says_so_at_once():
    with pytest.raises(PartitionError) as caught:
        Dirichlet(0.1).split(LABELS, 201, rng())
    assert str(caught.value) == (
        "Dirichlet(alpha=0.1, min_samples=10, balanced=False, max_tries=100) must leave each of 201 clients "
        "at least 10 samples, 2010 in all. Got 2000.\nhint: ask for fewer clients or lower `min_samples`."
    )


def test_hopeless_draws_end():
    with pytest.raises(PartitionError) as caught:
        Dirichlet(0.01, max_tries=3).split(LABELS, 100, rng())
    assert str(caught.value) == (
        "Dirichlet(alpha=0.01, min_samples=10, balanced=False, max_tries=3) must leave each of 100 clients "
        "at least 10 of 2000 samples. In 3 draws the smallest client never had more than 0.\n"
        "hint: raise `alpha`, ask for fewer clients, lower `min_samples`, or pass `balanced=True`."
    )


def test_iid_refuses_clients_of_one_sample():
    with pytest.raises(PartitionError, match="at least 2 samples"):
        Iid().split(LABELS[:10], 6, rng())


def test_no_clients():
    with pytest.raises(PartitionError, match=r"at least 1 client\. Got 0 instead"):
        Iid().split(LABELS, 0, rng())


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_alpha(alpha):
    with pytest.raises(PartitionError) as caught:
        Dirichlet(alpha)
    assert str(caught.value) == (
        f"`alpha` of Dirichlet must be a float in (0, inf). Got {alpha!r} instead.\n"
        "hint: 0.1 gives each client few classes, 100 is close to iid."
    )


def test_bad_fields():
    with pytest.raises(PartitionError, match="`max_tries` of Dirichlet must be at least 1. Got 0 instead."):
        Dirichlet(0.1, max_tries=0)
    with pytest.raises(PartitionError, match="`min_samples` of Iid must be at least 0. Got -1 instead."):
        Iid(min_samples=-1)


def test_parse_reads_what_names_lists():
    assert parse("iid") == Iid()
    assert parse("dirichlet:0.1") == Dirichlet(0.1)
    assert names() == ["iid", "dirichlet:ALPHA"]


def test_parse_offers_the_nearest_name():
    with pytest.raises(UnknownName) as caught:
        parse("dirichlett:0.1")
    assert str(caught.value) == ("Unknown partition 'dirichlett'. Did you mean: dirichlet?\nAvailable: dirichlet, iid")


@pytest.mark.parametrize("text", ["dirichlet", "dirichlet:", "dirichlet:often"])
def test_parse_wants_an_alpha(text):
    with pytest.raises(PartitionError) as caught:
        parse(text)
    assert str(caught.value) == (
        f"`dirichlet` must be followed by its alpha, a float in (0, inf). Got {text!r} instead.\n"
        "hint: write for example dirichlet:0.1."
    )


def test_parse_wants_nothing_after_iid():
    with pytest.raises(PartitionError, match="`iid` must be written without a value. Got 'iid:3' instead."):
        parse("iid:3")
