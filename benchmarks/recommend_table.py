"""Measure recommenders and write docs/results/recommend.json, a cell at a time.

    python benchmarks/recommend_table.py --choose                   # values of methods, by validation items, seed 0
    python benchmarks/recommend_table.py --minutes 20               # cells that are there are kept
    python benchmarks/recommend_table.py --published                # 100 rounds with the leak, as papers have it
    python benchmarks/recommend_table.py --speed                    # seconds of a round and of a ranking
    python benchmarks/recommend_table.py --page                     # print the tables from the file

Figures are of the last round on the test item of every user: nothing is selected on it. Values and the number of rounds
are those with the best NDCG@10 on validation items, of the candidates in `CANDIDATES`.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import hypergeom

from atoll import Task, federate
from atoll.data import datasets, partition
from atoll.metrics.evaluation import evaluate
from atoll.metrics.recommenders import REFERENCES, list_interactions, score_reference
from atoll.runtime.engines import LocalEngine

FILE = Path(__file__).parents[1] / "docs" / "results" / "recommend.json"
METRICS = ("hr@10", "ndcg@10", "hr@10-of-99", "ndcg@10-of-99")
MODELS = {"fedncf": "neural-items"}
TITLES = ("HR@10 full", "NDCG@10 full", "HR@10 99", "NDCG@10 99")
COMMIT = ["git", "rev-parse", "--short", "HEAD"]
TERCILES = (1 / 3, 2 / 3)
DATA = ("movietweetings-5core", "movielens-100k")
LEAK = "-leak"
ROUNDS = {"movietweetings-5core": (5, 10, 20), "movielens-100k": (10, 20, 40)}  # after which candidates are compared
CANDIDATES = {
    "local-items": ["local-items"],
    "fedmf": ["fedmf:rate=3", "fedmf:rate=3,l2=0.03"],
    "fcf": ["fcf", "fcf:lam=10,alpha=3"],
    "fedncf": ["fedncf", "fedncf:rate=3"],
    "pfedrec": ["pfedrec:rate=3", "pfedrec:rate=3,l2=0.03"],
    "gpfedrec": ["gpfedrec:rate=3,l2=0.03", "gpfedrec:rate=3,l2=0.03,reg=0.1", "gpfedrec:rate=3,reg=0.1"],
    "fedrap": ["fedrap:rate=3,l2=0.03", "fedrap:rate=3,l2=0.03,own_rate=0.1", "fedrap:rate=3,own_rate=0.1"],
    "fedora-items": [
        "fedora-items:rate=3,l2=0.03",
        "fedora-items:rate=3,l2=0.03,alpha=0.5",
        "fedora-items:rate=3,alpha=0.5",
    ],
}
WITHOUT_NEGATIVES = ("fcf",)  # a leak in these makes no difference
PUBLISHED = {  # as papers run them: on movielens-100k with the leak, all users, 100 rounds
    "pfedrec": ("pfedrec:rate=3", "71.1 / 43.9, a digest of the paper"),
    "gpfedrec": ("gpfedrec:rate=3,reg=0.1", "72.9 / 43.8, from memory"),
    "fedrap": ("fedrap:rate=3", "98.9 / 89.2, a log of the authors, best round on test"),
}
PUBLISHED_ROUNDS = 100


def find_groups(task: Task) -> np.ndarray:
    """Return each user's third by training interactions: 0 few, 1 some, 2 many."""
    sizes = task.splits["train"].sizes(np.arange(task.clients))
    return np.digitize(sizes, np.quantile(sizes, TERCILES), right=True)


def describe(scores: dict[str, np.ndarray], task: Task) -> dict[str, object]:
    """Return means over users, the first figure by group, and what it gains over popularity, user by user."""
    groups, first = find_groups(task), scores[METRICS[0]]
    some = [np.ones(len(groups), dtype=bool), *(groups == number for number in range(3))]
    gain = first - score_reference(task, REFERENCES["popularity"](list_interactions(task)), METRICS[0])
    return {
        **{name: 100 * float(value.mean()) for name, value in scores.items()},
        "thirds": [100 * float(first[chosen].mean()) for chosen in some[1:]],
        "gain": [[100 * float(gain[one].mean()), 100 * float(gain[one].std() / one.sum() ** 0.5)] for one in some],
    }


def build(name: str, data: str, seed: int) -> Task:
    """Build the task for a method."""
    model = MODELS.get(name.partition(":")[0])
    return Task.build(datasets.load(data), partition.parse("natural"), seed=seed, model=model)


def choose(family: str, data: str) -> dict[str, object]:
    """Return the candidate and the number of rounds with the best NDCG@10 on validation items."""
    found = []
    for name in CANDIDATES[family]:
        rounds = ROUNDS[data]
        report = federate(
            build(name, data, 0), name, rounds=rounds[-1], seed=0, engine=LocalEngine(strategy="chunk:256 eager"),
            eval_every=rounds[0], progress=False, metric="ndcg@10",
        )  # fmt: skip
        for line in report.history:
            if line["round"] in rounds:
                scores = line["evaluation"]["personal"]["val"]["clients"]
                found.append((100 * float(np.mean(scores)), name, line["round"]))
                print(family, data, *found[-1], flush=True)
    score, name, rounds = max(found)
    return {"method": name, "rounds": rounds, "validation": score, "tried": found}


def score_ranks(reciprocal: np.ndarray, task: Task) -> dict[str, np.ndarray] | None:
    """Return all figures from reciprocal ranks; None where items are tied, so a user has no single rank."""
    rank = np.round(1 / reciprocal)
    if np.abs(1 / reciprocal - rank).max() > 0.01:
        return None
    known = list_interactions(task) + list_interactions(task, "val") > 0
    others = task.classes - known.sum(axis=1) - 1
    found, place = np.arange(10), np.log2(2 + np.arange(10))
    share = hypergeom.pmf(found, others[:, None], rank[:, None] - 1, 99)  # of so many better ones among 99
    first = rank <= 10
    return dict(
        zip(METRICS, (first, first / np.log2(1 + rank), share.sum(axis=1), (share / place).sum(axis=1)), strict=True)
    )


def measure_method(name: str, data: str, seed: int, rounds: int) -> dict[str, object]:
    """Run a method and score every user by all figures."""
    task, engine = build(name, data, seed), LocalEngine(strategy="chunk:256 eager")
    began = time.process_time()
    report = federate(
        task, name, rounds=rounds, seed=seed, engine=engine, eval_every=rounds, progress=False, metric="mrr"
    )
    seconds = {
        "run": time.process_time() - began,
        "round": float(np.median([line["seconds"]["round"] for line in report.history])),
        "evaluation": report.history[-1]["seconds"]["evaluation"],
    }
    scores = score_ranks(report.scores(), task)
    for metric in METRICS if scores is None else ():
        found = evaluate(
            engine, report.population, report.algorithm, report.server, round=rounds, splits=("test",), metric=metric
        )
        scores = {**(scores or {}), metric: found["test"].score}
    memory = max(line["memory"] for line in report.history)
    sent = report.ledger.bytes("up") / rounds / task.clients
    return {
        "method": name, "rounds": rounds, **describe(scores, task), "seconds": seconds, "memory": memory, "sent": sent
    }  # fmt: skip


def measure_speed(name: str, data: str, turns: int = 3) -> dict[str, object]:
    """Return what a round of all users takes, and a ranking of all items for all users, after a first one of each."""
    task, engine = build(name, data, 0), LocalEngine()
    report = federate(task, name, rounds=1 + turns, seed=0, engine=engine, evaluation="none", progress=False)
    rankings = []
    for _ in range(1 + turns):
        began = time.perf_counter()
        evaluate(
            engine, report.population, report.algorithm, report.server, round=1 + turns, splits=("test",),
            metric="hr@10", calls=100,
        )  # fmt: skip
        rankings.append(time.perf_counter() - began)
    return {
        "round": float(np.median([line["seconds"]["round"] for line in report.history][1:])),
        "ranking": float(np.median(rankings[1:])),
        "memory": max(line["memory"] for line in report.history),
    }


def print_speed(methods: list[str], data: str) -> None:
    """Print a line for each method."""
    print(f"{data}, {torch.get_num_threads()} threads")
    for name in methods:
        one = run_apart(partial(measure_speed, name, data))
        seconds, memory = (f"{one[what]:.2f} s a {what}" for what in ("round", "ranking")), one["memory"] / 2**30
        print(f"{name}: {', '.join(seconds)}, {memory:.1f} GiB", flush=True)


def measure_reference(name: str, data: str) -> dict[str, object]:
    """Score every user by a reference."""
    task = Task.build(datasets.load(data), partition.parse("natural"))
    found = REFERENCES[name](list_interactions(task))
    return describe({metric: score_reference(task, found, metric) for metric in METRICS}, task)


def main() -> None:
    """Measure the cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[*REFERENCES, *CANDIDATES])
    parser.add_argument("--data", nargs="*", default=[f"{name}{leak}" for leak in ("", LEAK) for name in DATA])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    cells = json.loads(FILE.read_text()) if FILE.exists() else {}
    if asked.page:
        print_page(cells)
        return
    if asked.speed:
        print_speed([name for name in asked.methods if name in CANDIDATES], asked.data[0])
        return
    began = time.monotonic()
    for key, measure in list_work(asked, cells):
        if key in cells:
            continue
        if time.monotonic() - began > 60 * asked.minutes:
            print("Out of time; run the same command again to go on.")
            return
        commit = subprocess.run(COMMIT, check=True, capture_output=True, text=True)
        cells[key] = {**run_apart(measure), "commit": commit.stdout.strip()}
        FILE.write_text(json.dumps(cells, indent=1) + "\n")
        print(
            key, {k: v for k, v in cells[key].items() if k in (*METRICS, "thirds", "seconds", "validation")}, flush=True
        )


def run_apart(measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Measure a cell in a process of its own, so its memory is its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure)


def list_work(
    asked: argparse.Namespace, cells: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    """Yield what is to be measured: its key in the file, and how."""
    families = [name for name in asked.methods if name in CANDIDATES]
    if asked.choose:
        for family, data in itertools.product(families, [name for name in asked.data if not name.endswith(LEAK)]):
            yield f"chosen {family} {data}", partial(choose, family, data)
        return
    if asked.published:
        for seed, (family, (name, _)) in itertools.product(asked.seeds, PUBLISHED.items()):
            data = f"movielens-100k{LEAK}"
            yield f"published {family} {data} {seed}", partial(measure_method, name, data, seed, PUBLISHED_ROUNDS)
        return
    for name, data in itertools.product(asked.methods, asked.data):
        if name in REFERENCES and not data.endswith(LEAK):
            yield f"{name} {data}", partial(measure_reference, name, data)
    for seed, data, family in itertools.product(asked.seeds, asked.data, families):
        if family in WITHOUT_NEGATIVES and data.endswith(LEAK):
            continue
        name, rounds = find_chosen(cells, family, data.removesuffix(LEAK))
        yield f"{family} {data} {seed}", partial(measure_method, name, data, seed, rounds)


def find_chosen(cells: dict[str, Any], family: str, data: str) -> tuple[str, int]:
    """Return a method with its values and rounds: as chosen, on other data, or for FedMF if nothing was chosen."""
    own = cells.get(f"chosen {family} {data}")
    if own:
        return own["method"], own["rounds"]
    fedmf = cells[f"chosen fedmf {data}"]
    elsewhere = next((cells[key]["method"] for key in cells if key.startswith(f"chosen {family} ")), None)
    return elsewhere or family + fedmf["method"].removeprefix("fedmf"), fedmf["rounds"]


def print_page(cells: dict[str, Any]) -> None:
    """Print the values that were chosen, and a table for each data set, with the leak and without."""
    print("| method | data | chosen on validation | rounds | NDCG@10 there |\n|---|---|---|---|---|")
    for key, one in cells.items():
        if key.startswith("chosen "):
            _, family, data = key.split()
            values = one["method"].partition(":")[2] or "defaults"
            print(f"| {family} | {data} | {values} | {one['rounds']} | {one['validation']:.1f} |")
    for data in [f"{name}{leak}" for name in DATA for leak in ("", LEAK)]:
        names = dict.fromkeys(key.split()[0] for key in cells if data in key.split()[1:2])
        print(f"\n`{data}`:\n")
        titles = ["method", "seeds", *TITLES, "by activity", "gain", "CPU s a round", "GiB"]
        print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
        for name in names:
            print_row(name, [cell for key, cell in cells.items() if key.split()[:2] == [name, data]])
    titles = ["method", "values", "seeds", "HR@10 of 99, ours", "NDCG@10 of 99, ours", "published", "HR@10 full, ours"]
    print(f"\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for family, (name, theirs) in PUBLISHED.items():
        some = [cell for key, cell in cells.items() if key.startswith(f"published {family} ")]
        found = {metric: mean_and_spread([cell[metric] for cell in some]) for metric in METRICS}
        ours = " | ".join(found[metric] for metric in ("hr@10-of-99", "ndcg@10-of-99"))
        print(f"| {family} | {name.partition(':')[2]} | {len(some)} | {ours} | {theirs} | {found['hr@10']} |")


def mean_and_spread(values: list[float]) -> str:
    """Return `14.8 ± 0.3`, the mean over seeds and how far they lie apart."""
    return f"{np.mean(values):.1f} ± {f'{np.std(values, ddof=1):.1f}' if len(values) > 1 else '–'}"


def print_row(name: str, some: list[dict[str, Any]]) -> None:
    """Print means over seeds, how far they lie apart, and what is gained over popularity."""
    shown = " | ".join(mean_and_spread([cell[metric] for cell in some]) for metric in METRICS)
    thirds = np.mean([cell["thirds"] for cell in some], axis=0)
    gain = np.mean([cell["gain"] for cell in some], axis=0)
    marks = [f"{mean:+.1f}{' ▼' if mean < -2 * error else ''}" for mean, error in gain[1:]]
    took = f"{np.median([one['seconds']['run'] / one['rounds'] for one in some]):.1f}" if "seconds" in some[0] else "–"
    memory = f"{max(cell['memory'] for cell in some) / 2**30:.1f}" if "memory" in some[0] else "–"
    print(
        f"| {name} | {len(some)} | {shown} | {', '.join(f'{one:.1f}' for one in thirds)} | "
        f"{gain[0][0]:+.1f} ± {gain[0][1]:.1f} ({', '.join(marks)}) | {took} | {memory} |"
    )


if __name__ == "__main__":
    main()
