"""What the tables of published results have in common: cells that are run side by side, and kept in a JSON file.

A cell is one method on one task with one seed. A finished cell is never run again, so that a table can be completed
cell by cell; an interrupted one continues from its last checkpoint, and its curve so far is kept, marked as
unfinished. Cells of one method and data set, or of one family, run one after another in a process of their own, which
so compiles its programs once. On a GPU small federations leave most of it idle: start NVIDIA's multi-process service
(`nvidia-cuda-mps-control -d`) and run several processes with --jobs.

One-shot cells of one family, partition and seed share their clients' training, which is kept until all of them are
done.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TRAINED = "trained"  # the folder of the clients' training
GRACE = 20.0  # seconds between asking to stop and asking again


@dataclass(frozen=True)
class Cell:
    """One run: `settings`, `recipe` and `training` are keywords of the classes of these names."""

    task: str  # the column of the table
    method: str
    seed: int
    recipe: dict[str, Any]
    training: dict[str, Any]
    settings: dict[str, Any]
    family: str = ""  # of methods whose steps or whole training are the same; by default each is by itself

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.=-]+", "-", f"{self.task}-{self.method}-seed{self.seed}")

    @property
    def programs(self) -> tuple[str, str]:
        """Cells that agree in this run the same steps on the same shapes."""
        return self.recipe["dataset"], self.family or self.method

    @property
    def trained(self) -> str:
        """The folder of the clients' training, where it is long."""
        which = f"{self.recipe['dataset']}-{self.family or self.method}-{self.recipe['partition']}-seed{self.seed}"
        return re.sub(r"[^\w.=-]+", "-", which)


Runner = Callable[[Cell, Path, str | None, Any], dict[str, Any]]


def run(cell: Cell, folder: Path, data: str | None, engine: Any) -> dict[str, Any]:
    """Run or continue a cell; returns its figures: what was measured, not what the cell says itself."""
    from atoll import Recipe, Settings, Training, federate
    from atoll.compose import create

    recipe = Recipe(**cell.recipe, data=data, seed=cell.seed, training=Training(**cell.training))
    settings, algorithm = Settings(**cell.settings, seed=cell.seed), create(cell.method)
    task, place = _placed(recipe, engine), folder / cell.name
    began = time.time()
    report = federate(
        task, algorithm, settings=settings, engine=engine, folder=place, resume=(place / "config.json").exists(),
        trained=folder / TRAINED / cell.trained,
    )  # fmt: skip
    figures = {
        "curve": [_point(line) for line in report.history if "evaluation" in line],
        "seconds": round(time.time() - began, 1 if algorithm.one_shot else None),
        **origin(engine.precision),
    }
    if algorithm.one_shot:
        shutil.rmtree(place / "checkpoints")  # of all clients' models: nothing is left to be continued
        figures |= _of_one_round(report)
    return figures


def _of_one_round(report: Any) -> dict[str, Any]:
    """What a table of one-shot methods needs beside scores: seconds of what was found, bytes, and what was observed."""
    (line,), ledger = report.history, report.ledger
    seen = line.get("observed")
    return {
        "found": round(line["seconds"].get("found", 0.0), 1),
        "up": ledger.bytes("up"),
        "down": ledger.bytes("down"),
        "deployed": line["evaluation"]["deployed"],
        **({"observed": seen} if seen else {}),
    }


@functools.lru_cache(maxsize=1)
def _placed(recipe: Any, engine: Any) -> Any:
    """The task where the engine computes: cells that follow each other have it in the same memory."""
    return engine.place(recipe.build())


def so_far(cell: Cell, folder: Path) -> dict[str, Any] | None:
    """The curve of a cell that was interrupted, if it has one, and where it ran."""
    lines = folder / cell.name / "metrics.jsonl"
    history = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    curve = [_point(line) for line in history if "evaluation" in line]
    if not curve:
        return None
    config = json.loads((folder / cell.name / "config.json").read_text())
    place = _origin(config["engine"]["precision"], config["versions"], config["machine"])
    return {"curve": curve, "unfinished": True, **place}


def origin(precision: str) -> dict[str, Any]:
    """What the figures of a run that ends here come from."""
    from atoll.records.runs import machine, versions

    return _origin(precision, versions(), machine())


def _origin(precision: str, versions: dict[str, str], machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "precision": precision,
        "commit": (os.environ.get("ATOLL_COMMIT") or versions.get("commit") or "?")[:7],
        "torch": versions["torch"],
        "machine": machine["gpu"] or f"{machine['cores']} CPU cores",
    }


def _point(line: dict[str, Any]) -> dict[str, float]:
    """What a table needs of one evaluation: all in per cent, over samples and over clients."""
    found = line["evaluation"]
    point: dict[str, float] = {"round": line["round"]}
    for kind, model in (("", "personal"), ("shared_", "shared")):
        for split, names in (("val", ("micro",)), ("test", ("micro", "macro", "worst"))):
            if model in found and split in found[model]:
                for name in names:
                    value = float(found[model][split][name])
                    if not math.isnan(value):  # without samples there is no score
                        point[f"{kind}{split}_{name}"] = round(100 * value, 3)
    if "central" in found:
        point["central"] = round(100 * float(found["central"]["score"]), 3)
    return point


def _work(
    runner: Runner, cells: Sequence[Cell], folder: Path, data: str | None, options: dict[str, Any], answers: Any
) -> None:
    from atoll import LocalEngine

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    engine = LocalEngine(**options)
    for cell in cells:
        try:
            answers.put((cell.name, runner(cell, folder, data, engine)))
        except KeyboardInterrupt:
            return
        except Exception:  # the others must not pay for it
            logging.exception("%s failed", cell.name)


def main(
    name: str,
    cells: Sequence[Cell],
    pages: dict[str, Callable[[list[dict[str, Any]]], str]],
    *,
    small: Sequence[Cell] = (),
    tiny: Sequence[Cell] = (),
    studies: Mapping[str, str] | None = None,
    runner: Runner = run,
) -> None:
    """Run what is missing and write docs/results/NAME.json, and the pages by their names.

    `small` are the cells for a computer without a GPU, where there are such, and `tiny` those that only show that
    everything runs. `studies` are patterns of names of cells, which begin after `small-` or `tiny-`.
    """
    parser = argparse.ArgumentParser(description=f"Runs what is missing of {name}, then writes {', '.join(pages)}.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument(
        "--compile", choices=["auto", "yes", "no"], default="auto", help="compiled steps; auto: if it pays"
    )
    parser.add_argument("--engine", default="auto", help="clients at once, as of `atoll run`")
    if small:
        parser.add_argument("--small", action="store_true", help="the cells for a computer without a GPU")
    if tiny:
        parser.add_argument("--tiny", action="store_true", help="cells whose figures mean nothing; they need --out")
    parser.add_argument("--data", default=None, help="folder of the data sets; else $ATOLL_DATA")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--together", action="store_true", help="all in one process, which saves starting others")
    parser.add_argument(
        "--only", action="append", help="a regular expression that names of cells must match; several: in this order"
    )
    if studies:
        parser.add_argument("--study", choices=studies, help="the cells that decide a question; instead of --only")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop; call again to continue")
    parser.add_argument("--runs", type=Path, default=Path("runs") / name)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="name these cells and stop")
    parser.add_argument("--page", action="store_true", help="write the page from what is there and stop")
    asked = parser.parse_args()
    if studies and asked.study:
        asked.only = [f"^(small-|tiny-)?{studies[asked.study]}"]
    everything = [*cells, *small]
    cells = small if small and asked.small else cells
    if tiny and asked.tiny:
        if asked.out == RESULTS:
            parser.error("--tiny needs an --out of its own: its figures are no results")
        everything, cells = [*everything, *tiny], tiny
    path = asked.out / f"{name}.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def finished(cell: Cell) -> bool:
        return cell.name in done and "unfinished" not in done[cell.name]

    named = {cell.name: cell for cell in cells}
    wanted = {name: named[name] for name in choose(parser, named, asked.only)}
    if asked.list:
        print("\n".join(f"{'done' if finished(cell) else '    '}  {name}" for name, cell in wanted.items()))
        return
    waiting: dict[tuple[str, ...], list[Cell]] = {}
    for cell in wanted.values():
        if not asked.page and not finished(cell):
            waiting.setdefault(() if asked.together else cell.programs, []).append(cell)
    asked.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * asked.minutes
    context = multiprocessing.get_context("spawn")
    answers, running = context.Queue(), list[Any]()
    options = {
        "device": asked.device, "precision": asked.precision, "strategy": asked.engine,
        "compile": {"auto": None, "yes": True, "no": False}[asked.compile],
    }  # fmt: skip
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            group = waiting.pop(next(iter(waiting)))
            given = (runner, group, asked.runs, asked.data, options, answers)
            running.append(context.Process(target=_work, args=given, daemon=True))
            running[-1].start()
        if time.monotonic() > deadline:
            waiting.clear()
            for process in running:
                process.terminate()  # the run stops after its round or epoch, and can be continued
            deadline = time.monotonic() + GRACE  # then once more: a run that was at its end is followed by another
        time.sleep(0.2)
        gone = [process for process in running if not process.is_alive()]  # before their last words are read
        while not answers.empty():
            named, figures = answers.get()
            done[named] = figures
            path.write_text(_compact(done))
            print(f"{named}: {figures['curve'][-1]}, {figures['seconds']} s", flush=True)
            _forget(asked.runs / TRAINED, {cell.trained for cell in everything if not finished(cell)})
        running = [process for process in running if process not in gone]
    for cell in cells:
        if not finished(cell) and (figures := so_far(cell, asked.runs)) is not None:
            done[cell.name] = figures
    path.write_text(_compact(done))
    shown = [{**asdict(cell), **done[cell.name]} for cell in everything if cell.name in done]
    for title, page in pages.items():
        (asked.out / f"{title}.md").write_text(page(shown))


def choose(parser: argparse.ArgumentParser, names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names that `--only` chooses, in the order of its patterns; end with an error if one matches none."""
    listed, chosen = [*names], dict[str, None]()
    if patterns is None:
        return listed
    for pattern in patterns:
        try:
            found = [name for name in listed if re.search(pattern, name)]
        except re.error as error:
            parser.error(f"--only must be a regular expression. Got {pattern!r}: {error}.")
        if not found:
            some = ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
            parser.error(
                f"--only must match a name. Got {pattern!r}, which matches none of these {len(listed)}: {some}."
            )
        chosen |= dict.fromkeys(found)
    return [*chosen]


def _forget(folder: Path, needed: set[str]) -> None:
    """Remove training that no cell is left for: a ResNet-18 of five clients takes half a gigabyte."""
    for one in folder.iterdir() if folder.exists() else ():
        if one.name not in needed:
            shutil.rmtree(one)


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
        machines.setdefault((one["machine"], one["precision"], one["torch"]), set()).add(one["commit"])
    return "; ".join(
        f"{machine}, {precision}, torch {torch}, commits {', '.join(sorted(commits))}"
        for (machine, precision, torch), commits in sorted(machines.items())
    )
