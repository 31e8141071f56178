"""Splits that tear nothing apart, and leaks that are found and said."""

import logging

import numpy as np
import pytest

from atoll.data import own
from atoll.data.leaks import find_overlaps_within, nearest
from atoll.data.splits import SHARES, SPLITS, Cut, Rule, cut_by_rule
from atoll.data.task import Task
from atoll.kernel.errors import DataError, TaskError
from atoll.kernel.randomness import generator


def windows_of(samples=60, length=32, step=16, channels=3, seed=0):
    """Windows of one recording, each overlapping the next by `length` - `step` steps."""
    signal = generator(seed, "signal").normal(size=(channels, step * samples + length))
    return np.stack([signal[:, start : start + length] for start in range(0, step * samples, step)])


def recording(seed=0, **words):
    x = windows_of(seed=seed, **words)
    count = len(x)
    return {"x": x, "y": np.arange(count) // 10 % 2, "bout": np.arange(count) // 10, "time": np.arange(count)}


PERSONS = {f"person {seed}": recording(seed) for seed in range(3)}


def shared_with_training(task, x, split="test"):
    """Count by hand the test windows that hold a value of a training window."""
    known = set(x[task.splits["train"].order.numpy()].reshape(-1).tolist())
    return sum(bool(known & set(row.reshape(-1).tolist())) for row in x[task.splits[split].order.numpy()])


def test_overlapping_windows_are_counted_as_by_hand_and_said(caplog):
    x = np.concatenate([person["x"] for person in PERSONS.values()])
    with caplog.at_level(logging.WARNING):
        task = Task.own(PERSONS, features=["x"])
    shared, tested = shared_with_training(task, x), len(task.splits["test"].order)
    assert 0 < shared <= tested
    sentence = f"{shared} of {tested} test windows share raw values with a training window."
    assert task.facts["leaks"] == sentence
    assert sentence in caplog.text
    assert "split by `group`, or by `order` with a `gap`" in caplog.text


def test_a_split_in_time_with_a_gap_shares_nothing(caplog):
    x, shares = np.concatenate([person["x"] for person in PERSONS.values()]), (0.75, 0.0, 0.25)
    task = Task.own(PERSONS, features=["x"], order="time", gap=1, shares=shares)
    assert shared_with_training(task, x) == 0
    assert "leaks" not in task.facts
    assert not caplog.records
    touching = Task.own(PERSONS, features=["x"], order="time", shares=shares)  # windows at the borders overlap
    assert shared_with_training(touching, x) == 3
    assert touching.facts["leaks"].startswith("3 of 45 test windows")


def test_the_past_trains_and_the_future_tests():
    task = Task.own(PERSONS, features=["x"], order="time", gap=2)
    time = np.concatenate([person["time"] for person in PERSONS.values()])
    for client in range(3):
        train, val, test = (
            time[split.order[split.offsets[client] : split.offsets[client + 1]].numpy()]
            for split in task.splits.values()
        )
        assert train.max() + 2 < val.min()
        assert val.max() + 2 < test.min()


def test_dates_order_samples_too():
    days = [
        "2026-01-03",
        "2026-01-01",
        "2026-02-01",
        "2025-12-31",
        "2026-01-02",
        "2026-03-01",
        "2026-03-02",
        "2026-03-03",
    ]
    client = {"v": list(range(8)), "day": days, "y": [0, 1] * 4}
    task = Task.own({"a": client, "b": client}, order="day", shares=(0.5, 0.25, 0.25), standardise="none")
    assert sorted(task.x[task.splits["train"].order[:4], 0].tolist()) == [0, 1, 3, 4]
    with pytest.raises(DataError, match="Column `day` must hold numbers, or dates of one form. Got 'soon' in row 7"):
        Task.own({"a": {**client, "day": [*days[:-1], "soon"]}}, order="day")


def test_no_group_is_on_both_sides_even_of_different_clients():
    draw = generator(0, "groups")
    clients = {
        name: {
            "v": draw.normal(size=90),
            "patient": [f"p{number}" for number in draw.integers(0, 20, size=90)],
            "y": draw.integers(0, 3, size=90),
        }
        for name in "abc"  # a patient may have been at several of them
    }
    for seed in range(3):
        task = Task.own(clients, group="patient", seed=seed)
        patients = np.concatenate([client["patient"] for client in clients.values()])
        sides = [{*patients[split.order.numpy()].tolist()} for split in task.splits.values()]
        assert sum(map(len, sides)) == len(set().union(*sides))
        shares = np.array([len(split.order) for split in task.splits.values()]) / 270
        assert np.abs(shares - (0.6, 0.15, 0.25)).max() < 0.12
        assert len(np.concatenate([split.order.numpy() for split in task.splits.values()])) == 270
        assert "leaks" not in task.facts  # rows of one number are near another by chance


def test_groups_that_each_client_numbers_for_itself_are_not_the_same():
    task = Task.own(PERSONS, features=["x"], group="bout")
    sides = []
    for client in range(3):
        test = task.splits["test"]
        rows = test.order[test.offsets[client] : test.offsets[client + 1]].numpy()
        sides.append(tuple(sorted({*(rows % 60 // 10).tolist()})))
    assert len({*sides}) > 1


def test_whole_groups_are_dealt_by_their_samples():
    group = np.repeat(np.arange(40), 5)
    rows = [np.arange(200)]
    cut = cut_by_rule(Rule(group=group), rows, rows, Cut(), seed=0)
    for name, share in zip(SPLITS, SHARES, strict=True):
        assert len(cut[name].order) / 200 == pytest.approx(share, abs=0.05)


def test_a_client_with_one_group_trains_and_one_with_two_is_tested():
    one, two = np.zeros(6, dtype=np.int64), np.array([1, 1, 1, 2, 2, 2])
    rows = [np.arange(6), np.arange(6, 12)]
    cut = cut_by_rule(Rule(group=np.concatenate([one, two])), rows, rows, Cut(), seed=0)
    assert cut["train"].offsets.tolist() == [0, 6, 9]
    assert cut["test"].offsets.tolist() == [0, 0, 3]


def test_a_client_whose_groups_leave_none_to_test_is_named():
    stays = {"age": [61, 62, 63, 64], "back": [0, 1, 0, 1]}
    with pytest.raises(TaskError, match=r"at least 1 test sample. 1 of 2 have none, the first is client ulm\."):
        Task.own(
            {"ulm": {**stays, "patient": [1, 1, 1, 1]}, "porto": {**stays, "patient": [2, 3, 4, 5]}},
            target="back", group="patient",
        )  # fmt: skip


def test_rows_that_nearly_repeat_across_the_split_are_said():
    draw = generator(0, "twins")
    age, pressure = draw.normal(50, 10, 60), draw.normal(120, 15, 60)
    twice = {"age": np.tile(age, 2), "pressure": np.tile(pressure, 2) + np.repeat([0, 0.001], 60), "y": [0, 1] * 60}
    task = Task.own({"a": twice})
    train, test = (task.splits[name].order.numpy() % 60 for name in ("train", "test"))
    assert (
        task.facts["leaks"]
        == f"{np.isin(test, train).sum()} of {len(test)} test samples nearly repeat a training sample."
    )
    case = np.tile(np.arange(60), 2)
    assert "leaks" not in Task.own({"a": {**twice, "case": case}}, group="case").facts


def test_tables_of_few_values_repeat_by_themselves():
    draw = generator(0, "few")
    client = {
        "ward": draw.choice(["east", "west"], 80),
        "smoker": draw.random(80) < 0.5,
        "y": draw.integers(2, size=80),
    }
    assert "leaks" not in Task.own({"a": client}).facts


def test_steady_signals_are_no_overlap():
    x = np.zeros((20, 2, 32))  # a sensor that was off
    x += generator(0, "offset").normal(size=(20, 2, 1))
    schema = own.find_schema_of({"a": (x, [0, 1] * 10)})
    assert not find_overlaps_within(schema, x).any()
    assert find_overlaps_within(schema, windows_of(channels=2)).all()


def test_the_nearest_point_is_found_in_many_dimensions():
    points = generator(0, "points").normal(size=(300, 200))
    points[250] = points[10] + 0.001
    near, distance = nearest(points, points, apart=True)
    assert near[250] == 10
    assert near[10] == 250
    assert (near >= 0).sum() == 2
    assert distance[10] == pytest.approx(0.001)


def test_the_server_takes_nothing_where_groups_must_stay_whole():
    with pytest.raises(TaskError, match="`central` and `public` must be 0 where `group`"):
        Task.own(PERSONS, features=["x"], group="bout", central=0.2)


def test_a_split_column_decides_and_its_words_are_checked():
    client = {"v": [1.0, 2, 3, 4], "fold": ["train", "Training", "validation", "test"], "y": [0, 1, 0, 1]}
    task = Task.own({"a": client}, split="fold")
    assert [split.order.tolist() for split in task.splits.values()] == [[0, 1], [2], [3]]
    with pytest.raises(DataError, match="Column `fold` must hold train, val or test. Got 'tst' in row 3"):
        Task.own({"a": {**client, "fold": ["train", "train", "val", "tst"]}}, split="fold")
