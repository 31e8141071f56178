"""What the tables of published results have in common: cells that are run side by side, and kept in a JSON file.

A cell is one method on one task with one seed. A finished cell is never run again, so that a table can be completed
cell by cell; an interrupted one continues from its last checkpoint, and its curve so far is kept, marked as
unfinished. Cells of one method and data set run one after
another in a process of their own, which so compiles its programs once. On a GPU small federations leave most of it
idle: start NVIDIA's multi-process service (`nvidia-cuda-mps-control -d`) and run several processes with --jobs.
"""

from __future__ import annotations

import argparse
import json
import logging
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
    """One run: `settings`, `recipe` and `training` are keywords of the classes of these names."""

    task: str  # the column of the table
    method: str
    seed: int
    recipe: dict[str, Any]
    training: dict[str, Any]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=-]+", "-", f"{self.task}-{self.method}-seed{self.seed}")

    @property
    def programs(self) -> tuple[str, str]:
        """Cells that agree in this run the same steps on the same shapes."""
        return self.recipe["dataset"], self.method


def run(cell: Cell, folder: Path, data: str | None, engine: Any) -> dict[str, Any]:
    """Run or continue a cell; returns its figures."""
    from atoll import Recipe, Settings, Training, federate
    from atoll.algorithms import create

    recipe = Recipe(**cell.recipe, data=data, seed=cell.seed, training=Training(**cell.training))
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
        **_origin(engine.precision),
    }


def so_far(cell: Cell, folder: Path, precision: str) -> dict[str, Any] | None:
    """The curve of a cell that was interrupted, if it has one."""
    lines = folder / cell.name / "metrics.jsonl"
    history = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    curve = [_point(line) for line in history if "evaluation" in line]
    return {**asdict(cell), "curve": curve, "unfinished": True, **_origin(precision)} if curve else None


def _origin(precision: str) -> dict[str, Any]:
    from atoll.runs import machine, versions

    return {
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
                for name in ("micro", "macro", "worst"):
                    point[f"{kind}{split}_{name}"] = round(100 * float(found[model][split][name]), 3)
    if "central" in found:
        point["central"] = round(100 * float(found["central"]["score"]), 3)
    return point


def _work(cells: Sequence[Cell], folder: Path, data: str | None, options: dict[str, Any], answers: Any) -> None:
    from atoll import LocalEngine

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    engine = LocalEngine(**options)
    for cell in cells:
        try:
            answers.put((cell.name, run(cell, folder, data, engine)))
        except KeyboardInterrupt:
            return


def main(name: str, cells: Sequence[Cell], pages: dict[str, Callable[[list[dict[str, Any]]], str]]) -> None:
    """Run what is missing and write docs/results/NAME.json, and the pages by their names."""
    parser = argparse.ArgumentParser(description=f"Runs what is missing of {name}, then writes {', '.join(pages)}.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument(
        "--compile", choices=["auto", "yes", "no"], default="auto", help="compiled steps; auto: if it pays"
    )
    parser.add_argument("--data", default=None, help="folder of the data sets; else $ATOLL_DATA")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--only", default="", help="a regular expression that names of cells must match")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop; call again to continue")
    parser.add_argument("--runs", type=Path, default=Path("runs") / name)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="name the cells and stop")
    parser.add_argument("--page", action="store_true", help="write the page from what is there and stop")
    asked = parser.parse_args()
    path = asked.out / f"{name}.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def finished(cell: Cell) -> bool:
        return cell.name in done and "unfinished" not in done[cell.name]

    if asked.list:
        print("\n".join(f"{'done' if finished(cell) else '    '}  {cell.name}" for cell in cells))
        return
    waiting: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if not asked.page and not finished(cell) and re.search(asked.only, cell.name):
            waiting.setdefault(cell.programs, []).append(cell)
    asked.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * asked.minutes
    context = multiprocessing.get_context("spawn")
    answers, running = context.Queue(), list[Any]()
    options = {
        "device": asked.device, "precision": asked.precision,
        "compile": {"auto": None, "yes": True, "no": False}[asked.compile],
    }  # fmt: skip
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            group = waiting.pop(next(iter(waiting)))
            running.append(
                context.Process(target=_work, args=(group, asked.runs, asked.data, options, answers), daemon=True)
            )
            running[-1].start()
        if time.monotonic() > deadline:
            waiting.clear()
            for process in running:
                process.terminate()  # the run stops after its round and can be continued
            deadline = float("inf")
        time.sleep(0.2)
        gone = [process for process in running if not process.is_alive()]  # before their last words are read
        while not answers.empty():
            named, figures = answers.get()
            done[named] = figures
            path.write_text(_compact(done))
            print(f"{named}: {figures['curve'][-1]}, {figures['seconds']} s", flush=True)
        running = [process for process in running if process not in gone]
    for cell in cells:
        if not finished(cell) and (figures := so_far(cell, asked.runs, asked.precision)) is not None:
            done[cell.name] = figures
    path.write_text(_compact(done))
    for title, page in pages.items():
        (asked.out / f"{title}.md").write_text(page([*done.values()]))


def _compact(done: dict[str, Any]) -> str:
    """JSON with one cell per line."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(done[name])}" for name in sorted(done)) + "\n}\n"


# -- the parts of a page -----------------------------------------------------------------------------------------------


def mean_text(values: Sequence[float]) -> str:
    """The mean, and with several seeds their standard deviation."""
    if not values:
        return ""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.2f}"
    spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.2f} ± {spread:.2f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origins(done: Sequence[dict[str, Any]]) -> str:
    """Machines, commits and versions of the cells, each once."""
    machines: dict[tuple[str, str, str], set[str]] = {}
    for one in done:
        machines.setdefault((one["machine"], one["precision"], one["torch"]), set()).add((one["commit"] or "?")[:7])
    return "; ".join(
        f"{machine}, {precision}, torch {torch}, commits {', '.join(sorted(commits))}"
        for (machine, precision, torch), commits in sorted(machines.items())
    )
