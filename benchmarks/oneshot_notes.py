"""The notes' table, run again: V4, V5 and V6 on CIFAR-10 with ResNet-18, scored after every epoch that the notes name.

    python benchmarks/oneshot.py --study notes --list
    python benchmarks/oneshot.py --study notes --device cuda --precision bf16 --jobs 2 --minutes 9 --out FOLDER
    python benchmarks/oneshot.py --study notes --collect FOLDER          # into docs/results/notes.json, and the page
    python benchmarks/oneshot.py --study notes --tiny --out FOLDER       # a rehearsal of a minute, on a CPU

**Protocol.** FAFI's released one: `fafi:ALPHA:SEED` deals samples with overlap to 5 clients, `profile=faithful`, one
draw of SimCLR's view for a whole batch, batch 512, lr 0.05, momentum 0.9, clip 1, temperature 0.5 (0.07 where a cell
says so), scored on the official test set. A seed decides the partition, the initial model and all draws, so the arms of
a seed have the same clients. `public` is a tenth of the training images, taken before they are dealt; V4 is there with
that tenth left out (`V4`), so it differs from V5 and V6 in nothing else, and with all samples (`V4-all`).

**One training gives all points of a cell.** V6's first stage is a share of all epochs, so its early points are those of
a long training, not of a short one.

**A record is a line** in FOLDER/records.jsonl, written after every point; the last line of a cell counts. A cell that
is finished there, or in docs/results/notes.json, is not run again, so records of several machines and days add up.
Nothing else is kept: a cell that is cut off begins again.

Scores of a point are of 10,000 test images: `score` in the released profile (BatchNorm sees 256 test images at a time:
the answer is transductive), `inductive` the same for one image at a time, `running` with running statistics, where no
image sees another either, and `own` what each client answers by itself, with running statistics.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from oneshot_notes_page import pages
from published import RESULTS, origin

RECORDS = "records.jsonl"
TABLE = RESULTS / "notes.json"
POINTS = (1, 11, 21, 36, 51)
ALPHAS = (0.05, 0.1, 0.3, 0.5)
IMAGES = {0.05: 82_695, 0.1: 98_516, 0.3: 135_847, 0.5: 158_888}  # that five clients have in all, with seed 1
RATE = 2.3 / 82_695  # seconds of an epoch for each image, on an H200 in bf16, compiled, until a cell was timed
STARTING = 90.0  # seconds until a process trains: data, CUDA, compiling
SCORING = 8.0  # seconds of a point
ARMS = {
    "V4": ("fafi", ""),
    "V5": ("fafi-bank", ""),
    "V6": ("fafi-two-stage", "stage_share=0.2"),
    "V4-all": ("fafi", ""),
    "V6-0.1": ("fafi-two-stage", "stage_share=0.1"),
    "V6-0.4": ("fafi-two-stage", "stage_share=0.4"),
    "V6-light": ("fafi-two-stage", "stage_share=0.2,contrast_after=0.1"),
    "queue": ("fafi-queue", "queue_same=blind,mass=0"),
    "V4-conflict": ("fafi-plus", "conflict=measured"),
    "V5-conflict": ("fafi-plus", "conflict=measured,pool=features,masked=False,mass=0"),
}
MEASURED = ("V4-conflict", "V5-conflict")  # arms that train as V4 and V5 and take a second gradient, to compare the two
MEASURED_EPOCHS = 21
ALL_SAMPLES = ("V4-all",)  # arms without public samples


@dataclass(frozen=True)
class NotesCell:
    """One training: an arm at a skew with a seed."""

    arm: str
    alpha: float
    seed: int
    epochs: int = POINTS[-1]
    temperature: float = 0.5
    tiny: bool = False

    @property
    def name(self) -> str:
        """Its name, which says all that differs from others."""
        tiny = "tiny-" if self.tiny else ""
        return f"{tiny}a{self.alpha:g}-t{self.temperature:g}-{self.arm}-e{self.epochs}-seed{self.seed}"

    @property
    def method(self) -> str:
        """The method in words."""
        name, more = ARMS[self.arm]
        words = [
            f"epochs={self.epochs}",
            "profile=faithful",
            f"temperature={self.temperature:g}",
            *filter(None, [more]),
        ]
        if self.tiny and name in ("fafi-bank", "fafi-two-stage", "fafi-plus"):
            words.append("teacher_epochs=1")
        return f"{name}:{','.join(words)}"

    @property
    def curve(self) -> tuple[int, ...]:
        """The epochs after which it is scored, the last one among them."""
        return (*(one for one in POINTS if one < self.epochs), self.epochs)

    @property
    def recipe(self) -> dict[str, Any]:
        """The task in words."""
        public = 0.0 if self.arm in ALL_SAMPLES else 0.1
        common = {
            "partition": f"fafi:{self.alpha:g}:{self.seed}", "clients": 5, "split": "100/0/0", "public": public,
            "seed": self.seed,
        }  # fmt: skip
        if self.tiny:
            return {**common, "dataset": "digits", "model": "mlp:16", "central": "0.2", "samples": 500}
        augment = {"augment": "simclr-batch"}
        return {**common, **augment, "dataset": "cifar10", "model": "resnet18", "central": "official"}

    @property
    def training(self) -> dict[str, Any]:
        """The steps."""
        return {"lr": 0.05, "momentum": 0.9, "clip": 1.0, "batch_size": 16 if self.tiny else 512}

    def estimate(self, rate: float, *, starts: bool) -> float:
        """Return about how many seconds it takes; `rate` is of an epoch for each image."""
        if self.tiny:
            return 1.0
        images = IMAGES[self.alpha] * (1.0 if self.arm in ALL_SAMPLES else 0.9) * (1 + (self.arm in MEASURED))
        return starts * STARTING + len(self.curve) * SCORING + self.epochs * images * rate


def cells(epochs: int = POINTS[-1], *, tiny: bool = False) -> list[NotesCell]:
    """Return all cells, those that decide most first."""

    def make(arms: Iterable[str], alphas: Sequence[float], seeds: Iterable[int], temperature: float = 0.5) -> None:
        found.extend(
            NotesCell(arm, alpha, seed, min(epochs, MEASURED_EPOCHS) if arm in MEASURED else epochs, temperature, tiny)
            for alpha in alphas
            for seed in seeds
            for arm in arms
        )

    found = list[NotesCell]()
    three = ("V4", "V5", "V6")
    make(three, ALPHAS[:1], (1, 2, 3))  # where the notes say that the bank harms most
    make(three, ALPHAS[1:2], (1, 2, 3))
    make(three, ALPHAS[3:], (1, 2, 3))
    make(three, ALPHAS[2:3], (1, 2, 3))
    make(["V4-all"], ALPHAS[:1], (1, 2, 3))
    make(three, ALPHAS[:1], (1, 2, 3), 0.07)  # what the released code trains with
    make(three, ALPHAS[:1], (4, 5))
    make(MEASURED, ALPHAS[:1], (1,))
    make(["V4-all"], ALPHAS[1:], (1, 2, 3))
    make(["V6-0.4", "V6-0.1", "V6-light", "queue"], ALPHAS[:1], (1, 2, 3))
    make(["V4-all"], ALPHAS[:1], (1, 2, 3), 0.07)
    make(["V6-0.4", "V6-0.1", "V6-light", "queue"], ALPHAS[3:], (1, 2, 3))
    make([*three, "V4-all"], ALPHAS[1:], (4, 5))
    make(["V4-all", "V6-0.4", "V6-0.1", "V6-light", "queue"], ALPHAS[:1], (4, 5))
    make(MEASURED, ALPHAS[:1], (2, 3))
    make(MEASURED, ALPHAS[3:], (1, 2, 3))
    return found


# -- records -----------------------------------------------------------------------------------------------------------


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a file, by their cells: the last line of each counts, whole lines only."""
    found: dict[str, dict[str, Any]] = {}
    if path.suffix == ".json":
        return dict(json.loads(path.read_text())) if path.exists() else {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # it was cut off
            continue
        if "unfinished" in record and record["cell"] in found and "unfinished" not in found[record["cell"]]:
            continue  # a finished one was begun again elsewhere
        found[record["cell"]] = record
    return found


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Append a record as one line, in one write, so several processes may do so at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record) + "\n"
    place = os.open(folder / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(place, line.encode())
        os.fsync(place)
    finally:
        os.close(place)


def collect(folders: Iterable[Path], table: Path = TABLE) -> dict[str, dict[str, Any]]:
    """Add the records of folders to the table; finished ones stay, and longer unfinished ones replace shorter."""
    known = read_records(table)
    for folder in folders:
        for name, record in read_records(folder / RECORDS).items():
            before = known.get(name)
            if not name.startswith("tiny-") and (before is None or _worth(record) > _worth(before)):
                known[name] = record
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    table.write_text("{\n" + lines + "\n}\n")
    return known


def _worth(record: dict[str, Any]) -> tuple[bool, int]:
    return "unfinished" not in record, len(record["points"])


# -- one cell ----------------------------------------------------------------------------------------------------------


def run_cell(cell: NotesCell, folder: Path, data: str | None, engine: Any) -> dict[str, Any]:
    """Train and score a cell; write its record after every point, and return the last."""
    from atoll import Recipe, Settings, Training, federate
    from atoll.compose import create
    from atoll.kernel.sources import code_digest
    from atoll.runtime.memory import RamMemory
    from atoll.runtime.population import Population

    began = time.time()
    task = engine.place(Recipe(**cell.recipe, data=data, training=Training(**cell.training)).build())
    method = create(cell.method)
    bench = engine.bench(Population(task, RamMemory(task.clients), cell.seed), 0)
    record: dict[str, Any] = {
        "cell": cell.name, **asdict(cell), "method": cell.method, "recipe": cell.recipe, "training": cell.training,
        "curve": list(cell.curve), "samples": _sizes(task), "labels": _labels(task), "points": [], "unfinished": True,
        "code": code_digest(), **origin(engine.precision), "plan": engine.options["strategy"],
    }  # fmt: skip
    since, trained = [time.perf_counter()], [0.0]

    def on_epoch(*_: int) -> None:
        if engine.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        now = time.perf_counter()
        trained[0], since[0] = trained[0] + now - since[0], now

    def on_point(point: dict[str, Any], server: Any) -> None:
        central, spent = point["evaluation"]["central"], round(trained[0], 1)
        scores = {"score": round(100 * float(central["score"]), 2), "loss": round(float(central["loss"]), 4)}
        if "observed" in point:  # cosines of two gradients so far, by block and client
            record["conflict"] = {
                **record.get("conflict", {}),
                f"{point['epoch']}": {
                    name: [round(value, 4) for _, value in sorted(each.items(), key=lambda pair: int(pair[0]))]
                    for name, each in point["observed"].items()
                },
            }
        if "inductive" in central:
            scores["inductive"] = round(100 * float(central["inductive"]), 2)
        record["points"].append(
            {"epoch": point["epoch"], "trained": spent, **scores, **more_scores(bench, task, server)}
        )
        write_record(folder, record)
        print(f"{cell.name}: {record['points'][-1]}", flush=True)
        trained[0], since[0] = 0.0, time.perf_counter()

    report = federate(
        task, method, settings=Settings(rounds=1, seed=cell.seed, evaluation="central", curve=cell.curve),
        engine=engine, progress=False, on_epoch=on_epoch, on_point=on_point,
    )  # fmt: skip
    (line,) = report.history
    del record["unfinished"]
    record |= {
        "losses": {name: round(value, 5) for name, value in line["loss"].items()},
        "up": report.ledger.bytes("up"), "down": report.ledger.bytes("down"),
        "seconds": round(time.time() - began, 1), "memory": line["memory"],
        "plans": sorted({str(plan) for plan in engine.plans.values()}),
    }  # fmt: skip
    write_record(folder, record)
    return record


def _sizes(task: Any) -> list[int]:
    import numpy as np

    return [int(size) for size in task.splits["train"].sizes(np.arange(task.clients))]


def _labels(task: Any) -> list[list[int]]:
    """How many samples of each class each client trains on."""
    import numpy as np

    train = task.splits["train"]
    y = task.y.cpu().numpy()
    ends, order = np.asarray(train.offsets), train.order.cpu().numpy()
    return [np.bincount(y[order[a:b]], minlength=task.classes).tolist() for a, b in itertools.pairwise(ends)]


def more_scores(bench: Any, task: Any, server: Any) -> dict[str, Any]:
    """Return what no evaluation has: the answer by running statistics, of all clients together and of each alone."""
    import torch
    import torch.nn.functional as F

    from atoll.algorithms.answers.features import FusedFeatures
    from atoll.toolbox.objectives.prototypical import Objective, prototype_leaf

    (x, y), answer = task.central, server.answer
    released, objective = FusedFeatures(profile="faithful", batch_statistics=False), Objective(scale=0.0)
    with torch.no_grad():
        features = bench.answers(answer.models, x, features=True)  # [client, image, feature], by running statistics
        rows = answer.models[prototype_leaf(answer.models.layout)]
        fused = released.how.logits(features, None, released.beside(answer))
        own = [objective.logits(F.normalize(z, dim=1), p) for z, p in zip(features, rows, strict=True)]
        score, *each = (round(100 * float((one.argmax(1) == y).double().mean()), 2) for one in (fused, *own))
    return {"running": score, "own": each}


# -- many cells --------------------------------------------------------------------------------------------------------


def _work(options: dict[str, Any], folder: Path, data: str | None, line: Connection) -> None:
    """Run the cells that arrive, one after another, in a process of its own; send each one's record, or why not."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    from atoll import LocalEngine

    engine = LocalEngine(**options)
    line.send(None)
    while (cell := line.recv()) is not None:
        try:
            line.send(run_cell(cell, folder, data, engine))
        except Exception as error:  # the others must not pay for it
            logging.exception("%s failed", cell.name)
            line.send(f"{type(error).__name__}: {error}")


class Rates:
    """Seconds of an epoch for each image, as cells of this call took them, else as given."""

    def __init__(self, rate: float) -> None:
        self.rate, self._measured = rate, False

    def learn(self, cell: NotesCell, record: dict[str, Any]) -> None:
        """Take the time of a cell without its first point, in which programs are made; the slowest counts."""
        first, *later = record["points"]
        epochs = cell.epochs - first["epoch"]
        if later and not cell.tiny and epochs:
            rate = sum(point["trained"] for point in later) / epochs / sum(record["samples"])
            self.rate, self._measured = max(rate, self.rate) if self._measured else rate, True


def run_all(
    wanted: Sequence[NotesCell], folder: Path, data: str | None, options: dict[str, Any], jobs: int, minutes: float,
    rate: float,
) -> list[str]:  # fmt: skip
    """Run cells in their order, so many side by side; start none that would not end in time. Return what failed."""
    deadline, rates, waiting, failed = time.monotonic() + 60 * minutes, Rates(rate * jobs), [*wanted], list[str]()
    context, lines = multiprocessing.get_context("spawn"), dict[Connection, NotesCell | None]()
    processes = []
    for _ in range(min(jobs, len(wanted))):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_work, args=(options, folder, data, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        lines[mine] = None
    begun, skipped = set[Connection](), list[str]()
    while lines:
        for line in wait([*lines], timeout=1.0):
            assert isinstance(line, Connection)
            cell = lines[line]
            try:
                answer = line.recv()
            except EOFError:  # the process died
                del lines[line]
                if cell is not None:
                    failed.append(f"{cell.name}: its process died")
                continue
            if cell is not None:
                begun.add(line)
                if isinstance(answer, str):
                    failed.append(f"{cell.name}: {answer}")
                else:
                    rates.learn(cell, answer)
                    left = deadline - time.monotonic()
                    print(f"{cell.name}: done in {answer['seconds']} s; {left:.0f} s left", flush=True)
            left = deadline - time.monotonic()
            fits = [one for one in waiting if one.estimate(rates.rate, starts=line not in begun) <= left]
            if not fits:
                skipped = [one.name for one in waiting]
                line.send(None)
                del lines[line]
                continue
            lines[line] = fits[0]
            waiting.remove(fits[0])
            print(f"{fits[0].name}: begins; about {fits[0].estimate(rates.rate, starts=line not in begun):.0f} s")
            line.send(fits[0])
    for process in processes:
        process.join(timeout=10)
    if skipped:
        print(f"no time for {len(skipped)} more: {', '.join(skipped[:5])}{', ...' if len(skipped) > 5 else ''}")
    return failed


def choose(every: Sequence[NotesCell], patterns: Sequence[str] | None) -> list[NotesCell]:
    """Return the cells whose names match, by the order of the patterns; raise for a pattern that none matches."""
    found: dict[str, NotesCell] = {}
    for pattern in patterns or [""]:
        matching = {cell.name: cell for cell in every if re.search(pattern, cell.name)}
        if not matching:
            raise ValueError(f"--only {pattern!r} matches no cell. One is {every[0].name!r}; --list names all.")
        found |= {name: cell for name, cell in matching.items() if name not in found}
    return [*found.values()]


def require_data(data: str | None) -> None:
    """Raise unless CIFAR-10 is there: which file is missing, and where it comes from."""
    from atoll.data import datasets

    datasets.find("cifar10", datasets.data_folder(None if data is None else Path(data)))


def main(words: Sequence[str]) -> int:
    """Run what is missing of the study, list it, or collect what was run."""
    from atoll.kernel.errors import AtollError

    parser = argparse.ArgumentParser(prog="oneshot.py --study notes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--engine", default="auto", help="a plan, such as 'loop compiled graph channels_last'")
    parser.add_argument("--data", default=None, help="folder of the data sets; else $ATOLL_DATA")
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side, each in a process")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell that would end later")
    parser.add_argument("--rate", type=float, default=RATE, help="seconds of an epoch for each image, alone")
    parser.add_argument("--epochs", type=int, default=POINTS[-1], help="of all cells")
    parser.add_argument("--only", action="append", help="a regular expression; several: in this order")
    parser.add_argument("--out", type=Path, default=Path("runs") / "notes", help="folder of records.jsonl")
    parser.add_argument("--known", type=Path, default=TABLE, help="cells that are finished there are not run")
    parser.add_argument("--tiny", action="store_true", help="small data: figures mean nothing")
    parser.add_argument("--list", action="store_true", help="name these cells and stop")
    parser.add_argument("--collect", type=Path, nargs="+", help="add the records of these folders to the table")
    parser.add_argument("--page", action="store_true", help="write the pages from the table and stop")
    asked = parser.parse_args(words)
    if asked.collect or asked.page:
        known = collect(asked.collect or [])
        for place, text in pages(known).items():
            (RESULTS.parent / place).write_text(text, encoding="utf-8")
        print(f"{sum('unfinished' not in one for one in known.values())} finished cells in {TABLE.name}")
        return 0
    try:
        wanted = choose(cells(min(asked.epochs, 2) if asked.tiny else asked.epochs, tiny=asked.tiny), asked.only)
    except ValueError as error:
        parser.error(str(error))
    known = read_records(asked.known) | read_records(asked.out / RECORDS)
    finished = {name for name, record in known.items() if "unfinished" not in record}
    if asked.list:
        for cell in wanted:
            state = "done" if cell.name in finished else "    "
            print(f"{state}  {cell.name:34} {cell.estimate(asked.rate, starts=False):5.0f} s  {cell.method}")
        return 0
    missing = [cell for cell in wanted if cell.name not in finished]
    try:
        if not asked.tiny:
            require_data(asked.data)
    except AtollError as error:
        print(error, file=sys.stderr)
        return 1
    options = {"device": asked.device, "precision": asked.precision, "strategy": asked.engine}
    failed = run_all(missing, asked.out, asked.data, options, asked.jobs, asked.minutes, asked.rate)
    for one in failed:
        print(f"failed: {one}", file=sys.stderr)
    return 1 if failed else 0
