"""PFLlib's protocol: 20 clients, all of them in every round, its CNN, batch 10, lr 0.005; published beside ours.

python benchmarks/pfllib_table.py --device cuda --precision bf16 --jobs 8     # all that is missing, then the page
python benchmarks/pfllib_table.py --only 'fashion-prac-fedavg-seed0'          # one cell
python benchmarks/pfllib_table.py --list
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from published import Cell, main, mean_text, origins, table

ROUNDS = 300
TASKS = {
    "fashion-prac": ("Fashion-MNIST, Dirichlet 0.1", "fashion-mnist", "pfllib:0.1"),
    "cifar10-prac": ("CIFAR-10, Dirichlet 0.1", "cifar10", "pfllib:0.1"),
    "fashion-pat": ("Fashion-MNIST, 2 classes", "fashion-mnist", "pathological:2"),
    "cifar10-pat": ("CIFAR-10, 2 classes", "cifar10", "pathological:2"),
}
MILD = {"cifar100-mild": ("CIFAR-100, Dirichlet 5", "cifar100", "pfllib:5")}
METHODS = ["local", "fedavg", "fedavg-ft", "ditto:lam=0.1", "ditto:lam=1.0", "fedper"]
GRID = {"ditto:lam=1.0": ("fashion-prac", "cifar100-mild")}  # where a second value is tried; the better is taken over
FAMILY_ROUNDS = 100
MILD_ROUNDS = 150
FAMILY = [  # the rest of the personalized family, in fewer rounds
    "fedprox:mu=0.01",
    "perfedavg",
    "pfedme:eta=0.05",
    "apfl",
    "fedamp",
    "fedrep:head_epochs=1,final_epochs=0",
    "fedbabu",
    "ifca:starts=kmeans++,restarts=10",
    "fedgen:alpha=1,beta=0,decay=1,diversity=0",
]
EVALUATED = {"fedavg-ft": 50, "fedbabu": 50}  # those that tune five epochs before each evaluation
SEEDS = [0, 1, 2]
PUBLISHED = {  # PFLlib's page (Fashion-MNIST, CIFAR-100) and the FedALA poster (CIFAR-10)
    "fashion-prac": {
        "fedavg": "85.85 ± .19", "fedprox": "85.63 ± .57", "fedgen": "84.90 ± .31", "perfedavg": "95.10 ± .10",
        "pfedme": "97.25 ± .17", "ditto": "97.47 ± .04", "apfl": "97.25 ± .08", "fedamp": "97.20 ± .06",
        "fedper": "97.44 ± .06", "fedrep": "97.56 ± .04", "fedbabu": "97.46 ± .07",
    },
    "cifar10-prac": {
        "fedavg": "59.16 ± .47", "fedprox": "59.21 ± .40", "fedavg-ft": "90.34 ± .01", "perfedavg": "87.74 ± .19",
        "fedrep": "90.40 ± .24", "pfedme": "88.09 ± .32", "ditto": "90.59 ± .01", "fedamp": "88.70 ± .18",
    },
    "fashion-pat": {
        "fedavg": "80.41 ± .08", "fedprox": "78.08 ± .15", "fedgen": "79.76 ± .60", "perfedavg": "99.18 ± .08",
        "pfedme": "99.35 ± .14", "ditto": "99.44 ± .06", "apfl": "99.41 ± .02", "fedamp": "99.42 ± .03",
        "fedper": "99.47 ± .03", "fedrep": "99.56 ± .03", "fedbabu": "99.41 ± .05",
    },
    "cifar10-pat": {
        "fedavg": "55.09 ± .83", "fedprox": "55.06 ± .75", "fedavg-ft": "92.13 ± .03", "perfedavg": "89.63 ± .23",
        "fedrep": "91.93 ± .14", "pfedme": "90.11 ± .10", "ditto": "92.39 ± .06", "fedamp": "90.79 ± .16",
    },
    "cifar100-mild": {
        "fedavg": "35.51", "fedprox": "35.31", "fedgen": "35.64", "perfedavg": "24.94", "pfedme": "14.70",
        "ditto": "35.72", "apfl": "20.76", "fedamp": "13.71", "fedper": "16.09", "fedrep": "14.93", "fedbabu": "27.61",
    },
}  # fmt: skip
Point = dict[str, float]


def cells() -> list[Cell]:
    """Seed 0 has PFLlib's own partition (its seed 1), the others draw theirs."""
    return [
        Cell(
            task, method, seed,
            {"dataset": dataset, "partition": f"{dealt}:{seed + 1}", "clients": 20, "model": "cnn", "split": "70/5/25"},
            {"lr": 0.005, "batch_size": 10},
            {"rounds": rounds, "eval_every": EVALUATED.get(method, 10)},
        )
        for seed in SEEDS
        for tasks, methods, rounds in (
            (TASKS, METHODS, ROUNDS), (TASKS, FAMILY, FAMILY_ROUNDS), (MILD, METHODS + FAMILY, MILD_ROUNDS),
        )
        for task, (_, dataset, dealt) in tasks.items()
        for method in methods
        if _wanted(task, method)
    ]  # fmt: skip


def _wanted(task: str, method: str) -> bool:
    return task in GRID.get(method, [task])


def _last(curve: list[Point]) -> Point:
    return curve[-1]


def _best(curve: list[Point]) -> Point:
    return max(curve, key=lambda point: point["val_micro"])


def _oracle(curve: list[Point]) -> Point:
    return max(curve, key=lambda point: point["test_micro"])


def page(done: list[dict[str, Any]]) -> str:
    """The page docs/results/pfllib.md."""
    sections = [_section(task, [one for one in done if one["task"] == task]) for task in TASKS]
    return f"""# PFLlib's table, run again

Written by `python benchmarks/pfllib_table.py` from [pfllib.json](pfllib.json), which holds every curve; run it again to
add the missing cells. Cells so far: {len(done)} of {len(cells())}, on {origins(done) or "nothing"}.

**Protocol.** 20 clients, all of them in every round, PFLlib's CNN, plain SGD, batch 10, lr 0.005, one local
epoch, no augmentation; rounds as stated in each row. Official train and test samples are merged and split
inside each client, 70 % training, 5 % validation, 25 % test (PFLlib: 75/25 without validation). Accuracy in %
over the test samples of all clients (PFLlib's average), of the shared model for FedAvg and of each client's own
for the others, every 10 rounds (FedAvg-FT on CIFAR-10 and with 2 classes: every 50). *Last*, *best on
validation* and *oracle* (best on test) are three ways to choose the round; the published values are oracles
over up to 2000 rounds, means of three trials. Seed 0 uses PFLlib's own partition, index by index (its seed 1);
other seeds draw other partitions by the same rule. Published: PFLlib's benchmark page for Fashion-MNIST, the
FedALA poster for CIFAR-10; PFLlib does not publish its hyperparameters per method. FedAvg-FT fine-tunes all
layers for 5 epochs before each evaluation (FedALA's "FedAvg-C": epochs not stated). Ditto's λ is chosen on
validation from 0.1 and 1 on Fashion-MNIST, Dirichlet 0.1, and reused elsewhere.

{"".join(sections)}"""


def _section(task: str, done: list[dict[str, Any]]) -> str:
    if not done:
        return f"## {TASKS[task][0]}\n\nNot run yet.\n\n"
    of_method: dict[str, list[dict[str, Any]]] = {}
    for method in METHODS:
        found = [one for one in done if one["method"] == method]
        if found:
            of_method[method] = found
    for method in _lesser_dittos(of_method):
        del of_method[method]
    rows = []
    for method, found in of_method.items():
        published = PUBLISHED[task].get(method.partition(":")[0], "–")
        ours = [mean_text([choose(one["curve"])["test_micro"] for one in found]) for choose in (_last, _best, _oracle)]
        rounds = ", ".join(sorted({f"{one['curve'][-1]['round']}" for one in found}))
        rows.append([f"`{method}`", published, *ours, rounds, _rise(found), str(len(found))])
    heads = ["method", "published", "last", "best on validation", "oracle", "rounds", "change in 100 rounds", "seeds"]
    return f"## {TASKS[task][0]}\n\n{table(heads, rows)}\n\n{COMMENTS.get(task, '')}\n\n"


def family(done: list[dict[str, Any]]) -> str:
    """The page docs/results/personalized.md."""
    tasks = {**TASKS, **MILD}
    sections = [_family_section(task, title, [one for one in done if one["task"] == task])
                for task, (title, _, _) in tasks.items()]  # fmt: skip
    return f"""# The personalized family under PFLlib's protocol

Written by `python benchmarks/pfllib_table.py`, with [PFLlib's table](pfllib.md) and from the same cells, which are in
[pfllib.json](pfllib.json); run it again to add the missing ones. On
{origins(done) or "nothing"}.
The protocol is described there; here every method is shown **after {FAMILY_ROUNDS} rounds** ({MILD_ROUNDS} on
CIFAR-100), even if it ran longer, so all have had the same number of local epochs. Published values are the
best of up to 2000 rounds on test: methods with one shared model (FedAvg, FedProx, FedGen) are far from their end here.
*Worst*: the worst client. Hyperparameters are in the names; the others are the method's defaults.

{"".join(sections)}{FAMILY_COMMENT}"""


def _family_section(task: str, title: str, done: list[dict[str, Any]]) -> str:
    if not done:
        return f"## {title}\n\nNot run yet.\n\n"
    rows, ours, missing = [], dict[str, float](), list[str]()
    for method in [*METHODS, *FAMILY]:
        points = [
            _until(one["curve"], MILD_ROUNDS if task in MILD else FAMILY_ROUNDS)
            for one in done
            if one["method"] == method
        ]
        points = [point for point in points if point is not None]
        if not points:
            if _wanted(task, method):
                missing.append(f"`{method}`")
            continue
        called, mean = method.partition(":")[0], sum(point["test_micro"] for point in points) / len(points)
        ours[called] = max(ours.get(called, 0), mean)
        worst = [point["test_worst"] for point in points if "test_worst" in point]
        rounds = ", ".join(sorted({f"{point['round']:g}" for point in points}))
        rows.append([
            f"`{method}`", PUBLISHED[task].get(called, "–"), mean_text([point["test_micro"] for point in points]),
            mean_text([point["val_micro"] for point in points]), mean_text(worst) or "–", rounds, str(len(points)),
        ])  # fmt: skip
    heads = ["method", "published", "ours", "on validation", "worst", "round", "seeds"]
    left = f" Not run yet: {', '.join(missing)}." if missing else ""
    return f"## {title}\n\n{table(heads, rows)}\n\n{_order(task, ours)}{left}\n\n"


def _until(curve: list[Point], rounds: int) -> Point | None:
    """The last point up to a round."""
    return next((point for point in reversed(curve) if point["round"] <= rounds), None)


def _order(task: str, ours: dict[str, float]) -> str:
    """Where the published order does not hold, among methods that are published at least half a point apart."""
    published = {name: float(text.split()[0]) for name, text in PUBLISHED[task].items() if name in ours}
    pairs = [(one, other) for one in published for other in published if published[one] > published[other] + 0.5]
    turned = [(one, other) for one, other in pairs if ours[one] < ours[other]]
    if not pairs:
        return ""
    named = "; ".join(f"{one} above {other} by {published[one] - published[other]:.1f} there, below by "
                      f"{ours[other] - ours[one]:.1f} here" for one, other in turned)  # fmt: skip
    held = (
        f"Of {len(pairs)} pairs of methods that are published at least half a point apart, {len(pairs) - len(turned)}"
    )
    return f"{held} have the same order here{f': {named}' if named else ''}."


FAMILY_COMMENT = """
**Where the published order does not hold** is listed below each table. FedGen is above FedAvg and FedProx after 100
rounds on Fashion-MNIST (and on CIFAR-10, where it is not published) and below them in the published table, which covers
many more rounds. pFedMe reaches its published value on CIFAR-10 after 100 rounds, where FedAvg-FT, Ditto and FedAMP are
2 to 3 points below theirs (FedAMP with 2 classes 8), and so above them. FedAMP is below Per-FedAvg on CIFAR-10 with 2
classes. Local is missing in the published tables. On CIFAR-10 the methods that share features and keep heads (FedPer,
FedRep) are 0.8 to 1.6 above it, pFedMe with 2 classes half a point; on Fashion-MNIST with Dirichlet 0.1 FedPer, FedRep
and pFedMe are 0.2 to 0.3 above it; with 2 classes no method is above it by a tenth. On these four tasks IFCA's four
models, made for few groups, are 13 to 28 points above one model for all twenty clients, and 2 to 19 below one model
each.

**One seed.** How much a cell varies when it is run again was not measured here; the published ± are 0.01 to 0.8 points.
Differences of less than a point or two, and orders that rest on them, decide nothing.

**The crossover.** With Dirichlet 5 (CIFAR-100) the picture is reversed, as published: FedAvg, FedProx, Per-FedAvg
and FedGen are within a point of each other and above all others. Fine-tuning costs six points, Ditto four to seven,
FedAMP 12, IFCA's smaller groups 13, FedBABU 14, pFedMe 15, APFL 17, and methods that keep heads or whole models private
(FedPer, FedRep, Local) 21 to 23. Of the eight personalized methods with a published value, Per-FedAvg, FedAMP and
pFedMe are higher here (35.5, 23.5 and 20.7; there 24.9, 13.7 and 14.7), FedBABU and Ditto lower (21.3, there 27.6;
31.7, there 35.7). Per-FedAvg here takes one small step to adapt, which may be why it costs nothing where adapting does
not help.
"""


def _lesser_dittos(of_method: dict[str, list[dict[str, Any]]]) -> list[str]:
    """All but the one that is best on validation."""

    def score(method: str, choose: Callable[[list[Point]], Point] = _best) -> float:
        found = of_method[method]
        return sum(choose(one["curve"])["val_micro"] for one in found) / len(found)

    dittos = sorted((method for method in of_method if method.startswith("ditto")), key=score)
    return dittos[:-1]


def _rise(found: list[dict[str, Any]]) -> str:
    """How flat the curve is: the mean test accuracy of the last 100 rounds against that of the 100 before."""

    def mean(one: dict[str, Any], first: float, last: float) -> float:
        values = [point["test_micro"] for point in one["curve"] if first < point["round"] <= last]
        return sum(values) / len(values) if values else float("nan")

    ends = [one["curve"][-1]["round"] for one in found]
    rises = [mean(one, end - 100, end) - mean(one, end - 200, end - 100) for one, end in zip(found, ends, strict=True)]
    return "–" if math.isnan(sum(rises)) else f"{sum(rises) / len(rises):+.2f}"


COMMENTS = {
    "fashion-prac": """\
All are within one point of the published values. **Local alone reaches 97.2**, which PFLlib's table does not show: the
personalized methods are 0.3 to 0.5 points above it, with one seed. Their curves are flat. FedAvg's is not: it still
gains half a point in 100 rounds, and is above the published value, the best of up to 2000 rounds, after 500.""",
    "cifar10-prac": """\
FedAvg-FT and Ditto reproduce the published values to 0.4 points. **FedAvg is 3.3 points below after 300 rounds**: it
still rises by 5 points in 100 rounds, and its published value is the best of up to 2000. The others are flat or rise by
a point. Local alone reaches 88.3, one to two points below the personalized methods, with one seed.""",
    "fashion-pat": """\
All are within 1.5 points of the published values. FedPer was cut short when the device time ran out, as its number of
rounds shows;
FedAvg still rises. With two classes per client every personal model is above 99, Local among them.""",
    "cifar10-pat": """\
All agree with the published values to within a point: FedAvg is 0.8 above, FedAvg-FT 0.4 and Ditto, which is still
rising, 0.6 below.""",
}


if __name__ == "__main__":
    main("pfllib", cells(), {"pfllib": page, "personalized": family})
