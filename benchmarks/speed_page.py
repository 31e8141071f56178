"""Write docs/results/speed.md from what `atoll bench -o FILE` has written.

python benchmarks/speed_page.py FILE...      # adds these, then the page; without files, the page only

All that was measured is kept in docs/results/speed.json; a workload that is measured again on the same machine and
device replaces the former row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from published import RESULTS, table

from atoll.testing.bench.table import COLUMNS, Row

KEPT = RESULTS / "speed.json"
PAGE = RESULTS / "speed.md"
INTRODUCTION = """# Speed

Written by `python benchmarks/speed_page.py` from [speed.json](speed.json), that is from files of `atoll bench -o FILE`.
Every row says which command measured it, on which machine, at which commit. What stands beside Atoll was measured in
the same run, by turns.

- *atoll* is the steady state: the median of later rounds, or a comparison that finds the plans and programs of an
  earlier one.
- *first result* counts everything until the first round is done: plans are measured, programs traced and compiled. Of
  a comparison it is the whole of it with empty caches.
- `skewed` clients have sizes by Dirichlet(0.1) over ten classes; the others are equal.
- `pfllib-...`: PFLlib's own FedAvg on the same clients' images, from the same initial values, evaluated in every round
  as ours is. Its data loader leaves out each client's last short batch, so it takes slightly fewer steps; it scores
  training and test images, Atoll test images.
- A target that was missed is marked. Targets beside peers hold for two idle CPU cores.
"""


def add(kept: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """Add the rows of a run, each with where it comes from; former rows of the same workloads go."""
    origin = {name: run[name] for name in ("command", "device", "machine", "versions", "when")}
    new = [{**row, **origin} for row in run["rows"]]
    measured = {_key(row) for row in new}
    return [row for row in kept if _key(row) not in measured] + new


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["workload"], place(row)


def place(row: dict[str, Any]) -> str:
    """Return the machine in words."""
    machine = row["machine"]
    if row["device"].startswith("cuda"):
        return str(machine["gpu"])
    return f"{machine['cores']} CPU cores, {machine['processor']}"


def page(kept: list[dict[str, Any]]) -> str:
    """Return the page: a table for each machine."""
    parts = [INTRODUCTION]
    for where in sorted({place(row) for row in kept}):
        rows = []
        for row in kept:
            if place(row) == where:
                cells = Row(**{name: row[name] for name in Row.__dataclass_fields__}).cells
                commit = row["versions"].get("commit", "")[:7]
                rows.append([*cells, f"`{row['command']}`", commit, row["versions"]["torch"], row["when"][:8]])
        head = [*COLUMNS, "command", "commit", "torch", "date"]
        parts.append(f"## {where}\n\n" + table(head, rows) + "\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", type=Path)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else []
    for file in parser.parse_args().files:
        kept = add(kept, json.loads(file.read_text()))
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))


if __name__ == "__main__":
    main()
