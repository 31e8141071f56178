"""What each method costs: its time per round against FedAvg's in the same engine, beside what it must compute.

python benchmarks/cost.py                        # all that is missing on this machine, then docs/results/cost.md
python benchmarks/cost.py --device cuda
python benchmarks/cost.py --only '^(ditto|ifca)'  # again, these
python benchmarks/cost.py --only . --turns 1      # again, all methods that take rounds, in half the time
python benchmarks/cost.py --device cuda --clients 100 --images 750 --engine 'whole traced graph' --only '^fed(gen|cr)'

The task is made up: 20 clients with 100 images of 28x28 in 10 classes, PFLlib's CNN, batch 10. Six rounds of it are so
short on a GPU that the engine makes no programs for them; the last line asks for those of a long run, on a larger task.
Every method is measured by turns with FedAvg, in rounds after the second (in the first two it is chosen how to run,
programs are made, and some methods do more than later), and the ratio is that of the medians. The arithmetic ratio
counts gradients of batches: those of clients by the engine's own tally, those of servers as the method says. What is
known of passes without gradient is added, each as a third of a gradient. What a method computes besides, such as Adam's
steps, is written down once more in plain torch (`PLAIN`), timed in the same process, and added.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from published import RESULTS, choose, origin, table

ROUNDS = 6
VARIANTS = {  # of methods that are not measured as they are, or not only so
    "apfl-survey": ("apfl-survey", "apfl-survey:adaptive=false"),
    "fedamp": ("fedamp", "fedamp:variant=heur"),
    "feddf": ("feddf:server_epochs=1",),
    "fedfsa": ("fedfsa:sensitivity=minmax",),
    "fedrep": ("fedrep:head_epochs=1,final_epochs=0",),
    "interp": ("interp", "interp:adapt=grid,begin=own"),
    "perfedavg": ("perfedavg", "perfedavg:order=hf", "perfedavg:order=full"),
    "pfedme": ("pfedme:inner_steps=5",),
    "pfedme-survey": ("pfedme-survey:follow=1,weighting=samples",),
}
PUBLIC = 256  # images that a server may see
# Gradients on the server per round.
SERVER = {
    "fedgen": 50,  # of a generator of features, under the heads of all clients
    "feddf:server_epochs=1": PUBLIC / 10,  # of the same network, on larger batches
}
# Passes without gradient over a client's training data per round: what the tally does not see. Validation data are a
# quarter as many here.
PASSES = {
    "ifca": 4,  # the loss of four models
    "fedfomo": 6 / 4,  # the loss of six models on validation data
    "fedora": 2 / 4,  # that of two
    "fedphp": 1,  # the teacher's answers
    "fedcr": 1,  # what its samples say of their classes
    "fedproto": 1,  # class means
    "fedpac": 2,  # class means, before and after
    "perfedavg:order=full": 6,  # a gradient through a gradient costs two more
    "maml": 6,
    "fml": 2,  # each model answers for the other one
    "ccvr": 1,  # class means and covariances
    "sub-fedavg": 1 / 4,  # the score on validation data
    "interp": 2 / 4,  # the losses of two models there
    "interp-bandit": 1 / 4,
}
ASKED = {"feddf:server_epochs=1", "fedmd", "kt-pfl"}  # all clients' models answer to public images


FEATURES, CLASSES = 512, 10  # of PFLlib's CNN
REPEATS = 7  # of work in plain torch, of which the median counts


@dataclass(frozen=True)
class Size:
    """How many clients there are, and how many images each has: 80 % of them to train on."""

    clients: int = 20
    images: int = 100

    @property
    def gradients(self) -> int:
        """Of FedAvg's clients per round, of 10 images each."""
        return self.clients * round(0.8 * self.images / 10)

    def server(self, method: str) -> float:
        """The server's gradients in those of FedAvg's clients."""
        return SERVER.get(method, 0) / self.gradients

    def passes(self, method: str) -> float:
        """Passes over a client's training data, or over as much."""
        return PASSES.get(method, 0) + (PUBLIC / (0.8 * self.images) if method in ASKED else 0)

    def __str__(self) -> str:
        return f"{self.clients} clients with {self.images} images each"


def methods() -> list[str]:
    """All that take rounds: a method that uploads once has no time per round."""
    from atoll.algorithms import list_methods

    names = sorted(name for name, method in list_methods().items() if not method.one_shot)
    return [variant for name in names for variant in VARIANTS.get(name, (name,))]


def task(size: Size) -> Any:
    """Made-up images, the same for all."""
    import numpy as np
    import torch

    from atoll.data.task import Task, Training
    from atoll.kernel.randomness import default_generator, generator, number
    from atoll.models import build

    draw = generator(0, "cost")
    data = {
        f"{client}": (
            draw.standard_normal((size.images, 1, 28, 28)).astype(np.float32),
            draw.integers(0, 10, size.images),
        )
        for client in range(size.clients)
    }
    with default_generator(number(0, "cost")):
        model = build("cnn", (1, 28, 28), 10)
    made = Task.of_clients(data, model, classes=10, training=Training(lr=0.005), shares=(0.8, 0.2, 0.0))
    images = draw.standard_normal((PUBLIC, 1, 28, 28)).astype(np.float32)
    return replace(made, public=(torch.from_numpy(images), torch.from_numpy(draw.integers(0, 10, PUBLIC))))


def seconds(report: Any) -> tuple[list[float], float]:
    """Of rounds after the second, and the gradients of one; the last one's may have those of a last step in them."""
    lines = report.history[2:-1]
    return [line["seconds"]["round"] for line in lines], statistics.mean(line["gradients"] for line in lines)


def weights_of(here: Any, device: str) -> list[Any]:
    """Values of the size of the model: one client's, or on a GPU those of all, which take their steps together."""
    import torch

    clients = (here.clients,) if device.startswith("cuda") else ()
    return [torch.rand(*clients, *leaf.shape, device=device) for leaf in here.network.initial.trained.values()]


def adam_steps(here: Any, device: str, calls: int) -> Callable[[], float]:
    """What Adam takes more than SGD, by torch's own fused steps."""
    import torch

    def steps(kind: Any) -> float:
        model = weights_of(here, device)
        for leaf in model:
            leaf.grad = torch.rand_like(leaf)
        return calls * clock(kind(model, lr=1e-3, fused=True).step, device)

    return lambda: steps(torch.optim.Adam) - steps(torch.optim.SGD)


def mask_steps(here: Any, device: str, calls: int) -> Callable[[], float]:
    """A masked model, and the gradient of its scores: what FedMask computes on all weights in every step."""
    import torch

    w, scores, g = (weights_of(here, device) for _ in range(3))
    spare = [torch.empty_like(leaf) for leaf in w]

    def step() -> None:
        for leaf, score, gradient, place in zip(w, scores, g, spare, strict=True):
            torch.mul(leaf, score.gt(0), out=place)
            torch.exp(score, out=place).add_(place.reciprocal()).add_(2)
            torch.div(gradient.mul_(leaf), place, out=place)

    return lambda: calls * clock(step, device)


def calibration(here: Any, device: str, calls: int) -> Callable[[], float] | None:  # noqa: ARG001
    """CCVR: products of features by class at every client; at the server Gaussians, draws of them, and a head.

    Not on a GPU, where the head's small steps in plain torch would take the time of Python.
    """
    import torch

    from atoll.algorithms.ccvr import CCVR
    from atoll.kernel.randomness import generator

    if device.startswith("cuda"):
        return None
    rule, draw = CCVR(), generator(0, "plain")
    each = -(-int(here.splits["train"].offsets[1]) // CLASSES)
    z = torch.rand(CLASSES, each, FEATURES, device=device)
    spread = torch.rand(CLASSES, FEATURES, FEATURES, dtype=torch.float64, device=device)
    covariance = spread @ spread.mT + torch.eye(FEATURES, dtype=torch.float64, device=device)

    def client() -> None:
        torch.bmm(z.mT, z)

    def server() -> None:
        root = torch.linalg.cholesky(covariance)
        normal = torch.from_numpy(draw.standard_normal((CLASSES, rule.draws, FEATURES))).to(device)
        x = (normal @ root.mT).flatten(0, 1).float()
        x = (x - x.mean(0)) / x.std(0)
        y = torch.arange(CLASSES, device=device).repeat_interleave(rule.draws)
        head = torch.nn.Linear(FEATURES, CLASSES, device=device)
        sgd = torch.optim.SGD(head.parameters(), lr=rule.server_lr, momentum=0.9)
        for _ in range(rule.server_epochs):
            for rows in torch.randperm(len(x), device=device).split(rule.server_batch):
                sgd.zero_grad()
                torch.nn.functional.cross_entropy(head(x[rows]), y[rows]).backward()
                sgd.step()

    return lambda: here.clients * clock(client, device) + clock(server, device)


def clock(work: Callable[[], object], device: str) -> float:
    """The median seconds of some calls."""
    import torch

    found = []
    for _ in range(2 + REPEATS):
        began = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


# What a method computes that is neither a gradient nor a pass, in plain torch: seconds per round.
PLAIN: dict[str, Callable[..., Callable[[], float] | None]] = {
    "mtfl-adam": adam_steps,
    "fedmask": mask_steps,
    "ccvr": calibration,
}


def measure(method: str, engine: Any, here: Any, turns: int, size: Size, device: str) -> dict[str, Any]:
    """Time and gradients per round of a method and of FedAvg beside it."""
    from atoll import federate
    from atoll.compose import create

    times: dict[str, list[float]] = {method: [], "fedavg": []}
    gradients: dict[str, float] = {}
    calls = size.gradients // (size.clients if device.startswith("cuda") else 1)
    plain, besides = PLAIN[method](here, device, calls) if method in PLAIN else None, list[float]()
    for _ in range(turns):
        if plain is not None:
            besides.append(plain())
        for name in times:
            report = federate(here, create(name), rounds=ROUNDS, engine=engine, evaluation="none")
            found, gradients[name] = seconds(report)
            times[name] += found
    fedavg = statistics.median(times["fedavg"])
    return {
        "seconds": statistics.median(times[method]),
        "ratio": statistics.median(times[method]) / fedavg,
        "gradients": gradients[method] / gradients["fedavg"],
        **({"besides": statistics.median(besides) / fedavg} if besides else {}),
    }


def page(found: dict[str, Any]) -> str:
    """The page docs/results/cost.md."""
    sections = []
    for machine, here in found.items():
        rows, size = [], Size(**here.get("size", {}))
        for method, one in sorted(here["methods"].items()):
            server, passes = size.server(method), size.passes(method)
            besides = one.get("besides", 0)
            arithmetic = one["gradients"] + server + passes / 3 + besides
            over = one["ratio"] / arithmetic if arithmetic else float("nan")
            rows.append([
                f"`{method}`", f"{one['gradients']:.2f}", f"{server:.2f}" if server else "",
                f"{besides:.2f}" if besides else "", f"{arithmetic:.2f}",
                f"{one['ratio']:.2f}", f"{over:.2f}{' (!)' if over > 1.25 else ''}",
            ])  # fmt: skip
        heads = ["method", "gradients", "server's", "besides", "arithmetic", "measured", "measured / arithmetic"]
        sections.append(
            f"## {machine}\n\n{_commits(here)}, torch {here['torch']}; FedAvg "
            f"{here['fedavg']:.3f} s per round\n\n{table(heads, rows)}\n"
        )
    return f"{INTRODUCTION}\n" + "\n".join(sections) + COMMENT


def _commits(here: dict[str, Any]) -> str:
    """`commit a; b, c at commit d`: the one of most methods, then those measured again at another."""
    apart: dict[str, list[str]] = {}
    for method, one in sorted(here["methods"].items()):
        if (commit := one.get("commit", here["commit"])) != here["commit"]:
            apart.setdefault(commit, []).append(f"`{method}`")
    again = [f"{', '.join(methods)} at commit {commit}" for commit, methods in apart.items()]
    return "; ".join([f"commit {here['commit']}", *again])


INTRODUCTION = """\
# What each method costs

Written by `python benchmarks/cost.py` from [cost.json](cost.json). Time per round relative to FedAvg in the same engine
and the same process, measured in turns, beside the gradients of batches that the clients compute per round, and those
that the server computes, relative to FedAvg's. *Besides* is what a method computes that is neither, written in plain
torch and timed in the same process: Adam's steps (torch's fused ones, less SGD's), FedMask's masks and slopes, CCVR's
products by class, draws and head. *Arithmetic* is the sum of these and of passes without gradient, each counted as a
third of a gradient. 20 clients with 80 training images of 28x28 each, PFLlib's CNN, batch 10, no compiler. (!) marks
methods above 1.25 times their arithmetic.
"""
COMMENT = """
On the CPU every method was measured in one turn (`--only . --turns 1`); ratios then differ by up to a fifth from run to
run: FedFomo had 2.13 and 1.67, FedProto 1.75 and 1.46; the later ones are shown. So a mark near 1.25, or its absence,
means little there. Of those at commit 2861b3e `mtfl-adam` was measured three times, at 1.25 (3 turns), 1.22 (7, shown)
and 1.19 (7) of its arithmetic, the others once in 3 turns. Whether GPU and cores were otherwise idle is not recorded;
ratios compare turns in one process, and seconds per round are not a benchmark. A step here processes 10 images on a
network of 582,026 weights, so any work on all weights in every step shows. Terms that pull to another model (`fedprox`,
`ditto`, `scaffold`, `feddyn`, `fedsmoo`, `fedspeed`, `fedamp`, `mocha`, `mtl-reg`, `pfedme`) are added to the gradient
in closed form since commit 5f50be6; in measurements of earlier commits they were differentiated with the loss, at a
fifth of a gradient or more. The servers of `fedamp` and `mocha` work with the models of all clients. `fedgen`'s server
takes 50 gradients of its generator per round, each counted as one; on a CPU it took about 0.7 of the time of a
client's. `pfedhn`'s server has a hundred weights for every one of the model. Gradients of `fedala` are partly those of
two tensors, those of `fedgen-local` mostly those of a small generator, and cost less than one of the whole network;
`fedrod` takes two gradients in one pass. `mtfl-adam` takes Adam's steps, eight passes over all weights in each, where
SGD takes one. `ccvr` describes every class by products of 512 features, 1.3 million numbers of a client, and its server
draws 5,000 features and trains a head on them in every round, in 400 steps: on the CPU these are counted in plain
torch, on the GPU not, where such small steps would take the time of Python. The models of `fml` answer for each other,
which is counted.
`fedcr` trains one more layer, from 512 to 512 features, and its head on 18 noisy copies of every sample, 92,160
normal numbers in a step, which the count of gradients does not show.

**With the compiler**, as the engine runs them where much work is ahead (`--engine 'loop compiled'`, 2 CPU cores), a
round of `mtfl-adam` takes 1.11 times as long as FedAvg's, of `ccvr` 1.83, of `fedmask` 1.32 (commit 4d571ed, 3 turns);
of `fml` 2.45, of `sub-fedavg` 1.17 (commit f324a3e).

**Short runs on the H200.** Six rounds of this task take a fraction of a second on a GPU, so the engine builds no
programs, and Python starts every operation: 32 us each, whatever it computes. Time then counts operations, not
arithmetic: a step of FedAvg's clients, all at once, has 154, and there are 8 in a round; one of `fedgen` has 364, of
`fedgen-local` 412 and 311 in each of the 40 steps of its generators, of `fedcr` 304. That is why these three are above
1.25 in the table of 20 clients. As CUDA graphs (`--engine 'whole traced graph'`, commit 31063b5) the same rounds take
14 ms (FedAvg), 45 (`fedgen`), 108 (`fedgen-local`) and 29 (`fedcr`), but the task is then too small for a GPU: by
torch's profiler a round of `fedgen` has 11,400 kernels and FedAvg's 2,050, and the additional ones, which compute for
1.5 us each and are 3.3 us apart, account for all of the extra time. Most belong to the server's 50 steps, one after
another, while clients take 8 steps all at once.

**Long runs on the H200.** The last table above has 100 clients with 600 training images each, 60 steps in a round, as
programs in CUDA graphs, which the engine chooses automatically in long runs. There kernels are large, and all its
methods except `fedcr` are within 1.25 of their arithmetic. `fedcr` does more than its gradients suggest: its network
has 262,656 more weights (45 %), and a step of all clients draws 9 million normal numbers.
"""


def main() -> None:
    """Measure what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--engine", default="auto", help="clients at once, as of `atoll run`")
    parser.add_argument("--clients", type=int, default=Size.clients)
    parser.add_argument("--images", type=int, default=Size.images, help="of a client")
    parser.add_argument("--only", nargs=1, help="measure again what matches this regular expression")
    parser.add_argument("--turns", type=int, default=2, help="how often a method and FedAvg take turns")
    parser.add_argument("--page", action="store_true", help="write the page and stop")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    path = asked.out / "cost.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not asked.page:
        from atoll import LocalEngine
        from atoll.kernel.errors import AtollError
        from atoll.records.runs import machine

        now = origin(asked.precision)
        where = now["machine"] if asked.device.startswith("cuda") else f"{machine()['cores']} CPU cores"
        size = Size(asked.clients, asked.images)
        if (size, asked.engine) != (Size(), "auto"):
            where = f"{where}, {size}, `{asked.engine}`"
        here = found.setdefault(where, {"methods": {}, "size": asdict(size)})
        spelled = asked.engine != "auto"
        engine = LocalEngine(
            device=asked.device, precision=asked.precision, strategy=asked.engine, compile=None if spelled else False
        )
        placed = engine.place(task(size))
        commit, here["torch"] = now["commit"], now["torch"]
        here.setdefault("commit", commit)
        for method in choose(parser, methods(), asked.only):
            if asked.only is None and method in here["methods"]:
                continue
            try:
                measured = measure(method, engine, placed, asked.turns, size, asked.device)
                here["methods"][method] = {**measured, "commit": commit}
            except AtollError as error:
                print(f"{method}: {error}", flush=True)
                continue
            print(method, here["methods"][method], flush=True)
            if method == "fedavg" or "fedavg" not in here["methods"]:
                here["fedavg"] = measured["seconds"] / measured["ratio"]
            path.write_text(json.dumps(found, indent=1) + "\n")
    (asked.out / "cost.md").write_text(page(found))


if __name__ == "__main__":
    main()
