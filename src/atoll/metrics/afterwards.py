"""Evaluation after a round: personal models; after the last one also the shared model, newcomers and clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine
from atoll.kernel.params import Tree
from atoll.kernel.predictor import predictor_of
from atoll.metrics.evaluation import (
    INDUCTIVE,
    Arrays,
    Clients,
    collect_observations,
    evaluate,
    evaluate_central,
    splits_scored,
)
from atoll.metrics.measures import OWN
from atoll.metrics.newcomers import evaluate_newcomers
from atoll.runtime.population import MANY_CLIENTS, Notes, Population


def evaluate_round(
    engine: Engine,
    population: Population,
    algorithm: Algorithm,
    server: Tree,
    *,
    round: int,
    last: bool,
    calls: int,
    scored: Clients | None,
    seed: int,
    metric: str = OWN,
    triggered: Task | None = None,
    out_of: int | None = None,
) -> tuple[dict[str, Any], Arrays | None]:
    """Score personal models of the clients `scored`; after the last round also the shared one, and every test sample.

    Where `scored` is None, only the shared model is scored, on the server's own test set. Returns the figures and,
    after the last round, arrays: the score of every test sample, and what the figures leave out of very many clients.
    `triggered` is the task whose test samples show a backdoor's trigger: after the last round it is scored, too.
    `out_of` is how many clients those scored stand for; see `evaluate`.
    """
    found: dict[str, Any] = {}
    outcomes: Arrays | None = None
    shared, task = algorithm.shared(server), population.task
    if scored is not None:
        listed = len(scored) <= MANY_CLIENTS
        if listed and len(scored) < task.clients:
            found["sample"] = scored.tolist()
        for kind in models_after(algorithm, server, last=last):
            each = last and kind == "personal"
            notes: Notes = []
            scores = evaluate(
                engine, population, algorithm, server, round=round, model=kind, calls=calls, clients=scored, each=each,
                notes=notes, metric=metric, out_of=out_of,
            )  # fmt: skip
            found[kind] = {split: one.as_json() for split, one in scores.items()}
            if each:
                each_sample = scores["test"].each  # None where clients are sites, which tell sums only
                if each_sample is not None:
                    some = {} if listed else {"client": scored}
                    outcomes = {"test": each_sample, **some, **scores["test"].as_arrays()}
                    outcomes |= scores["test"].list_answers()
                found["deployed"] = scores["test"].deployed
                found |= {"observed": seen} if (seen := collect_observations(notes, scored)) else {}
        if last:
            found |= _describe_structure(algorithm, server, task.clients, outcomes)
        if last and triggered is not None:
            shown = replace(population, task=engine.place(triggered))
            found["attack"] = evaluate(
                engine, shown, algorithm, server, round=round, clients=scored, splits=("test",)
            )["test"].macro  # fmt: skip
        if last and task.unseen is not None:
            found["newcomers"] = evaluate_newcomers(
                engine, algorithm, server, task.unseen, seed=seed, round=round, metric=metric
            )
    if task.central is not None and shared is not None:
        bench = engine.bench(population, round)
        how: dict[str, Any] = {"exact": algorithm.solved, "metric": metric}
        found["central"] = evaluate_central(bench, task.central, shared, **how)
        whole = last or not algorithm.one_shot  # points of a curve do without: one image at a time takes long
        if whole and INDUCTIVE in splits_scored(algorithm, task):
            alone = evaluate_central(bench, task.central, shared, **how, alone=True)
            found["central"] |= {INDUCTIVE: alone["score"]}
        if last:
            found.setdefault("deployed", predictor_of(shared).bytes)
    return found, outcomes


def models_after(algorithm: Algorithm, server: Tree, *, last: bool) -> tuple[str, ...]:
    """Return which models clients score after a round: their personal ones, and at the end also the shared one."""
    both = last and algorithm.shared(server) is not None and algorithm.defines("personalize")
    return ("personal", "shared") if both else ("personal",)


def _describe_structure(algorithm: Algorithm, server: Tree, clients: int, outcomes: Arrays | None) -> dict[str, Any]:
    """Return who learns from whom and the clusters; of very many clients only these, and among the arrays."""
    found: dict[str, Any] = {}
    clusters = algorithm.found_clusters(server)
    if clients > MANY_CLIENTS:
        if clusters is not None and outcomes is not None:
            outcomes["cluster"] = clusters.of_client
        return found
    mixing = algorithm.mixing(server)
    if mixing is not None:
        found["mixing"] = mixing.tolist()
    if clusters is not None:
        found["clusters"] = clusters.as_json()
    return found
