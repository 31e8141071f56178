"""The scripts in examples/ run; with few clients and rounds, because only that they run is tested."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.algorithms import load_file
from atoll.data import datasets, partition
from atoll.data.task import Task
from atoll.federation.loop import federate
from atoll.runtime.engines.measuring import one_thread_each

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much where cores are busy."""
    with one_thread_each():
        yield


def main_of(name: str) -> Callable[..., None]:
    main: Callable[..., None] = runpy.run_path(str(EXAMPLES / name))["main"]
    return main


def test_every_example_is_tested() -> None:
    tested = {"quickstart.py", "own_data.py", "hospitals.py", "new_method.py", "drop_outs.py", "typed.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert max(lengths.values()) < 40, lengths


def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("quickstart.py")(clients=3, rounds=1)
    assert "each client sent 0.1 MB in 1 rounds" in capsys.readouterr().out


def test_own_data(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("own_data.py")(rounds=1)
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["Ulm", "Local", "FedAvg", "FedPer"]


def test_hospitals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main_of("hospitals.py")(rounds=1, seeds=1, out=str(tmp_path))
    assert "ditto" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()
    clients = (tmp_path / "clients.csv").read_text()
    assert all(name in clients for name in ("Ulm", "Porto", "Lund"))


def test_drop_outs(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("drop_outs.py")(clients=8, rounds=2)
    out = capsys.readouterr().out
    assert "dropped out" in out
    assert "all 8 clients" in out


def test_typed(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("typed.py")(rounds=1)
    out = capsys.readouterr().out
    assert all(f"{hospital:6} gains" in out for hospital in ("Ulm", "Porto", "Lund"))
    assert "one upload: " in out


def test_new_method(tiny_task: Task) -> None:
    blend = load_file(EXAMPLES / "new_method.py")
    assert federate(tiny_task, blend(share=0.3), rounds=1).scores().shape == (tiny_task.clients,)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"`share` of Blend must be a float in \[0, 1\]"):
        blend(share=1.5)  # type: ignore[call-arg]


# A bar in a real kernel, opened at once; it is drawn again at its end.
BAR = """
import atoll.federation.progress as progress
progress.DELAY = 0.0
with progress.show_progress(rounds=4, runs=1) as bar:
    while bar._bar is None:
        pass
    bar.begin("<ditto>")
    bar.advance(3)
"""


def test_the_notebook_shows_tables_and_progress(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "compare.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)  # it is kept without outputs
    notebook.cells.append(nbformat.v4.new_code_cell(BAR))
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    shown = [
        [output["data"].get("text/html", "") for output in cell.outputs if "data" in output]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert "On average a client" in shown[0][-1]
    assert "Gains are paired by client" in shown[1][-1]
    assert all(name in shown[1][-1] for name in ("local", "fedavg", "fedavg-ft", "ditto"))
    assert (tmp_path / "report" / "report.html").exists()
    (bar,) = shown[-1]
    assert '<progress value="3" max="4"' in bar
    assert "&lt;ditto&gt;" in bar


@pytest.fixture
def tiny_task() -> Task:
    return Task.build(datasets.load("digits"), partition.parse("iid"), clients=2)
