import itertools

import numpy as np
import pytest

from atoll.data.splits import SHARES, SPLITS, Shares, cut_splits, deal_turns
from atoll.kernel.errors import TaskError
from atoll.kernel.randomness import generator

ALL_SHARES: list[Shares] = [
    SHARES, (0.75, 0.0, 0.25), (1.0, 0.0, 0.0), (1 / 3, 1 / 3, 1 / 3), (0.1, 0.0, 0.9), (0.1, 0.45, 0.45),
    (0.05, 0.9, 0.05), (128 / 469, 64 / 469, 277 / 469),
]  # fmt: skip


def dealt(sizes=(1, 2, 3, 7, 40, 153), classes=4):
    """Clients of these sizes with ascending samples, and the label of every sample; some classes are rare."""
    draw = generator(0, "test of splits")
    labels = draw.choice(classes, size=sum(sizes), p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]), labels.astype(np.int64)


def cut(parts, shares=SHARES, labels=None, gap=None, seed=0):
    """The samples of each client by split: [client][split]."""
    splits = cut_splits(parts, shares, labels, gap, seed)
    assert list(splits) == list(SPLITS)
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
    # how far train, val and test are behind, place by place: .6 .15 .25, .2 .3 .5, .8 .45 -.25, .4 .6 0, 1 -.25 .25
    assert deal_turns(SHARES, 5).tolist() == [0, 2, 0, 1, 0]


# -- without a time order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("shares", ALL_SHARES)
def test_every_sample_is_in_one_split_and_every_client_can_train(shares, with_labels):
    parts, labels = dealt()
    for part, pieces in zip(parts, cut(parts, shares, labels if with_labels else None), strict=True):
        assert sorted(np.concatenate(pieces)) == part.tolist()
        assert len(pieces[0]) >= 1
        for piece, share in zip(pieces, shares, strict=True):
            assert abs(len(piece) - share * len(part)) < 1
            assert len(piece) == 0 or share > 0


@pytest.mark.parametrize("shares", ALL_SHARES)
def test_every_class_is_cut_by_the_same_shares(shares):
    parts, labels = dealt()
    for part, pieces in zip(parts, cut(parts, shares, labels), strict=True):
        for label, (piece, share) in itertools.product(range(4), zip(pieces, shares, strict=True)):
            of_class = (labels[part] == label).sum()
            # two ends of a run in the pattern, each off by less than one sample
            assert abs((labels[piece] == label).sum() - share * of_class) < 2


def test_classes_are_cut_more_evenly_than_by_chance():
    part, labels = np.arange(400), np.repeat(np.arange(100), 4)  # every class: two or three of four for training
    ((train, _, _),) = cut([part], labels=labels)
    assert set(np.bincount(labels[train], minlength=100)) == {2, 3}
    ((train, _, _),) = cut([part])
    assert set(np.bincount(labels[train], minlength=100)) > {2, 3}


def test_which_samples_of_a_class_are_for_training_is_drawn():
    part, labels = np.arange(40), np.zeros(40, dtype=np.int64)
    trained = {tuple(sorted(cut([part], labels=labels, seed=seed)[0][0])) for seed in range(5)}
    assert len(trained) == 5
    assert tuple(range(24)) not in trained


def test_the_same_seed_gives_the_same_splits_and_another_does_not():
    parts, labels = dealt()

    def orders(seed):
        return [split.order.tolist() for split in cut_splits(parts, SHARES, labels, None, seed).values()]

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
            whole = cut([run], shares, None, 0)[0] if len(run) else []
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


# -- what must hold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.0, 0.5, 0.5), (0.5, 0.5, 0.5), (1.2, -0.2, 0.0), (float("nan"), 0.5, 0.5)]
)
def test_shares_must_be_three_that_sum_to_one(shares):
    with pytest.raises(TaskError, match=r"`shares` must be three shares \(train, val, test\) that sum to 1. Got"):
        cut_splits([np.arange(5)], shares, None, None, 0)
