"""Whole comparisons, everything included: the program's start, the data, plans, programs, checkpoints, the report."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from atoll.data.datasets import data_folder
from atoll.kernel.errors import RunError
from atoll.testing.bench.table import Row

DEMO = "local fedavg fedavg-ft fedprox ditto fedper --task digits --partition dirichlet:0.3 --clients 20 --seeds 3"
FOUR = (
    "local fedavg ditto fedper --task fashion-mnist --model cnn --partition dirichlet:0.1 --clients 100 --rounds 100 "
    "--seeds 1"
)


@dataclass(frozen=True)
class Whole:
    """A comparison as it is typed, run in a process of its own: cold, then with what the first left behind."""

    name: str
    words: str
    most: float  # seconds, warm
    precision: str = "fp32"

    def measure(self, device: str, repeats: int) -> Row:
        """Run the comparison with empty caches, and then `repeats` times more; the fastest of those counts."""
        with tempfile.TemporaryDirectory() as place:
            first = self._time(device, Path(place))
            atoll = min(self._time(device, Path(place)) for _ in range(repeats))
        return Row(workload=self.name, unit="s", atoll=atoll, first=first, most=self.most, note=f"compare {self.words}")

    def _time(self, device: str, place: Path) -> float:
        """Run the comparison in a new folder; caches of plans and programs lie in `place`."""
        own = {"ATOLL_CACHE": str(place / "atoll"), "TORCHINDUCTOR_CACHE_DIR": str(place / "torch")}
        if (data := data_folder(None)) is not None:
            own["ATOLL_DATA"] = str(data.resolve())
        words = [*self.words.split(), "--device", device, "--precision", self.precision]
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "atoll", "compare", *words], cwd=folder, env=os.environ | own,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            took = time.perf_counter() - began
        if done.returncode:
            raise RunError(
                f"A comparison that is timed must succeed. `atoll compare {self.words}` failed:\n{done.stderr}"
            )
        return took
