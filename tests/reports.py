"""Reports of runs that never ran, from what they would have written."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from atoll.compose import create
from atoll.federation.config import AlgorithmSpec, RunConfig
from atoll.federation.report import Report
from atoll.protect.ledger import Entry, Ledger
from atoll.records.rounds import Evaluation, Figures, Round

NUMBERS = {field.name: 0.0 for field in fields(Figures) if field.type == "float"}


def report_of(
    method: str,
    config: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    counted: Mapping[tuple[str, str], int] | None = None,
    statistics: Any = None,
    each: Any = None,
) -> Report:
    """The report of these lines and of so many bytes by direction and kind; figures that are not given are 0."""
    algorithm = create(method)
    ledger = Ledger([Entry(way, 0, kind, kind, size, (0,)) for (way, kind), size in (counted or {}).items()])
    written = RunConfig.of_json({**config, "algorithm": AlgorithmSpec.of(algorithm)})
    lines = [Round.of_json({**line, **_evaluated(line)}) for line in history]
    return Report(algorithm, written, lines, ledger, statistics, None if each is None else {"test": each})


def change(report: Report, place: int = -1, **found: Any) -> None:
    """Let the report have found something else after one of its rounds."""
    line = report.history[place]
    again = Evaluation.of_json({**line.evaluation.as_json(), **found})
    report.history[place] = replace(line, evaluation=again)
    vars(report).pop("evaluations", None)  # of the lines before


def _evaluated(line: Mapping[str, Any]) -> dict[str, Any]:
    if "evaluation" not in line:
        return {}
    found = dict(line["evaluation"])
    for model in ("personal", "shared"):
        if model in found:
            found[model] = {split: {**NUMBERS, **figures} for split, figures in found[model].items()}
    if "newcomers" in found:
        served = found["newcomers"]
        tuned = {
            epochs: {"samples": [1] * len(of["clients"]), **NUMBERS, **of} for epochs, of in served["labelled"].items()
        }
        found["newcomers"] = {**served, "labelled": tuned}
    return {"evaluation": found}
