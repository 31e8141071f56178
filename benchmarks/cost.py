"""What each method costs: its time per round against FedAvg's in the same engine, beside what it must compute.

python benchmarks/cost.py                       # all that is missing on this machine, then docs/results/cost.md
python benchmarks/cost.py --device cuda
python benchmarks/cost.py --only 'ditto|ifca'   # again, these

The task is made up: 20 clients with 100 images of 28x28 in 10 classes, PFLlib's CNN, batch 10. Every method is measured
by turns with FedAvg, in rounds after the first (which chooses how to run), and the ratio is that of the medians. The
arithmetic ratio counts gradients of batches (taken by the engine's own tally, which counts a pass without gradient as
nothing) and adds what is known of passes without gradient, each a third of a gradient.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from published import RESULTS, table

ROUNDS = 4
TURNS = 2
METHODS = [
    "local", "fedavg", "fedprox", "fedavg-ft", "fedper", "fedrep:head_epochs=1,final_epochs=0", "lg-fedavg",
    "fedbn", "fedbabu", "ditto", "apfl", "interp", "mtfl", "mtl-reg", "mocha", "fedamp", "fedamp:variant=heur",
    "perfedavg", "perfedavg:order=hf", "perfedavg:order=full", "reptile", "maml", "pfedme:inner_steps=5",
    "pfedme:form=survey",
    "scaffold", "feddyn", "ifca", "cfl", "flhc", "fedgen",
    "fedsam", "mofedsam", "fedfsa", "fedspeed", "fedsmoo",
    "fedala", "fedphp", "fedfomo", "fedpac", "fedproto", "fedrod", "knn-per", "fedcr", "fedora", "pfedhn",
]  # fmt: skip
# Passes without gradient over a client's training data per round: what the tally does not see. Validation data are a
# quarter as many here.
PASSES = {
    "ifca": 4,  # the loss of four models
    "fedfomo": 6 / 4,  # the loss of six models on validation data
    "fedora": 2 / 4,  # that of two
    "fedphp": 1,  # the teacher's answers
    "fedproto": 1,  # class means
    "fedpac": 2,  # class means, before and after
    "perfedavg:order=full": 6,  # a gradient through a gradient costs two more
    "maml": 6,
}


def task() -> Any:
    """Made-up images, the same for all."""
    import numpy as np

    from atoll.data.task import Task, Training
    from atoll.models import build
    from atoll.randomness import default_generator, generator, number

    draw = generator(0, "cost")
    data = {
        f"{client}": (
            draw.standard_normal((100, 1, 28, 28)).astype(np.float32),
            draw.integers(0, 10, 100),
        )
        for client in range(20)
    }
    with default_generator(number(0, "cost")):
        model = build("cnn", (1, 28, 28), 10)
    return Task.of_clients(data, model, classes=10, training=Training(lr=0.005), shares=(0.8, 0.2, 0.0))


def seconds(report: Any) -> tuple[list[float], float]:
    """Of each round but the first, and the gradients of one."""
    rounds = [line["seconds"]["round"] for line in report.history[1:]]
    return rounds, statistics.mean(line["gradients"] for line in report.history[1:-1])


def measure(method: str, device: str, precision: str) -> dict[str, Any]:
    """Time and gradients per round of a method and of FedAvg beside it."""
    from atoll import LocalEngine, federate
    from atoll.algorithms import create

    engine, here = LocalEngine(device=device, precision=precision, compile=False), task()
    times: dict[str, list[float]] = {method: [], "fedavg": []}
    gradients: dict[str, float] = {}
    for _ in range(TURNS):
        for name in times:
            report = federate(here, create(name), rounds=ROUNDS, engine=engine, evaluation="none")
            found, gradients[name] = seconds(report)
            times[name] += found
    return {
        "seconds": statistics.median(times[method]),
        "ratio": statistics.median(times[method]) / statistics.median(times["fedavg"]),
        "gradients": gradients[method] / gradients["fedavg"],
    }


def page(found: dict[str, Any]) -> str:
    """The page docs/results/cost.md."""
    sections = []
    for machine, methods in found.items():
        rows = []
        for method, one in methods["methods"].items():
            passes = PASSES.get(method, PASSES.get(method.partition(":")[0], 0))
            arithmetic = one["gradients"] + passes / 3
            over = one["ratio"] / arithmetic if arithmetic else float("nan")
            rows.append([
                f"`{method}`", f"{one['gradients']:.2f}", f"{arithmetic:.2f}", f"{one['ratio']:.2f}",
                f"{over:.2f}{' (!)' if over > 1.25 else ''}",
            ])  # fmt: skip
        heads = ["method", "gradients", "arithmetic", "measured", "measured / arithmetic"]
        sections.append(
            f"## {machine}\n\ncommit {methods['commit'][:7]}, torch {methods['torch']}; FedAvg "
            f"{methods['fedavg']:.3f} s per round\n\n{table(heads, rows)}\n"
        )
    return f"{INTRODUCTION}\n" + "\n".join(sections) + COMMENT


INTRODUCTION = """\
# What each method costs

Written by `python benchmarks/cost.py` from [cost.json](cost.json). Time per round relative to FedAvg in the same engine
and the same process, measured by turns, beside the gradients a client must take per round relative to FedAvg's.
*Arithmetic* adds passes without gradient, each a third of a gradient. 20 clients with 80 training images of 28x28 each,
PFLlib's CNN, batch 10, no compiler. (!) marks methods above 1.25 times their arithmetic.
"""
COMMENT = """
A step here is one of 10 images on a network of 582,026 weights, so that whatever is done with all weights in every step
costs a fifth of a gradient or more: terms that pull to another model are differentiated with the loss (`fedprox`,
`feddyn`, `fedsmoo`, `fedamp`, `mocha`). That is why `feddyn`, `fedsmoo`, `fedamp` and `mocha` are above 1.25 here, the
last two also because their servers work with all models; a pull that is added to the gradient in closed form would be
cheaper, and is to be done. `fedgen` takes 50 steps on its generator per round, on the server, which are not in the
clients' gradients, and answers generated features in every step of a client. `fedala`'s gradients are mostly those of
its first visit, on two tensors, and cost less than a gradient of the whole network; `fedrod` takes two gradients in one
pass. Not measured yet: `fedcr`, `fedora`, `pfedhn`, and everything on a GPU.
"""


def main() -> None:
    """Measure what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--only", default=None, help="measure again what matches")
    parser.add_argument("--page", action="store_true", help="write the page and stop")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    path = asked.out / "cost.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not asked.page:
        import os

        from atoll.errors import AtollError
        from atoll.runs import machine, versions

        where = machine()["gpu"] if asked.device.startswith("cuda") else f"{machine()['cores']} CPU cores"
        here = found.setdefault(where, {"methods": {}})
        here["commit"], here["torch"] = os.environ.get("ATOLL_COMMIT") or versions()["commit"], versions()["torch"]
        for method in METHODS:
            if (asked.only is None and method in here["methods"]) or not re.search(asked.only or "", method):
                continue
            try:
                here["methods"][method] = measure(method, asked.device, asked.precision)
            except AtollError as error:
                print(f"{method}: {error}", flush=True)
                continue
            print(method, here["methods"][method], flush=True)
            here["fedavg"] = here["methods"].get("fedavg", here["methods"][method])["seconds"]
            path.write_text(json.dumps(found, indent=1) + "\n")
    (asked.out / "cost.md").write_text(page(found))


if __name__ == "__main__":
    main()
