"""Models that leave a run, on the command line: export, predict, welcome."""

import csv
import io
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from atoll import Task, Training, federate
from atoll.cli import app
from atoll.kernel.randomness import generator

TARGET = "outcome"


def rows(n, seed):
    draw = generator(seed, "test exporting")
    age, ward = draw.normal(60, 20, size=n), draw.integers(2, size=n)
    return [
        {"age": f"{a:.1f}", "ward": "ab"[w], TARGET: "ill" if a + 20 * w > 70 else "well"}
        for a, w in zip(age, ward, strict=True)
    ]


def write(path, listed):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*listed[0]])
        writer.writeheader()
        writer.writerows(listed)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on two hospitals, beside the files of a third one."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    for seed, name in enumerate(("Ulm", "Porto")):
        write(folder / "data" / f"{name}.csv", rows(40, seed))
    write(folder / "new.csv", rows(12, 7))
    write(folder / "bare.csv", [{"age": row["age"], "ward": row["ward"]} for row in rows(12, 7)])
    task = Task.own(folder / "data", target=TARGET, model="tabular:8", training=Training(lr=0.3))
    federate(task, "fedrep", rounds=8, folder=folder / "run")
    return folder / "run"


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_export_of_one_and_of_all(run, tmp_path):
    done = call("export", run, "--client", "Porto", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "Porto" / "manifest.json").read_text())["client"]["name"] == "Porto"
    done = call("export", run, "--all", "--int8", "--licence", "CC BY 4.0")
    assert done.exit_code == 0, done.output
    assert "by 8 bits" in done.output
    for name in ("Ulm", "Porto"):
        manifest = json.loads((run / "models" / "safetensors-int8" / name / "manifest.json").read_text())
        assert manifest["data"]["licence"] == "CC BY 4.0"


def test_predictions_are_class_names_with_probabilities(run, tmp_path):
    done = call("predict", run, run.parent / "bare.csv", "--client", "Ulm")
    assert done.exit_code == 0, done.output
    answers = [*csv.DictReader(io.StringIO(done.stdout))]
    assert [*answers[0]] == ["prediction", "p(ill)", "p(well)"]
    assert np.mean([a["prediction"] == b[TARGET] for a, b in zip(answers, rows(12, 7), strict=True)]) > 0.7
    for answer in answers:
        assert answer["prediction"] == ("ill" if float(answer["p(ill)"]) > 0.5 else "well")
    call("predict", run, run.parent / "bare.csv", "--client", "Ulm", "--out", tmp_path / "answers.csv")
    assert (tmp_path / "answers.csv").read_text() == done.stdout


def test_a_client_that_was_never_there_gets_a_model(run, tmp_path):
    done = call("welcome", run, run.parent / "new.csv", "--out", tmp_path / "new")
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["client"] == {"name": "new", "number": None, "took_part": False}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "RUN"], "must know whose model it is. Give --client, or --all"),
        (["export", "RUN", "--client", "Prto"], "did you mean: Porto?"),
        (["export", "RUN", "--client", "7"], "by a number from 0 to 1. Got '7'"),
        (["export", "RUN", "--client", "0", "--format", "onxx"], "Did you mean: onnx?"),
        (["export", "nothing", "--client", "0"], "A run's folder must hold config.json"),
        (["predict", "RUN", "nothing.csv", "--client", "0"], "New samples must be in a file"),
        (["welcome", "RUN", "BARE"], "labels must be in the column `outcome`. There is none."),
        (["welcome", "RUN", "BARE", "--unlabelled"], "fedrep needs labels to make a model for a new client"),
    ],
)  # fmt: skip
def test_bad_input_ends_in_a_sentence(run, words, said):
    known = {"RUN": run, "BARE": run.parent / "bare.csv"}
    done = call(*(known.get(word, word) for word in words))
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output
