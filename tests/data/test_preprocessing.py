"""Scales rest on training samples; a raw row becomes the very numbers that the network was trained on."""

import json

import numpy as np
import pytest
import torch

from atoll.data import own
from atoll.data.preprocessing import Preprocessing, Scaling
from atoll.data.recipe import Recipe
from atoll.data.task import Task
from atoll.kernel.errors import DataError
from atoll.kernel.randomness import generator


def training_rows(task, client):
    split = task.splits["train"]
    return split.order[split.offsets[client] : split.offsets[client + 1]]


def table(count=40, level=0.0, seed=0):
    draw = generator(seed, "table")
    return {
        "age": draw.normal(50 + level, 10, count).tolist(),
        "sex": draw.choice(["F", "M"], count).tolist(),
        "smoker": (draw.random(count) < 0.3).tolist(),
        "y": draw.choice(["no", "yes"], count).tolist(),
    }


TABLES = {"a": table(), "b": table(30, level=20, seed=1)}


def test_each_client_is_scaled_by_its_training_samples_only():
    raw, task = own.read(TABLES), Task.own(TABLES)
    for client in range(2):
        rows = training_rows(task, client)
        mine = raw.x[rows, 0]
        assert task.scaling.mean[client, 0] == pytest.approx(mine.mean().item())
        assert task.scaling.std[client, 0] == pytest.approx(mine.std(correction=0).item())
        assert task.x[rows, 0].mean().item() == pytest.approx(0, abs=1e-6)
    both = torch.cat([training_rows(task, 0), training_rows(task, 1)])
    shared = Task.own(TABLES, standardise="global").scaling
    assert shared.mean.tolist() == [[pytest.approx(raw.x[both, 0].mean().item())]]
    assert Task.own(TABLES, standardise="none").x[:, 0].tolist() == raw.x[:, 0].float().tolist()


def test_test_samples_do_not_change_a_scale():
    task = Task.own(TABLES)
    split = task.splits["test"]
    changed = {name: {**columns, "age": list(columns["age"])} for name, columns in TABLES.items()}
    for row in split.order[: split.offsets[1]].tolist():
        changed["a"]["age"][row] += 1000
    again = Task.own(changed)
    assert np.array_equal(again.scaling.mean, task.scaling.mean)
    assert np.array_equal(again.scaling.std, task.scaling.std)


def test_windows_and_pictures_are_scaled_channel_by_channel():
    draw = generator(0, "windows")
    x = draw.normal(size=(20, 3, 16)) * np.array([1, 100, 0.01])[:, None] + np.array([0, 5, 7])[:, None]
    task = Task.own({"a": (x, [0, 1] * 10)})
    assert task.scaling.mean.shape == (1, 3)
    rows = training_rows(task, 0)
    assert torch.allclose(task.x[rows].mean(dim=(0, 2)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(task.x[rows].std(dim=(0, 2), correction=0), torch.ones(3), atol=1e-4)
    last = Task.own({"a": (x.transpose(0, 2, 1), [0, 1] * 10)})  # time first: the shorter axis counts channels
    assert torch.allclose(last.x, task.x.transpose(1, 2))
    pixels = draw.integers(0, 255, size=(20, 3, 16, 16)).astype(np.uint8)
    pictures = Task.own({"a": (pixels, [0, 1] * 10)})
    assert pictures.scaling.mean.shape == (1, 3)
    assert torch.equal(pictures.preprocessing(0).encode(pixels[3]), pictures.x[3:4])


def test_a_square_has_one_scale_and_a_list_one_per_place():
    draw = generator(0, "squares")
    assert Task.own({"a": (draw.normal(size=(8, 5, 5)), [0, 1] * 4)}).scaling.mean.shape == (1, 1)
    assert Task.own({"a": (draw.normal(size=(8, 5)), [0, 1] * 4)}).scaling.mean.shape == (1, 5)


def test_what_does_not_vary_becomes_zero():
    task = Task.own({"a": {"v": [0.1] * 4, "w": [1, 2, 3, 4], "y": [0, 1, 0, 1]}})
    assert task.x[:, 0].abs().max() < 1e-6


def test_large_values_are_scaled_before_they_lose_digits():
    seconds = [1.7e9 + step for step in range(8)]
    task = Task.own({"a": {"time": seconds, "y": [0, 1] * 4}})
    assert len(task.x[:, 0].unique()) == 8


@pytest.mark.parametrize("how", ["client", "global", "none"])
def test_a_raw_row_becomes_what_the_network_was_trained_on(how):
    task = Task.own(TABLES, standardise=how)
    for client, (name, first) in enumerate((("a", 0), ("b", 40))):
        mine = Preprocessing.of_json(json.loads(json.dumps(task.preprocessing(client).as_json())))
        features = {column: TABLES[name][column] for column in ("age", "sex", "smoker")}
        assert torch.equal(mine.encode(features), task.x[first : first + len(features["age"])])
        row = {column: values[3] for column, values in TABLES[name].items()}
        assert torch.equal(mine.encode(row), task.x[first + 3 : first + 4])
        assert mine.decode(torch.tensor([[0.1, 0.9], [2.0, 1.0]])) == ["yes", "no"]


def test_a_file_is_encoded_like_its_rows(tmp_path):
    for name, columns in TABLES.items():
        rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows))
    task = Task.own(tmp_path)
    assert torch.equal(task.preprocessing(1).encode(tmp_path / "b.csv"), task.x[40:])
    (tmp_path / "new.csv").write_text("age,sex,smoker\n55,X,True\n")
    with pytest.raises(DataError, match=r"`sex` must hold one of F, M. Got 'X' in line 2 of new.csv"):
        task.preprocessing(0).encode(tmp_path / "new.csv")


def test_a_newcomer_finds_its_own_scale():
    task = Task.own(TABLES)
    new = table(25, level=50, seed=2)
    encoded = task.scaling.welcome(new).encode(new)
    assert encoded[:, 0].mean().item() == pytest.approx(0, abs=1e-5)
    shared = Task.own(TABLES, standardise="global").scaling
    assert shared.welcome(new) == shared.of_client(0)


def test_samples_of_the_server_are_scaled_as_by_their_owner():
    task = Task.own(TABLES, central=0.2, seed=3)
    raw = own.read(TABLES)
    found = {
        tuple(np.round(row, 5))
        for client in range(2)
        for row in task.scaling.apply(raw.x.numpy(), np.full(len(raw.x), client)).numpy().astype(float)
    }
    assert {tuple(np.round(row, 5)) for row in task.central[0].numpy().astype(float)} <= found


def test_scales_follow_their_clients():
    task = Task.own({f"c{k}": table(20, level=10 * k, seed=k) for k in range(5)})
    some = task.of(np.array([3, 1]))
    assert some.preprocessing(0) == task.preprocessing(3)
    held = task.hold_out(0.4)
    for part in (held, held.unseen):
        for client, name in enumerate(part.names):
            assert part.preprocessing(client) == task.preprocessing(task.names.index(name))
    again = Scaling.of_json(json.loads(json.dumps(task.scaling.as_json())))
    assert again.of_client(2) == task.preprocessing(2)


def test_other_tasks_have_a_preprocessing_that_changes_nothing():
    task = Recipe("digits", clients=3, samples=200).build()
    plain = task.preprocessing(1)
    assert torch.equal(plain.encode(task.x[:2]), task.x[:2])
    assert plain.classes == tuple("0123456789")


def test_tokens_stay_whole_and_amounts_do_not():
    x = generator(0, "tokens").integers(12, size=(10, 9))
    tokens = Task.own({"a": (x, None)}, kind="tokens")
    assert tokens.x.dtype == torch.int64
    assert tokens.preprocessing(0).encode(x[:, :-1]).dtype == torch.int64
    amounts = Task.own({"a": (x, [0, 1] * 5)})
    assert amounts.x.dtype == torch.float32
    assert torch.equal(amounts.preprocessing(0).encode(x), amounts.x)
