"""The benchmark: steps, whole comparisons and peers in one command and one table, each beside what it is to beat.

Every workload has a name and `measure(device, repeats) -> Row`: first result and steady state, in one run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from atoll.kernel.errors import RunError, unknown
from atoll.testing.bench import steps
from atoll.testing.bench.comparisons import DEMO, FOUR, Whole
from atoll.testing.bench.peers import duels
from atoll.testing.bench.pfl import PflCifar10
from atoll.testing.bench.steps import Workload
from atoll.testing.bench.table import COLUMNS, Row, write, write_line

REPEATS = 5
WIDTH = 200  # of a table that is not in a terminal


class Measurable(Protocol):
    """What is measured."""

    @property
    def name(self) -> str:
        """The name in the table and for `--only`."""

    def measure(self, device: str, repeats: int) -> Row:
        """Measure it by turns with what it is to beat."""


CPU: tuple[Measurable, ...] = (*steps.CPU, Whole("demo", DEMO, most=20.0))
CUDA: tuple[Measurable, ...] = (
    *steps.CUDA,
    PflCifar10(),
    Whole("four-methods", FOUR, most=70.0, precision="bf16"),
    Whole("demo", DEMO, most=20.0),
)


def list_workloads(device: str, peers: list[str]) -> dict[str, Measurable]:
    """Return the workloads of a device by their names: those beside peers last."""
    chosen = CUDA if device.startswith("cuda") else CPU
    return {one.name: one for one in (*chosen, *duels(peers))}


def run(
    device: str = "auto",
    *,
    quick: bool = False,
    only: list[str] | None = None,
    peers: list[str] | None = None,
    file: Path | None = None,
) -> int:
    """Print the table, row by row, and write it as JSON if there is a `file`; return 1 if a target was missed.

    A `quick` one measures steps only, compiles nothing and has no targets.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    usual = list_workloads(device, peers or [])
    known = list_workloads("cpu" if device.startswith("cuda") else "cuda", []) | usual  # any can be asked for by name
    for name in only or ():
        if name not in known:
            raise unknown("workload", name, known)
    if file is not None and not file.parent.is_dir():
        raise RunError(
            f"The folder of the result must exist. {file.parent} does not.", hint="make it, or choose another."
        )
    chosen = {name: known[name] for name in only or usual}
    if quick:
        kept = chosen if only else {name: one for name, one in chosen.items() if _is_short(one)}
        chosen = {name: _shorten(one) for name, one in kept.items()}
    rows, longest = list[Row](), max(map(len, chosen))
    console = Console(width=None if sys.stdout.isatty() else WIDTH, soft_wrap=True, highlight=False)
    kind = torch.cuda.get_device_name() if device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    console.print(f"Speed on {kind}, torch {torch.__version__}", style="bold")
    console.print(write_line(COLUMNS, longest), style="dim")
    for name, workload in chosen.items():
        with Console(stderr=True).status(f"measuring {name} (plans and programs first)"):
            row = workload.measure(device, repeats=_count_repeats(workload, quick=quick))
        rows.append(replace(row, least=None, most=None) if quick else row)
        console.print(write_line(rows[-1].cells, longest), markup=False)
        if file is not None:  # what is measured is kept, whatever comes later
            write(file, device, rows)
    if quick:
        console.print("A quick look: few steps, nothing compiled, no targets. `atoll bench` measures all.", style="dim")
    return 1 if any(row.missed for row in rows) else 0


def _is_short(workload: Measurable) -> bool:
    """Return whether a workload takes seconds only: one of each network, clients of equal size, small batches."""
    if not isinstance(workload, Workload) or workload.skewed or workload.seeds > 1:
        return False
    return workload.model in ("mlp", "cnn") and workload.batch <= 10


def _shorten(workload: Measurable) -> Measurable:
    """Return a workload with few steps, for which nothing is compiled."""
    if not isinstance(workload, Workload):
        return workload
    return replace(workload, steps=max(2, workload.steps // 10), compile=False)


def _count_repeats(workload: Measurable, *, quick: bool) -> int:
    """Return how often a workload is measured: whole runs take long and vary less."""
    if isinstance(workload, Whole | PflCifar10):
        return 1 if quick else 2
    return 3 if quick else REPEATS
