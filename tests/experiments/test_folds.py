"""Comparisons of own data whose clients are small: each fold is for testing once, and cuts are counted."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from atoll import Recipe, Report, Task, compare
from atoll.data.own import Own, read
from atoll.data.partition import Natural
from atoll.data.splits import Cut
from atoll.experiments.comparison import Comparison, read_runs
from atoll.export.model import ClientModel
from atoll.federation.folds import pool_folds
from atoll.kernel.errors import RunError, TaskError
from atoll.kernel.randomness import generator
from atoll.metrics.gains import estimate_gain

METHODS = ["local", "fedavg"]


def invent(clients=8, least=4):
    """Small clients, each with its own share of class 1."""
    draw = generator(0, "small clients")
    frames = {}
    for number in range(clients):
        x = draw.normal(size=(least + 2 * number, 2))
        rate = 1 / (1 + np.exp(-x[:, 0] - draw.normal()))
        frames[f"ward {number}"] = {"age": x[:, 0], "stay": x[:, 1], "back": (draw.random(len(x)) < rate).astype(int)}
    return frames


@pytest.fixture(scope="module")
def task():
    return Task.own(invent(), target="back", model="linear")


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """The same clients as one file with a column of wards."""
    path = tmp_path_factory.mktemp("data") / "wards.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ward", "age", "stay", "back"])
        for name, columns in invent().items():
            writer.writerows(zip([name] * len(columns["back"]), *columns.values(), strict=True))
    return path


def own(path):
    return Recipe.of_own(Own.of(path, target="back", client="ward"), model="linear")


@pytest.fixture(scope="module")
def compared(task):
    return compare(task, METHODS, folds=3, repeats=2, rounds=2, progress=False)


# -- what is compared --------------------------------------------------------------------------------------------------


def test_small_clients_are_compared_in_folds_unless_the_user_says_otherwise(task):
    assert task.wants_folds
    assert not Task.own(invent(), target="back", shares=(0.5, 0.25, 0.25)).wants_folds
    assert not Task.own(invent(clients=2, least=900), target="back").wants_folds
    asked = {name: [*values, 0] for name, values in {"day": range(9), "a": [1] * 9, "back": [0, 1, 1] * 3}.items()}
    assert not Task.own({"x": asked, "y": asked}, target="back", order="day").wants_folds
    cuts = compare(task, METHODS, rounds=1, progress=False)
    assert (cuts.folds, cuts.cuts, len(cuts.seeds)) == (5, 10, 2)
    held = compare(task, METHODS, rounds=1, seeds=2, progress=False)
    assert (held.folds, held.cuts) == (0, 1)


def test_a_clients_score_is_that_of_all_its_samples_together(task, compared):
    for method in METHODS:
        for repeat in range(2):
            right, count = np.zeros(8), np.zeros(8)
            for fold in range(3):
                number = 3 * repeat + fold
                again = compare(
                    lambda _, number=number: task.recut(cut_number(number)), METHODS, rounds=2, seeds=[number],
                    progress=False,
                ).outcomes[method][0]  # fmt: skip
                # a task built by a function carries its fold, so its only report is a repeat that lacks the others
                right += np.nan_to_num(again.scores()) * again.samples()
                count += again.samples()
            assert count.tolist() == [len(columns["back"]) for columns in invent().values()]
            assert compared.scores(method)[repeat] == pytest.approx(right / count, abs=1e-12)
    assert compared.example.samples().tolist() == count.tolist()


def cut_number(number):
    return Cut(folds=3, number=number)


def test_a_metric_that_is_no_mean_is_taken_over_all_samples_of_a_client(task):
    found = compare(task, METHODS, folds=3, repeats=1, rounds=2, metric="auroc", progress=False)
    outcomes = found.outcomes["fedavg"][0].outcomes
    ends = np.cumsum(found.example.samples())[:-1]
    scores, labels = (np.split(outcomes[name], ends) for name in ("kept", "target"))
    for mine, classes, score in zip(scores, labels, found.scores("fedavg")[0], strict=True):
        both = len(np.unique(classes)) > 1
        assert score == pytest.approx(roc_auc_score(classes[:, 0], mine[:, -1]), abs=1e-12) if both else np.isnan(score)


def test_a_run_in_a_folder_keeps_what_such_a_metric_needs(task, tmp_path):
    asked = {"folds": 3, "repeats": 1, "rounds": 2, "metric": "auroc", "progress": False}
    here, there = compare(task, METHODS, **asked), compare(task, METHODS, **asked, folder=tmp_path / "runs")
    runs, _ = read_runs(tmp_path / "runs")
    read = Comparison.of_runs(runs)
    for method in METHODS:
        assert not np.isnan(here.scores(method)).all()
        np.testing.assert_allclose(there.scores(method), here.scores(method), atol=1e-12)
        np.testing.assert_allclose(read.scores(method), here.scores(method), atol=1e-12)


def test_every_repeat_tests_each_sample_once(task):
    tested = [task.recut(cut_number(number)).splits["test"].order.tolist() for number in range(6)]
    for repeat in (tested[:3], tested[3:]):
        assert sorted(row for rows in repeat for row in rows) == [*range(len(task.y))]
    assert tested[0] != tested[3]


def test_a_change_of_the_task_is_made_again_after_a_cut(task):
    faster = task.with_training(lr=0.7).of(np.array([1, 3]))
    again = faster.recut(cut_number(1))
    assert again.training.lr == 0.7
    assert again.names == ("ward 1", "ward 3")


def test_a_client_that_diverged_in_one_fold_is_named(task):
    asked = {"rounds": 1, "progress": False}
    runs = [compare(lambda seed: task.recut(cut_number(seed)), METHODS, seeds=[number], **asked) for number in range(3)]
    reports = [run.outcomes["fedavg"][0] for run in runs]
    line = reports[1].history[-1]
    test = replace(line.personal["test"], diverged=[5])
    found = replace(line.evaluation, personal={**line.personal, "test": test})
    reports[1] = replace(reports[1], history=[replace(line, evaluation=found)])
    (pooled,) = pool_folds(reports)
    assert pooled.figures().diverged == [5]


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_table_says_how_many_cuts_it_rests_on(task, compared):
    assert "(in 3 folds, every sample tested 2 times, 6 cuts)" in compared.protocol
    assert "seeds 0 to 5." in compared.protocol
    once = compare(task, METHODS, seeds=2, rounds=1, progress=False)
    assert "(one cut for all 2 seeds)" in once.protocol


def test_gains_have_an_interval_over_clients_and_cuts(compared):
    (row,) = [row for row in compared.results if row["method"] == "fedavg"]
    gains = compared.gains("fedavg")
    assert gains.shape == (2, 8)
    assert row["gain_local_interval"] == pytest.approx(estimate_gain(gains).half)
    assert row["p_local"] == pytest.approx(estimate_gain(gains).p)
    assert "over clients and cuts" in compared.protocol


def test_the_interval_of_a_gain_by_hand():
    """A vector computed by another program."""
    gain = estimate_gain(np.array([[0.1, 0.2, 0.0, 0.3, 0.2, 0.1], [0.2, 0.1, 0.1, 0.2, 0.0, 0.3]]))
    se_clients = np.std([0.15, 0.15, 0.05, 0.25, 0.1, 0.2], ddof=1) / np.sqrt(6)
    assert gain.mean == pytest.approx(0.15)
    assert gain.of_seeds == pytest.approx(0.0, abs=1e-12)
    assert gain.half == pytest.approx(2.570581835636314 * se_clients)


def test_parts_of_a_repeat_are_told_apart_from_all_of_it(wards, tmp_path):
    compare(own(wards), METHODS, folds=3, repeats=2, rounds=1, folder=tmp_path / "runs", progress=False)
    runs, _ = read_runs(tmp_path / "runs")
    alone = Comparison.of_runs([run for run in runs if run.seed == 1])
    assert "(in 3 folds, 1 of them so far)" in alone.protocol
    assert "seed 1." in alone.protocol
    left = Comparison.of_runs([run for run in runs if run.seed != 4])
    assert "every sample tested once, 3 cuts" in left.protocol
    assert left.missing == ("Left out, because not all folds of their repeat are there: seeds 3, 5.",)


def test_gains_that_are_rounding_are_not_significant(compared):
    pair = compared.outcomes["fedavg"]
    twin = [with_scores(report, report.scores() + 1e-17) for report in pair]
    again = Comparison({"local": compared.outcomes["local"], "fedavg": pair, "twin": twin})
    assert again.estimate("twin", "fedavg").p == 1.0


def with_scores(report, scores):
    """The same report with other scores of clients after the last round."""
    line = report.history[-1]
    test = replace(line.personal["test"], clients=scores.tolist())
    found = replace(line.evaluation, personal={**line.personal, "test": test})
    return replace(report, history=[*report.history[:-1], replace(line, evaluation=found)])


# -- runs in a folder --------------------------------------------------------------------------------------------------


def test_folds_are_kept_resumed_and_read_again(wards, tmp_path):
    recipe = own(wards)
    first = compare(recipe, METHODS, folds=3, repeats=2, rounds=1, folder=tmp_path / "runs", progress=False)
    assert len([*(tmp_path / "runs").glob("local-seed*")]) == 6
    begun = []
    again = compare(
        recipe, METHODS, folds=3, repeats=2, rounds=1, folder=tmp_path / "runs", progress=False,
        on_run=lambda method, seed, how: begun.append(how),
    )  # fmt: skip
    assert set(begun) == {"reused"}
    runs, _ = read_runs(tmp_path / "runs")
    read = Comparison.of_runs(runs)
    for method in METHODS:
        assert first.scores(method).tolist() == again.scores(method).tolist() == read.scores(method).tolist()


def test_a_repeat_that_is_not_whole_is_left_out(wards, tmp_path):
    compare(own(wards), METHODS, folds=3, repeats=2, rounds=1, folder=tmp_path / "runs", progress=False)
    runs, _ = read_runs(tmp_path / "runs")
    read = Comparison.of_runs([run for run in runs if run.seed != 4])
    assert read.scores("local").shape == (1, 8)


def test_models_of_a_fold_can_be_opened_again(wards, tmp_path):
    task = Task.own(wards, target="back", client="ward", model="linear")
    compare(task, METHODS, folds=3, repeats=1, rounds=1, folder=tmp_path / "runs", progress=False)
    report = Report.read(next((tmp_path / "runs").glob("fedavg-*seed1")))
    assert isinstance(report.model("ward 3"), ClientModel)


# -- what must hold ----------------------------------------------------------------------------------------------------


def test_seeds_and_folds_exclude_each_other(task, wards):
    for source in (task, own(wards)):
        with pytest.raises(
            RunError, match="Every fold is trained with a seed of its own, 6 in all, so `seeds` must be"
        ):
            compare(source, METHODS, folds=3, repeats=2, seeds=4, progress=False)


def test_a_task_that_cannot_be_cut_again_has_no_folds():
    with pytest.raises(
        RunError, match="Folds need own data, 2 samples or groups of every client, .* digits cannot be cut again"
    ):
        compare(Recipe(samples=200, clients=4).build(), METHODS, folds=5, progress=False)


@pytest.mark.parametrize("folds", [1, 2])
def test_three_folds_are_needed(task, folds):
    with pytest.raises(TaskError, match=f"`folds` must be at least 3.*Got {folds}"):
        compare(task, METHODS, folds=folds, progress=False)


def test_repeats_must_be_positive(task, wards):
    for source in (task, own(wards)):
        with pytest.raises(TaskError, match="`repeats` must be at least 1. Got 0."):
            compare(source, METHODS, folds=3, repeats=0, progress=False)


def test_a_client_without_test_samples_is_named():
    frames = {"ulm": {"a": [1.0, 2, 3], "on": ["train", "test", "val"], "y": [0, 1, 0]}}
    frames["porto"] = {"a": [1.0, 2], "on": ["train", "train"], "y": [0, 1]}
    with pytest.raises(TaskError, match=r"at least 1 test sample. 1 of 2 have none, the first is client porto\."):
        Task.own(frames, target="y", split="on")


def test_folds_need_the_scores_of_all_clients(task):
    with pytest.raises(RunError, match="Folds need the scores of all clients. Got evaluation='sample:3'"):
        compare(task, METHODS, folds=3, rounds=1, evaluation="sample:3", progress=False)


def test_in_folds_a_figure_of_all_samples_is_taken_after_the_last_round(task):
    with pytest.raises(RunError, match="In folds, auroc is taken after the last round, over all samples of a client"):
        compare(task, METHODS, folds=3, rounds=2, metric="auroc", select="best", progress=False)


def test_a_column_beside_groups_decides_once():
    """The folds of such data would all be the same cut."""
    sides = ["train", "train", "val", "test"]
    frames = {
        name: {"a": [1.0, 2, 3, 4], "stay": [number, number, number + 1, number + 2], "on": sides, "y": [0, 1, 0, 1]}
        for number, name in ((0, "ulm"), (10, "porto"))
    }
    task = Task.own(frames, target="y", split="on", group="stay")
    assert not task.wants_folds
    assert task.recut is None


def test_groups_that_several_clients_have_may_leave_one_without_test_samples():
    """A group is on one side for all of them; no client can be blamed."""
    draw = generator(0, "shared groups")
    for seed in range(5):
        frames = {
            f"client {k}": {"a": draw.normal(size=9), "g": draw.integers(6, size=9), "y": draw.integers(2, size=9)}
            for k in range(6)
        }
        assert Task.own(frames, target="y", group="g", seed=seed).clients == 6


@pytest.mark.parametrize("words", [{"folds": 5}, {"stratify": True}])
def test_generated_clients_are_not_cut_again(words):
    with pytest.raises(
        TaskError, match=f"The samples of million are made for their clients, so {next(iter(words))} cannot"
    ):
        Recipe("million", clients=10, **words).build()


def test_amounts_are_not_cut_class_by_class():
    frames = {name: {"a": [1.0, 2, 3, 4], "y": [0.5, 1.5, 2.5, 3.5]} for name in ("ulm", "porto")}
    data = read(frames, target="y", kind="regression")
    with pytest.raises(TaskError, match="`stratify` needs samples of one class each that no time orders"):
        Task.build(data, Natural(), cut=Cut(stratify=True))
