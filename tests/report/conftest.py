"""Comparisons made by hand, so that what a report must say about them is known."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from reports import report_of

from atoll.data.statistics import Statistics
from atoll.experiments.comparison import Comparison
from atoll.federation.report import Report

Scores = Sequence[float]


def outcome(
    method: str,
    scores: Scores,
    *,
    seed: int = 0,
    curve: Scores = (0.5, 0.6, 0.7),
    samples: int | Sequence[int] = 100,
    names: Sequence[str] | None = None,
    same: bool = False,
    metric: Mapping[str, Any] | None = None,
    variances: Scores | None = None,
    megabytes: float = 2.0,
    rounds: int | None = None,
    mixing: Any = None,
    clusters: Any = None,
    groups: Sequence[int] | None = None,
    newcomers: Any = None,
    task_name: str = "<toy> & co",
    command: str | None = None,
) -> Report:
    """A run whose clients end with these scores, and whose mean on validation was `curve`."""
    values, clients = np.array(scores, dtype=float), len(scores)
    counts = [samples] * clients if isinstance(samples, int) else [*samples]
    test = {"clients": [*scores], "samples": counts, "macro": float(np.nanmean(values)), "loss": 0.25}
    test["micro"] = float(np.nansum(values * counts) / np.sum(counts))
    test |= {"variances": [*variances]} if variances is not None else {}
    lines = []
    for done, value in enumerate(curve, start=1):
        val = {"macro": value, "clients": [value] * clients, "samples": counts}
        evaluation = {"personal": {"val": val, "test": test}} | ({} if mixing is None else {"mixing": mixing})
        evaluation |= {"clusters": clusters.as_json()} if clusters is not None else {}
        evaluation |= {"newcomers": newcomers} if newcomers is not None else {}
        sent = {"up": int(megabytes * 1e6), "down": int(megabytes * 1e6)}
        lines.append({"round": done, "seconds": {"round": 1.5}, "bytes": sent, "evaluation": evaluation})
    total = {} if not megabytes else {(way, "model"): int(megabytes * 1e6) * len(curve) for way in ("up", "down")}
    task = {"name": task_name, "clients": clients, "data": "always" if same else f"of seed {seed}"}
    task |= {} if metric is None else {"metric": metric}
    config = {"task": task, "settings": {"rounds": len(curve) if rounds is None else rounds, "seed": seed}}
    config |= {} if command is None else {"command": command}
    planted = None if groups is None else np.array(groups)
    found = Statistics(np.arange(10, 10 + clients), groups=planted, names=None if names is None else tuple(names))
    return report_of(method, config, lines, total, found)


@pytest.fixture
def make() -> Callable[..., Comparison]:
    """`make({"local": [[scores of seed 0], [of seed 1]], ...})`; Local sends nothing."""

    def make_comparison(
        scores: Mapping[str, Sequence[Scores]], *, missing: Sequence[str] = (), target: float | None = None, **more: Any
    ) -> Comparison:
        def runs(method: str, seeds: Sequence[Scores]) -> list[Report]:
            silent = {"megabytes": 0.0} if method == "local" else {}
            return [outcome(method, of, seed=seed, **more, **silent) for seed, of in enumerate(seeds)]

        found = [run for method, seeds in scores.items() for run in runs(method, seeds)]
        by_label: dict[str, list[Report]] = {}
        for run in found:
            by_label.setdefault(run.label, []).append(run)
        return Comparison(by_label, missing=missing, target=target)

    return make_comparison
