import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll import Recipe, federate
from atoll.cli import app
from atoll.compose import create
from atoll.federation.report import Report
from atoll.kernel.errors import RunError, UnknownName

MINE = """
from dataclasses import dataclass
from pathlib import Path

from atoll import Algorithm, Update
from helping import epochs
from atoll.toolbox.client import sgd

Path("executed").write_text("yes")


@dataclass(frozen=True, kw_only=True)
class Mine(Algorithm):
    def local(self, w, cohort):
        return Update(send={"delta": sgd(cohort, start=w, epochs=epochs()) - w}, weight=cohort.samples)
"""
HELPING = "def epochs():\n    return 1\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A run of a user's own method, in runs/mine; afterwards nobody has executed its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    Path("mine.py").write_text(MINE)
    Path("helping.py").write_text(HELPING)
    federate(Recipe(clients=2, samples=60, model="mlp:4").build(), create("./mine.py"), rounds=1, folder="runs/mine")
    Path("executed").unlink()
    return tmp_path


def atoll(*arguments):
    return CliRunner().invoke(app, arguments)


def test_a_file_that_this_user_ran_is_run_again(here):
    assert Report.read("runs/mine").label == "mine.py"
    assert Path("executed").exists()


@pytest.mark.parametrize("command", ["report", "explain", "resume"])
def test_a_folder_does_not_make_another_user_run_its_file(here, monkeypatch, command):
    monkeypatch.setenv("ATOLL_STATE", str(here / "another"))
    refused = atoll(command, "runs/mine")
    assert refused.exit_code == 2
    assert f"that you have not run before. It names {here / 'mine.py'}." in " ".join(refused.stderr.split())
    assert "--trust" in refused.stderr
    assert not Path("executed").exists()
    trusted = atoll(command, "runs/mine", "--trust")
    assert trusted.exit_code == 0, trusted.output
    assert Path("executed").exists()
    assert atoll(command, "runs/mine").exit_code == 0  # from now on


@pytest.mark.parametrize("name", ["mine.py", "helping.py"])
def test_a_file_that_was_changed_is_another_one(here, name):
    Path(name).write_text(Path(name).read_text() + "\n# changed\n")
    with pytest.raises(RunError, match="a file that you have not run before"):
        Report.read("runs/mine")
    assert not Path("executed").exists()
    assert Report.read("runs/mine", trust=True)


def test_listing_runs_nothing(here, monkeypatch):
    monkeypatch.setenv("ATOLL_STATE", str(here / "another"))
    assert "runs/mine" in atoll("list", "runs").stdout
    assert not Path("executed").exists()


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "nothing"])
def test_a_damaged_list_trusts_nobody(here, content):
    known = here / "state" / "trusted.json"
    assert str(here / "mine.py") in json.loads(known.read_text()).values()
    known.write_text(content)
    with pytest.raises(RunError, match="a file that you have not run before"):
        Report.read("runs/mine")


def test_a_file_that_is_gone_is_missed(here):
    Path("mine.py").unlink()
    with pytest.raises(UnknownName, match="The file of a run's method must be there"):
        Report.read("runs/mine", trust=True)
