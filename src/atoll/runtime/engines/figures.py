"""What was measured, kept for the next process on this machine: how long a client-step takes under each plan.

There is a file for each kind of work, in `plans` of the user's cache folder. It holds figures, not decisions: how much
work lies ahead differs from run to run, so each run decides by itself. A file that is damaged, old or about other work
is not used, and the log says so. Several processes may write at once: a figure that gets lost is measured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.kernel.fingerprints import fingerprint, portable
from atoll.kernel.sources import code_digest
from atoll.runtime.engines.parts import Part
from atoll.runtime.engines.plan import Plan
from atoll.runtime.files import cache_folder, write_whole

log = logging.getLogger("atoll.engine")

KEPT_SECONDS = 30 * 24 * 3600.0  # after which a figure is measured again: drivers and cooling change, too
MOST = 1000  # files; the oldest are removed
TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # the variable that names the folder of torch's compiled programs


@dataclass(frozen=True)
class Measured:
    """What was measured of a plan: seconds per client-step, and the client-steps of one job."""

    plan: Plan
    seconds: float
    steps: float
    took: float = 0.0  # seconds that it took to measure, and to make the programs
    rough: bool = False  # from one or two steps, because so little work lay ahead
    programs: str | None = None  # the folder in which torch keeps what was compiled for it

    def ahead(self, part: Part) -> float:
        """Return the seconds that this and all coming jobs would take, with those of the runs beside it."""
        return self.seconds * self.steps * part.job.calls * part.runs


class Figures:
    """The figures of one kind of work: what earlier processes measured, and what this one adds.

    Without `work`, which says what kind it is, nothing is read or kept. `one_pass` is how many client-steps the
    clients take to go over their data once: with others, a job has more or fewer steps in proportion.
    """

    def __init__(self, work: Mapping[str, Any] | None, one_pass: float) -> None:
        self._work, self._one_pass = work, max(one_pass, 1.0)
        self._known, self._new = dict[Plan, Measured](), dict[Plan, Measured]()
        if work is not None:
            self._name = hashlib.sha256(json.dumps(work).encode()).hexdigest()[:32]
            self._file = cache_folder() / "plans" / f"{self._name}.json"
            self._known = self._read()

    @property
    def grew(self) -> bool:
        """Whether this process measured anything."""
        return bool(self._new)

    def get(self, plan: Plan) -> Measured | None:
        """Return what an earlier process measured of a plan."""
        return self._known.get(plan)

    def add(self, measured: Measured) -> None:
        """Take a new figure."""
        self._new[measured.plan] = measured

    def has_programs(self, plan: Plan) -> bool:
        """Return whether torch still has what was compiled for a plan, so compiling it again takes no time."""
        folder = self._known[plan].programs if plan in self._known else None
        return folder is not None and os.environ.get(TORCH_FOLDER, folder) == folder and self._note(folder).exists()

    def save(self) -> None:
        """Write the new figures beside those that other processes have written by now."""
        if self._work is None or not self._new:
            return
        figures = [self._to_json(one) for one in {**self._read(), **self._new}.values()]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, (json.dumps({"work": self._work, "figures": figures}, indent=1) + "\n").encode())
            _remove_oldest(self._file.parent)
            for folder in {one.programs for one in self._new.values() if one.programs is not None}:
                self._note(folder).parent.mkdir(parents=True, exist_ok=True)
                self._note(folder).touch()
        except OSError as error:  # a home that cannot be written is no reason not to run
            log.info("what was measured cannot be kept in %s: %s", self._file.parent, error)

    def _note(self, folder: str) -> Path:
        """Return a file among torch's programs that is lost when they are."""
        return Path(folder) / "atoll" / self._name

    def _read(self) -> dict[Plan, Measured]:
        try:
            if time.time() - self._file.stat().st_mtime > KEPT_SECONDS:
                log.info("%s is old: its plans are measured again", self._file)
                return {}
            found = json.loads(self._file.read_bytes())
            if found["work"] != self._work:
                raise ValueError("it is about other work")
            return {one.plan: one for one in map(self._from_json, found["figures"])}
        except FileNotFoundError:
            return {}
        except Exception as error:  # noqa: BLE001 - a damaged file may fail in any way
            log.warning("%s is not used and its plans are measured again (%s)", self._file, error)
            return {}

    def _to_json(self, measured: Measured) -> dict[str, Any]:
        return {**asdict(measured), "steps": measured.steps / self._one_pass}

    def _from_json(self, figure: dict[str, Any]) -> Measured:
        numbers = {name: float(figure[name]) for name in ("seconds", "steps", "took")}
        if not all(0 <= value < math.inf for value in numbers.values()):
            raise ValueError(f"{numbers} must be positive numbers")
        numbers["steps"] *= self._one_pass
        return Measured(Plan(**figure["plan"]), **numbers, rough=bool(figure["rough"]), programs=figure["programs"])


def describe_work(part: Part, device: torch.device, threads: int) -> dict[str, Any]:
    """Return all that the speed of a part's plans depends on; raise Unstable if the method's code cannot be known."""
    task, job = part.task, part.job
    batch = task.training.batch_size
    functions = (
        fingerprint(job.phase), fingerprint(job.method), part.population.facts.network.function,
        fingerprint(task.augment), fingerprint(task.training),
    )  # fmt: skip
    return {
        "torch": torch.__version__,
        "atoll": code_digest(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": _processor(),
        "threads": [threads, torch.get_num_threads()],
        "phase": job.phase.name,
        "functions": hashlib.sha256(repr(portable(functions)).encode()).hexdigest(),
        "sample": list(part.population.facts.sample.shape),
        "dtype": str(part.population.facts.network.dtype),
        "batch": batch,
        "clients": part.usual,
        "evenness": round(task.splits["train"].evenness(batch), 2),
    }


@functools.cache
def _processor() -> str:
    """Return the name of the processor; homes are shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _remove_oldest(folder: Path) -> None:
    """Remove files beyond the most that are kept."""
    ages = []
    for file in folder.glob("*.json"):
        try:
            ages.append((file.stat().st_mtime, file))
        except FileNotFoundError:  # another process has just done so
            continue
    for _, file in sorted(ages)[:-MOST]:
        file.unlink(missing_ok=True)
