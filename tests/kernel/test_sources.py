"""Which code a digest stands for."""

import shutil
from pathlib import Path

import pytest

from atoll.kernel import sources


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of Atoll's code that can be edited."""
    copy = tmp_path / "atoll"
    shutil.copytree(sources.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "PACKAGE", copy)
    forget()
    yield copy
    monkeypatch.undo()
    forget()


def forget():
    for cached in (
        sources._snapshot,
        sources._imported_files,
        sources._is_within,
        sources.is_edited,
        sources.code_digest,
    ):
        cached.cache_clear()


def edit(file: Path) -> None:
    file.write_text(file.read_text() + "\nEDITED = 1\n")
    forget()


SGD, TERMS = "toolbox/client/sgd.py", "toolbox/objectives/terms.py"


def of_training(package: Path) -> str:
    return sources.training_digest([package / SGD, package / TERMS])


@pytest.mark.parametrize(
    "name",
    ["report/html.py", "report/table.py", "cli/program.py", "experiments/explain/words.py", "experiments/tracking.py",
     "federation/results.py", "federation/loop.py", "metrics/evaluation.py", "testing/conformance/battery.py",
     "data/statistics.py", "algorithms/ditto.py"],
)  # fmt: skip
def test_an_edit_that_training_cannot_reach_keeps_its_digest(package, name):
    before = of_training(package)
    edit(package / name)
    assert of_training(package) == before


@pytest.mark.parametrize(
    "name",
    ["toolbox/client/sgd.py", "toolbox/client/descent.py", "kernel/params.py", "kernel/batch.py",
     "runtime/engines/scan.py", "runtime/engines/programs.py", "kernel/network.py",
     "kernel/portable.py", "data/augment.py", "data/batches.py", "kernel/randomness.py",
     "toolbox/objectives/terms.py", "toolbox/objectives/prototypical.py", "toolbox/objectives/contrastive.py"],
)  # fmt: skip
def test_an_edit_of_what_training_runs_changes_its_digest(package, name):
    before = of_training(package)
    edit(package / name)
    assert of_training(package) != before


def test_the_objective_of_another_method_is_not_reached(package):
    before = sources.training_digest([package / SGD])
    edit(package / TERMS)
    assert sources.training_digest([package / SGD]) == before


@pytest.mark.parametrize(
    ("name", "kept"),
    [("report/html.py", True), ("cli/program.py", True), ("metrics/evaluation.py", False),
     ("federation/loop.py", False), ("algorithms/ditto.py", False), ("toolbox/client/sgd.py", False)],
)  # fmt: skip
def test_runs_are_reused_unless_code_that_decides_their_numbers_was_edited(package, name, kept):
    before = sources.code_digest()
    edit(package / name)
    assert (sources.code_digest() == before) is kept


def test_nothing_that_trains_imports_what_is_said_to_stand_around():
    """`data.task` shows statistics, whose tables are the report's; everything else is found without being left out."""
    roots = [*(sources.PACKAGE / f"{name}.py" for name in sources.TRAINING), *(sources.PACKAGE / "local").glob("*.py")]
    found = sources.reach(roots, ("data/statistics",))
    assert not [file for file in found if sources._is_within(file, sources.AROUND_TRAINING)]


def test_what_a_user_imports_from_atoll_is_followed_to_where_it_is(package, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from atoll import federate, Params\nfrom atoll.toolbox.client import sgd\nfrom atoll import models\n"
    )
    found = sources.reach([file], sources.AROUND_TRAINING)
    names = {one.relative_to(package).as_posix() for one in found if package in one.parents}
    assert {"kernel/params.py", "toolbox/client/sgd.py", "models/__init__.py"} <= names
    assert not {"__init__.py", "federation/loop.py", "toolbox/client/__init__.py"} & names


def test_where_a_file_is_does_not_matter_but_what_it_is_called(tmp_path):
    digests = []
    for folder, name in (("a", "mine"), ("b", "mine"), ("b", "other")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text("X = 1")
        digests.append(sources.file_digest(tmp_path / folder / f"{name}.py"))
    assert digests[0] == digests[1] != digests[2]


def test_installed_code_is_nobodys_to_edit():
    import numpy as np
    import torch

    assert not sources.is_edited(torch.__file__)
    assert not sources.is_edited(np.__file__)
    assert not sources.is_edited(shutil.__file__)
    assert not sources.is_edited(sources.__file__)
    assert not sources.is_edited(None)
    assert sources.is_edited(__file__)
    assert sources.is_edited("<stdin>")
