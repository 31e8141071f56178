"""A federation of a million clients with private state on one machine: seconds, memory, stops and kills.

    python benchmarks/million.py                                  10,000, 100,000 and 1,000,000 clients
    python benchmarks/million.py --clients 10000 --methods ditto --rounds 10

For each number of clients and each method, four processes: one builds the task and runs to the end; one is stopped by
its user half-way; one is killed with SIGKILL in a later round; the last two are resumed. Every round is checkpointed.
All clients have something in their memory before the first round, so the file has its full size from the beginning.

`round` is the median time of a round, `saved` that of a round with its checkpoint, in seconds; `CPU` is what the
process itself computed for it, which others on the machine disturb less. `memory` is the most the process held.
`stopped` and `killed` tell whether the run ended in the same files as the one that was left alone, and after how many
seconds its first new round was done.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll import LocalEngine, federate
from atoll.data.recipe import Recipe
from atoll.data.task import Task
from atoll.federation import session
from atoll.kernel.params import Stack
from atoll.runtime.memory import DiskMemory

COHORT, AT_ONCE, WARM = 1000, 5000, 3  # clients per round, clients written at once, rounds that are not counted
KEEPERS = ("local", "ditto")  # of these, a client keeps a model
PLAN = "chunk:128 eager one_core"  # one for all, so nothing is measured and all runs have the same bits


def fill(task: Task, path: Path) -> None:
    """Let every client keep the initial model, in a round before the first."""
    memory, initial = DiskMemory(path), task.network.initial
    for first in range(0, task.clients, AT_ONCE):
        some = np.arange(first, min(first + AT_ONCE, task.clients))
        copies = Stack({name: leaf.expand(len(some), *leaf.shape) for name, leaf in initial.items()}, initial.layout)
        memory.keep(some, copies, round=-1)
    memory.prune(round=0)
    memory.save(round=0)
    memory.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Begin or continue one run, and end it as `--end` says; return what was measured."""
    session.CHECKPOINT_SECONDS = 0.0  # after every round
    began, stop = time.perf_counter(), threading.Event()
    task = Recipe("million", clients=options.clients[0]).build()
    built = time.perf_counter() - began
    ticks: list[tuple[float, float, float]] = []  # seconds of the round, wall clock, CPU clock

    def on_round(line: Any) -> None:
        ticks.append((line.seconds["round"], time.perf_counter(), time.process_time()))
        if options.end == "stop" and line.round == options.rounds // 2:
            stop.set()
        if options.end == "kill" and line.round == options.rounds // 2 + 2:
            os.kill(os.getpid(), signal.SIGKILL)

    resume = (options.folder / "config.json").exists()
    began = time.perf_counter()
    try:
        federate(
            task, options.methods[0], rounds=options.rounds, cohort=min(COHORT, task.clients), evaluation="none",
            memory=options.memory, folder=options.folder, resume=resume, on_round=on_round, stop=stop,
            engine=LocalEngine(device="cpu", strategy=PLAN),
        )  # fmt: skip
    except KeyboardInterrupt:
        if options.end != "stop":
            raise
    rounds, wall, cpu = (np.array(part) for part in zip(*ticks, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "build": built, "first": wall[0] - began, "memory": peak / 2**30,
        "round": typical(rounds), "saved": typical(np.diff(wall)), "cpu": typical(np.diff(cpu)),
    }  # fmt: skip


def typical(seconds: NDArray[np.float64]) -> float:
    """Return the median of all but the first rounds; NaN if there are no others, as in a run that was resumed."""
    return float(np.median(seconds[WARM:])) if len(seconds) > WARM else float("nan")


def start(options: argparse.Namespace, clients: int, method: str, folder: Path, end: str) -> dict[str, Any] | None:
    """Do a run in a process of its own; return what it measured, or None if it was killed as it should."""
    command = [
        sys.executable, __file__, "--clients", str(clients), "--methods", method, "--rounds", str(options.rounds),
        "--memory", options.memory, "--folder", str(folder), "--end", end,
    ]  # fmt: skip
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if end == "kill":
        assert done.returncode == -signal.SIGKILL, done.returncode
        return None
    assert done.returncode == 0, done.returncode
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def digest(folder: Path) -> dict[str, str]:
    """Return digests of all that a run leaves, but for times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    facts = [{name: line[name] for name in line if name not in ("seconds", "memory")} for line in lines]
    found = {"metrics": json.dumps(facts), "ledger": (folder / "ledger.jsonl").read_text()}
    newest = max((folder / "checkpoints").glob("*.safetensors"))
    found["checkpoint"] = f"{newest.name} {hashlib.sha256(newest.read_bytes()).hexdigest()}"
    if (folder / "memory.sqlite").exists():
        connection, rows = sqlite3.connect(folder / "memory.sqlite"), hashlib.sha256()
        newest = "SELECT piece, client, MAX(round), checksum FROM kept GROUP BY piece, client"
        for row in connection.execute(f"{newest} ORDER BY piece, client"):
            rows.update(repr(row).encode())
        found["memory"] = rows.hexdigest()
        connection.close()
    return found


def measure(options: argparse.Namespace, clients: int, method: str, home: Path, filled: Path) -> list[str]:
    """Return a row of the table."""

    def begin(name: str) -> Path:
        folder = home / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if method in KEEPERS and options.memory == "disk":
            shutil.copy(filled, folder / "memory.sqlite")
        return folder

    whole = begin("whole")
    found = start(options, clients, method, whole, "whole")
    assert found is not None
    expected, outcomes, peak = digest(whole), [], found["memory"]
    shutil.rmtree(whole)
    for end in ("stop", "kill") if options.interrupt else ():
        folder = begin(end)
        start(options, clients, method, folder, end)
        again = start(options, clients, method, folder, "whole")
        assert again is not None
        now, peak = digest(folder), max(peak, again["memory"])
        differs = [name for name in expected if now.get(name) != expected[name]]
        outcomes.append(f"{'differs: ' + ', '.join(differs) if differs else 'same'}, {again['first']:.1f} s")
        shutil.rmtree(folder)
    figures = [f"{found[name]:.2f}" for name in ("build", "round", "saved", "cpu")]
    return [f"{clients:,}", method, *figures, f"{peak:.1f} GiB", *outcomes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--methods", nargs="+", default=["local", "fedavg", "ditto"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--memory", default="disk", help="ram, disk or auto")
    parser.add_argument("--no-interrupt", dest="interrupt", action="store_false", help="no stops and kills")
    parser.add_argument("--folder", type=Path, help="of the runs; else a temporary one")
    parser.add_argument("--end", choices=["whole", "stop", "kill"], help=argparse.SUPPRESS)  # of a child
    options = parser.parse_args()
    if options.end:
        print(json.dumps(run(options)))
        return
    names = ["clients", "method", "build", "round", "saved", "CPU", "memory", "stopped", "killed"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        home, filled = Path(place), Path(place, "filled.sqlite")
        for clients in options.clients:
            if options.memory == "disk":
                fill(Recipe("million", clients=clients).build(), filled)
            for method in options.methods:
                row = measure(options, clients, method, home, filled)
                print("| " + " | ".join(row) + " |", flush=True)
            filled.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
