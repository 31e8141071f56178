"""How scores are written in tables: shares of 1 in percent, others with few digits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.federation.report import Report
    from atoll.federation.results import Results

UNKNOWN = "–"


@dataclass(frozen=True)
class Numbers:
    """How the scores of a metric are written: shares of 1 in percent, others with few digits."""

    name: str
    higher_is_better: bool = True
    share: bool = True
    mean: bool = True  # over samples

    @classmethod
    def of(cls, comparison: Results) -> Numbers:
        """Take the metric of a comparison."""
        return cls(**comparison.metric)

    def score(self, value: float | None) -> str:
        """Write a score, or a distance between scores."""
        if value is None or not math.isfinite(value):
            return UNKNOWN
        return f"{100 * value:.1f}" if self.share else f"{value:.3g}"

    def gain(self, value: float | None) -> str:
        """Write a difference of scores, with its sign."""
        if value is None or not math.isfinite(value):
            return UNKNOWN
        return f"{100 * value:+.1f}" if self.share else f"{value:+.2g}"

    @property
    def unit(self) -> str:
        """The unit, to follow the name of the metric."""
        return " in %" if self.share else ""

    @property
    def points(self) -> str:
        """The unit of gains."""
        return "percentage points" if self.share else f"units of {self.name}, positive is better"


def mean_text(numbers: Numbers, row: dict[str, Any]) -> str:
    """Write the mean with its interval."""
    mean = numbers.score(row["mean"])
    return mean if row["interval"] is None else f"{mean} ± {numbers.score(row['interval']):>4}"


def run_cells(outcome: Report) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table of a single run, one row per model and split."""
    numbers = Numbers(**outcome.metric)
    heads = ["model", "split", "mean", "over samples", "worst client", "bottom 10 %", "std over clients", "loss"]
    evaluation = outcome.evaluations[-1].evaluation if outcome.evaluations else None
    models = {} if evaluation is None else {"personal": evaluation.personal, "shared": evaluation.shared}
    rows = []
    for model, split in ((model, split) for model in models for split in ("test", "inductive", "val")):
        found = (models[model] or {}).get(split)
        if found is not None:
            mean = mean_text(numbers, {"mean": found.macro, "interval": found.interval})
            shown = (found.micro, found.worst, found.bottom10, found.std)
            loss = f"{found.loss:.3f}" if math.isfinite(found.loss) else UNKNOWN
            on = "test, one at a time" if split == "inductive" else split
            rows.append([model, on, mean, *map(numbers.score, shown), loss])
    if outcome.central is not None:
        rows.append(["shared", "central", UNKNOWN, numbers.score(outcome.central), *[UNKNOWN] * 4])
    if outcome.central_inductive is not None:
        on = "central, one at a time"
        rows.append(["shared", on, UNKNOWN, numbers.score(outcome.central_inductive), *[UNKNOWN] * 4])
    return heads, rows
