"""What the gate saves and costs: harmed clients, mean and gradients of methods without it, and with several margins.

    python benchmarks/do_no_harm.py                                       # digits, a few minutes on 2 cores
    ATOLL_DATA=data python benchmarks/do_no_harm.py --task fashion --clients 50 --rounds 60

Each method is trained once per seed with the gate on. A margin decides at deployment only, so that all rows of a method
are about the same models; "never" is the method without the gate, and "always" is Local. "Best" looks at the test
samples, which nobody can: no gate could save more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll import Recipe, Report, Training, federate
from atoll.compose import create
from atoll.kernel.params import Params
from atoll.metrics import evaluate
from atoll.metrics.evaluation import ClientScores
from atoll.metrics.significance import is_harmed, standard_error
from atoll.testing.conformance import personal_models

GATES: dict[str, dict[str, Any]] = {
    "never": {"margin": "never"},
    **{
        f"{judge}, margin {margin}": {"judge": judge, "margin": float(margin)}
        for judge in ("score", "loss")
        for margin in (0, 1, 2)
    },
    "always": {"margin": "always"},
}
HEADS = ("method", "gate", "fall back", "harmed", "harm in points", "mean", "worst", "gradients a round")


def main() -> None:
    """Print one table per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["fedavg", "fedper", "ditto"])
    parser.add_argument("--task", default="digits")
    parser.add_argument("--partition", default="dirichlet:0.3")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    print(f"| {' | '.join(HEADS)} |\n|---|---|{'--:|' * (len(HEADS) - 2)}")
    for method in options.methods:
        runs = [[*_rows(method, seed, options)] for seed in range(options.seeds)]
        for rows in zip(*runs, strict=True):
            means = np.mean([row[1:] for row in rows], axis=0)
            figures = [f"{value:.{digits}f}" for value, digits in zip(means, (1, 1, 2, 1, 1, 0), strict=True)]
            print(f"| `{method}` | {rows[0][0]} | {' | '.join(figures)} |", flush=True)


def _rows(method: str, seed: int, options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """A row of figures for every gate, of one seed."""
    training = Training(lr=options.lr)
    recipe = Recipe(options.task, options.partition, options.clients, seed=seed, training=training)
    name, _, values = method.partition(":")
    rounds, task = options.rounds, recipe.build()
    plain = federate(task, create(method), rounds=1, seed=seed, evaluation="none")
    gated = federate(task, create(f"{name}+gate:{values}"), rounds=rounds, seed=seed, evaluation="none")
    found = {gate: _scores(gated, **kind) for gate, kind in GATES.items()}
    alone, offered = found["always"], found["never"]
    own = _models(gated, margin="always")
    for gate, kind in GATES.items():
        back = [_same(one, other) for one, other in zip(_models(gated, **kind), own, strict=True)]
        cost = _gradients(plain if gate == "never" else gated)
        yield gate, sum(back), *_figures(found[gate], alone), cost
    best = replace(alone, score=np.fmax(alone.score, offered.score))
    back = alone.score > offered.score
    yield "best on test", int(back.sum()), *_figures(best, alone), _gradients(gated)


def _figures(scores: ClientScores, alone: ClientScores) -> tuple[float, ...]:
    """How many are harmed, by how much, the mean and the worst."""
    assert scores.variance is not None
    assert alone.variance is not None
    gains: NDArray[np.float64] = scores.score - alone.score
    error = standard_error(scores.variance, alone.variance, scores.samples)
    return (
        float(is_harmed(gains, error).sum()),
        100 * float(np.nanmean(np.maximum(-gains, 0))),
        100 * scores.macro,
        100 * scores.worst,
    )


def _scores(report: Report, **kind: Any) -> ClientScores:
    """The scores of all clients on their test samples, with another gate in front of the same models."""
    algorithm = replace(report.algorithm, **kind)
    done = report.settings.rounds
    found = evaluate(report.engine, report.population, algorithm, report.server, round=done, splits=("test",))
    return found["test"]


def _models(report: Report, **kind: Any) -> list[Params]:
    return personal_models(replace(report, algorithm=replace(report.algorithm, **kind)))


def _same(one: Params, other: Params) -> bool:
    return all(torch.equal(leaf, other[name]) for name, leaf in one.items())


def _gradients(report: Report) -> int:
    """Of all clients in a round."""
    return int(report.history[0]["gradients"])


if __name__ == "__main__":
    main()
