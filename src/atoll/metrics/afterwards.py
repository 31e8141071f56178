"""Evaluation after a round: personal models; after the last one also the shared model, newcomers and clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine
from atoll.kernel.params import Tree
from atoll.kernel.predictor import predictor_of
from atoll.metrics.evaluation import collect_observations, evaluate, evaluate_central
from atoll.metrics.newcomers import evaluate_newcomers
from atoll.runtime.exchange import Notes
from atoll.runtime.population import Population


def evaluate_round(
    engine: Engine,
    population: Population,
    algorithm: Algorithm,
    server: Tree,
    *,
    round: int,
    last: bool,
    calls: int,
    everybody: bool,
    seed: int,
) -> tuple[dict[str, Any], NDArray[np.float64] | None]:
    """Score personal models; after the last round also the shared one, and every single test sample.

    Without `everybody`, only the shared model is scored, on the server's own test set. Returns the
    figures, and the scores of single samples.
    """
    found: dict[str, Any] = {}
    outcomes = None
    shared, task = algorithm.shared(server), population.task
    if everybody:
        both = last and shared is not None and algorithm.defines("personalize")
        for kind in ("personal", "shared") if both else ("personal",):
            each = last and kind == "personal"
            notes: Notes = []
            scores = evaluate(
                engine, population, algorithm, server, round=round, model=kind, calls=calls, each=each, notes=notes
            )
            found[kind] = {split: one.as_json() for split, one in scores.items()}
            if each:
                outcomes = scores["test"].each
                found["deployed"] = scores["test"].deployed
                found |= {"observed": seen} if (seen := collect_observations(notes)) else {}
        mixing = algorithm.mixing(server) if last else None
        if mixing is not None:
            found["mixing"] = mixing.tolist()
        clusters = algorithm.found_clusters(server) if last else None
        if clusters is not None:
            found["clusters"] = clusters.as_json()
        if last and task.unseen is not None:
            found["newcomers"] = evaluate_newcomers(engine, algorithm, server, task.unseen, seed=seed, round=round)
    if task.central is not None and shared is not None:
        bench = engine.bench(population, round)
        found["central"] = evaluate_central(bench, task.central, shared, exact=algorithm.solved)
        if last:
            found.setdefault("deployed", predictor_of(shared).bytes)
    return found, outcomes
