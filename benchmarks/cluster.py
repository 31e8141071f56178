"""A Ray cluster on this machine: what a round costs more than on the local engine, and what a death costs.

    python benchmarks/cluster.py                 overhead per round with 100 clients, against the local engine
    python benchmarks/cluster.py --deaths        two nodes; a worker is killed, then a node; float64 bits are compared

All plans are spelled out, so nothing is measured inside the runs. Rounds are timed from the third on, when workers hold
their clients and programs are made. Times of a shared machine swing: the smallest and the median are printed.
"""

import argparse
import os
import signal
import statistics
import threading
import time
from typing import Any

import torch

from atoll import LocalEngine, RayEngine, Recipe, Report, federate

CLIENTS, ROUNDS, STORE = 100, 23, 200 * 2**20
AFTER = 0.2  # seconds after a round begins
METHODS = {"fedavg": "sums come back", "ditto": "sums, and a model per client", "fedora": "one model down and up each"}


def time_rounds(task: Any, method: str, engine: Any) -> list[float]:
    report = federate(task, method, rounds=ROUNDS, engine=engine, evaluation="none", progress=False)
    return [line["seconds"]["round"] * 1e3 for line in report.history[2:]]


def measure_overhead() -> None:
    task = Recipe("digits", "iid", clients=CLIENTS, model="mlp:64").build()
    plan = {"strategy": "whole traced", "device": "cpu"}
    rows: dict[str, dict[str, list[float]]] = {}
    for method in METHODS:
        rows[method] = {"local": time_rounds(task, method, LocalEngine(**plan))}
    for workers in (1, 2):
        began = time.perf_counter()
        with RayEngine(workers=workers, object_store_memory=STORE, **plan) as engine:
            print(f"Ray and {workers} worker(s) were there after {time.perf_counter() - began:.1f} s")
            for method in METHODS:
                rows[method][f"{workers} worker(s)"] = time_rounds(task, method, engine)
    size = f"{task.clients} clients, {task.network.parameters:,} parameters"
    print(f"\nms per round, smallest and median of {ROUNDS - 2}; {size}")
    for method, found in rows.items():
        cells = [f"{name} {min(times):.0f} / {statistics.median(times):.0f}" for name, times in found.items()]
        print(f"{method:8} {METHODS[method]:28} " + "   ".join(cells))


def show_deaths() -> None:
    from ray.cluster_utils import Cluster

    plan = {"strategy": "whole eager", "device": "cpu", "dtype": torch.float64}
    task, settings = Recipe("digits", clients=20).build(), {"rounds": 8, "eval_every": 1, "progress": False}
    method = "ditto:epochs=10,personal_epochs=10"
    alone = federate(task, method, engine=LocalEngine(**plan), **settings)
    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    second = nodes.add_node(num_cpus=1, object_store_memory=STORE)
    nodes.wait_for_nodes()

    def kill(line: Any) -> None:
        if line["round"] == 2:  # in the middle of the next round
            first = engine.crew.processes()[engine.crew.workers[0]]
            threading.Timer(AFTER, os.kill, (first, signal.SIGKILL)).start()
        if line["round"] == 5:
            threading.Timer(AFTER, nodes.remove_node, (second, False)).start()

    with RayEngine(nodes.address, workers=2, **plan) as engine:
        there = federate(task, method, engine=engine, on_round=kill, **settings)
        left = len(engine.crew.workers)
    nodes.shutdown()
    for line in there.history:
        took, scored = line["seconds"]["round"], line["seconds"]["evaluation"]
        who = f"{line['replied']} replied, lost {line['lost']}"
        print(f"round {line['round']}: {took:.2f} s, evaluation {scored:.2f} s, {who}")
    print(f"workers left: {left}; the same bits as without a cluster: {same_bits(alone, there)}")


def same_bits(one: Report, other: Report) -> bool:
    servers = all(torch.equal(leaf, other.server[name]) for name, leaf in one.server.items())
    return servers and bool((one.scores() == other.scores()).all())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", action="store_true")
    (show_deaths if parser.parse_args().deaths else measure_overhead)()
