import math

import numpy as np
import pytest
import torch

from atoll import Recipe
from atoll.data.shift import WORDS, Colour, Concept, Feature, Missing, Noise, Rotation, WrongLabels, parse, turn
from atoll.kernel.errors import PartitionError, UnknownName

GRADED = [Missing(1.0), WrongLabels(1.0)]  # the second of six clients has a fifth of it
SHIFTS = [Rotation(4), Noise(0.5), *GRADED, Colour(3), Feature(1.0, 2), Concept(3)]


def rng(seed=0):
    return np.random.default_rng(seed)


def images(channels=3, size=6, n=24):
    return torch.from_numpy(rng(9).normal(size=(n, channels, size, size)))


OWNER = np.arange(24) // 4  # six clients with four samples each
Y = torch.arange(24) % 4


def applied(shift, x, y=Y, seed=0):
    return shift.apply(x, y, OWNER, 6, rng(seed))


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_what_was_given_stays_and_the_first_client_too(shift):
    x, y = images(), Y.clone()
    before = x.clone()
    new_x, new_y = applied(shift, x, y)
    assert torch.equal(x, before)
    assert torch.equal(y, Y)
    assert torch.equal(new_x[OWNER == 0], x[OWNER == 0])
    assert torch.equal(new_y[OWNER == 0], Y[OWNER == 0])
    assert new_x.dtype == x.dtype
    changed = (new_x != x).flatten(1).any(1) | (new_y != Y)
    assert torch.all(changed[(5 if shift in GRADED else 1) == OWNER])


@pytest.mark.parametrize("shift", SHIFTS, ids=str)
def test_same_generator_same_samples(shift):
    first, second = (applied(shift, images(), seed=3) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_every_kind_of_shift_is_tested():
    assert {type(parse(word.example.removeprefix("iid+"))) for word in WORDS.values()} == {type(one) for one in SHIFTS}


# -- missing values and wrong labels -----------------------------------------------------------------------------------


def test_values_are_missing_as_often_as_asked():
    x, owner = torch.ones(3000, 40), np.arange(3000) // 1000
    new, _ = Missing(0.4).apply(x, Y, owner, 3, rng())
    gone = [(new[owner == client] == 0).double().mean().item() for client in range(3)]
    assert gone == pytest.approx([0, 0.2, 0.4], abs=0.01)
    assert set(new.unique().tolist()) == {0, 1}


def test_labels_are_wrong_as_often_as_asked_and_all_others_alike():
    y, owner = torch.zeros(9000, dtype=torch.long), np.arange(9000) // 3000
    y[::2] = 3
    _, new = WrongLabels(0.6).apply(torch.zeros(9000, 1), y, owner, 3, rng())
    wrong = [(new != y)[owner == client].double().mean().item() for client in range(3)]
    assert wrong == pytest.approx([0, 0.3, 0.6], abs=0.02)
    others = new[(y == 0).numpy() & (owner == 2)].bincount(minlength=4)[1:] / 1500
    assert others.tolist() == pytest.approx([0.2, 0.2, 0.2], abs=0.03)


def test_with_every_label_wrong_none_is_right():
    _, new = applied(WrongLabels(1.0), images())
    assert not (new == Y)[OWNER == 5].any()


@pytest.mark.parametrize("share", [0, -0.1, 1.1, math.nan])
@pytest.mark.parametrize("shift", [Missing, WrongLabels])
def test_a_share_must_be_one(shift, share):
    with pytest.raises(PartitionError, match=r"float in \(0, 1\]"):
        shift(share)


def test_wrong_labels_spare_the_tests_and_leave_the_split_as_it_is():
    plain, spoilt = (
        Recipe(clients=4, partition=f"iid{shift}").build() for shift in ("+noise:0.1", "+noise:0.1+label-noise:1")
    )
    assert torch.equal(plain.x, spoilt.x)
    for name, split in plain.splits.items():
        assert torch.equal(split.order, spoilt.splits[name].order)
    last = {name: split.of(np.array([3])).order for name, split in plain.splits.items()}
    assert torch.equal(plain.y[last["test"]], spoilt.y[last["test"]])
    for name in ("train", "val"):
        assert not (plain.y[last[name]] == spoilt.y[last[name]]).any()


# -- rotation ----------------------------------------------------------------------------------------------------------


def test_quarter_turns_move_pixels():
    x = images()
    new, _ = applied(Rotation(4), x)
    for client, quarters in enumerate([0, 1, 2, 3, 0, 1]):
        rows = client * 4 + np.arange(4)
        assert torch.equal(new[rows], torch.from_numpy(np.rot90(x[rows].numpy(), quarters, axes=(2, 3)).copy()))


def test_other_angles_turn_the_same_way():
    x = images()
    assert torch.allclose(turn(x, 90 + 1e-9), x.rot90(1, dims=(2, 3)), atol=1e-6)
    wide = images()[:, :, :, :4]  # not square: half a turn keeps the shape
    assert torch.allclose(turn(wide, 180 + 1e-9), wide.rot90(2, dims=(2, 3)), atol=1e-6)


def test_a_turn_keeps_lengths_in_images_that_are_not_square():
    # A point to the right of the middle is found above it after a quarter turn, as far away in pixels.
    x = torch.zeros(1, 1, 9, 15, dtype=torch.float64)
    x[0, 0, 4, 10] = 1
    new = turn(x, 90 + 1e-9)[0, 0]
    assert new[1, 7] == pytest.approx(1.0, abs=1e-6)


def test_any_angle_turns_counter_clockwise():
    side = torch.linspace(-1, 1, 41, dtype=torch.float64)

    def blob(right, up):
        return torch.exp(-2 * ((side[None] - right) ** 2 + (side[:, None] + up) ** 2))[None, None]

    angle = math.radians(40)
    new, expected = turn(blob(0.4, 0.0), 40), blob(0.4 * math.cos(angle), 0.4 * math.sin(angle))
    middle = (..., slice(10, 31), slice(10, 31))  # away from the edges, where nothing is known
    assert torch.allclose(new[middle], expected[middle], atol=5e-3)
    assert not torch.allclose(new[middle], blob(0.4, 0.0)[middle], atol=5e-2)


def test_quarter_turns_need_square_images():
    with pytest.raises(PartitionError) as caught:
        applied(Rotation(4), images()[:, :, :, :4])
    assert str(caught.value) == (
        "Rotation(count=4) must have square images to turn by 90 degrees. Got 6 x 4.\nhint: use rotation:2."
    )


# -- the others --------------------------------------------------------------------------------------------------------


def test_noise_grows_from_client_to_client():
    x = torch.zeros(6 * 500, 20, dtype=torch.float64)
    owner = np.repeat(np.arange(6), 500)
    new, _ = Noise(2.0).apply(x, torch.zeros(3000), owner, 6, rng())
    levels = [float(new[owner == client].std()) for client in range(6)]
    assert levels == pytest.approx([2.0 * client / 5 for client in range(6)], rel=0.02)


def test_noise_of_a_single_client_is_none():
    new, _ = Noise(2.0).apply(images(), Y, np.zeros(24, dtype=np.int64), 1, rng())
    assert torch.equal(new, images())


def test_colours_are_moved_and_scaled():
    x = images()
    new, _ = applied(Colour(3), x)
    for client in (1, 2):
        rows = client * 4 + np.arange(4)
        gains = new[rows] / x[rows].roll(client, dims=1)
        one = gains[0, :, 0, 0]
        assert torch.allclose(gains, one[:, None, None].expand_as(gains))
        assert torch.all((one >= 0.5) & (one <= 1.5))
        assert len(set(one.tolist())) == 3


def test_grey_images_change_in_contrast():
    x = images(channels=1)
    gains = applied(Colour(2), x)[0] / x
    assert torch.allclose(gains[OWNER % 2 == 1], gains[4, 0, 0, 0])
    assert torch.all(gains[OWNER % 2 == 0] == 1)


def test_features_move_by_class_and_group():
    x = torch.from_numpy(rng(1).normal(size=(24, 5)))
    moved = applied(Feature(2.0, 3), x)[0] - x
    for group in range(3):
        for label in range(4):
            rows = moved[torch.from_numpy(group == OWNER % 3) & (label == Y)]
            assert torch.allclose(rows, rows[0])
    assert len({tuple(row.round(decimals=6).tolist()) for row in moved}) == 1 + 2 * 4


def test_offsets_are_in_units_of_the_samples():
    x = 10 * torch.from_numpy(rng(1).normal(size=(24, 2000)))
    moved = (applied(Feature(2.0, 2), x)[0] - x)[OWNER == 1]
    assert float(moved.std()) == pytest.approx(20, rel=0.03)


def test_concepts_rename_classes():
    x, y = applied(Concept(3), images())
    assert torch.equal(x, images())
    assert y[:12].tolist() == [0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1]
    assert y.dtype == Y.dtype


def test_groups():
    assert Rotation(4).groups(6).tolist() == [0, 1, 2, 3, 0, 1]
    assert Noise(0.1).groups(6) is None


# -- what must hold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [Rotation(7), Colour(7), Concept(7), Feature(1.0, 7)], ids=str)
def test_each_group_has_a_client(shift):
    with pytest.raises(PartitionError, match="at least one client in each group. Got 6 clients"):
        shift.groups(6)


@pytest.mark.parametrize("kind", [Rotation, Colour, Concept, lambda count: Feature(1.0, count)])
def test_one_group_is_none(kind):
    with pytest.raises(PartitionError, match="must be at least 2 groups. Got 1 instead"):
        kind(1)


@pytest.mark.parametrize("kind", [Noise, Feature])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_positive_numbers(kind, value):
    with pytest.raises(PartitionError, match=r"must be a float in \(0, inf\)"):
        kind(value)


@pytest.mark.parametrize("shift", [Rotation(2), Colour(2)], ids=str)
def test_only_images_turn_and_have_colours(shift):
    with pytest.raises(
        PartitionError, match=r"must have images, floats \[n, C, H, W\]. Got torch.float32 of shape \(24, 5\)"
    ):
        applied(shift, torch.zeros(24, 5))


@pytest.mark.parametrize("shift", [Noise(1.0), Feature(1.0, 2)], ids=str)
def test_only_floats_take_offsets(shift):
    with pytest.raises(PartitionError, match="must have samples of floats. Got torch.int64"):
        applied(shift, torch.zeros(24, 5, dtype=torch.int64))


@pytest.mark.parametrize("shift", [Concept(2), Feature(1.0, 2)], ids=str)
@pytest.mark.parametrize("y", [torch.zeros(24), torch.zeros(24, 3, dtype=torch.int64)])
def test_only_classes_are_renamed(shift, y):
    with pytest.raises(PartitionError, match="must have one class per sample. Got targets of type"):
        applied(shift, torch.zeros(24, 5), y)


def test_no_more_concepts_than_classes():
    with pytest.raises(PartitionError, match="must have as many classes as groups, or two groups agree. Got 4 classes"):
        applied(Concept(5), images())


def test_parse():
    assert parse("rotation:4") == Rotation(4)
    assert parse("feature:0.5") == Feature(0.5)
    assert parse("feature:0.5:2") == Feature(0.5, 2)
    with pytest.raises(UnknownName, match="Unknown shift 'color'. Did you mean: colour?"):
        parse("color:3")
    with pytest.raises(
        PartitionError, match="`rotation` must be followed by its number of groups, an int of at least 2"
    ):
        parse("rotation:x")
