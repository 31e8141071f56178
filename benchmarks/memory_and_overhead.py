"""Two properties of a round: what it costs beside the client steps, and how memory grows with the cohort.

    python benchmarks/memory_and_overhead.py --device cuda

Overhead: whole rounds of FedAvg on 100 clients through `federate` (choosing, sending, aggregating, logging; no
evaluation) against the same client steps alone. Memory: the peak with a cohort of 1000 clients over that with 100.
"""

import argparse
import gc
import resource
import statistics
import subprocess
import sys
from dataclasses import replace

import torch

from atoll import LocalEngine, Report, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.testing.bench import Workload, make_task


def overhead(device: str, model: str, precision: str) -> None:
    shape = (3, 32, 32) if model == "cnn" else (1, 28, 28)
    workload = Workload(model, shape, 100, 10, target=0, steps=50)
    task = make_task(workload)
    engine = LocalEngine(
        device=device, precision=precision, compile=True
    )  # overhead weighs most where steps are fastest
    settings = {"engine": engine, "evaluation": "none", "rounds": 12}
    # The same with five times the steps: the slope is the cost of a step, the rest is overhead.
    longer = make_task(replace(workload, steps=workload.steps * 5))
    whole, long = (_seconds(federate(one, FedAvg(), **settings)) for one in (task, longer))
    steps = (long - whole) / 4  # of one short round
    print(
        f"{model}: a round of {workload.steps} steps x 100 clients takes {1e3 * whole:.1f} ms, its client steps "
        f"{1e3 * steps:.1f} ms: everything else is {100 * (1 - steps / whole):.1f} %"
    )


def _seconds(report: Report) -> float:
    """The median round; the first ones calibrate and compile."""
    return statistics.median(line["seconds"]["round"] for line in report.history[2:])


def peak(device: str, clients: int) -> float:
    """Peak megabytes of two rounds with this many clients."""
    workload = Workload("cnn" if device == "cuda" else "mlp", (3, 32, 32), clients, 10, target=0, steps=2)
    task = make_task(workload)
    engine = LocalEngine(device=device, compile=False)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    federate(task, FedAvg(), rounds=2, engine=engine, evaluation="none")
    gc.collect()
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--peak", type=int, help="print the peak of one cohort size, in a process of its own")
    options = parser.parse_args()
    if options.peak:
        print(peak(options.device, options.peak))
        return
    sizes = {}
    for clients in (100, 1000):  # each in a process of its own, so that nothing is left over
        command = [sys.executable, __file__, "--device", options.device, "--peak", str(clients)]
        sizes[clients] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    ratio = sizes[1000] / sizes[100]
    print(f"peak memory: {sizes[100]:.0f} MB with 100 clients, {sizes[1000]:.0f} MB with 1000: {ratio:.2f} times")
    for model in ("mlp", "cnn") if options.device == "cuda" else ("mlp",):
        overhead(options.device, model, options.precision)


if __name__ == "__main__":
    main()
