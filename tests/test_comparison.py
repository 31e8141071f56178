import json
import logging
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import Recipe, Settings, compare
from atoll.algorithm import Algorithm
from atoll.algorithms import create
from atoll.comparison import (
    Comparison,
    Outcome,
    algorithm_of,
    folder_name,
    interval,
    label,
    reopen,
    run_name,
    standard_error,
    with_references,
)
from atoll.engines.local import LocalEngine
from atoll.errors import RunError
from atoll.federation import describe

SMALL = Recipe(clients=4)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for a second one
    yield
    torch.set_num_threads(before)


def outcome(method: str, scores: list[float], samples: list[int], *, seed: int = 0, up: int = 0) -> Outcome:
    """A run that ended with these scores."""
    values = np.array(scores)
    figures = {
        "clients": scores, "samples": samples, "macro": float(values.mean()), "micro": 0.0,
        "worst": float(values.min()), "bottom10": float(values.min()), "std": float(values.std()),
    }  # fmt: skip
    line = {"round": 1, "seconds": {"round": 2.0}, "evaluation": {"personal": {"test": figures, "val": figures}}}
    config = {
        "task": {"name": "digits", "clients": len(scores)},
        "settings": {"rounds": 1, "seed": seed},
        "training": {},
    }
    return Outcome(create(method), config, [line], {("up", "model"): up})


def test_gains_are_paired_client_by_client():
    comparison = Comparison(
        {
            "local": [outcome("local", [0.5, 0.9], [10, 10])],
            "fedavg": [outcome("fedavg", [0.7, 0.6], [10, 10])],
            "ditto": [outcome("ditto", [0.8, 0.9], [10, 10])],
        }
    )
    assert comparison.gains("ditto").tolist() == [[pytest.approx(0.3), pytest.approx(0.0)]]
    assert comparison.gains("ditto", over="fedavg").tolist() == [[pytest.approx(0.1), pytest.approx(0.3)]]
    assert comparison.best == "ditto"
    assert [row["gain_local"] for row in comparison.results] == pytest.approx([0.0, -0.05, 0.15])


def test_a_client_is_harmed_beyond_one_standard_error():
    # r = 0.9, a = 0.7: se^2 = (0.09 + 0.21) / n, so se = 0.173 with 10 samples, 0.245 with 5; the loss is 0.2
    assert standard_error(np.array([0.7]), np.array([0.9]), np.array([10])) == pytest.approx(np.sqrt(0.03))
    comparison = Comparison(
        {
            "local": [outcome("local", [0.9, 0.9, 1.0], [10, 5, 10])],
            "fedavg": [outcome("fedavg", [0.7, 0.7, 1.0], [10, 5, 10])],
        }
    )
    assert comparison.harmed("fedavg").tolist() == [[True, False, False]]
    assert comparison.results[1]["harmed"] == 1.0


def test_clients_without_test_samples_do_not_count():
    nan = float("nan")
    comparison = Comparison(
        {"local": [outcome("local", [0.5, nan], [4, 0])], "fedavg": [outcome("fedavg", [0.75, nan], [4, 0])]}
    )
    assert comparison.results[1]["gain_local"] == pytest.approx(0.25)
    assert comparison.harmed("fedavg").tolist() == [[False, False]]


def test_interval_is_student_t():
    # mean of 1, 2, 3: s = 1, t(0.975, 2) = 4.3027
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / np.sqrt(3), abs=1e-4)
    assert interval([1.0]) is None


def test_methods_of_a_comparison_share_their_seeds():
    with pytest.raises(RunError, match="same seeds"):
        Comparison({"local": [outcome("local", [1.0], [1])], "fedavg": [outcome("fedavg", [1.0], [1], seed=1)]})


def test_missing_references_are_added_with_the_same_budget(caplog):
    with caplog.at_level(logging.WARNING, "atoll"):
        chosen = with_references([create("ditto:epochs=3")])
    assert list(chosen) == ["local:epochs=3", "fedavg:epochs=3", "ditto:epochs=3"]
    assert "added local:epochs=3 and fedavg:epochs=3" in caplog.text
    assert list(with_references([create("fedavg"), create("local")])) == ["fedavg", "local"]


@pytest.mark.parametrize("text", ["ditto", "ditto:lam=0.1", "fedavg:epochs=2,weighting=uniform"])
def test_labels_are_what_the_command_line_takes(text):
    assert label(create(text)) == text
    assert label(create(label(create(text)))) == text


def test_runs_of_different_hyperparameters_have_different_folders():
    names = [run_name(create(text), 0) for text in ("ditto", "ditto:lam=0.1", "ditto:lam=0.1,epochs=2")]
    assert names == ["ditto-seed0", "ditto-lam=0.1-seed0", "ditto-lam=0.1,epochs=2-seed0"]


def test_the_folder_of_a_users_method_changes_with_its_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (files("atoll") / "templates" / "example.py").read_text()
    Path("mine.py").write_text(source)
    first = create("mine.py")
    assert label(first) == "mine.py"
    name = run_name(first, 0)
    Path("mine.py").write_text(source + "\n# changed\n")
    assert run_name(create("mine.py"), 0) != name


def test_configuration_gives_the_algorithm_back():
    ditto = create("ditto:lam=0.1")
    config = json.loads(json.dumps(describe(SMALL.build(), ditto, Settings())))
    assert algorithm_of(config) == ditto


def test_compare_runs_reuses_and_reopens(tmp_path):
    begun: list[tuple[str, int, str]] = []
    question = {"seeds": 2, "rounds": 2, "folder": tmp_path / "c", "on_run": lambda *run: begun.append(run)}
    first = compare(SMALL, ["local", "fedavg", "fedper"], **question)
    assert [how for *_, how in begun] == ["new"] * 6
    begun.clear()
    again = compare(SMALL, ["local", "fedavg", "fedper"], **question)
    assert [how for *_, how in begun] == ["reused"] * 6
    assert again.results == first.results
    assert reopen(tmp_path / "c")["task"] == SMALL
    in_memory = compare(SMALL, ["local", "fedavg", "fedper"], seeds=2, rounds=2)
    keys = ("method", "mean", "worst", "gain_local", "harmed", "megabytes_up")
    assert [[row[key] for key in keys] for row in in_memory.results] == [
        [row[key] for key in keys] for row in first.results
    ]

    with pytest.raises(RunError, match="another settings"):
        compare(SMALL, ["local", "fedavg"], seeds=1, rounds=3, folder=tmp_path / "c")

    paths = first.save(tmp_path / "c")
    assert [path.name for path in paths] == ["report.html", "results.csv", "results.json", "clients.csv"]
    assert len(paths[3].read_text().splitlines()) == 1 + 3 * 2 * 4
    assert json.loads(paths[2].read_text())["results"][0]["method"] == "local"


def test_a_task_built_in_python_can_be_compared_but_not_reopened(tmp_path):
    task = SMALL.build()
    found = compare(task, ["local", "fedavg"], seeds=[3], rounds=1, folder=tmp_path)
    assert found.seeds == [3]
    with pytest.raises(RunError, match="built from a recipe"):
        reopen(tmp_path)


def test_folder_names_answer_to_the_question():
    methods: list[Algorithm] = [create("local"), create("fedavg")]
    engine = LocalEngine()
    name = folder_name(SMALL, methods, [0, 1], Settings(), engine)
    assert name == folder_name(SMALL, methods, [0, 1], Settings(), engine)
    assert name != folder_name(SMALL, methods, [0, 1], Settings(rounds=7), engine)
    assert name != folder_name(Recipe(clients=5), methods, [0, 1], Settings(), engine)
    assert name != folder_name(SMALL, methods, [0, 1, 2], Settings(), engine)
