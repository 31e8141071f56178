"""What the tables of published results have in common: cells that are run side by side, and kept in a JSON file.

A cell is one method on one task with one seed. A finished cell is never run again, so that a table can be completed cell
by cell; an interrupted one continues from its last checkpoint. On a GPU small federations leave most of it idle: start
NVIDIA's multi-process service (`nvidia-cuda-mps-control -d`) and run several cells at once with --jobs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "docs" / "results"


@dataclass(frozen=True)
class Cell:
    """One run: `settings` and `recipe` are keywords of `Settings` and `Recipe`."""

    task: str  # the column of the table
    method: str
    seed: int
    recipe: dict[str, Any]
    training: dict[str, Any]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=-]+", "-", f"{self.task}-{self.method}-seed{self.seed}")


def run(cell: Cell, folder: Path, data: str | None, device: str, precision: str) -> dict[str, Any]:
    """Run or continue a cell; returns its figures."""
    from atoll import LocalEngine, Recipe, Settings, Training, federate
    from atoll.algorithms import create
    from atoll.runs import machine, versions

    recipe = Recipe(**cell.recipe, data=data, seed=cell.seed, training=Training(**cell.training))
    engine = LocalEngine(device=device, precision=precision)
    settings = Settings(**cell.settings, seed=cell.seed)
    place = folder / cell.name
    began = time.time()
    report = federate(
        recipe.build(), create(cell.method), settings=settings, engine=engine, folder=place,
        resume=(place / "config.json").exists(),
    )  # fmt: skip
    return {
        **asdict(cell),
        "curve": [_point(line) for line in report.history if "evaluation" in line],
        "seconds": round(time.time() - began),
        "precision": precision,
        "commit": os.environ.get("ATOLL_COMMIT") or versions().get("commit"),
        "torch": versions()["torch"],
        "machine": machine()["gpu"] or f"{machine()['cores']} CPU cores",
    }


def _point(line: dict[str, Any]) -> dict[str, float]:
    """What a table needs of one evaluation: all in per cent, over samples and over clients."""
    found = line["evaluation"]
    point: dict[str, float] = {"round": line["round"]}
    for kind, model in (("", "personal"), ("shared_", "shared")):
        for split in ("val", "test"):
            if model in found and split in found[model]:
                for name in ("micro", "macro"):
                    point[f"{kind}{split}_{name}"] = round(100 * found[model][split][name], 3)
    if "central" in found:
        point["central"] = round(100 * found["central"]["score"], 3)
    return point


def _work(cell: Cell, arguments: tuple[Any, ...], answers: Any) -> None:
    answers.put((cell.name, run(cell, *arguments)))


def main(name: str, cells: Sequence[Cell], page: Callable[[list[dict[str, Any]]], str]) -> None:
    """Run what is missing and write docs/results/NAME.json and NAME.md."""
    parser = argparse.ArgumentParser(description=page.__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--data", default=None, help="folder of the data sets; else $ATOLL_DATA")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--only", default="", help="a regular expression that names of cells must match")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop; call again to continue")
    parser.add_argument("--runs", type=Path, default=Path("runs") / name)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="name the cells and stop")
    asked = parser.parse_args()
    path = asked.out / f"{name}.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    missing = [cell for cell in cells if cell.name not in done and re.search(asked.only, cell.name)]
    if asked.list:
        print("\n".join(f"{'done' if cell.name in done else '    '}  {cell.name}" for cell in cells))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * asked.minutes
    arguments = (asked.runs, asked.data, asked.device, asked.precision)
    context = multiprocessing.get_context("spawn")
    answers, running = context.Queue(), dict[str, Any]()
    while (missing or running) and time.monotonic() < deadline:
        while missing and len(running) < asked.jobs:
            cell = missing.pop(0)
            running[cell.name] = context.Process(target=_work, args=(cell, arguments, answers))
            running[cell.name].start()
        time.sleep(0.2)
        while not answers.empty():
            finished, figures = answers.get()
            done[finished] = figures
            path.write_text(_compact(done))
            print(f"{finished}: {figures['curve'][-1]}, {figures['seconds']} s", flush=True)
        for cell_name, process in [*running.items()]:
            if not process.is_alive() and (cell_name in done or process.exitcode):
                if process.exitcode:
                    print(f"{cell_name}: failed with exit code {process.exitcode}", flush=True)
                del running[cell_name]
    for cell_name, process in running.items():
        print(f"{cell_name}: stopped; call again to continue", flush=True)
        process.terminate()  # the run stops after its round and can be resumed
    for process in running.values():
        process.join()
    if done:
        (asked.out / f"{name}.md").write_text(page([*done.values()]))


def _compact(done: dict[str, Any]) -> str:
    """JSON with one cell per line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(done[name])}" for name in sorted(done)) + "\n}\n"
