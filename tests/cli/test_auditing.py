"""Attacks on a run, on the command line."""

import json

import pytest
from typer.testing import CliRunner

from atoll import Recipe, federate
from atoll.cli import app
from atoll.protect.client_level import NoisySum


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "private"
    task = Recipe("digits", clients=4, samples=200, model="linear").build()
    federate(task, "fedavg", rounds=1, dp="client:noise=8,clip=1", folder=folder, progress=False)
    return folder


def test_an_audit_writes_its_findings(run):
    done = call("audit", run, "--attacks", "membership", "--references", "2", "--canaries", "20")
    assert done.exit_code == 0, done.output
    found = json.loads((run / "audit" / "audit.json").read_text())
    assert {one["attack"] for one in found["membership"]} == {"rmia", "calibrated", "loss"}
    assert found["promise"]["holds"]
    assert (run / "audit" / "audit.html").read_text().startswith("<!doctype html>")
    assert "promised is" in " ".join(done.stdout.split())


def test_a_refuted_promise_ends_with_an_exit_code(run, tmp_path, monkeypatch):
    monkeypatch.setattr(NoisySum, "_add_noise", lambda self, where, value: value)
    done = call("audit", run, "--attacks", "", "--canaries", "100", "--out", tmp_path)
    assert done.exit_code == 1
    assert "The promise does not hold" in " ".join(done.stdout.split())


def test_bad_input(run, tmp_path):
    done = call("audit", run, "--references", "3")
    assert done.exit_code == 2
    assert "--references must be an even number" in " ".join(done.output.split())
    assert call("audit", tmp_path / "nothing").exit_code == 2
    (tmp_path / "comparison.json").write_text("{}")
    assert "An audit is of one run" in call("audit", tmp_path).output
