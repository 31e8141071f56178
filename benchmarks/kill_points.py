"""SIGKILL at every write point of a run: each of them is resumed, and ends in the files of a run that was left alone.

    python benchmarks/kill_points.py                       all of them, for six runs
    python benchmarks/kill_points.py --only "ditto disk" --every 20

A write point is a moment just before something changes on disk: a file is opened to be written, renamed or removed, a
folder is made, an SQL statement is executed. `again` kills a run while it is being resumed.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atoll import LocalEngine, Task, Training, federate
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ditto ram": ("ditto", {"rounds": 3, "eval_every": 1}),
    "ditto few": ("ditto", {"rounds": 4, "eval_every": 1, "cohort": 1}),
    "ditto disk": ("ditto", {"rounds": 3, "eval_every": 1, "memory": "disk", "cohort": 3}),
    "scaffold disk": ("scaffold", {"rounds": 3, "eval_every": 2, "memory": "disk", "late": 0.3}),
    "oneshot-avg": ("oneshot-avg:epochs=2", {"rounds": 1}),
    "ditto disk again": ("ditto", {"rounds": 3, "eval_every": 2, "memory": "disk"}),
}
ENGINE = LocalEngine(device="cpu", strategy="whole", compile=False)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def make_task() -> Task:
    draw = generator(0, "data")
    data = {
        str(k): (torch.from_numpy(draw.normal(size=(n, 4))).float(), torch.from_numpy(draw.integers(3, size=n)))
        for k, n in enumerate((12, 8, 5, 9))
    }
    with default_generator(0):
        model = MLP((4,), 3, hidden=(6,))
    return Task.of_clients(data, model, classes=3, training=Training(batch_size=4), shares=(0.6, 0.2, 0.2))


class Points:
    """Counts write points inside a folder, and ends the process with SIGKILL at one of them."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.folder, self.fatal, self.count = str(folder), fatal, 0
        sys.addaudithook(self.hear)
        connect = sqlite3.connect

        def traced(*given: Any, **more: Any) -> sqlite3.Connection:
            connection = connect(*given, **more)
            connection.set_trace_callback(self.pass_by)
            return connection

        sqlite3.connect = traced  # type: ignore[assignment]

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        """See each thing that the interpreter is about to do."""
        changes = event in CHANGES or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and str(given[0]).startswith(self.folder):
            self.pass_by()

    def pass_by(self, _statement: str = "") -> None:
        """Count a point; it may be the last."""
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Do something in a process of its own; return its exit code, negative for a signal, and what it found."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, json.dumps(work()).encode())
            code = 0
        except BaseException as error:  # noqa: BLE001 - the parent says so
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, json.loads(found) if found else None


def run(name: str, folder: Path, fatal: int | None = None, stop: int | None = None) -> int:
    """Begin or continue a run; return how many write points it passed."""
    points = Points(folder, fatal)
    method, asked = RUNS[name]

    def on_round(line: Any) -> None:
        if line.round == stop:
            raise KeyboardInterrupt

    begun = (folder / "config.json").exists()
    try:
        federate(make_task(), method, folder=folder, resume=begun, engine=ENGINE, on_round=on_round, **asked)
    except KeyboardInterrupt:
        if stop is None:
            raise
    return points.count


def contents(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "metrics.jsonl": [{name: line[name] for name in line if name not in ("seconds", "memory")} for line in lines],
        "files": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix != ".log"),
    }
    for path in (folder / "ledger.jsonl", folder / "outcomes.npz", folder / "clients.json"):
        found[path.name] = path.read_bytes()
    for path in (folder / "checkpoints").glob("*.safetensors"):
        found[path.name] = path.read_bytes()
    if (folder / "memory.sqlite").exists():
        connection = sqlite3.connect(folder / "memory.sqlite")
        for path in (folder / "checkpoints").glob("*.json"):  # what each of them sees; other rows are free
            newest = "SELECT piece, client, MAX(round), form, tree, checksum FROM kept WHERE round < ?"
            rows = connection.execute(f"{newest} GROUP BY piece, client", (int(path.stem.removeprefix("round-")),))
            found[f"memory.sqlite at {path.stem}"] = sorted(rows.fetchall())
        connection.close()
    return found


def check(name: str, home: Path, every: int) -> tuple[int, list[str]]:
    """Kill a run at its write points; return how many there were, and what went wrong."""
    whole, begun, killed = home / "whole", home / "begun", home / "run"
    begun.mkdir()
    code, found = in_child(lambda: run(name, whole))
    assert code == 0, found
    expected = contents(whole)
    if name.endswith("again"):
        code, found = in_child(lambda: run(name, begun, stop=2))
        assert code == 0, found
    shutil.copytree(begun, killed)
    code, points = in_child(lambda: run(name, killed))
    assert code == 0, points
    wrong, at = [], range(1, points + 1, every)
    for fatal in at:
        shutil.rmtree(killed)
        shutil.copytree(begun, killed)
        code, found = in_child(lambda fatal=fatal: run(name, killed, fatal))  # type: ignore[misc]
        if code != -signal.SIGKILL:
            wrong.append(f"{name}, point {fatal}: was not killed ({found})")
            continue
        code, found = in_child(lambda: run(name, killed))
        if code:
            wrong.append(f"{name}, point {fatal}: not resumed ({found})")
            continue
        now = contents(killed)
        wrong += [f"{name}, point {fatal}: {part} differs" for part in expected if now.get(part) != expected[part]]
    return len(at), wrong


def make_ready(names: list[str]) -> None:
    """Do every run once, so children need not import and look up everything again."""
    for name in names:
        with tempfile.TemporaryDirectory() as home:
            method, asked = RUNS[name]
            federate(make_task(), method, folder=Path(home, "run"), engine=ENGINE, **asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*RUNS])
    parser.add_argument("--every", type=int, default=1, help="only one of so many points")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a process with threads of its own cannot fork
    logging.disable(logging.WARNING)
    names = [options.only] if options.only else [*RUNS]
    make_ready(names)
    failures = 0
    for name in names:
        with tempfile.TemporaryDirectory() as home:
            kills, wrong = check(name, Path(home), options.every)
        print(*wrong, f"{name}: {kills} kills, {kills - len(wrong)} resumed to the same files", sep="\n", flush=True)
        failures += len(wrong)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
