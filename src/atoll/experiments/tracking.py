"""TensorBoard and MLflow: trackers are told what a run writes to its folder. Nothing else changes.

A tracker is told of every round once, beginning with those the folder already holds, so a run that is resumed, or was
begun without it, is tracked whole. A tracker that fails while clients train is left out from then on: the folder
has everything, and the next call catches up.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from atoll.federation.config import RunConfig
from atoll.kernel.errors import RunError
from atoll.records.files import read_record, write_json
from atoll.records.rounds import Round
from atoll.records.runs import Run

log = logging.getLogger("atoll.experiments.tracking")

Status = Literal["FINISHED", "FAILED", "KILLED"]  # MLflow's words
EVENTS = "events.out.tfevents.*"
MLFLOW_RUN = "mlflow.json"  # which MLflow run belongs to a folder
MOST_PARAMS = 100  # MLflow takes no more at once
MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nothing is sent that was not asked for
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for data
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # seconds, not minutes, until a server counts as lost
}


@contextmanager
def tracking(home: Path | str, *, tensorboard: bool = False, mlflow: bool = False) -> Iterator[Tracking]:
    """Track one run or comparison, whose folder is `home`; it ends after the report is written.

    with tracking("runs/mine", tensorboard=True) as tracked:
        tracked.begin("runs/mine")
        federate(task, Ditto(), folder="runs/mine", on_round=tracked.after)
    """
    home = Path(home)
    tracked = Tracking(home, [*([TensorBoard()] if tensorboard else []), *([MLflow(home)] if mlflow else [])])
    status: Status = "FAILED"
    try:
        yield tracked
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        tracked.end(status)


def trackers_in(home: Path) -> dict[str, bool]:
    """Return which trackers know the run or comparison in a folder, as arguments of `tracking`."""
    return {"tensorboard": any(home.rglob(EVENTS)), "mlflow": (home / MLFLOW_RUN).exists()}


# -- what trackers are told --------------------------------------------------------------------------------------------


class Tracking:
    """Tells trackers about one run after the other."""

    def __init__(self, home: Path, trackers: list[Tracker]) -> None:
        self.home, self.trackers = home, trackers
        self.folder: Path | None = None
        self.known: dict[Tracker, int] | None = None  # rounds they were told of before; None: the run is not open
        self.bytes: Counter[str] = Counter()

    def begin(self, folder: Path | str) -> None:
        """Begin the run of this folder; the one before is finished."""
        self._close("FINISHED")
        self.folder = Path(folder)

    def after(self, line: Round) -> None:
        """Log a round that is done; the first time, also those that the folder has."""
        if not self.trackers:
            return
        if self.known is None:
            self._open()  # and tell of all rounds in the folder, this one included
        else:
            self._log(line)

    def end(self, status: Status) -> None:
        """End all runs; `status` says how the last one ended."""
        last = self.folder
        self._close(status)
        if last not in (None, self.home):
            self._close_folder(self.home, status)

    def _open(self) -> None:
        assert self.folder is not None
        run, self.known, self.bytes = Run.open(self.folder), {}, Counter()
        for entry in run.ledger():
            if entry.round < 0:  # the exchange before the first round, which has no line of its own
                self.bytes[entry.direction] += entry.total
        for tracker in [*self.trackers]:
            with self._sparing(tracker):
                self.known[tracker] = tracker.open(self.folder, flatten_names(RunConfig.of_run(run)))
        for line in run.metrics():
            self._log(line)

    def _log(self, line: Round) -> None:
        assert self.known is not None
        self.bytes.update(line.bytes)
        found = figures_of(line) | {f"bytes/{way}": float(size) for way, size in self.bytes.items()}
        for tracker in [*self.trackers]:
            if line.round > self.known[tracker]:
                with self._sparing(tracker):
                    tracker.log(line.round, found)

    def _close(self, status: Status) -> None:
        if self.trackers and self.folder is not None:
            if self.known is None and status == "FINISHED":  # it was finished before
                self._open()
            if self.known is not None:
                self._close_folder(self.folder, status)
        self.folder = self.known = None

    def _close_folder(self, folder: Path, status: Status) -> None:
        for tracker in [*self.trackers]:
            with self._sparing(tracker):
                tracker.close(folder, status)

    @contextmanager
    def _sparing(self, tracker: Tracker) -> Iterator[None]:
        """Leave out a tracker that fails; the run goes on."""
        try:
            yield
        except tracker.failures as error:
            self.trackers.remove(tracker)
            log.warning("%s failed and is left out: %s", type(tracker).__name__, error)


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round by name: `loss/main`, `personal/test/macro`, `seconds/round`, `lost`, ..."""
    told = {**line, **line["loss"], **line.get("evaluation", {}), "lost": sum(line["lost"].values())}
    numbers = flatten_names(
        {name: told[name] for name in told.keys() - {"round", "loss", "observed", "evaluation", "bytes"}}
    )
    return {name: float(value) for name, value in sorted(numbers.items()) if isinstance(value, int | float)}


def flatten_names(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one, with names like `training/lr`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flatten_names(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


# -- the trackers ------------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """A place where the figures of runs go."""

    failures: tuple[type[Exception], ...]  # what it raises if it cannot be written or reached

    def open(self, folder: Path, config: Mapping[str, Any]) -> int:
        """Begin or continue the run of a folder; return how many of its rounds are known."""

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Log the figures after a round of the run that was opened last."""

    def close(self, folder: Path, status: Status) -> None:
        """End the run, or the comparison, of a folder."""


class TensorBoard:
    """Event files in the folder of each run; `tensorboard --logdir runs` shows them side by side."""

    def __init__(self) -> None:
        self.failures: tuple[type[Exception], ...] = (OSError,)
        self.make_writer: Any = import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.writer: Any = None
        self.config: Mapping[str, Any] = {}
        self.last: dict[str, float] = {}

    def open(self, folder: Path, config: Mapping[str, Any]) -> int:
        """Write the events of a run again from its first round: what is there may be cut short."""
        for old in folder.glob(EVENTS):
            old.unlink()
        self.writer = self.make_writer(str(folder), flush_secs=10)
        self.config = config
        rows = "".join(f"| {name} | {value} |\n" for name, value in config.items())
        self.writer.add_text("config", f"| name | value |\n|---|---|\n{rows}")
        return 0

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Write one scalar per figure."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, round)
        self.last = {f"final/{name}": value for name, value in figures.items()}

    def close(self, folder: Path, status: Status) -> None:
        """Write hyperparameters and final figures for the HPARAMS page."""
        if self.writer is None:  # a comparison has no events of its own
            return
        if status == "FINISHED":
            plain = {name: value for name, value in self.config.items() if isinstance(value, bool | int | float | str)}
            self.writer.add_hparams(plain, self.last, run_name=".")
        self.writer.close()
        self.writer = None


class MLflow:
    """One MLflow run per run; those of a comparison have a parent, which holds its report.

    They go to $MLFLOW_TRACKING_URI if it is set, otherwise to the file mlflow.db in the folder of the results.
    """

    def __init__(self, home: Path) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        self.home, self.server = home, os.environ.get("MLFLOW_TRACKING_URI")
        self.mlflow = import_extra("mlflow", "mlflow")
        self.failures: tuple[type[Exception], ...] = (self.mlflow.MlflowException, OSError)
        self.runs: dict[Path, str] = {}  # the ids of MLflow runs by folder
        self.current = ""
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        if self.server:
            self._require_answer()
        else:
            import_extra("sqlalchemy", "mlflow")
            import_extra("alembic", "mlflow")

    @cached_property
    def client(self) -> Any:
        """The connection; a local store is made where the results are."""
        local = f"sqlite:///{(self.home / 'mlflow.db').resolve()}"
        return self.mlflow.MlflowClient(tracking_uri=self.server or local)

    def open(self, folder: Path, config: Mapping[str, Any]) -> int:
        """Find or make the run of a folder, and its parent."""
        experiment = self._experiment(str(config["task/name"]))
        parent = {} if folder == self.home else {"mlflow.parentRunId": self._run(self.home, experiment)}
        self.current = self._run(folder, experiment, parent, config)
        return max((point.step for point in self.client.get_metric_history(self.current, "seconds/round")), default=0)

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Log one metric per figure, all of a round at once."""
        metric, now = self.mlflow.entities.Metric, int(1000 * time.time())
        metrics = [metric(clean_name(name), value, now, round) for name, value in figures.items()]
        self.client.log_batch(self.current, metrics=metrics)

    def close(self, folder: Path, status: Status) -> None:
        """Hand over the report, if the folder has one, and say how the run ended."""
        run = self.runs.pop(folder, None)
        if run is None:  # no run of the comparison came so far
            return
        if status == "FINISHED" and (folder / "report.html").exists():
            self.client.log_artifact(run, str(folder / "report.html"))
        if self.client.get_run(run).info.status != "FINISHED":  # when it ended stays as it was
            self.client.set_terminated(run, status)

    def _require_answer(self) -> None:
        try:
            self.client.search_experiments(max_results=1)
        except self.failures as error:
            raise RunError(
                f"MLflow must answer at $MLFLOW_TRACKING_URI. It did not: {error}",
                hint="start its server, or unset MLFLOW_TRACKING_URI to write next to the results.",
            ) from None

    def _experiment(self, name: str) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None if self.server else (self.home / "mlflow").resolve().as_uri()
        return str(self.client.create_experiment(name, artifacts))

    def _run(
        self,
        folder: Path,
        experiment: str,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the id of the MLflow run of a folder; it is kept there."""
        if folder in self.runs:
            return self.runs[folder]
        kept = folder / MLFLOW_RUN
        try:
            found = self.client.get_run(read_record(kept, dict[str, str])["run_id"])
        except (RunError, KeyError, self.mlflow.MlflowException):  # never tracked, by another server, or damaged
            found = self.client.create_run(experiment, run_name=folder.name, tags=tags)
            params = [
                self.mlflow.entities.Param(clean_name(name), str(value)) for name, value in (config or {}).items()
            ]
            for start in range(0, len(params), MOST_PARAMS):
                self.client.log_batch(found.info.run_id, params=params[start : start + MOST_PARAMS])
            write_json(kept, {"run_id": found.info.run_id})
        if found.info.status != "FINISHED":
            self.client.update_run(found.info.run_id, "RUNNING")
        self.runs[folder] = found.info.run_id
        return self.runs[folder]


def clean_name(name: str) -> str:
    """Replace what MLflow does not take in a name."""
    return re.sub(r"[^\w/. :-]+", "-", name)


def import_extra(module: str, package: str) -> Any:
    """Import a module of the tracking extra."""
    try:
        return import_module(module)
    except ImportError:
        raise RunError(
            f"Tracking with {package} needs its package. Module {module} cannot be imported.",
            hint="pip install 'atoll[tracking]'.",
        ) from None
