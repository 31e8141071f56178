"""`atoll tune` and `atoll advise` on the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli import app

QUICK = ["--rounds", "5", "--trials", "3", "--chosen-by", "1", "--seeds", "2"]
DIGITS = ["--task", "digits", "--clients", "6", "--samples", "300", "--model", "mlp:4"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*words):
    return CliRunner().invoke(app, [*words])


def test_tune_says_what_it_found_and_how_to_use_it():
    found = call("tune", "fedper", *DIGITS, *QUICK, "--out", "here")
    assert found.exit_code == 0, found.output
    assert "Every method had the same budget: 3 configurations each" in " ".join(found.stdout.split())
    assert "Use them, with the same data: atoll compare local:lr=" in found.stdout
    assert "fedper:lr=" in json.loads(Path("here/tuning.json").read_text())["best"]["fedper"]
    assert Path("here/report.html").exists()


def test_runs_of_a_race_are_one_line_of_the_list():
    """catches: a list of a hundred trials, among which the runs that were asked for cannot be found."""
    assert call("tune", "fedper", *DIGITS, *QUICK).exit_code == 0
    assert call("run", "local", *DIGITS, "--rounds", "1").exit_code == 0
    (race,) = Path("runs").glob("digits-tune-*")
    number = len([*race.rglob("config.json")])
    found = call("list", "runs")
    lines = [line for line in found.stdout.splitlines() if "runs/" in line]
    assert len(lines) == 2
    assert f"tune: {number} runs" in lines[1]
    assert f"`atoll list runs --long` lists the {number} runs of tune and advise as well." in found.stderr
    everything = [line for line in call("list", "runs", "--long").stdout.splitlines() if "runs/" in line]
    assert len(everything) == number + 1
    (race / "choosing.json").write_text("{}")
    assert f"left out: {race}" in " ".join(call("list", "runs").stderr.split())


def write_hospitals():
    Path("hospitals").mkdir()
    for k, name in enumerate(("Ulm", "Porto", "Lund")):
        rows = [f"{(17 * i + k) % 13},{(7 * i) % 5},{int((17 * i + k) % 13 + (7 * i) % 5 > 8)}" for i in range(60)]
        Path(f"hospitals/{name}.csv").write_text("\n".join(["age,days,readmitted", *rows]))


def test_advise_on_own_files_ends_with_a_sentence_and_resume_finds_it():
    write_hospitals()
    found = call("advise", "fedavg-ft", "--own", "hospitals", "--target", "readmitted", *QUICK, "--out", "here")
    assert found.exit_code == 0, found.output
    advice = json.loads(Path("here/advice.json").read_text())
    said = " ".join(found.stdout.split())
    assert " ".join(advice["sentence"].split()) in said
    assert "Client by client" in said
    assert "Ulm" in said
    again = call("resume", "here")
    assert again.exit_code == 0, again.output
    assert json.loads(Path("here/advice.json").read_text())["sentence"] == advice["sentence"]


def test_ctrl_c_leaves_something_that_is_continued():
    words = [sys.executable, "-m", "atoll", "tune", "ditto", *DIGITS, "--rounds", "400", "--out", "here"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len([*Path("here/race").glob("*/metrics.jsonl")]) < 2:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "continue with `atoll resume here`" in said
    assert Path("here/choosing.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", "ditto", *DIGITS, "--split", "75/0/25"], "digits has none.\nhint: give them a share"),
        (["advise", "--task", "digits", "--partition", "iid", "--clients", "1"], "There is nothing to federate"),
        (["tune", "dito", *DIGITS], "Did you mean: ditto?"),
        (["tune", "ditto:lamm=1", *DIGITS], "Did you mean: lam?"),
        (["tune", "ditto", *DIGITS, "--mlflow"], "Trackers follow one run at a time"),
        (["advise", *DIGITS, "--one-shot", "--rounds", "3"], "With one upload there is one round"),
    ],
)
def test_bad_input_ends_in_a_sentence(words, message):
    found = call(*words, "--out", "here")
    assert found.exit_code == 2, found.output
    assert message in found.stderr
    assert "Traceback" not in found.output
    assert not Path("here").exists()
