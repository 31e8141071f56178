"""What an audit of a run found, as it is kept beside the run for its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.records.files import read_record
from atoll.records.schema import Record, SchemaError

AUDIT = Path("audit") / "audit.json"  # in the folder of a run


@dataclass(frozen=True, eq=False, kw_only=True)
class Contributed(Record):
    """What clients contributed to the shared model's validation score, in the order of clients."""

    names: list[str]
    shapley: list[float]
    alone: list[float]  # leave-one-out
    rounds: list[int]  # in which a client replied
    score: list[float | None]  # of the model that it deploys, on its own test samples
    moved: float  # the score of the last model less that of the first
    more: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise unless there is one value of each kind for every client."""
        if {len(one) for one in (self.shapley, self.alone, self.rounds, self.score)} != {len(self.names)}:
            raise SchemaError("there must be as many values as names")


@dataclass(frozen=True, eq=False, kw_only=True)
class Audited(Record):
    """What an audit found, as far as a report shows it; `more` has all other figures."""

    sentences: list[str]
    contribution: Contributed | None = None
    more: dict[str, Any] = field(default_factory=dict)


def read_audit(folder: Path) -> Audited | None:
    """Read what an audit of the run in a folder found; None if there was none."""
    path = folder / AUDIT
    return read_record(path, Audited) if path.exists() or path.is_symlink() else None
