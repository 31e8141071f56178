"""A run's folder: configuration, metrics, ledger, checkpoints. Whatever happens, it can be continued from it.

    config.json          what was asked for, resolved, with versions and machine
    clients.json         what each client has: sizes, labels, how it differs from the others
    preprocessing.json   of own data: columns, class names, and mean and spread of every client
    metrics.jsonl        one line per round
    ledger.jsonl         every message
    run.log              what the engine chose, who was lost
    checkpoints/         round-000012.safetensors, what clients kept since the checkpoint before it
                         (kept-000012.safetensors), and round-000012.json, which holds checksums
    outcomes.npz         the score of every test sample, written after the last round; of very many clients, theirs
    report.html          written at the end

Files are written to a temporary name, flushed to disk and renamed, so a file is either whole or not there. A round
writes its outcomes, then its line of metrics, its messages, what clients keep, the checkpoint's tensors and last the
checkpoint's JSON file: the first five count only once the last one is there, so a kill between any two is survived. A
checkpoint counts only if its checksums are right; otherwise the one before it is used. It seals what it builds on, and
lists the files of what clients kept in RAM, its own and older ones, from which all of it is put together.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.data.files import open_arrays, reading
from atoll.data.preprocessing import Scaling
from atoll.data.statistics import Statistics
from atoll.kernel.errors import CheckpointError, DataError, RunError
from atoll.kernel.params import Layout, Tree
from atoll.metrics.evaluation import Arrays
from atoll.protect.ledger import Entry
from atoll.records.checkpoints import Checkpoint, Seal, Segment, is_whole, read_tensors, write_tensors
from atoll.records.files import (
    changed_file_error,
    guarding,
    open_to_append,
    read_lines,
    read_record,
    write_json,
    write_record,
    write_text,
    writing,
)  # fmt: skip
from atoll.records.logs import log_to
from atoll.records.rounds import Round
from atoll.runtime.files import open_regular, require_no_link, write_whole

__all__ = [
    "KEPT_CHECKPOINTS", "Run", "command", "find_runs", "machine", "now", "peak_memory", "quietly", "versions",
    "write_json", "write_text", "writing",
]  # fmt: skip

log = logging.getLogger("atoll.run")

KEPT_CHECKPOINTS = 2
LINES = ("metrics.jsonl", "ledger.jsonl")  # files that grow by lines
WHOLE = ("config.json", "clients.json", "preprocessing.json", "outcomes.npz")  # files that are written at once
OUTCOMES: dict[str, type] = {  # what outcomes.npz may hold
    "test": np.float64,  # the score of every test sample, client after client
    "answer": np.int64, "label": np.int64,  # the class that it was given, and the one that it has
    "kept": np.float64, "target": np.float64,  # where the metric is no mean: what it needs of each, in columns
    # of very many clients:
    "client": np.int64, "samples": np.int64, "score": np.float64, "variance": np.float64,  # of each client scored
    "cluster": np.int64,  # of each client
}  # fmt: skip
COLUMNS = ("kept", "target")  # of them, those with several numbers for each sample


class Run:
    """A run's folder, open for writing."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._sealed: dict[str, Seal] = {}  # as far as this process has written or read the files
        self._segments: list[Segment] = []  # of the last checkpoint that was written or loaded

    # -- opening ---------------------------------------------------------------------------------------------------
    @classmethod
    def create(cls, folder: Path | str, config: Mapping[str, Any]) -> Run:
        """Make a new folder; refuse one that already holds a run."""
        folder = Path(folder)
        if (folder / "config.json").exists():
            raise RunError(
                f"A new run must have a folder of its own. {folder} already holds one.",
                hint=f"continue it with `atoll resume {folder}`, or choose another folder.",
            )
        remains = [*(folder / name for name in LINES), *folder.glob("checkpoints/*.json")]
        for path in remains:
            if path.is_file() and not path.is_symlink():  # lines would be added to those of the other run
                raise RunError(
                    f"A new run must have a folder of its own. {folder} holds {path.name} of one without config.json.",
                    hint="put config.json back, remove the folder, or choose another one.",
                )
        origin = {"versions": versions(), "machine": machine(), "command": command()}
        with writing(folder):
            require_no_link(folder / "checkpoints")
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            for stale in folder.glob(".config.json.*.tmp"):  # of a beginning that was killed
                stale.unlink(missing_ok=True)
            write_record(folder / "config.json", {**config, **origin})
        return cls(folder)

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """Open a folder that holds a run."""
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise RunError(
                f"A run's folder must hold config.json. {folder} does not.",
                hint="`atoll list runs` shows the runs there are.",
            )
        return cls(folder)

    @property
    def statistics(self) -> Statistics | None:
        """What the clients have, in numbers; None if it was not written."""
        path = self.folder / "clients.json"
        if not path.exists():
            return None
        found = read_record(path, dict[str, Any])
        with guarding(path):
            return Statistics.of_json(found)

    def keep_statistics(self, found: Mapping[str, Any]) -> None:
        """Write down what the clients have."""
        with writing(self.folder):
            write_record(self.folder / "clients.json", found, indent=None)  # a million numbers are no lines to read

    @property
    def scaling(self) -> Scaling | None:
        """How raw samples of own data became numbers; None of other data."""
        path = self.folder / "preprocessing.json"
        if not path.exists():
            return None
        found = read_record(path, dict[str, Any])
        with guarding(path):
            return Scaling.of_json(found)

    def keep_scaling(self, found: Mapping[str, Any]) -> None:
        """Write down how raw samples became numbers."""
        with writing(self.folder):
            write_record(self.folder / "preprocessing.json", found, indent=None)

    # -- metrics and ledger ----------------------------------------------------------------------------------------
    def record(self, line: Round, entries: Iterable[Entry], outcomes: Arrays | None = None) -> None:
        """Append one round's metrics and messages; before that, write the outcomes, if there are any."""
        if outcomes is not None:
            self.save_outcomes(outcomes)
        with writing(self.folder):
            for name, lines in zip(LINES, ([line.as_json()], (entry.as_json() for entry in entries)), strict=True):
                seal = self._seal(name)  # before the file grows
                with open_to_append(self.folder / name) as file:
                    for one in lines:
                        text = json.dumps(one) + "\n"
                        file.write(text)
                        seal.add(text.encode())

    def metrics(self) -> list[Round]:
        """Read all rounds so far; what a crash left unreadable after the last checkpoint is left out."""
        found = read_lines(self.folder / "metrics.jsonl", Round, self._sealed_lines("metrics.jsonl"))
        if [line.round for line in found] != [*range(1, len(found) + 1)]:
            raise RunError(f"{self.folder / 'metrics.jsonl'} must have one line for each round, in order.")
        return found

    def ledger(self) -> list[Entry]:
        """Read all messages so far."""
        return read_lines(self.folder / "ledger.jsonl", Entry, self._sealed_lines("ledger.jsonl"))

    def save_outcomes(self, outcomes: Arrays) -> None:
        """Write what was found after the last round, by name: `test` is the score of every test sample."""
        data = io.BytesIO()
        with np.errstate(over="ignore"):  # a loss that is too large becomes infinite
            arrays: dict[str, Any] = {**outcomes, "test": outcomes["test"].astype(np.float32)}
        arrays |= {name: outcomes[name].astype(np.int32) for name in ("answer", "label") if name in outcomes}
        np.savez_compressed(data, **arrays)
        with writing(self.folder):
            write_whole(self.folder / "outcomes.npz", data.getvalue())

    def outcomes(self) -> Arrays | None:
        """Read what was found after the last round, by name; None before it."""
        path = self.folder / "outcomes.npz"
        if not path.exists():
            return None
        open_regular(path).close()
        try:
            with reading(path), open_arrays(path) as arrays:
                there = [name for name in OUTCOMES if name in arrays or name == "test"]
                found: Arrays = {name: arrays[name].astype(OUTCOMES[name]) for name in there}
        except (DataError, NotImplementedError, RuntimeError) as error:  # or packed in a way that is not known here
            raise RunError(f"{path} must be what a run writes. It cannot be read.") from error
        for name, array in found.items():
            if array.ndim != (2 if name in COLUMNS else 1):
                form = "a table" if name in COLUMNS else "one row"
                raise RunError(f"{path} must hold {form} of numbers as {name}. It has the shape {array.shape}.")
        return found

    def rewind(self, rounds: int) -> None:
        """Forget what came after the first `rounds` rounds, and what a crash left half written."""
        with writing(self.folder):
            self._sealed.clear()
            for stale in self.folder.rglob(".*.tmp"):
                stale.unlink(missing_ok=True)
            for name in LINES:
                write_whole(self.folder / name, b"".join(self._lines_until(name, rounds)))
            self._forget_old()
            seals = self._facts(rounds).files if rounds else {}
            if seals is not None and "outcomes.npz" not in seals:  # of a last round that is to come again
                (self.folder / "outcomes.npz").unlink(missing_ok=True)

    def _lines_until(self, name: str, rounds: int) -> list[bytes]:
        """Read the lines that a file had after so many rounds, unchanged."""
        path = self.folder / name
        if not rounds or not path.exists():
            return []
        seals = self._facts(rounds).files
        with open_regular(path) as file:
            if seals is not None:
                return [*itertools.islice(file, seals[name].lines)]
            # Metrics count rounds from 1, messages from 0; those before the first round are sent again with it.
            last = rounds if name == "metrics.jsonl" else rounds - 1
            kept = []
            for line in file:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    if json.loads(line)["round"] <= last:
                        kept.append(line)
            return kept

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def save(
        self, rounds: int, state: Tree, layouts: Sequence[Layout] = (), *, changes: Tree = None, kept: int | None = None
    ) -> None:
        """Write a checkpoint after `rounds` rounds; older ones but the last are removed.

        `changes` are what clients kept in RAM since the checkpoint before, or all of it (`Memory.save`). A checkpoint
        seals what it builds on: the configuration, what clients have, the lines of metrics and ledger so far, the
        outcomes, and how many clients have something in a memory on disk (`kept`).
        """
        with writing(self.folder):
            require_no_link(self.folder / "checkpoints")
            (self.folder / "checkpoints").mkdir(exist_ok=True)  # a run whose checkpoints are gone begins again
            for name in LINES:  # what a checkpoint builds on must not be lost after it
                if (self.folder / name).exists():
                    with (self.folder / name).open("rb") as file:
                        os.fsync(file.fileno())
            self._sealed.pop("outcomes.npz", None)  # it is written anew
            there = [name for name in (*WHOLE, *LINES) if name in LINES or (self.folder / name).exists()]
            if changes is not None:
                size, digest = write_tensors(self._segment(rounds), changes, layouts)
                older = [] if changes["whole"] else self._segments
                self._segments = [*older, Segment(round=rounds, bytes=size, sha256=digest)]
            state = {**state, "segments": [one.as_json() for one in self._segments]}
            size, digest = write_tensors(self._checkpoint(rounds, "safetensors"), state, layouts)
            facts = Checkpoint(
                round=rounds, bytes=size, sha256=digest, kept=kept, segments=self._segments or None,
                files={name: self._seal(name).sealed for name in there},
            )  # fmt: skip
            write_record(self._checkpoint(rounds, "json"), facts)
            self._forget_old()

    def _forget_old(self) -> None:
        """Remove all but the last checkpoints; first the JSON files, so tensors without one are what a kill leaves."""
        rounds, folder = self.checkpoints()[-KEPT_CHECKPOINTS:], self.folder / "checkpoints"
        needed = {self._checkpoint(done, suffix) for done in rounds for suffix in ("json", "safetensors")}
        for done in rounds:
            with contextlib.suppress(RunError):  # one that cannot be read needs nothing
                needed |= {self._segment(one.round) for one in self._facts(done).segments or ()}
        for pattern in ("round-*.json", "round-*.safetensors", "kept-*.safetensors"):
            for path in {*folder.glob(pattern)} - needed:
                path.unlink(missing_ok=True)

    def checkpoints(self) -> list[int]:
        """List the rounds of the checkpoints there are, damaged ones included."""
        names = [path.name for path in (self.folder / "checkpoints").glob("round-*.json")]
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"round-(\d{6,15})\.json", name)))

    def load(self, layouts: Sequence[Layout], device: torch.device) -> tuple[int, Tree] | None:
        """Return the newest checkpoint that is whole, as (rounds, state); None if there is none at all.

        The state has what clients kept in RAM as `memory`, a list of what checkpoints wrote of it. Raises RunError if
        the files that it builds on are not those that it was written with.
        """
        found, self._segments = self.checkpoints(), []
        for rounds in reversed(found):
            try:
                state = self._load(rounds, layouts, device)
            except CheckpointError as error:
                log.warning("%s", error)
                continue
            self._require_sealed(self._facts(rounds))
            return rounds, state
        if found:
            log.warning("no checkpoint is whole: the run begins again")
        return None

    def _load(self, rounds: int, layouts: Sequence[Layout], device: torch.device) -> Tree:
        path = self._checkpoint(rounds, "safetensors")
        try:
            facts = self._facts(rounds)
            state, segments = read_tensors(path, facts, layouts, device), facts.segments or []
            if state.get("segments", []) != [one.as_json() for one in segments]:
                raise CheckpointError("Its JSON file must list the files of what clients keep that it builds on.")
            older = [] if state.get("memory") is None else [state["memory"]]  # before there were segments
            kept = [read_tensors(self._segment(one.round), one, layouts, device) for one in segments]
        except (RunError, AttributeError) as error:
            raise CheckpointError(
                f"Checkpoint {path.name} cannot be read: {error} The one before it is used."
            ) from error
        self._segments = segments
        return {**state, "memory": older + kept}

    def count_keepers(self, rounds: int) -> int | None:
        """Count the clients that had something in a memory on disk after `rounds` rounds; None if nobody counted."""
        return self._facts(rounds).kept

    def is_finished(self, rounds: int) -> bool:
        """Return whether the checkpoint after the last of `rounds` rounds is there and whole."""
        try:
            facts = self._facts(rounds)
        except RunError:
            return False
        return is_whole(self._checkpoint(rounds, "safetensors"), facts) and all(
            is_whole(self._segment(one.round), one) for one in facts.segments or ()
        )

    def verify(self) -> None:
        """Raise RunError if a file is not as the newest checkpoint that can be read has sealed it."""
        facts = self._newest()
        if facts is not None:
            self._require_sealed(facts)

    def _newest(self) -> Checkpoint | None:
        """Read the newest checkpoint whose JSON file can be read."""
        for rounds in reversed(self.checkpoints()):
            with contextlib.suppress(RunError):
                return self._facts(rounds)
        return None

    def _sealed_lines(self, name: str) -> int:
        facts = self._newest()
        return 0 if facts is None or facts.files is None else facts.files[name].lines

    def _facts(self, rounds: int) -> Checkpoint:
        path = self._checkpoint(rounds, "json")
        facts = read_record(path, Checkpoint)
        if facts.round != rounds or (facts.files is not None and not {*LINES, "config.json"} <= {*facts.files}):
            raise changed_file_error(path)
        return facts

    def _seal(self, name: str) -> Seal:
        """Return the seal of a file: read once, then continued with every line that is written."""
        if name not in self._sealed:
            self._sealed[name] = Seal.of(self.folder / name)
        return self._sealed[name]

    def _require_sealed(self, facts: Checkpoint) -> None:
        """Raise unless the files of the run are those that a checkpoint was written with."""
        asked = read_record(self.folder / "config.json", dict[str, Any])["settings"]
        last = facts.round == asked["rounds"]  # after which no line can come
        for name, seal in (facts.files or {}).items():
            if name not in (*WHOLE, *LINES):
                raise changed_file_error(self._checkpoint(facts.round, "json"))
            found = Seal.of(self.folder / name, seal.lines if name in LINES and not last else None).sealed
            if found != seal:
                raise changed_file_error(self.folder / name, f"round {facts.round}")

    def _checkpoint(self, rounds: int, suffix: str) -> Path:
        return self.folder / "checkpoints" / f"round-{rounds:06d}.{suffix}"

    def _segment(self, rounds: int) -> Path:
        return self.folder / "checkpoints" / f"kept-{rounds:06d}.safetensors"

    # -- log -------------------------------------------------------------------------------------------------------
    def logging(self) -> AbstractContextManager[None]:
        """Write what Atoll logs to run.log as well."""
        return log_to(self.folder / "run.log")


def find_runs(folder: Path) -> list[Path]:
    """Return the folders inside that hold a run, or what is left of one."""
    return sorted(
        Path(path) for path, folders, files in os.walk(folder) if {"config.json", *LINES} & {*folders, *files}
    )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence Atoll's log, but for errors."""
    logger = logging.getLogger("atoll")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@functools.cache  # what was imported stays as it is
def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    names = ("atoll", "torch", "numpy", "scipy", "scikit-learn", "safetensors")
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        found["commit"] = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return found


def machine() -> dict[str, Any]:
    """Describe the machine that seconds depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count(), "gpu": gpu}


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held so far: on the GPU by tensors, else by the whole process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def command() -> str:
    """Return the command line, without the folder of the program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def now() -> str:
    """Return a time stamp for folder names."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
