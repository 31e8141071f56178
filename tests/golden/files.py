"""The file of golden digests: one line for each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("runs.json")


def read_golden(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write_golden(file: Path, golden: dict[str, Any]) -> None:
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(golden["runs"].items()))
    text = f'{{\n "machine": {json.dumps(golden["machine"])},\n "runs": {{\n{runs}\n }}\n}}\n'
    file.write_text(text, encoding="utf-8")
