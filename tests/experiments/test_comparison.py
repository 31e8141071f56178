import json
import logging
import os
import signal
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from samples import Sloped

from atoll import Recipe, Settings, Task, compare
from atoll.compose import create
from atoll.data import datasets
from atoll.data.partition import Iid
from atoll.experiments.comparison import add_references, folder_name, reopen, run_name, runs_in
from atoll.federation.labels import label
from atoll.kernel.errors import AtollError, RunError, UnknownName
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.files import alone_in

SMALL = Recipe(samples=600, clients=4)

ONE_SHOT = """
from dataclasses import dataclass
from typing import ClassVar

from atoll.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Once(FedAvg):
    one_shot: ClassVar[bool] = True
"""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for a second one
    yield
    torch.set_num_threads(before)


@pytest.fixture
def begun():
    """The runs of a comparison as they begin: (method, seed, how). Pass `on_run=begun.add`."""

    class Begun(list):
        def add(self, *run):
            self.append(run)

    return Begun()


def figures(comparison):
    """All that must not depend on how a comparison came about."""
    measured = ("seconds", "memory_megabytes")
    return [{name: value for name, value in row.items() if name not in measured} for row in comparison.results]


# -- the methods -------------------------------------------------------------------------------------------------------


def test_missing_references_are_added_with_the_same_budget(caplog):
    with caplog.at_level(logging.WARNING, "atoll"):
        chosen = add_references([create("ditto:epochs=3")])
    assert list(chosen) == ["local:epochs=3", "fedavg:epochs=3", "ditto:epochs=3"]
    assert "added local:epochs=3 and fedavg:epochs=3" in caplog.text
    assert list(add_references([create("fedavg"), create("local")])) == ["fedavg", "local"]


def test_long_training_of_one_shot_methods_is_no_budget_for_every_round():
    mixed = add_references([create("ensemble:epochs=20"), create("ditto:epochs=2")])
    assert list(mixed)[:2] == ["local:epochs=2", "fedavg:epochs=2"]
    alone = add_references([create("ensemble:epochs=20")])
    assert list(alone)[:2] == ["local:epochs=20", "fedavg:epochs=20"]


def test_runs_of_different_hyperparameters_have_different_folders():
    names = [run_name(create(text), 0) for text in ("ditto", "ditto:lam=0.1", "ditto:lam=0.1,epochs=2")]
    assert names == ["ditto-seed0", "ditto-lam=0.1-seed0", "ditto-lam=0.1,epochs=2-seed0"]


def test_the_folder_of_a_users_method_changes_with_its_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (files("atoll.cli") / "templates" / "example.py").read_text()
    Path("mine.py").write_text(source)
    first = create("mine.py")
    assert label(first) == "mine.py"
    name = run_name(first, 0)
    Path("mine.py").write_text(source + "\n# changed\n")
    assert run_name(create("mine.py"), 0) != name


def test_the_folder_of_a_users_method_changes_with_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (files("atoll.cli") / "templates" / "example.py").read_text()
    (tmp_path / "mine.py").write_text(f"import beside_mine  # noqa\n{source}")
    (tmp_path / "beside_mine.py").write_text("X = 1\n")
    name = run_name(create(str(tmp_path / "mine.py")), 0)
    (tmp_path / "beside_mine.py").write_text("X = 2\n")
    assert run_name(create(str(tmp_path / "mine.py")), 0) != name


def test_finished_runs_of_a_model_with_another_attribute_are_not_reused(tmp_path, make_task):
    def task(slope):
        return make_task(lambda: Sloped(slope), sizes=(9, 9), shares=(0.5, 0.0, 0.5))

    compare(task(1.0), ["local", "fedavg"], seeds=1, rounds=1, folder=tmp_path)
    compare(task(1.0), ["local", "fedavg"], seeds=1, rounds=1, folder=tmp_path)
    with pytest.raises(RunError, match="Runs are reused for the same model only"):
        compare(task(2.0), ["local", "fedavg"], seeds=1, rounds=1, folder=tmp_path)


def test_one_shot_methods_have_one_round_among_others(tmp_path):
    (tmp_path / "once.py").write_text(ONE_SHOT)
    once = create(str(tmp_path / "once.py"))
    found = compare(SMALL, ["local", "fedavg", once], seeds=1, rounds=3, folder=tmp_path / "c")
    assert [row["round"] for row in found.results] == [3, 3, 1]
    assert found.results[2]["megabytes_up"] == pytest.approx(found.results[1]["megabytes_up"] / 3)
    assert "after the last round (1 or 3)" in found.protocol


# -- running, reusing, continuing --------------------------------------------------------------------------------------


def test_compare_runs_reuses_and_reopens(tmp_path, begun):
    question = {"seeds": 2, "rounds": 2, "folder": tmp_path / "c", "on_run": begun.add}
    methods = ["local", "fedavg", "fedper"]
    first = compare(SMALL, methods, **question)
    assert begun == [(method, seed, "new") for seed in (0, 1) for method in methods]
    begun.clear()
    again = compare(SMALL, methods, **question)
    assert [how for *_, how in begun] == ["reused"] * 6
    assert again.results == first.results
    asked = reopen(tmp_path / "c")
    assert (asked["task"], asked["methods"]) == (SMALL, [create(method) for method in methods])
    assert (asked["seeds"], asked["settings"]) == ([0, 1], Settings(rounds=2))
    in_memory = compare(SMALL, methods, seeds=2, rounds=2)
    assert figures(in_memory) == figures(first)
    with pytest.raises(RunError, match="another settings"):
        compare(SMALL, ["local", "fedavg"], seeds=1, rounds=3, folder=tmp_path / "c")
    with pytest.raises(RunError, match="another recipe"):
        compare(Recipe(clients=5), ["local", "fedavg"], seeds=1, rounds=2, folder=tmp_path / "c")


def test_other_methods_and_more_seeds_reuse_what_is_there(tmp_path, begun):
    question = {"rounds": 1, "folder": tmp_path, "on_run": begun.add}
    first = compare(SMALL, ["local", "fedavg", "ditto"], seeds=1, **question)
    begun.clear()
    second = compare(SMALL, ["local", "fedavg", "fedper"], seeds=2, **question)
    assert begun == [
        ("local", 0, "reused"), ("fedavg", 0, "reused"), ("fedper", 0, "new"),
        ("local", 1, "new"), ("fedavg", 1, "new"), ("fedper", 1, "new"),
    ]  # fmt: skip
    assert second.outcomes["local"][0].scores().tolist() == first.outcomes["local"][0].scores().tolist()
    assert [path.name for path in runs_in(tmp_path)] == [
        f"{method}-seed{seed}" for method in ("local", "fedavg", "fedper") for seed in (0, 1)
    ]  # those that were asked for last; ditto's stay where they are
    assert (tmp_path / "ditto-seed0" / "metrics.jsonl").exists()


def test_an_interrupted_comparison_goes_on_where_it_was_stopped(tmp_path, begun):
    seen = []

    def ctrl_c(line):
        seen.append(line)
        if len(seen) == 5:  # in the second round of the second run: it ends with its third one
            os.kill(os.getpid(), signal.SIGINT)

    question = {"seeds": 1, "rounds": 4, "folder": tmp_path, "on_run": begun.add}
    methods = ["local", "fedavg", "ditto"]
    with pytest.raises(KeyboardInterrupt, match="stopped in fedavg with seed 0; continue with `atoll resume"):
        compare(SMALL, methods, on_round=ctrl_c, **question)
    assert len(seen) == 6
    begun.clear()
    found = compare(SMALL, methods, **question)
    assert begun == [("local", 0, "reused"), ("fedavg", 0, "resumed"), ("ditto", 0, "new")]
    assert figures(found) == figures(compare(SMALL, methods, seeds=1, rounds=4))


def test_an_end_in_the_middle_of_everything_loses_nothing(tmp_path, begun):
    def impatient(line):
        raise KeyboardInterrupt

    question = {"seeds": 1, "rounds": 2, "folder": tmp_path, "on_run": begun.add}
    with pytest.raises(KeyboardInterrupt, match="stopped in local with seed 0"):
        compare(SMALL, ["local", "fedavg"], on_round=impatient, **question)
    begun.clear()
    found = compare(SMALL, ["local", "fedavg"], **question)
    assert begun == [("local", 0, "resumed"), ("fedavg", 0, "new")]
    assert figures(found) == figures(compare(SMALL, ["local", "fedavg"], seeds=1, rounds=2))


# -- side by side ------------------------------------------------------------------------------------------------------


def traced():
    return LocalEngine(device="cpu", strategy="whole traced", dtype=torch.float64)


def test_runs_side_by_side_are_those_of_a_comparison_one_by_one(tmp_path, begun):
    methods = ["local", "fedavg", "ditto", "oneshot-avg"]
    question = {"seeds": 2, "rounds": 2, "cohort": 3}
    one_by_one = compare(SMALL, methods, engine=traced(), **question)
    beside = compare(SMALL, methods, engine=traced(), together=True, folder=tmp_path, on_run=begun.add, **question)
    assert figures(beside) == figures(one_by_one)
    assert sorted(begun) == sorted((method, seed, "new") for seed in (0, 1) for method in methods)
    begun.clear()
    again = compare(SMALL, methods, engine=traced(), together=True, folder=tmp_path, on_run=begun.add, **question)
    assert {how for *_, how in begun} == {"reused"}
    assert again.results == beside.results


def test_runs_side_by_side_are_stopped_together_and_go_on_together(tmp_path, begun):
    seen = []

    def ctrl_c(line):
        seen.append(line.round)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    question = {"seeds": 1, "rounds": 4, "folder": tmp_path, "together": True, "on_run": begun.add}
    methods = ["local", "fedavg", "ditto"]
    with pytest.raises(KeyboardInterrupt, match="continue with `atoll resume"):
        compare(SMALL, methods, engine=traced(), on_round=ctrl_c, **question)
    assert max(seen) < 4
    begun.clear()
    found = compare(SMALL, methods, engine=traced(), **question)
    assert {how for *_, how in begun} == {"resumed"}
    assert figures(found) == figures(compare(SMALL, methods, seeds=1, rounds=4, engine=traced()))


def test_what_goes_wrong_in_one_run_side_by_side_is_said_and_stops_the_others(tmp_path):
    def fail(method, seed, how):
        def after(line):
            if (method, seed, line.round) == ("fedavg", 1, 2):
                raise ValueError("out of paper")

        return after

    question = {"seeds": 2, "rounds": 3, "folder": tmp_path, "together": True}
    with pytest.raises(ValueError, match="out of paper"):
        compare(SMALL, ["local", "fedavg"], engine=traced(), on_run=fail, **question)
    found = compare(SMALL, ["local", "fedavg"], engine=traced(), **question)
    assert figures(found) == figures(compare(SMALL, ["local", "fedavg"], seeds=2, rounds=3, engine=traced()))


def test_runs_of_changed_data_are_refused(tmp_path, make_task):
    tasks = [make_task(sizes=(9, 12), shares=(0.5, 0.2, 0.3), **more) for more in ({}, {"shape": (5,)})]
    compare(tasks[0], ["local", "fedavg"], seeds=1, rounds=1, folder=tmp_path)
    with pytest.raises(RunError) as error:
        compare(tasks[1], ["local", "fedavg"], seeds=1, rounds=1, folder=tmp_path)
    assert str(error.value) == (
        f"Runs are reused for the same data only. Those of {tmp_path / 'local-seed0'} have the fingerprint "
        f"{tasks[0].fingerprint}, now it is {tasks[1].fingerprint}.\n"
        "hint: the data or their split have changed: choose another folder."
    )


def test_a_task_built_in_python_can_be_compared_but_not_reopened(tmp_path):
    task = SMALL.build()
    found = compare(task, ["local", "fedavg"], seeds=[3], rounds=1, folder=tmp_path)
    assert found.seeds == [3]
    with pytest.raises(RunError, match="built from a recipe"):
        reopen(tmp_path)


def test_a_function_may_build_a_task_for_every_seed():
    digits = datasets.load("digits")
    found = compare(
        lambda seed: Task.build(digits, Iid(), clients=2, seed=seed), ["local", "fedavg"], seeds=2, rounds=1
    )
    of_seeds = [outcome.config["task"]["data"] for outcome in found.outcomes["local"]]
    assert of_seeds == [outcome.config["task"]["data"] for outcome in found.outcomes["fedavg"]]
    assert of_seeds[0] != of_seeds[1]


def test_selection_and_target_are_passed_on():
    found = compare(SMALL, ["local", "fedavg"], seeds=1, rounds=2, select="oracle", target=0.01)
    assert (found.select, found.target) == ("oracle", 0.01)
    assert found.results[1]["rounds_to_target"] == 2


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "more", "error", "said"),
    [
        (SMALL, {"seeds": []}, RunError, "A comparison must have at least 1 seed. Got none."),
        (SMALL, {"select": "bets"}, UnknownName, "Unknown selection 'bets'. Did you mean: best?"),
        (SMALL, {"evaluation": "none"}, RunError, "evaluation='all' or 'sample:N'. Got 'none'."),
        (Recipe(clients=4, split="80/20/0"), {}, RunError, "the last round must have test samples. digits has none."),
        (Recipe(clients=4, split="80/0/20"), {"select": "best"}, RunError, "of the best round must have val samples."),
    ],
)  # fmt: skip
def test_what_would_fail_after_the_last_run_fails_before_the_first(recipe, more, error, said, begun):
    with pytest.raises(error) as raised:
        compare(recipe, ["local", "fedavg"], rounds=1, on_run=begun.add, **more)
    assert said in str(raised.value)
    assert begun == []


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fedfsa:top_c=9", "at most the number of the model's layers, 3. Got 9."),  # it would say so when it starts
        ("feddf", "FedDF needs public data"),  # the settings would
    ],
)
def test_a_method_that_cannot_begin_says_so_before_another_has_run(method, said, begun, caplog):
    with pytest.raises(AtollError) as raised:
        compare(SMALL, ["local", "fedavg", "fedbn", method], rounds=1, on_run=begun.add)
    assert said in str(raised.value)
    assert begun == []
    assert "shares everything" not in caplog.text  # FedBN says it when its turn comes


def test_a_schedule_that_has_changed_is_another_question(tmp_path):
    schedule = tmp_path / "schedule.csv"
    schedule.write_text("client,from,to\n0,1,2\n1,1,2\n")
    settings = Settings(rounds=2, participation=f"file:{schedule}")
    compare(SMALL, ["local", "fedavg"], seeds=1, settings=settings, folder=tmp_path / "here")
    before = folder_name(SMALL, settings, LocalEngine())
    schedule.write_text("client,from,to\n0,1,2\n")
    assert folder_name(SMALL, settings, LocalEngine()) != before
    with pytest.raises(RunError, match="has another schedule"):
        compare(SMALL, ["local", "fedavg"], seeds=1, settings=settings, folder=tmp_path / "here")


def test_a_comparison_does_not_go_into_the_folder_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="A comparison must have a folder of its own. .* holds a single run."):
        compare(SMALL, ["local", "fedavg"], seeds=1, rounds=1, folder=tmp_path)


# -- the folder --------------------------------------------------------------------------------------------------------


def test_folder_names_answer_to_task_settings_and_first_seed_and_not_to_methods():
    engine = LocalEngine()
    name = folder_name(SMALL, Settings(), engine)
    assert name.startswith("digits-compare-")
    assert folder_name(SMALL.with_seed(4), Settings(seed=4), engine) == f"{name}-seed4"
    others = {
        folder_name(SMALL, Settings(rounds=7), engine),
        folder_name(Recipe(clients=5), Settings(), engine),
        folder_name(SMALL, Settings(), LocalEngine(precision="bf16")),
    }
    assert len({name, *others}) == 4


def test_what_was_asked_for_is_in_the_folder(tmp_path):
    compare(SMALL, ["local", "fedavg", "ditto:lam=0.5"], seeds=[7], rounds=1, folder=tmp_path)
    asked = json.loads((tmp_path / "comparison.json").read_text())
    assert [method["name"] for method in asked["methods"]] == ["local", "fedavg", "ditto"]
    assert asked["methods"][2]["values"]["lam"] == 0.5
    assert asked["seeds"] == [7]
    assert runs_in(tmp_path / "ditto-lam=0.5-seed7") == [tmp_path / "ditto-lam=0.5-seed7"]


def test_a_second_comparison_in_the_same_folder_is_refused(tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    with alone_in(folder), pytest.raises(RunError, match=f"One process at a time may write to {folder}"):
        compare(Recipe(clients=4), ["local"], seeds=1, rounds=1, folder=folder)
    assert not (folder / "comparison.json").exists()
