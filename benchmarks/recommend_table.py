"""Measure recommenders on MovieTweetings and write docs/results/recommend.json, a cell at a time.

    python benchmarks/recommend_table.py --methods fedmf --seeds 0 1 2        # cells that are there are kept
    python benchmarks/recommend_table.py --page                               # print the table from the file

Figures are of the last round on the test item of every user: nothing is selected on it.
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from atoll import Task, federate
from atoll.data import datasets, partition
from atoll.metrics.evaluation import evaluate
from atoll.metrics.recommenders import REFERENCES, list_interactions, score_reference
from atoll.runtime.engines import LocalEngine

FILE = Path(__file__).parents[1] / "docs" / "results" / "recommend.json"
METRICS = ("hr@10", "ndcg@10", "hr@10-of-99", "ndcg@10-of-99")
MODELS = {"fedncf": "neural-items"}
COMMIT = ["git", "rev-parse", "--short", "HEAD"]
TERCILES = (1 / 3, 2 / 3)


def find_groups(task: Task) -> np.ndarray:
    """Return each user's third by training interactions: 0 few, 1 some, 2 many."""
    sizes = task.splits["train"].sizes(np.arange(task.clients))
    return np.digitize(sizes, np.quantile(sizes, TERCILES), right=True)


def describe(scores: dict[str, np.ndarray], task: Task) -> dict[str, object]:
    """Return means over users, and the first figure by group."""
    groups, first = find_groups(task), scores[METRICS[0]]
    thirds = [100 * float(first[groups == number].mean()) for number in range(3)]
    return {**{name: 100 * float(value.mean()) for name, value in scores.items()}, "thirds": thirds}


def measure_method(name: str, data: str, seed: int, rounds: int) -> dict[str, object]:
    """Run a method and score every user by all figures."""
    model = MODELS.get(name.partition(":")[0])
    task = Task.build(datasets.load(data), partition.parse("natural"), seed=seed, model=model)
    engine = LocalEngine(strategy="chunk:256 eager")
    began = time.perf_counter()
    report = federate(task, name, rounds=rounds, seed=seed, engine=engine, eval_every=rounds, progress=False)
    seconds = {
        "run": time.perf_counter() - began,
        "round": float(np.median([line["seconds"]["round"] for line in report.history])),
        "evaluation": report.history[-1]["seconds"]["evaluation"],
    }
    scores = {}
    for metric in METRICS:
        found = evaluate(
            engine, report.population, report.algorithm, report.server, round=rounds, splits=("test",), metric=metric
        )
        scores[metric] = found["test"].score
    memory = max(line["memory"] for line in report.history)
    return {"rounds": rounds, **describe(scores, task), "seconds": seconds, "memory": memory}


def measure_reference(name: str, data: str) -> dict[str, object]:
    """Score every user by a reference."""
    task = Task.build(datasets.load(data), partition.parse("natural"))
    found = REFERENCES[name](list_interactions(task))
    return describe({metric: score_reference(task, found, metric) for metric in METRICS}, task)


def main() -> None:
    """Measure the cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--data", nargs="*", default=["movietweetings-5core", "movietweetings-5core-leak"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    cells = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in asked.methods:
        for data in asked.data:
            for seed in [None] if name in REFERENCES else asked.seeds:
                key = f"{name} {data} {'' if seed is None else seed}".strip()
                if key in cells:
                    continue
                cell = measure_reference(name, data) if seed is None else measure_method(name, data, seed, asked.rounds)
                commit = subprocess.run(COMMIT, check=True, capture_output=True, text=True)
                cells[key] = {**cell, "commit": commit.stdout.strip()}
                FILE.write_text(json.dumps(cells, indent=1) + "\n")
                print(key, {k: v for k, v in cells[key].items() if k in (*METRICS, "thirds", "seconds")}, flush=True)
    if asked.page:
        print_page(cells)


def print_page(cells: dict[str, dict[str, object]]) -> None:
    """Print two tables: means over seeds, and how far they lie apart; then what has no seed."""
    names = dict.fromkeys(key.rpartition(" ")[0] if key[-1].isdigit() else key for key in cells)
    _print_table(cells, [name for name in names if name not in cells])
    _print_table(cells, [name for name in names if name in cells])


def _print_table(cells: dict[str, dict[str, object]], names: list[str]) -> None:
    print("\n| method, data | seeds | HR@10 full | NDCG@10 full | HR@10 99 | NDCG@10 99 | HR@10 by activity |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        some = [cell for key, cell in cells.items() if key == name or key.rpartition(" ")[0] == name]
        row = [np.array([cell[metric] for cell in some], dtype=float) for metric in METRICS]
        apart = [f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "" for values in row]
        thirds = np.mean([cell["thirds"] for cell in some], axis=0)
        shown = " | ".join(f"{values.mean():.1f}{more}" for values, more in zip(row, apart, strict=True))
        print(f"| {name} | {len(some)} | {shown} | {', '.join(f'{one:.1f}' for one in thirds)} |")


if __name__ == "__main__":
    main()
