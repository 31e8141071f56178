"""The clients of a comparison as rows of a table: one by one, or in percentiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.federation.labels import REFERENCES
from atoll.metrics import fairness

if TYPE_CHECKING:
    from atoll.federation.results import Results


def list_clients(results: Results) -> Iterator[dict[str, Any]]:
    """Yield one row per method, seed and client that was scored."""
    for method, outcomes in results.outcomes.items():
        harmed = results.find_harmed(method)
        if harmed is not None and results.together:  # a client is harmed or not, whatever the seed
            harmed = np.repeat(harmed, len(outcomes), axis=0)
        of_method = {f"gain_{name}": results.gains(method, name) for name in REFERENCES} | {
            "harmed": harmed, "mcnemar_local": results.mcnemar(method)
        }  # fmt: skip
        for index, outcome in enumerate(outcomes):
            scores, clusters = outcome.scores(select=results.select), outcome.clusters
            numbered = zip(outcome.scored.tolist(), scores, outcome.samples(), strict=True)
            for place, (client, score, samples) in enumerate(numbered):
                paired = {
                    name: None if values is None else values[index, place].item() for name, values in of_method.items()
                }
                found = outcome.statistics
                yield {
                    "method": method, "seed": outcome.seed, "client": client,
                    "name": str(client) if found is None else found.name(client),
                    "test_samples": int(samples), "score": float(score), **paired,
                    "cluster": None if clusters is None else int(clusters.of_client[client]),
                }  # fmt: skip


def list_percentiles(results: Results) -> Iterator[dict[str, Any]]:
    """Yield one row per method, seed and percentile: each column has its own percentiles over clients."""
    for method, outcomes in results.outcomes.items():
        gains = {f"gain_{name}": results.gains(method, name) for name in REFERENCES}
        for index, outcome in enumerate(outcomes):
            columns: dict[str, NDArray[np.generic] | None] = {
                "test_samples": outcome.samples(), "score": outcome.scores(select=results.select),
                **{name: None if values is None else values[index] for name, values in gains.items()},
            }  # fmt: skip
            known = {name: fairness.percentiles(values) for name, values in columns.items() if values is not None}
            for place, percentile in enumerate(fairness.PERCENTILES):
                yield {
                    "method": method, "seed": outcome.seed, "clients": results.clients, "scored": results.scored,
                    "percentile": percentile,
                    **{name: known[name][place] if name in known else None for name in columns},
                }  # fmt: skip
