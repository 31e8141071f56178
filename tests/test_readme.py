"""The code in README.md runs, and what it shows of the package is what the package holds."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import Task, algorithms, federate
from atoll.data import datasets, partition
from atoll.runtime.engines.measuring import one_thread_each

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much where cores are busy."""
    with one_thread_each():
        yield


def test_the_first_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is, but for fewer rounds and clients."""
    code = next(block for block in BLOCKS if "Local()" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 14
    small = code.replace("rounds=20", "rounds=1").replace("clients=20", "clients=3")
    assert small != code
    exec(compile(small, "README.md", "exec"), {})
    assert "Ditto" in capsys.readouterr().out


def test_it_counts_the_methods() -> None:
    methods = algorithms.list_methods().values()
    assert f"**{len(methods)} methods**" in README
    assert f"**One shot**: {sum(method.one_shot for method in methods)} methods" in README


def test_three_hospitals_go_from_files_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code as it is, but for fewer rounds and seeds, on the files that the example invents."""
    code = next(block for block in BLOCKS if "hospitals/" in block)
    assert len([line for line in code.splitlines() if line]) == 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hospitals").mkdir()
    runpy.run_path(str(ROOT / "examples/hospitals.py"))["invent"](tmp_path / "hospitals")
    small = code.replace('"ditto"])', '"ditto"], rounds=2, folds=3, repeats=1)')
    exec(compile(small, "README.md", "exec"), {})
    assert "ditto" in capsys.readouterr().out
    report = (tmp_path / "report/report.html").read_text()
    assert all(name in report for name in ("Ulm", "Porto", "Lund"))


def test_ditto_is_shown_as_it_is() -> None:
    source = (ROOT / "src/atoll/algorithms/ditto.py").read_text()
    shown = next(block for block in BLOCKS if "class Ditto" in block)
    assert shown.strip() == source.strip()


def test_the_method_of_five_lines_runs() -> None:
    code = next(block for block in BLOCKS if "class Mine" in block)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)

    task = Task.build(datasets.load("digits"), partition.parse("iid"), clients=2)
    federate(task, names["Mine"](), rounds=1)  # type: ignore[operator]


def test_the_layout_is_the_one_there_is() -> None:
    shown = re.search(r"^src/atoll/\n((?:  .*\n)+)", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert shown is not None
    names = {name for line in shown[1].splitlines() for name in re.findall(r"[a-z_]+(?:\.py|/)", line[:40])}
    there = {path.name + ("/" if path.is_dir() else "") for path in (ROOT / "src/atoll").iterdir()}
    assert names <= there, names - there
    missing = {name for name in there if not name.startswith("_") and name.endswith(("/", ".py"))} - names
    assert not missing
