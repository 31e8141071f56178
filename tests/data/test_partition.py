import numpy as np
import pytest
import torch

from atoll.data.partition import (
    WORDS,
    Dirichlet,
    Fafi,
    FafiDisjoint,
    Iid,
    LabelsEach,
    LogNormal,
    Natural,
    Pathological,
    PFLlib,
    PowerLaw,
    Priors,
    Quantity,
    Shards,
    Shifted,
    meanings,
    names,
    parse,
)
from atoll.data.shift import Concept, Noise, Rotation
from atoll.kernel.errors import PartitionError, UnknownName

LABELS = np.repeat(np.arange(10), 200)
OWNERS = np.arange(2000) % 30
CIFAR10 = np.repeat(np.arange(10), 5000)
SVHN = np.repeat(np.arange(10), [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659])
MNIST = np.repeat(np.arange(10), [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])  # train and test

PARTITIONS = [
    Iid(),
    Dirichlet(0.3),
    Dirichlet(0.1, balanced=True),
    Dirichlet(1e3),
    PFLlib(0.1, min_samples=10),
    Pathological(2),
    Pathological(3, equal=True),
    LabelsEach(2),
    LabelsEach(10),
    Shards(2),
    Priors(0.5),
    Quantity(1.0),
    PowerLaw(1.0),
    LogNormal(1.0),
    Natural(),
    Fafi(0.3),
    FafiDisjoint(0.5),
    Shifted(Dirichlet(0.3), (Rotation(4),)),
    Shifted(Fafi(0.3), (Concept(2),)),
]


def rng(seed=0):
    return np.random.default_rng(seed)


def of(partition):
    """What this partition wants to know of every sample."""
    return OWNERS if partition.reads == "owners" else LABELS


def counts_of(parts, labels=LABELS):
    """Clients by classes."""
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def test_every_kind_of_partition_is_tested():
    tried = {type(getattr(each, "partition", each)) for each in PARTITIONS}
    assert {type(parse(word.example or name)) for name, word in WORDS.items()} <= tried


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_every_sample_is_dealt_once_unless_the_partition_says_otherwise(partition):
    parts = partition.split(of(partition), 20, rng())
    assert len(parts) == 20
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    once = np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert once == partition.exact


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_same_generator_same_parts(partition):
    first, second, other = (partition.split(of(partition), 10, rng(seed)) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, second))
    if not getattr(partition, "equal", False):  # which draws nothing
        assert not all(map(np.array_equal, first, other))


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_the_order_of_samples_does_not_matter_to_the_sizes(partition):
    mixed = rng(5).permutation(len(LABELS))
    sorted_, shuffled = (partition.split(of(partition)[order], 20, rng()) for order in (np.arange(2000), mixed))
    assert list(map(len, sorted_)) == list(map(len, shuffled))


@pytest.mark.parametrize("partition", [each for each in PARTITIONS if each.reads == "labels"], ids=str)
def test_labels_are_dealt_to_a_number_of_clients(partition):
    for clients in (None, 0, -1):
        with pytest.raises(PartitionError, match=rf"at least 1 client\. Got {clients} instead"):
            partition.split(LABELS, clients, rng())


@pytest.mark.parametrize(
    "partition", [Dirichlet(1.0), PFLlib(1.0), Shards(2), LabelsEach(1), Pathological(1), Fafi(1.0)]
)
@pytest.mark.parametrize("targets", [np.linspace(0, 1, 2000), np.zeros((2000, 5), dtype=np.int64)])
def test_what_deals_by_class_needs_one_class_per_sample(partition, targets):
    with pytest.raises(PartitionError, match="must have one class per sample to deal by") as caught:
        partition.split(targets, 5, rng())
    assert str(caught.value).endswith("hint: use iid, quantity, powerlaw, lognormal or natural.")


@pytest.mark.parametrize("partition", [Iid(), Quantity(1.0), PowerLaw(1.0), LogNormal(1.0)])
def test_the_others_deal_numbers_as_well(partition):
    assert sum(map(len, partition.split(np.linspace(0, 1, 2000), 5, rng()))) == 2000


# -- iid and Dirichlet -------------------------------------------------------------------------------------------------


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


# -- PFLlib and NIID-Bench ---------------------------------------------------------------------------------------------


def test_pfllib_gives_the_table_of_its_readme():
    # The output of `generate_MNIST.py noniid - dir` that PFLlib's README shows, clients 0 to 2 and all sizes.
    counts = counts_of(parse("pfllib:0.1:1").split(MNIST, 20, rng()), MNIST)
    assert counts[:3].tolist() == [
        [140, 890, 0, 0, 1, 319, 0, 29, 1067, 184],
        [5, 0, 27, 0, 0, 19, 335, 0, 6, 107],
        [3, 0, 0, 143, 0, 0, 1461, 0, 0, 23],
    ]
    sizes = [2630, 499, 1630, 2541, 1917, 6189, 1256, 1269, 3600, 4006]
    sizes += [3116, 3772, 3613, 2134, 5730, 5448, 3628, 5653, 5266, 6103]
    assert counts.sum(1).tolist() == sizes


def test_the_seed_decides_instead_of_the_generator():
    for text in ("pfllib:0.1", "pathological:2", "niid-bench:0.5"):
        first, second = (parse(f"{text}:1").split(LABELS.repeat(3), 10, rng(seed)) for seed in (1, 2))
        assert all(map(np.array_equal, first, second))
    first, second = (parse("fafi:0.1:1").split(LABELS, 10, rng(seed)) for seed in (1, 2))
    assert np.array_equal(counts_of(first), counts_of(second))


def test_pfllib_stops_clients_at_their_fair_share():
    sizes = [len(part) for part in PFLlib(0.1, min_samples=1).split(LABELS, 10, rng())]
    assert max(sizes) < 200 + 200


def test_pfllib_ends():
    with pytest.raises(PartitionError, match="In 1000 draws the smallest client never had more than") as caught:
        PFLlib(0.01, min_samples=50).split(LABELS[::4], 10, rng())
    assert caught.value.hint == "raise `alpha`, ask for fewer clients, or lower `min_samples`."


def test_pfllib_survives_shares_of_nothing():
    # With a tiny alpha all of p may fall on clients that are full: such a draw does not count.
    parts = PFLlib(1e-3, min_samples=0).split(LABELS, 10, rng(3))
    assert sum(map(len, parts)) == len(LABELS)


def test_pathological_as_pfllib_neighbours_share_their_classes():
    counts = counts_of(Pathological(2).split(LABELS, 20, rng()))
    held = [np.flatnonzero(row).tolist() for row in counts]
    assert held == [[2 * (client // 4), 2 * (client // 4) + 1] for client in range(20)]
    assert np.all(counts[counts > 0] >= 5)  # a tenth of the even share, 200 / 4
    three = counts.reshape(5, 4, 10)[:, :3]
    assert three[three > 0].max() < 50  # all but the last take less than it
    assert len(set(counts[counts > 0])) > 10


def test_pathological_in_equal_shares():
    counts = counts_of(Pathological(2, equal=True).split(LABELS, 20, rng()))
    assert set(counts[counts > 0]) == {50}


def test_pathological_leaves_no_class_to_nobody():
    with pytest.raises(PartitionError) as caught:
        Pathological(3).split(LABELS, 4, rng())
    assert str(caught.value) == (
        "Pathological(classes=3, equal=False, min_samples=2, seed=None) must deal each of 10 classes to 1 client or "
        "more, each of which gets a sample. Got 4 clients: class number 6, of 200 samples, falls to 0.\n"
        "hint: make clients x classes per client a multiple of 10, or use labels:3."
    )


@pytest.mark.parametrize("classes", [1, 2, 3, 10])
def test_labels_each_has_so_many_classes_in_even_shares(classes):
    counts = counts_of(LabelsEach(classes).split(LABELS, 10, rng()))
    assert np.all((counts > 0).sum(1) == classes)
    assert np.all(np.diag(counts) > 0)  # client k has class k
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1


def test_labels_each_with_fewer_clients_than_classes_uses_all_of_them():
    for seed in range(5):
        assert np.all(counts_of(LabelsEach(3).split(LABELS, 5, rng(seed))).sum(0) == 200)


@pytest.mark.parametrize(("classes", "clients"), [(2, 5), (1, 10), (5, 2), (3, 4)])
def test_just_enough_classes_fall_to_one_client_each(classes, clients):
    """catches: draws that are given up because hardly any gives every class to somebody."""
    for seed in range(5):
        counts = counts_of(LabelsEach(classes).split(LABELS, clients, rng(seed)))
        assert np.all(counts.sum(0) == 200)
        assert np.all((counts > 0).sum(1) == classes)


@pytest.mark.parametrize(("classes", "clients"), [(11, 20), (2, 4)])
def test_labels_each_that_cannot_be(classes, clients):
    with pytest.raises(PartitionError, match=f"enough for each class.*Got 10 classes and {clients} clients"):
        LabelsEach(classes).split(LABELS, clients, rng())


def test_shards_are_cut_from_sorted_labels():
    counts = counts_of(Shards(2).split(LABELS, 100, rng()))
    assert np.all(counts.sum(1) == 20)
    assert np.all((counts > 0).sum(1) <= 2)
    assert (counts > 0).sum(1).mean() > 1.5


def test_a_client_needs_a_sample_for_each_shard():
    with pytest.raises(PartitionError, match="at least 50 samples, 5000 in all. Got 2000"):
        Shards(50).split(LABELS, 100, rng())


def test_priors_have_equal_sizes_and_the_skew_that_was_asked_for():
    mild, strong = (counts_of(Priors(alpha).split(LABELS, 20, rng())) for alpha in (100.0, 0.1))
    assert set(mild.sum(1)) == set(strong.sum(1)) == {100}
    assert (mild.max(1) / 100).mean() < 0.2
    assert (strong.max(1) / 100).mean() > 0.4


def test_priors_with_sizes_that_do_not_divide():
    sizes = counts_of(Priors(0.3).split(LABELS[:1003], 10, rng())).sum(1)
    assert sorted(set(sizes)) == [100, 101]


# -- quantity skew -----------------------------------------------------------------------------------------------------


def test_power_law_sizes():
    sizes = sorted((len(part) for part in PowerLaw(1.0).split(LABELS, 4, rng())), reverse=True)
    assert sizes == pytest.approx([2000 / rank / (1 + 1 / 2 + 1 / 3 + 1 / 4) for rank in (1, 2, 3, 4)], abs=1)


def test_log_normal_sizes():
    labels = np.zeros(1_000_000, dtype=np.int64)
    logs = np.log([len(part) for part in LogNormal(0.5, min_samples=0).split(labels, 1000, rng())])
    assert logs.std() == pytest.approx(0.5, rel=0.05)


def test_quantity_sizes_follow_the_dirichlet_law():
    generator = rng()
    labels = np.zeros(10_000, dtype=np.int64)
    sizes = [[len(part) for part in Quantity(0.5, min_samples=0).split(labels, 4, generator)] for _ in range(1000)]
    assert (np.array(sizes) / 10_000).var() == pytest.approx(0.25 * 0.75 / 3, rel=0.05)


@pytest.mark.parametrize("partition", [Quantity(100.0), PowerLaw(0.1), LogNormal(0.1)])
def test_quantity_skew_leaves_labels_alone(partition):
    counts = counts_of(partition.split(LABELS, 5, rng()))
    assert np.all(counts > 0.5 * counts.mean())


def test_sizes_that_cannot_be():
    with pytest.raises(PartitionError, match="at least 2 of 2000 samples. In 100 draws the smallest") as caught:
        PowerLaw(3.0).split(LABELS, 20, rng())
    assert caught.value.hint == "make the sizes more even, ask for fewer clients, or lower `min_samples`."


# -- natural -----------------------------------------------------------------------------------------------------------


def test_natural_clients_are_owners_in_order():
    parts = Natural().split(np.array([3, 1, 3, 1, 1, 7]), None, rng())
    assert [part.tolist() for part in parts] == [[1, 3, 4], [0, 2]]  # owner 7 has one sample
    assert [part.tolist() for part in Natural(1).split(np.array([3, 1, 3]), None, rng())] == [[1], [0, 2]]


def test_natural_draws_some_owners():
    parts = Natural().split(OWNERS, 12, rng())
    owners = [np.unique(OWNERS[part]) for part in parts]
    assert all(len(owner) == 1 for owner in owners)
    assert np.all(np.diff(np.concatenate(owners)) > 0)
    assert sum(map(len, Natural().split(OWNERS, 30, rng()))) == 2000


def test_natural_has_no_more_clients_than_owners():
    with pytest.raises(PartitionError) as caught:
        Natural(3).split(np.repeat([1, 2, 3], [2, 3, 4]), 3, rng())
    assert str(caught.value) == (
        "Natural(min_samples=3) must find 3 owners with at least 3 samples. Got 2 of 3.\n"
        "hint: ask for fewer clients or lower `min_samples`."
    )
    with pytest.raises(PartitionError, match="must find some owners with at least 9 samples. Got 0 of 3"):
        Natural(9).split(np.repeat([1, 2, 3], [2, 3, 4]), None, rng())
    with pytest.raises(PartitionError, match="at least 1 client. Got 0"):
        Natural().split(OWNERS, 0, rng())


# -- FAFI --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "labels", "sizes"),
    [
        ("fafi:0.05:1", CIFAR10, [30000, 6972, 5894, 24217, 15612]),
        ("fafi:0.1:1", CIFAR10, [25047, 6905, 20723, 25839, 20002]),
        ("fafi:0.3:1", CIFAR10, [19508, 31826, 35794, 22984, 25735]),
        ("fafi:0.5:1", CIFAR10, [39296, 32237, 30057, 36893, 20405]),
        ("fafi:0.05:1", SVHN, [43894, 10449, 11471, 35170, 18162]),
        ("fafi:0.1:1", SVHN, [41943, 10382, 26503, 37047, 23154]),
        ("fafi:0.3:1", SVHN, [33854, 37432, 47058, 33083, 27857]),
        ("fafi:0.5:1", SVHN, [53894, 38979, 40989, 49329, 20002]),
        ("fafi-disjoint:0.05:1", CIFAR10, [15274, 13309, 4729, 9738, 6950]),
        ("fafi-disjoint:0.1:1", CIFAR10, [20268, 13055, 3517, 6549, 6611]),
        ("fafi-disjoint:0.3:1", CIFAR10, [11359, 10198, 10823, 7951, 9669]),
        ("fafi-disjoint:0.5:1", CIFAR10, [11213, 6581, 14602, 10694, 6910]),
    ],
)
def test_fafi_sizes_as_its_logs_have_them(text, labels, sizes):
    mixed = labels[rng().permutation(len(labels))]
    assert [len(part) for part in parse(text).split(mixed, 5, rng())] == sizes


@pytest.mark.parametrize(("alpha", "thousands"), [(0.05, 156), (0.1, 204), (0.3, 297), (0.5, 351)])
def test_fafi_deals_as_many_of_tiny_imagenet_as_its_logs_have(alpha, thousands):
    tiny = np.repeat(np.arange(200), 500)
    assert round(sum(map(len, Fafi(alpha, seed=1).split(tiny, 5, rng()))) / 1000) == thousands


def test_fafi_clients_share_samples():
    parts = Fafi(0.5, seed=1).split(CIFAR10, 5, rng())
    counts = counts_of(parts, CIFAR10)
    assert counts.max() == 5000
    assert (counts == 5000).sum() > 10  # whole classes, more than there are
    assert len(np.intersect1d(parts[0], parts[1])) > 0


# -- with shifts -------------------------------------------------------------------------------------------------------


def test_shifts_are_applied_in_order_to_what_was_dealt():
    x, y = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 2, 0])
    parts = [np.array([2, 3]), np.array([0, 3])]  # sample 3 is dealt twice, sample 1 to nobody
    shifted = Shifted(Iid(), (Concept(2), Concept(2)))
    new_x, new_y, where = shifted.apply(x, y, parts, rng())
    assert [part.tolist() for part in where] == [[0, 1], [2, 3]]
    assert torch.equal(new_x, x[[2, 3, 0, 3]])
    assert new_y.tolist() == [2, 0, 2, 2]
    assert y.tolist() == [0, 1, 2, 0]


def test_groups_of_several_shifts_are_those_alike_in_all():
    assert Shifted(Iid(), (Noise(0.1),)).groups(4) is None
    assert Shifted(Iid(), (Noise(0.1), Rotation(2))).groups(4).tolist() == [0, 1, 0, 1]
    both = Shifted(Iid(), (Rotation(2), Concept(3))).groups(7)
    assert len(set(both.tolist())) == 6
    assert both[0] == both[6]


# -- fields and words --------------------------------------------------------------------------------------------------


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
    with pytest.raises(PartitionError, match="`classes` of LabelsEach must be at least 1. Got 0 instead."):
        LabelsEach(0)
    with pytest.raises(PartitionError, match="`classes` of Pathological must be at least 1. Got -2 instead."):
        Pathological(-2)
    with pytest.raises(PartitionError, match="`shards` of Shards must be at least 1. Got 0 instead."):
        Shards(0)
    with pytest.raises(PartitionError, match="`min_samples` of Natural must be at least 1, or None. Got 0 instead."):
        Natural(0)
    with pytest.raises(
        PartitionError, match="`seed` of PFLlib must be an int in 0 .. 2.32 - 1, or None. Got -1 instead."
    ):
        PFLlib(0.1, seed=-1)
    for wrong, name in (
        (lambda: Quantity(0.0), "beta"),
        (lambda: PowerLaw(-1.0), "exponent"),
        (lambda: LogNormal(0.0), "sigma"),
    ):
        with pytest.raises(PartitionError, match=rf"`{name}` of \w+ must be a float in \(0, inf\)"):
            wrong()


@pytest.mark.parametrize(
    ("text", "partition"),
    [
        ("iid", Iid()),
        ("dirichlet:0.1", Dirichlet(0.1)),
        (" dirichlet:1e+3 ", Dirichlet(1000.0)),
        ("pfllib:0.1", PFLlib(0.1)),
        ("pfllib:0.1:7", PFLlib(0.1, seed=7)),
        ("niid-bench:0.5", PFLlib(0.5, min_samples=10)),
        ("pathological:2", Pathological(2)),
        ("pathological:2:1", Pathological(2, seed=1)),
        ("labels:3", LabelsEach(3)),
        ("shards:2", Shards(2)),
        ("prior:0.5", Priors(0.5)),
        ("quantity:0.5", Quantity(0.5)),
        ("powerlaw:1.2", PowerLaw(1.2)),
        ("lognormal:2", LogNormal(2.0)),
        ("natural", Natural()),
        ("natural:20", Natural(20)),
        ("fafi:0.05:1", Fafi(0.05, seed=1)),
        ("fafi-disjoint:0.05", FafiDisjoint(0.05)),
        ("dirichlet:0.3+noise:0.1", Shifted(Dirichlet(0.3), (Noise(0.1),))),
        ("natural + rotation:4+concept:2", Shifted(Natural(), (Rotation(4), Concept(2)))),
    ],
)
def test_parse(text, partition):
    assert parse(text) == partition


def test_names_and_meanings():
    assert names()[:3] == ["iid", "dirichlet:ALPHA", "pfllib:ALPHA[:SEED]"]
    assert all(name.partition(":")[0].partition("[")[0] in WORDS for name in names())
    assert list(meanings())[: len(names())] == names()
    assert meanings()["…+rotation:G"] == "images of G groups of clients turned by 360/G degrees"


def test_parse_offers_the_nearest_name():
    with pytest.raises(UnknownName) as caught:
        parse("dirichlett:0.1")
    assert str(caught.value) == (
        "Unknown partition 'dirichlett'. Did you mean: dirichlet?\nAvailable: dirichlet, fafi, fafi-disjoint, iid, "
        "labels, lognormal, natural, niid-bench, pathological, pfllib, powerlaw, prior, quantity, shards"
    )
    with pytest.raises(UnknownName, match="Unknown shift 'rotate'. Did you mean: rotation?"):
        parse("iid+rotate:4")


def test_a_shift_is_no_partition():
    with pytest.raises(PartitionError) as caught:
        parse("rotation:4")
    assert str(caught.value) == (
        "A shift must follow a partition. Got 'rotation:4' instead.\nhint: write for example iid+rotation:4."
    )


@pytest.mark.parametrize("text", ["dirichlet", "dirichlet:", "dirichlet:often", "dirichlet:0.1:1"])
def test_parse_wants_an_alpha(text):
    with pytest.raises(PartitionError) as caught:
        parse(text)
    assert str(caught.value) == (
        f"`dirichlet` must be followed by its alpha, a float in (0, inf). Got {text!r} instead.\n"
        "hint: write for example dirichlet:0.1."
    )


@pytest.mark.parametrize("text", ["pfllib:0.1:x", "pfllib:0.1:1:2", "labels:2.5", "labels", "natural:few", "shards:"])
def test_parse_wants_numbers(text):
    with pytest.raises(PartitionError, match="must be followed by .* Got .* instead"):
        parse(text)


def test_parse_wants_nothing_after_iid():
    with pytest.raises(PartitionError, match="`iid` must be written without a value. Got 'iid:3' instead."):
        parse("iid:3")
