"""A run's folder: configuration, metrics, ledger, checkpoints. Whatever happens, it can be continued from it.

    config.json          what was asked for, resolved, with versions and machine
    clients.json         what each client has: sizes, labels, how it differs from the others
    metrics.jsonl        one line per round
    ledger.jsonl         every message
    run.log              what the engine chose, who was lost
    checkpoints/         round-000012.safetensors and its round-000012.json, which holds the checksum
    outcomes.npz         the score of every test sample, written after the last round
    report.html          written at the end

Files are written to a temporary name, flushed to disk and renamed, so that a file is either whole or not there. A
checkpoint counts only if its checksum is right; otherwise the one before it is used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import itertools
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray

from atoll.data.files import open_arrays, reading
from atoll.kernel.errors import CheckpointError, RunError
from atoll.kernel.params import Layout, Tree
from atoll.runtime.channel.ledger import Entry
from atoll.runtime.files import require_no_link, write_whole
from atoll.runtime.serialise import pack, unpack

log = logging.getLogger("atoll.run")

KEPT_CHECKPOINTS = 2
LINES = ("metrics.jsonl", "ledger.jsonl")  # files that grow by lines


class _Seal:
    """How many lines a file has, and their digest."""

    def __init__(self) -> None:
        self.lines, self.digest = 0, hashlib.sha256()

    @classmethod
    def of(cls, path: Path, lines: int | None = None) -> _Seal:
        """Read the seal of a file, or of its first `lines` lines; one that is not there has none."""
        seal = cls()
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            for line in itertools.islice(file, lines):
                seal.add(line)
        return seal

    def add(self, line: bytes) -> None:
        """Go on with another line."""
        self.lines += 1
        self.digest.update(line)

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint writes down."""
        return {"lines": self.lines, "sha256": self.digest.hexdigest()}


class Run:
    """A run's folder, open for writing."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._sealed: dict[str, _Seal] = {}  # of files that grow, as far as this process has written or read them

    # -- opening ---------------------------------------------------------------------------------------------------
    @classmethod
    def create(cls, folder: Path | str, config: Mapping[str, Any]) -> Run:
        """A new folder; refuses one that already holds a run."""
        folder = Path(folder)
        if (folder / "config.json").exists():
            raise RunError(
                f"A new run must have a folder of its own. {folder} already holds one.",
                hint=f"continue it with `atoll resume {folder}`, or choose another folder.",
            )
        with writing(folder):
            require_no_link(folder / "checkpoints")
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            origin = {"versions": versions(), "machine": machine(), "command": command()}
            write_json(folder / "config.json", {**config, **origin})
        return cls(folder)

    @classmethod
    def open(cls, folder: Path | str) -> Run:
        """A folder that holds a run."""
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise RunError(
                f"A run's folder must hold config.json. {folder} does not.",
                hint="`atoll list runs` shows the runs there are.",
            )
        return cls(folder)

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    @property
    def statistics(self) -> dict[str, Any] | None:
        """What the clients have, in numbers; None if it was not written."""
        path = self.folder / "clients.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    def keep_statistics(self, found: Mapping[str, Any]) -> None:
        """Write down what the clients have."""
        with writing(self.folder):
            write_json(self.folder / "clients.json", found)

    # -- metrics and ledger ----------------------------------------------------------------------------------------
    def record(self, line: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        """Append one round's metrics and messages."""
        with writing(self.folder):
            for name, lines in zip(LINES, ([line], (entry.as_json() for entry in entries)), strict=True):
                seal = self._seal(name)  # before the file grows
                with _appending(self.folder / name) as file:
                    for one in lines:
                        text = json.dumps(one) + "\n"
                        file.write(text)
                        seal.add(text.encode())

    def metrics(self) -> list[dict[str, Any]]:
        """All rounds so far; a last line that was cut short is left out."""
        return list(_lines(self.folder / "metrics.jsonl"))

    def ledger(self) -> list[Entry]:
        """All messages so far."""
        return [Entry(**{**line, "clients": tuple(line["clients"])}) for line in _lines(self.folder / "ledger.jsonl")]

    def save_outcomes(self, outcomes: NDArray[np.float64]) -> None:
        """The score of every test sample after the last round, client after client."""
        data = io.BytesIO()
        np.savez_compressed(data, test=outcomes.astype(np.float32))
        with writing(self.folder):
            write_whole(self.folder / "outcomes.npz", data.getvalue())

    def outcomes(self) -> NDArray[np.float64] | None:
        """The score of every test sample after the last round; None before it."""
        path = self.folder / "outcomes.npz"
        if not path.exists():
            return None
        with reading(path), open_arrays(path) as arrays:
            found: NDArray[np.float64] = arrays["test"].astype(np.float64)
        return found

    def rewind(self, rounds: int) -> None:
        """Forget what came after the first `rounds` rounds, and what a crash left half written."""
        with writing(self.folder):
            self._sealed.clear()
            for stale in self.folder.rglob(".*.tmp"):
                stale.unlink(missing_ok=True)
            # Metrics count rounds from 1, messages from 0; those before the first round are sent again with it.
            for name, last in zip(LINES, (rounds, rounds - 1), strict=True):
                kept = [line for line in _lines(self.folder / name) if rounds and line["round"] <= last]
                write_whole(self.folder / name, "".join(json.dumps(line) + "\n" for line in kept).encode())

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def save(self, rounds: int, state: Tree, layouts: Sequence[Layout] = (), kept: int | None = None) -> None:
        """A checkpoint after `rounds` rounds; older ones but the last are removed.

        It seals what it builds on: the configuration, the lines of metrics and ledger so far, and how many clients have
        something in a memory on disk (`kept`).
        """
        tensors, structure = pack(state, layouts)
        data = safetensors.torch.save(tensors, {"structure": structure})
        facts: dict[str, Any] = {"round": rounds, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        facts["kept"] = kept
        with writing(self.folder):
            require_no_link(self.folder / "checkpoints")
            for name in LINES:  # what a checkpoint builds on must not be lost after it
                if (self.folder / name).exists():
                    with (self.folder / name).open("rb") as file:
                        os.fsync(file.fileno())
            facts["files"] = {name: self._seal(name).as_json() for name in ("config.json", *LINES)}
            write_whole(self._checkpoint(rounds, "safetensors"), data)
            write_json(self._checkpoint(rounds, "json"), facts)
        for old in self.checkpoints()[:-KEPT_CHECKPOINTS]:
            for suffix in ("json", "safetensors"):
                self._checkpoint(old, suffix).unlink(missing_ok=True)

    def checkpoints(self) -> list[int]:
        """The rounds of the checkpoints there are, damaged ones included."""
        return sorted(
            int(path.stem.removeprefix("round-")) for path in (self.folder / "checkpoints").glob("round-*.json")
        )

    def load(self, layouts: Sequence[Layout], device: torch.device) -> tuple[int, Tree] | None:
        """The newest checkpoint that is whole, as (rounds, state); None if there is none at all.

        Raises RunError if the files that it builds on are not those that it was written with.
        """
        found = self.checkpoints()
        for rounds in reversed(found):
            try:
                state = self._load(rounds, layouts, device)
            except CheckpointError as error:
                log.warning("%s", error)
                continue
            self._require_sealed(rounds)
            return rounds, state
        if found:
            log.warning("no checkpoint is whole: the run begins again")
        return None

    def _load(self, rounds: int, layouts: Sequence[Layout], device: torch.device) -> Tree:
        path = self._checkpoint(rounds, "safetensors")
        try:
            facts = json.loads(self._checkpoint(rounds, "json").read_text())
            data = path.read_bytes()
            if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise CheckpointError(
                    f"Checkpoint {path.name} is damaged: {len(data)} bytes, expected {facts['bytes']} with the "
                    "recorded checksum. The one before it is used."
                )
            length = int.from_bytes(data[:8], "little")
            structure = json.loads(data[8 : 8 + length])["__metadata__"]["structure"]
            return unpack(safetensors.torch.load(data), structure, layouts, device)
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"Checkpoint {path.name} cannot be read ({error}). The one before it is used."
            ) from error

    def kept(self, rounds: int) -> int | None:
        """How many clients had something in a memory on disk after `rounds` rounds, if that was written down."""
        found: int | None = self._facts(rounds).get("kept")
        return found

    def finished(self, rounds: int) -> bool:
        """Whether the checkpoint after the last of `rounds` rounds is there, as long as it should be."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(self._checkpoint(rounds, "safetensors").stat().st_size == self._facts(rounds)["bytes"])
        return False

    def _facts(self, rounds: int) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._checkpoint(rounds, "json").read_text())
        return facts

    def _seal(self, name: str) -> _Seal:
        """The seal of a file: read once, and then kept up with what is written."""
        if name not in self._sealed:
            self._sealed[name] = _Seal.of(self.folder / name)
        return self._sealed[name]

    def _require_sealed(self, rounds: int) -> None:
        """Raise unless the files of the run are those that a checkpoint was written with."""
        for name, seal in self._facts(rounds).get("files", {}).items():
            if _Seal.of(self.folder / name, seal["lines"] if name in LINES else None).as_json() != seal:
                raise RunError(
                    f"A run must be resumed from the files that it wrote. {self.folder / name} was changed after round "
                    f"{rounds}.",
                    hint="put the file back as it was, or begin a new run in another folder.",
                )

    def _checkpoint(self, rounds: int, suffix: str) -> Path:
        return self.folder / "checkpoints" / f"round-{rounds:06d}.{suffix}"

    # -- log -------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Write what Atoll logs to run.log as well."""
        logger = logging.getLogger("atoll")
        with writing(self.folder):
            handler = logging.StreamHandler(_appending(self.folder / "run.log"))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        before = logger.level
        logger.addHandler(handler)
        logger.setLevel(min(before or logging.INFO, logging.INFO))
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)
            handler.close()
            handler.stream.close()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Nobody needs to read what Atoll logs here, short of errors."""
    logger = logging.getLogger("atoll")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn failures to write into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"The disk with {folder} must have room for the run. It is full.",
                hint=f"make room, then continue with `atoll resume {folder}`; all before the last checkpoint is safe.",
            ) from error
        raise RunError(f"{folder} must be writable: {error}.") from error


def _appending(path: Path) -> IO[str]:
    """A text file to add lines to; never through a link."""
    require_no_link(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """A JSON file, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not at all."""
    write_whole(path, text.encode())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # cut short by a crash; the checkpoint before it does not need it
            return


def versions() -> dict[str, str]:
    """The versions that results depend on."""
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
    """The machine that seconds depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count(), "gpu": gpu}


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: on the GPU by this run's tensors, else by the whole process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def command() -> str:
    """The command line, without the folder of the program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def now() -> str:
    """A time stamp for folder names."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
