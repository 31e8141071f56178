"""Ranking figures and references: by hand, with ties, with sampled items, and on real data."""

import logging
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import Recipe, Task, federate
from atoll.data import datasets, partition
from atoll.data.datasets import Dataset
from atoll.data.download import how_to_get
from atoll.data.own import Own
from atoll.data.partition import Natural
from atoll.data.ranking import expected_gain, expected_sampled_gain, gain_of_hit, gain_of_inverse
from atoll.data.ratings import core, list_interactions
from atoll.kernel.errors import AtollError, DataError, TaskError, UnknownName
from atoll.metrics.recommenders import ease, find_reference, neighbours, popularity, score_reference
from atoll.metrics.recommenders import list_interactions as users_by_items

A, B, C, D, E, F = range(6)
HAND = [[A, B, C, D], [A, D, B, E], [A, B, D, E, C]]  # training, then validation, then test


def by_hand() -> Task:
    rows = [(user, item, time) for user, items in enumerate(HAND) for time, item in enumerate(items)]
    rows.append((9, F, 0))  # only for the number of items: this user has too few
    fields = list_interactions("hand", "a test", *np.array(rows[:-1]).T, fewest=(3, 1))
    return Task.build(Dataset(**{**fields, "classes": 6}), Natural())


def test_popularity_by_hand():
    """Counts are a 3, b 2, d 2, others 0: HR@1 is 11/18 and MRR 0.78704."""
    task = by_hand()
    scores = popularity(users_by_items(task))
    assert scores[0].tolist() == [3, 2, 0, 2, 0, 0]
    assert score_reference(task, scores, "mrr").mean() == pytest.approx(0.78704, abs=1e-5)
    known = users_by_items(task) + users_by_items(task, "val") > 0
    outputs = torch.from_numpy(np.where(known, -np.inf, scores))
    asked = task.y[task.splits["test"].order]
    first = expected_gain(lambda rank: gain_of_hit(rank, 1), outputs, asked)
    assert first.mean().item() == pytest.approx(11 / 18)


def test_a_constant_model_scores_chance():
    outputs = torch.zeros(1, 50)
    assert expected_gain(gain_of_hit, outputs, torch.tensor([7])).item() == pytest.approx(10 / 50)
    assert expected_gain(gain_of_inverse, outputs, torch.tensor([7])).item() == pytest.approx(
        sum(1 / rank for rank in range(1, 51)) / 50
    )


def test_items_that_are_no_candidates_do_not_count():
    outputs = torch.arange(20.0)[None]
    outputs[0, 10:] = -torch.inf
    assert expected_gain(gain_of_inverse, outputs, torch.tensor([8])).item() == pytest.approx(1 / 2)


@pytest.mark.parametrize("tied", [0, 5])
def test_sampled_figures_are_the_mean_over_draws(tied):
    draw = np.random.Generator(np.random.Philox(1))
    outputs = torch.arange(300.0, dtype=torch.float64)[None].clone()
    outputs[0, 280 : 280 + tied] = 280
    outputs[0, :20] = -torch.inf
    asked, others = 280, np.setdiff1d(np.arange(20, 300), [280])
    hits = []
    for _ in range(4000):
        some = outputs[0, draw.permutation(others)[:99]]
        row = torch.cat([outputs[0, [asked]], some])[None]
        hits.append(expected_gain(gain_of_hit, row, torch.tensor([0])).item())
    expected = expected_sampled_gain(gain_of_hit, outputs, torch.tensor([asked])).item()
    assert np.mean(hits) == pytest.approx(expected, abs=4 * np.std(hits) / 4000**0.5 + 1e-9)


def test_sampled_figures_of_few_candidates_are_the_full_ones():
    outputs = torch.arange(30.0, dtype=torch.float64)[None]
    for asked in (0, 19, 20, 21, 29):
        full, sampled = (f(gain_of_hit, outputs, torch.tensor([asked])) for f in (expected_gain, expected_sampled_gain))
        torch.testing.assert_close(full, sampled)


def test_ease_solves_its_least_squares():
    x = (np.random.Generator(np.random.Philox(2)).random((40, 8)) < 0.4).astype(float)
    lam, found = 3.0, np.linalg.lstsq(x, ease(x, 3.0), rcond=None)[0]
    assert abs(np.diag(found)).max() < 1e-9
    for item in range(8):
        rest = np.delete(np.arange(8), item)
        by_hand = np.linalg.solve(x[:, rest].T @ x[:, rest] + lam * np.eye(7), x[:, rest].T @ x[:, item])
        np.testing.assert_allclose(found[rest, item], by_hand, atol=1e-9)


def test_neighbours_by_hand():
    x = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1.0]])
    likeness = np.array([[0, 2 / (6**0.5 + 1), 1 / (2 + 1)], [0, 0, 2 / (6**0.5 + 1)], [0, 0, 0]])
    np.testing.assert_allclose(neighbours(x, k=3, shrink=1.0), x @ (likeness + likeness.T))


@pytest.mark.parametrize("of", [popularity, neighbours, ease])
def test_permuting_items_permutes_scores(of):
    x = (np.random.Generator(np.random.Philox(2)).random((30, 9)) < 0.4).astype(float)
    order = np.random.Generator(np.random.Philox(4)).permutation(9)
    np.testing.assert_allclose(of(x[:, order]), of(x)[:, order], atol=1e-9)


def test_evaluation_in_a_run_agrees_with_a_reference():
    """A run in which nothing is trained ranks by biases of 0 and random rows under p = 0: all items alike."""
    task = by_hand()
    report = federate(task, "local:epochs=0", rounds=1, progress=False, metric="mrr")
    chance = score_reference(task, np.zeros((3, 6)), "mrr")
    np.testing.assert_allclose(report.scores(), chance, atol=1e-6)


def test_the_core_is_filtered_again_and_again():
    user, item = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 2])
    assert core(user, item, 2, 2).tolist() == [True, True, True, True, False]
    assert not core(user, item, 3, 1).any()


def test_ties_in_time_and_repeats():
    """Of equal times the smaller item comes first; an item that comes again counts when it first came."""
    fields = list_interactions("t", "t", [5] * 5, [3, 1, 2, 3, 0], [1, 0, 1, 7, 2], fewest=(3, 1))
    assert fields["y"].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"user": [1], "item": [2]}, "Ratings must have a column 'time' for `time`. Leave-one-out needs an order"),
        ({"user": [1], "item": [2], "time": ["noon"]}, "row 0 of the table has 'noon' in 'time'"),
        ({"user": [1, 1], "item": [1, 2], "time": [1, 2]}, "users with 5 ratings or more of items with 5 or more"),
    ],
)
def test_bad_ratings(table, words):
    with pytest.raises(DataError, match=words):
        Task.ratings(table)


def test_users_need_three_ratings():
    table = {"user": [1, 1, 1], "item": [1, 2, 3], "time": [1, 2, 3]}
    with pytest.raises(DataError, match="Users must have at least 3 ratings"):
        Task.ratings(table, fewest=(2, 1))
    assert Task.ratings(table, fewest=(3, 1)).clients == 1


def test_own_ratings_from_a_file(tmp_path):
    lines = [f"u{u},i{(u + j) % 7},{j}" for u in range(6) for j in range(5)]
    (tmp_path / "sales.csv").write_text("\n".join(["customer,article,day", *lines]))
    task = Task.ratings(tmp_path / "sales.csv", user="customer", item="article", time="day", fewest=(5, 1))
    assert (task.clients, task.classes, task.recommends) == (6, 7, True)
    assert task.client_name(0) == "user u0"


def test_only_recommenders_have_users():
    digits = Task.build(datasets.load("digits"), partition.parse("iid"), clients=2)
    with pytest.raises(TaskError, match="digits is none"):
        users_by_items(digits)
    with pytest.raises(UnknownName):
        find_reference("nearest")


MOVIELENS = "1\t{item}\t3\t{time}\n"


@pytest.mark.parametrize("name", ["u.data", "ml-100k.inter"])
def test_movielens_is_read_from_the_users_own_file(tmp_path, name):
    (tmp_path / "ml-100k").mkdir()
    rows = [(user, item, 3, 100 * user + item) for user in (1, 2, 3) for item in range(1, 7 + user)]
    head = "" if name == "u.data" else "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    (tmp_path / "ml-100k" / name).write_text(head + "".join("\t".join(map(str, row)) + "\n" for row in rows))
    data = datasets.load("movielens-100k", tmp_path)
    assert (len(data.y), data.classes, data.owners) == (24, 9, ("user 1", "user 2", "user 3"))
    assert (data.x == data.classes).all()
    leak = datasets.load("movielens-100k-leak", tmp_path)
    assert leak.x[0].tolist() == [5, 6]


def write_wheel(path, member="recbole/dataset_example/ml-100k/ml-100k.inter"):
    rows = [(user, item, 3, 100 * user + item) for user in (1, 2, 3) for item in range(1, 7 + user)]
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, head + "".join("\t".join(map(str, row)) + "\n" for row in rows))


def test_movielens_is_read_from_a_wheel_that_is_not_installed(tmp_path):
    write_wheel(tmp_path / "ml-100k" / "recbole-1.2.1-py3-none-any.whl")
    data = datasets.load("movielens-100k", tmp_path)
    assert (len(data.y), data.classes, data.owners) == (24, 9, ("user 1", "user 2", "user 3"))


def test_a_wheel_without_movielens(tmp_path):
    write_wheel(tmp_path / "ml-100k" / "recbole-1.2.1-py3-none-any.whl", "recbole/other.inter")
    with pytest.raises(DataError, match="it must have a file ml-100k.inter, as recbole 1.2.1 has"):
        datasets.load("movielens-100k", tmp_path)


def test_movielens_that_is_not_there_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(
        DataError, match=r"(?s)was not found. Looked in.*ml-100k: no u.data.*no recbole-\*.whl"
    ) as error:
        datasets.load("movielens-100k", tmp_path)
    assert "atoll data movielens-100k" in error.value.hint
    assert "pip download --no-deps recbole==1.2.1" in how_to_get("movielens-100k")


HAS_MOVIELENS = bool(list(Path(os.environ.get("ATOLL_DATA", "/nowhere")).glob("ml-100k/*")))


@pytest.mark.skipif(not HAS_MOVIELENS, reason="needs MovieLens-100K in ml-100k/ of ATOLL_DATA")
def test_references_on_movielens():
    task = Task.build(datasets.load("movielens-100k"), partition.parse("natural"))
    assert (task.clients, task.classes, len(task.y)) == (943, 1682, 100_000)
    x = users_by_items(task)
    for of, expected in ((popularity, 5.0), (neighbours, 7.4), (ease, 8.1)):
        assert 100 * score_reference(task, of(x)).mean() == pytest.approx(expected, abs=0.15)


OWN = {"kind": "ratings", "client": "who", "target": "what", "order": "when"}


def write_ratings(path, lines=()):
    rows = [f"u{u},i{(u + j) % 7},2026-03-{j + 1:02d}" for u in range(6) for j in range(5)]
    path.write_text("\n".join(["who,what,when", *rows, *lines]))
    return path


def test_own_ratings_by_the_words_of_own_data(tmp_path):
    """Users are clients, items the target and times the order; the recipe builds the same task again."""
    file = write_ratings(tmp_path / "sales.csv")
    task = Task.own(file, **OWN)
    assert (task.name, task.clients, task.classes, task.recommends) == ("sales", 6, 7, True)
    again = Recipe.of_own(Own.of(file, **OWN)).build()
    assert torch.equal(again.y, task.y)
    assert federate(task, "fedmf", rounds=1, progress=False).finished


def test_own_ratings_say_what_is_left_out_and_what_cannot_be_found(tmp_path, caplog):
    few = ["x,i0,2026-03-01", "x,i1,2026-03-02"]
    file = write_ratings(tmp_path / "sales.csv", [*few, "u0,rare,2026-04-01"])
    with caplog.at_level(logging.WARNING):
        task = Task.own(file, **OWN)
    assert task.clients == 6
    assert "sales: 1 of 7 users have fewer than 3 ratings and are left out" in caplog.text
    assert "of 6 users, 1 have a test item that is in nobody's training data: no method can find it" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"order": "day"}, "Ratings must have a column 'day' for `order`. Leave-one-out needs an order"),
        ({"client": "user"}, "Ratings must have a column 'user' for `client`. The columns of sales.csv are: who"),
        ({"order": "what"}, "Every rating must have a time, as a number such as seconds or as a date."),
        ({"features": ["when"]}, "Of ratings only who, what and when is read, so `features` must be left out."),
        ({"min_samples": 9}, "There must be users with 9 ratings or more"),
    ],
)
def test_bad_own_ratings(tmp_path, words, message):
    file = write_ratings(tmp_path / "sales.csv")
    with pytest.raises(AtollError, match=re.escape(message)):
        Task.own(file, **{**OWN, **words})


def test_a_folder_is_no_table_of_ratings(tmp_path):
    with pytest.raises(DataError, match="Ratings must be in one file, with a column of users"):
        Task.own(tmp_path, **OWN)


@pytest.mark.skipif("ATOLL_DATA" not in os.environ, reason="needs MovieTweetings in ATOLL_DATA")
@pytest.mark.parametrize(
    ("name", "users", "items", "popular", "linear"),
    [("movietweetings-5core", 4333, 2414, 14.6, 14.5), ("movietweetings-10core", 2059, 1099, 15.0, 14.6)],
)
def test_references_on_movietweetings(name, users, items, popular, linear):
    task = Task.build(datasets.load(name), partition.parse("natural"))
    assert (task.clients, task.classes) == (users, items)
    x = users_by_items(task)
    assert 100 * score_reference(task, popularity(x)).mean() == pytest.approx(popular, abs=0.1)
    if items < 2000:
        assert 100 * score_reference(task, ease(x)).mean() == pytest.approx(linear, abs=0.1)
