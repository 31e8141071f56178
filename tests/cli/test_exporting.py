"""Models that leave a run, on the command line: export, predict, welcome."""

import csv
import io
import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from atoll import Task, Training, federate
from atoll.cli import app
from atoll.federation.models import _deal_folds, score_newcomer
from atoll.federation.report import Report
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


def test_a_new_client_is_scored_on_samples_its_models_were_not_made_from(run, tmp_path):
    """catches: labels that were learnt by heart, scored on the same samples."""
    done = call("welcome", run, run.parent / "new.csv", "--out", tmp_path / "new")
    said = " ".join(done.output.split())
    quality = json.loads((tmp_path / "new" / "manifest.json").read_text())["cross_validation"]
    assert (quality["samples"], quality["folds"], quality["shared"]) == (12, 5, None)  # a head each: nothing is shared
    assert f"Its accuracy is {100 * quality['score']:.1f} %, and there is no shared model: on 12 samples" in said
    report, raw = Report.read(run), run.parent / "new.csv"
    fold = _deal_folds(report, raw, 12)
    assert sorted(np.bincount(fold).tolist()) == [2, 2, 2, 3, 3]
    right = []
    for one in range(5):
        listed = rows(12, 7)
        write(tmp_path / "rest.csv", [row for row, place in zip(listed, fold, strict=True) if place != one])
        write(tmp_path / "held.csv", held := [row for row, place in zip(listed, fold, strict=True) if place == one])
        answers = report.model_for(tmp_path / "rest.csv").predict(tmp_path / "held.csv")
        right += [answer == row[TARGET] for answer, row in zip(answers, held, strict=True)]
    assert quality["score"] == pytest.approx(np.mean(right))
    write(tmp_path / "one.csv", rows(1, 7))
    done = call("welcome", run, tmp_path / "one.csv", "--out", tmp_path / "single")
    assert "cannot be told: scoring takes at least 2 samples" in " ".join(done.output.split())


def test_groups_stay_in_one_fold(tmp_path):
    listed = [{**row, "patient": f"p{number // 3}"} for number, row in enumerate(rows(24, 3))]
    write(tmp_path / "new.csv", listed[:12])
    for name, part in (("a", listed), ("b", listed[::-1])):
        (tmp_path / "data").mkdir(exist_ok=True)
        write(tmp_path / "data" / f"{name}.csv", part)
    task = Task.own(tmp_path / "data", target=TARGET, group="patient", model="linear")
    report = federate(task, "fedavg-ft", rounds=1, folder=tmp_path / "run")
    fold = _deal_folds(report, tmp_path / "new.csv", 12)
    assert fold.reshape(4, 3).tolist() == [[one] * 3 for one in fold[::3]]
    assert len({*fold.tolist()}) == 4
    quality = score_newcomer(report, tmp_path / "new.csv")
    assert quality.shared is not None
    assert 0 <= quality.score <= 1


def test_a_welcomed_client_predicts_by_its_name(run, tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path))
    assert call("welcome", run, run.parent / "new.csv").exit_code == 0
    done = call("predict", run, run.parent / "bare.csv", "--client", "new")
    assert done.exit_code == 0, done.output
    answers = [row["prediction"] for row in csv.DictReader(io.StringIO(done.stdout))]
    assert answers == Report.read(run).model_for(run.parent / "new.csv").predict(run.parent / "bare.csv")
    done = call("predict", run, run.parent / "bare.csv", "--client", "nw")
    assert done.exit_code == 2
    assert "Welcomed were new." in done.output
    (tmp_path / "trusted.json").unlink()  # a run's folder from somebody else
    done = call("predict", run, run.parent / "bare.csv", "--client", "new")
    assert done.exit_code == 2
    assert "must not make you run a file that you have not run before" in " ".join(done.output.split())
    assert call("predict", run, run.parent / "bare.csv", "--client", "new", "--trust").exit_code == 0
    weights = run / "models" / "new" / "new" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    done = call("predict", run, run.parent / "bare.csv", "--client", "new")
    assert "must be those of its manifest" in done.output
    write(tmp_path / "Ulm.csv", rows(12, 7))
    assert call("welcome", run, tmp_path / "Ulm.csv").exit_code == 0
    done = call("predict", run, run.parent / "bare.csv", "--client", "Ulm")
    assert "'Ulm' is a client of the run, and one that it welcomed" in " ".join(done.output.split())
    shutil.rmtree(run / "models" / "new")


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
