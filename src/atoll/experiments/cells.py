"""The cells of a comparison: each is a method with a seed, whose run is found, continued or made."""

from __future__ import annotations

import functools
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from atoll.algorithms import file_of
from atoll.data.task import Task
from atoll.federation.config import is_another_model
from atoll.federation.labels import label
from atoll.federation.loop import federate
from atoll.federation.progress import call_all
from atoll.federation.report import Report
from atoll.federation.settings import Settings, count_epochs
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine, Spreading
from atoll.kernel.errors import DivergedError, EngineError, RunError, describe_given
from atoll.kernel.sources import file_digest
from atoll.records.rounds import Round
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.engines.trainings import TRAINED, OnEpoch

Begun = Literal["new", "resumed", "reused"]
OnRound = Callable[[Round], None]
OnRun = Callable[[str, int, Begun], OnRound | None]  # method, seed, how it begins -> what to call after its rounds

KEPT_SHARE = 0.5  # of a GPU's memory may go to what the clients of runs side by side keep
COPIES = 3  # of a model, that a client may keep: its own, another one, a velocity


class Pause(threading.Event):
    """Stops one run, at a round of its own or when all are to stop."""

    def __init__(self, everything: threading.Event) -> None:
        super().__init__()
        self._everything = everything

    def is_set(self) -> bool:
        """Return whether the run is to end after its round."""
        return super().is_set() or self._everything.is_set()


@dataclass(frozen=True, eq=False)
class Cell:
    """One method with one seed, and what is there of its run.

    With `until`, it pauses after so many rounds, and one that diverges ends there without a word: it is judged by how
    far it came.
    """

    name: str
    algorithm: Algorithm
    seed: int
    task: Task
    settings: Settings
    folder: Path | None  # of the comparison
    until: int | None = None
    done: Report | None = None

    @classmethod
    def find(
        cls,
        name: str,
        algorithm: Algorithm,
        seed: int,
        task: Task,
        settings: Settings,
        folder: Path | None,
        until: int | None = None,
    ) -> Cell:
        """Look for a run in the folder of a comparison; raise if one is there that had other data."""
        cell = cls(name, algorithm, seed, task, settings_of(algorithm, settings, seed), folder, until)
        if cell.place is None or not (cell.place / "config.json").exists():
            return cell
        done = Report.read(cell.place)
        _require_same_data(done, task)
        return replace(cell, done=done)

    def look_again(self) -> Cell:
        """Return the cell with what is there of its run by now: a worker that died may have begun it."""
        return Cell.find(self.name, self.algorithm, self.seed, self.task, self.settings, self.folder, self.until)

    @property
    def place(self) -> Path | None:
        """The folder of the run."""
        return None if self.folder is None else self.folder / run_name(self.algorithm, self.seed)

    @property
    def begun(self) -> Begun:
        """How the run begins."""
        return "new" if self.done is None else "reused" if self.done.finished else "resumed"

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to run."""
        if self.done is None or self.until is None:
            return self.done is not None and self.done.finished
        return self.done.done >= min(self.until, self.settings.rounds)

    def run(self, engine: Engine, stop: threading.Event, on_round: OnRound | None, on_epoch: OnEpoch | None) -> Report:
        """Return the report of the run, of which the missing part is made; raise KeyboardInterrupt if it is stopped."""
        report = self.done
        if not self.is_done:
            pause = Pause(stop)
            try:
                made = federate(
                    self.task, self.algorithm, settings=self.settings, engine=engine, folder=self.place,
                    resume=report is not None, on_round=call_all(self._look_ahead(pause), on_round), on_epoch=on_epoch,
                    stop=pause, trained=None if self.folder is None else self.folder / TRAINED, progress=False,
                )  # fmt: skip
            except BaseException as error:
                if stop.is_set() or not self._may_end_with(error):
                    stop.set()  # runs beside this one end after their round
                    if not isinstance(error, KeyboardInterrupt):
                        raise
                else:
                    assert self.place is not None
                    report = Report.read(self.place)
            else:
                report = made.without_live()
        if stop.is_set():
            raise KeyboardInterrupt(_say_how_to_go_on(f"stopped in {self.name} with seed {self.seed}", self.folder))
        assert report is not None
        return report

    def _look_ahead(self, pause: Pause) -> OnRound | None:
        """Return what pauses the run: it is told one round before, because a run ends after the round to come."""
        until, rounds = self.until, self.settings.rounds
        if until is None or until >= rounds:
            return None
        if (0 if self.done is None else self.done.done) >= until - 1:
            pause.set()

        def look(line: Round) -> None:
            if line.round >= until - 1:
                pause.set()

        return look

    def _may_end_with(self, error: BaseException) -> bool:
        """Return whether a run that is to pause may end so: it was paused, or it diverged."""
        return self.until is not None and isinstance(error, KeyboardInterrupt | DivergedError)


def run_cells(
    cells: Sequence[Cell],
    engine: Engine,
    stop: threading.Event,
    *,
    on_run: OnRun | None,
    on_round: OnRound | None,
    on_epoch: OnEpoch | None,
) -> dict[tuple[str, int], Report]:
    """Run one cell, or several side by side; return their reports by name and seed.

    On a cluster, one cell has its clients spread over the workers, and of several each is one worker's.
    """
    after = []
    for cell in cells:
        own = on_run(cell.name, cell.seed, cell.begun) if on_run else None
        after.append(call_all(own, on_round))
    if len(cells) > 1 and isinstance(engine, Spreading):
        return _spread_cells(cells, engine, stop, after)
    works = [functools.partial(cell.run, engine, stop, one, on_epoch) for cell, one in zip(cells, after, strict=True)]
    if len(cells) == 1:
        return {(cells[0].name, cells[0].seed): works[0]()}
    if not isinstance(engine, LocalEngine):
        raise EngineError(
            f"Runs go on side by side on a LocalEngine or on workers. Got {describe_given(engine)}.",
            hint="leave out `together`.",
        )
    return _name_reports(cells, engine.run_together([cell.task for cell in cells], works))


def _name_reports(cells: Sequence[Cell], found: Sequence[Report | BaseException]) -> dict[tuple[str, int], Report]:
    """Return reports by name and seed; raise what went wrong instead, before those that were stopped for it."""
    errors = [one for one in found if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt)):
        raise error
    return {(cell.name, cell.seed): one for cell, one in zip(cells, found, strict=True) if isinstance(one, Report)}


def _spread_cells(
    cells: Sequence[Cell], engine: Spreading, stop: threading.Event, after: Sequence[OnRound]
) -> dict[tuple[str, int], Report]:
    """Have the workers of a cluster run cells, each of them one at a time."""
    here = [replace(cell, folder=None if cell.folder is None else cell.folder.resolve()) for cell in cells]
    found: dict[int, Report] = {
        number: cell.done for number, cell in enumerate(here) if cell.done is not None and cell.is_done
    }
    ahead = [number for number in range(len(here)) if number not in found]
    failures = list[BaseException]()
    for place, event in engine.spread(play_cell, [here[number] for number in ahead], stop):
        if isinstance(event, Round):
            after[ahead[place]](event)
        elif isinstance(event, Report):
            found[ahead[place]] = event
        else:
            failures.append(event)
    if len(found) < len(here) and not failures:
        failures.append(KeyboardInterrupt(_say_how_to_go_on("stopped while runs were under way", cells[0].folder)))
    return _name_reports(here, failures or [found[number] for number in range(len(here))])


def play_cell(engine: LocalEngine, stop: threading.Event, cell: Cell) -> Iterator[Round | Report]:
    """Run a cell where its worker is; yield its rounds, and at last its report."""
    if cell.folder is not None and not cell.folder.is_dir():
        raise RunError(
            f"The folder of a comparison must be one that all machines of a cluster see. {cell.folder} is not there on "
            f"{socket.gethostname()}.",
            hint="choose a folder on a shared file system, or `together=False`: then the driver alone writes.",
        )
    cell = cell.look_again()
    events: queue.Queue[Round | Report | BaseException] = queue.Queue()

    def run() -> None:
        try:
            events.put(cell.run(engine, stop, events.put, None))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            events.put(error)

    threading.Thread(target=run, daemon=True).start()
    while not isinstance(event := events.get(), Report):
        if isinstance(event, BaseException):
            raise event
        yield event
    yield event


def _say_how_to_go_on(message: str, folder: Path | None) -> str:
    return message if folder is None else f"{message}; continue with `atoll resume {folder}`"


def runs_together(engine: Engine) -> bool:
    """Return whether runs go on side by side unless told otherwise: on a cluster, and on a GPU."""
    if isinstance(engine, LocalEngine):
        return engine.device.type == "cuda" and engine.timeout is None
    return isinstance(engine, Spreading)


def group_cells(cells: Sequence[Cell], engine: Engine, *, together: bool) -> list[list[Cell]]:
    """Group cells that run side by side: all on a cluster; else those that train in rounds and fit a GPU's memory."""
    if not together or isinstance(engine, Spreading):
        return [[*cells]] if together else [[cell] for cell in cells]
    alone = [cell for cell in cells if cell.algorithm.one_shot or cell.is_done]
    others = sorted((cell for cell in cells if cell not in alone), key=lambda cell: cell.name)  # seeds of one method
    most = len(others)
    if engine.device.type == "cuda" and others:
        task = others[0].task
        kept = task.clients * COPIES * sum(leaf.nbytes for leaf in task.network.initial.values())
        most = max(1, int(KEPT_SHARE * torch.cuda.get_device_properties(engine.device).total_memory / kept))
    return [[cell] for cell in alone] + [others[start : start + most] for start in range(0, len(others), most or 1)]


def settings_of(algorithm: Algorithm, settings: Settings, seed: int) -> Settings:
    """Return the settings of a run: a one-shot method has one round, however many the others have, and a curve."""
    curve = settings.curve if algorithm.one_shot and count_epochs(algorithm) else ()
    return replace(settings, seed=seed, rounds=1 if algorithm.one_shot else settings.rounds, curve=curve)


def run_name(algorithm: Algorithm, seed: int) -> str:
    """Return the folder name of a run in a comparison.

    It changes with the hyperparameters, and with the text of a user's file and of the files that it imports.
    """
    file = file_of(algorithm)
    name = None if file is None else f"{file.stem}-{file_digest(file)}{algorithm.added}"
    return re.sub(r"[^\w.=,+-]+", "-", f"{label(algorithm, name)}-seed{seed}")


def _require_same_data(done: Report, task: Task) -> None:
    before = done.config.task.data
    if before not in (None, task.fingerprint):
        raise RunError(
            f"Runs are reused for the same data only. Those of {done.folder} have the fingerprint {before}, now it is "
            f"{task.fingerprint}.",
            hint="the data or their split have changed: choose another folder.",
        )
    if is_another_model(done.config, task):
        raise RunError(
            f"Runs are reused for the same model only. Those of {done.folder} had one that computes something else.",
            hint="an attribute of the model has changed: choose another folder.",
        )
