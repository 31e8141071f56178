import itertools

import numpy as np
import pytest

from atoll.data.splits import SHARES, SPLITS, Cut, Rule, Shares, cut_by_rule, cut_splits, deal_turns, measure_flattery
from atoll.kernel.errors import TaskError
from atoll.kernel.randomness import generator

ALL_SHARES: list[Shares] = [
    SHARES, (0.75, 0.0, 0.25), (1.0, 0.0, 0.0), (1 / 3, 1 / 3, 1 / 3), (0.1, 0.0, 0.9), (0.1, 0.45, 0.45),
    (0.9, 0.05, 0.05), (128 / 469, 64 / 469, 277 / 469),
]  # fmt: skip


def dealt(sizes=(1, 2, 3, 7, 40, 153), classes=4):
    """Clients of these sizes with ascending samples, and the label of every sample; some classes are rare."""
    draw = generator(0, "test of splits")
    labels = draw.choice(classes, size=sum(sizes), p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), labels.astype(np.int64)


def cut(parts, how=SHARES, labels=None, gap=None, seed=0):
    """The samples of each client by split: [client][split]; `how` is a cut, or shares at random."""
    splits = cut_splits(parts, how if isinstance(how, Cut) else Cut(how), labels, gap, seed)
    assert list(splits) == list(SPLITS)
    return by_client(parts, splits)


def by_client(parts, splits):
    return [
        [split.order[split.offsets[k] : split.offsets[k + 1]].numpy() for split in splits.values()]
        for k in range(len(parts))
    ]


# -- the pattern -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", ALL_SHARES)
def test_after_every_sample_all_splits_have_their_share(shares):
    turns = deal_turns(shares, 1000)
    have = np.cumsum(turns[:, None] == np.arange(3), axis=0)
    assert (np.abs(have - np.arange(1, 1001)[:, None] * np.array(shares)) < 1).all()
    assert turns[0] == 0


def test_the_pattern_of_the_usual_shares_by_hand():
    # how far train, val and test are behind, from the third place on: .8 .45 -.25, .4 .6 0, 1 -.25 .25
    assert deal_turns(SHARES, 5).tolist() == [0, 2, 0, 1, 0]


@pytest.mark.parametrize("shares", [shares for shares in ALL_SHARES if shares[2] > 0])
def test_two_samples_are_one_to_train_and_one_to_test(shares):
    assert deal_turns(shares, 2).tolist() == [0, 2]


# -- at random ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stratify", [True, False])
@pytest.mark.parametrize("shares", ALL_SHARES)
def test_every_sample_is_in_one_split_and_every_client_can_train(shares, stratify):
    parts, labels = dealt()
    for part, pieces in zip(parts, cut(parts, Cut(shares, stratify), labels), strict=True):
        assert sorted(np.concatenate(pieces)) == part.tolist()
        assert len(pieces[0]) >= 1
        for piece, share in zip(pieces, shares, strict=True):
            # class by class, a pattern is read from a drawn turn on: two ends, each off by less than one sample
            assert abs(len(piece) - share * len(part)) < (2 if stratify else 1)
            assert len(piece) == 0 or share > 0


@pytest.mark.parametrize("sizes", [8, 12, 17, 30])
@pytest.mark.parametrize("how", [Cut(), Cut(folds=5, number=3)], ids=["held out", "folds"])
def test_train_validation_and_test_have_the_same_base_rate(sizes, how):
    """With all clients alike, no split is richer in a class, and a client's test rate tells nothing of its training."""
    draw = generator(0, "base rates")
    labels = (draw.random(600 * sizes) < 0.3).astype(np.int64)
    parts = np.split(np.arange(len(labels)), 600)
    means = [[labels[piece].mean() for piece in pieces] for pieces in cut(parts, how, labels) if all(map(len, pieces))]
    train, val, test = np.array(means).T
    pooled = [np.mean(np.concatenate([labels[one[index]] for one in cut(parts, how, labels)])) for index in range(3)]
    assert np.abs(np.array(pooled) - 0.3).max() < 0.03
    assert abs(val.mean() - test.mean()) < 0.06
    # without replacement: what trains does not test
    assert -0.3 < np.corrcoef(train, test)[0, 1] < 0.08


def test_class_by_class_a_clients_test_rate_is_its_training_rate():
    """What flatters personal models, and why it has to be asked for."""
    draw = generator(0, "base rates")
    labels = (draw.random(600 * 30) < 0.3).astype(np.int64)
    parts = np.split(np.arange(len(labels)), 600)
    found = [[labels[piece].mean() for piece in pieces] for pieces in cut(parts, Cut(stratify=True), labels)]
    train, val, test = np.array(found).T
    assert np.corrcoef(train, test)[0, 1] > 0.6
    assert abs(val.mean() - test.mean()) < 0.06  # the order of classes and the first turn are drawn


def test_how_far_a_cut_class_by_class_flatters_by_hand():
    # 30 samples, 9 of class 1: p (1 - p) (1/30 + 1/18), and nothing where there is one class
    labels = np.array([1] * 9 + [0] * 21 + [0] * 10)
    assert measure_flattery([np.arange(30)], labels, SHARES) == pytest.approx(0.21 * (1 / 30 + 1 / 18))
    assert measure_flattery([np.arange(30), np.arange(30, 40)], labels, SHARES) == pytest.approx(0.0186666667 / 2)


def test_which_samples_are_for_training_is_drawn():
    trained = {tuple(sorted(cut([np.arange(40)], seed=seed)[0][0])) for seed in range(5)}
    assert len(trained) == 5
    assert tuple(range(24)) not in trained


def test_the_same_seed_gives_the_same_splits_and_another_does_not():
    parts, labels = dealt()

    def orders(seed):
        return [split.order.tolist() for split in cut_splits(parts, Cut(), labels, None, seed).values()]

    assert orders(3) == orders(3)
    assert orders(3) != orders(4)


def test_a_client_is_cut_alike_whoever_the_others_are():
    parts, labels = dealt()
    alone = cut([parts[0], parts[1], np.arange(0), parts[3]], labels=labels)
    for one, other in zip(alone[3], cut(parts, labels=labels)[3], strict=True):
        assert one.tolist() == other.tolist()


def test_samples_that_two_clients_share_are_cut_for_each():
    ((train, val, test), (train_2, val_2, test_2)) = cut([np.arange(20), np.arange(20)])
    assert sorted([*train, *val, *test]) == sorted([*train_2, *val_2, *test_2]) == list(range(20))
    assert sorted(train) != sorted(train_2)


def test_a_client_without_samples_has_none_in_any_split():
    for gap, labels in itertools.product((None, 1), (None, np.zeros(4, dtype=np.int64))):
        assert [len(piece) for piece in cut([np.arange(0), np.arange(4)], labels=labels, gap=gap)[0]] == [0, 0, 0]


# -- in time order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("shares", ALL_SHARES)
def test_splits_follow_each_other_in_time_with_a_gap(shares, with_labels, gap):
    parts, labels = dealt()
    classes = labels if with_labels else np.zeros_like(labels)
    for part, pieces in zip(parts, cut(parts, shares, labels if with_labels else None, gap), strict=True):
        assert len(pieces[0]) >= 1
        for label in range(4):
            run = part[classes[part] == label]
            places = [np.flatnonzero(np.isin(run, piece)) for piece in pieces]
            before = -1
            for index, place in enumerate(places):
                if len(place):
                    assert place.tolist() == [*range(place[0], place[-1] + 1)]
                    assert place[0] > before + (gap if index else 0)
                    before = place[-1]
            # what the same run has without a gap, less the gap before each of the two later splits
            whole = cut([run], shares, gap=0)[0] if len(run) else []
            wanted = sum(min(gap, len(piece)) for piece in whole[1:])
            assert len(run) - sum(map(len, places)) == wanted


def test_time_order_by_hand():
    labels = np.array([0, 1] * 10)  # ten of each: 6, 2 and 2
    ((train, val, test),) = cut([np.arange(20)], (0.6, 0.2, 0.2), labels, gap=1)
    assert train.tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    assert val.tolist() == [14, 15]  # 12 and 13 are left out
    assert test.tolist() == [18, 19]  # 16 and 17 are left out


def test_time_order_does_not_depend_on_the_seed():
    parts, labels = dealt()
    for one, other in zip(cut(parts, labels=labels, gap=1), cut(parts, labels=labels, gap=1, seed=9), strict=True):
        assert [piece.tolist() for piece in one] == [piece.tolist() for piece in other]


# -- in folds ----------------------------------------------------------------------------------------------------------


def test_every_sample_is_tested_once_and_validates_once_in_a_repeat():
    parts, _ = dealt(sizes=(5, 7, 40))
    folds = [cut(parts, Cut(folds=5, number=number)) for number in range(5)]
    for client, part in enumerate(parts):
        for split in (1, 2):
            assert sorted(np.concatenate([fold[client][split] for fold in folds])) == part.tolist()
        for one, following in zip(folds, [*folds[1:], folds[0]], strict=True):
            assert sorted(one[client][1]) == sorted(following[client][2])  # what validates is tested next
            assert sorted(np.concatenate(one[client])) == part.tolist()


def test_folds_by_hand():
    # seven samples from fold 3 on: 3 4 0 1 2 3 4
    turns = Cut(folds=5)
    assert turns.side_of(np.array([3, 4, 0, 1, 2, 3, 4])).tolist() == [0, 0, 2, 1, 0, 0, 0]
    assert Cut(folds=5, number=8).side_of(np.array([3, 4, 0, 1, 2, 3, 4])).tolist() == [2, 1, 0, 0, 0, 2, 1]


def test_a_client_of_two_samples_trains_on_one_and_tests_the_other():
    for number in range(5):
        ((train, val, test),) = cut([np.arange(2)], Cut(folds=5, number=number))
        assert (len(train), len(val), len(test)) in {(1, 0, 1), (2, 0, 0), (1, 1, 0)}


def test_repeats_deal_anew_and_small_clients_begin_at_drawn_folds():
    parts = [np.arange(40)] * 12
    first, second = (cut(parts, Cut(folds=5, number=number)) for number in (0, 5))
    assert sorted(first[0][2]) != sorted(second[0][2])
    begun = {
        len(cut([np.arange(1)] * 30, Cut(folds=5, number=number))[client][2])
        for number in range(5)
        for client in range(30)
    }
    assert begun == {0, 1}


def test_groups_stay_whole_in_folds_and_each_is_tested_once():
    group = np.repeat(np.arange(9), [1, 2, 3, 4, 5, 6, 7, 8, 9])
    parts, tested = [np.arange(45)], []
    for number in range(3):
        splits = cut_by_rule(Rule(group=group), parts, parts, Cut(folds=3, number=number), 0)
        train, val, test = (set(group[piece].tolist()) for piece in by_client(parts, splits)[0])
        assert not (train & val) | (train & test) | (val & test)
        tested += sorted(test)
        assert 10 <= len(by_client(parts, splits)[0][2]) <= 20
    assert sorted(tested) == [*range(9)]


def test_validation_and_test_groups_are_drawn_alike():
    """The largest groups no longer go first, so validation is as hard as test."""
    group = np.repeat(np.arange(12), 5)
    labels = (group % 3 == 0).astype(np.int64)
    parts = [np.arange(60)]
    means = []
    for seed in range(400):
        (pieces,) = by_client(parts, cut_by_rule(Rule(group=group), parts, parts, Cut((0.5, 0.25, 0.25)), seed))
        means.append([labels[piece].mean() for piece in pieces])
    assert np.abs(np.mean(means, axis=0) - 1 / 3).max() < 0.03


# -- what must hold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.5, 0.5), (1.2, -0.2, 0.0), (float("nan"), 0.5, 0.5)])
def test_shares_must_be_three_that_sum_to_one(shares):
    with pytest.raises(TaskError, match=r"`shares` must be three shares \(train, val, test\) that sum to 1. Got"):
        Cut(shares)


def test_something_must_be_trained_on():
    with pytest.raises(TaskError, match=r"The share of training samples must be above 0. Got \(0.0, 0.5, 0.5\)"):
        Cut((0.0, 0.5, 0.5))


@pytest.mark.parametrize("folds", [1, 2, -5])
def test_there_must_be_three_folds(folds):
    with pytest.raises(TaskError, match=f"`folds` must be at least 3: one for testing.*Got {folds}"):
        Cut(folds=folds)


def test_folds_are_not_cut_class_by_class():
    with pytest.raises(TaskError, match="Folds are dealt at random, so `stratify` must be left out"):
        Cut(folds=5, stratify=True)
