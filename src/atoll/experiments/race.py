"""A race: runs that are paused after some rounds, judged by validation scores, and continued if they are good enough.

A run is begun with all its rounds, stopped after a few, and resumed, so nothing is done twice, and what survives is
the run that it would have been without a pause, bit for bit. The task of a race has no test samples: in their place
are the validation samples (`hide_test`). So no choice can rest on test scores, not even by mistake.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.batches import Split, find_offsets
from atoll.data.task import Task
from atoll.experiments.cells import Cell, OnRound, group_cells, run_cells
from atoll.federation.labels import label
from atoll.federation.progress import ProgressTracker
from atoll.federation.report import Report
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Engine
from atoll.kernel.errors import RunError
from atoll.metrics import significance
from atoll.records.rounds import Figures

log = logging.getLogger("atoll.experiments.race")

Scores = NDArray[np.float64]
STEADY = 10  # samples at which a client's score counts half as much as one that is known exactly
DOUBT = 0.1  # of dropping a method that is as good as the leader
FEWEST_CLIENTS = 6  # to drop one by a test


def hide_test(task: Task, *, halve: bool) -> Task:
    """Return the task of a race: validation samples stand in for the test samples, which are not there.

    Where a method reads validation samples, `halve` them: methods read one half of each client's, and are scored on
    the other.
    """
    read, scored = _halve(task.splits["val"]) if halve else (task.splits["val"], task.splits["val"])
    splits = {**task.splits, "val": read, "test": scored}
    return replace(task, splits=splits, central=None, unseen=None, facts={**task.facts, "test": "validation samples"})


def _halve(split: Split) -> tuple[Split, Split]:
    """Return every second sample of each client, and the others, of which there may be one more."""
    if not split.stored:
        raise RunError(
            "Validation samples must be stored to be halved for methods that read them. These are made when needed.",
            hint="leave out methods that read validation samples.",
        )
    parts = [split.order[first:last] for first, last in zip(split.offsets, split.offsets[1:], strict=False)]
    return tuple(  # type: ignore[return-value]
        Split(torch.cat([part[begin::2] for part in parts]), find_offsets(np.array([len(p[begin::2]) for p in parts])))
        for begin in (1, 0)
    )


def list_rungs(rounds: int) -> list[int]:
    """Return the rounds after which methods are judged: about a ninth, a third, and all."""
    first = max(2 if rounds >= 8 else 1, rounds // 9)  # one round alone says little of a step size
    middle = first * max(2, round(rounds / 3 / first))
    return [first, middle, rounds] if middle < rounds else [first, rounds] if first < rounds else [rounds]


@dataclass(eq=False)
class Arm:
    """A method with its values, and how far it came."""

    entry: str  # the method as it was asked for
    method: Algorithm
    lr: float
    rungs: dict[int, float] = field(default_factory=dict)  # the score on validation samples, by round
    dropped_at: int | None = None
    reason: str = ""

    @property
    def label(self) -> str:
        """What it is called, as the command line takes it."""
        return label(self.method)

    def drop(self, rounds: int, reason: str) -> None:
        """Note why it does not go on."""
        self.dropped_at, self.reason = rounds, reason


@dataclass(eq=False)
class Race:
    """Arms that run on the same clients with the same seeds."""

    tasks: Mapping[int, Task]  # by seed, without test samples
    settings: Settings
    engine: Engine
    folder: Path
    stop: threading.Event
    bar: ProgressTracker
    together: bool  # whether what need not wait runs side by side
    arms: list[Arm] = field(default_factory=list)
    reports: dict[tuple[Arm, int], Report] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How many rounds a whole run has."""
        return self.settings.rounds

    def run(self, arms: Sequence[Arm], rounds: int) -> None:
        """Run arms up to so many rounds, with every seed, and note their scores; those that diverge are last.

        If `together` says so, they are spread over the workers of a cluster, or are lanes of one program on a GPU.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.arms += [arm for arm in arms if arm not in self.arms]
        same = {arm.label: [other for other in arms if other.label == arm.label] for arm in arms}
        cells = [
            Cell.find(name, some[0].method, seed, task, self.settings, self.folder, until=rounds)
            for name, some in same.items()
            for seed, task in self.tasks.items()
        ]
        for group in group_cells(cells, self.engine, together=self.together):
            alive = [cell for cell in group if not same[cell.name][0].reason]
            for (name, seed), report in self._run_cells(alive).items():
                for arm in same[name]:
                    self.reports[arm, seed] = report
                    if report.done < min(rounds, report.rounds) or _has_blown_up(report, rounds):
                        log.info("%s with seed %d diverged", name, seed)
                        arm.rungs[rounds] = -math.inf
                        arm.drop(rounds, "diverged")
        for arm in arms:
            if not arm.reason:
                arm.rungs[rounds] = self.score(arm, rounds)

    def _run_cells(self, cells: Sequence[Cell]) -> dict[tuple[str, int], Report]:
        """Run cells and show how far they are; return their reports by name and seed."""
        done = {(cell.name, cell.seed): 0 if cell.done is None else cell.done.done for cell in cells}

        def begin(name: str, seed: int, _: str) -> OnRound:
            return self.bar.begin(f"{name}, seed {seed}", done[name, seed])

        if not cells:
            return {}
        return run_cells(cells, self.engine, self.stop, on_run=begin, on_round=None, on_epoch=self.bar.show_epoch)

    # -- scores ------------------------------------------------------------------------------------------------------
    @property
    def sign(self) -> int:
        """1 if a higher score is better, else -1."""
        return next(iter(self.reports.values())).sign

    def scores(self, arm: Arm, rounds: int) -> Scores:
        """Return the validation score of each client after so many rounds, as [seed, client]."""
        found = [_figures_after(self.reports[arm, seed], rounds).clients for seed in self.tasks]
        return np.array(found, dtype=np.float64)

    def samples(self, arm: Arm) -> Scores:
        """Return how many validation samples each client is scored on, as [seed, client]."""
        return np.stack([self.reports[arm, seed].samples() for seed in self.tasks]).astype(np.float64)

    def weights(self, arm: Arm) -> Scores:
        """Return how much each client counts in a choice: less with few samples, nothing without."""
        samples = self.samples(arm)
        return samples / (samples + STEADY)

    def score(self, arm: Arm, rounds: int) -> float:
        """Return the mean validation score over clients and seeds; clients with few samples count less."""
        return weighted_mean(self.scores(arm, rounds), self.weights(arm))

    def rank(self, arms: Sequence[Arm], rounds: int) -> list[Arm]:
        """Sort arms by their score after so many rounds, the best first; diverged ones last."""
        return sorted(arms, key=lambda arm: -self.value(arm, rounds))

    def value(self, arm: Arm, rounds: int) -> float:
        """Return the score after so many rounds, turned where less is better."""
        score = arm.rungs.get(rounds, -math.inf)
        return score if not math.isfinite(score) else self.sign * score

    def lead(self, arm: Arm, other: Arm, rounds: int) -> tuple[float, float, Scores]:
        """Return how much better an arm is than another, the standard error over clients, and each client's lead."""
        lead = self.sign * (self.scores(arm, rounds) - self.scores(other, rounds))
        weights = self.weights(arm)
        known = ~np.isnan(lead).all(axis=0) & (weights.sum(axis=0) > 0)
        of_client, weight = np.nanmean(lead[:, known], axis=0), weights[:, known].mean(axis=0)
        mean, clients = weighted_mean(of_client, weight), len(of_client)
        share = weight / weight.sum()
        error = math.sqrt(float((share**2 * (of_client - mean) ** 2).sum()) * clients / max(clients - 1, 1))
        return mean, error, of_client

    def is_beaten(self, arm: Arm, leader: Arm, rounds: int, tests: int) -> bool:
        """Return whether an arm is behind the leader beyond doubt, among so many tests."""
        from scipy import stats

        mean, error, of_client = self.lead(arm, leader, rounds)
        if len(of_client) < FEWEST_CLIENTS:
            return False
        return bool(mean + stats.t.ppf(1 - DOUBT / (2 * tests), len(of_client) - 1) * error < 0)

    def count_harmed(self, arm: Arm, alone: Arm) -> float:
        """Count the clients that validation samples show to be worse off than alone, as a mean over seeds."""
        counts = []
        for seed in self.tasks:
            one, other = self.reports[arm, seed], self.reports[alone, seed]
            gain = self.sign * (one.scores() - other.scores())
            error = significance.standard_error(one.variances(), other.variances(), one.samples())
            counts.append(int(significance.is_harmed(gain, error).sum()))
        return float(np.mean(counts))

    def megabytes(self, arm: Arm) -> float:
        """Return what a client would send and receive in all rounds, as far as those that were run show."""
        found = [self.reports[arm, seed] for seed in self.tasks if (arm, seed) in self.reports]
        sent = [(one.megabytes("up") + one.megabytes("down")) * one.rounds / max(one.done, 1) for one in found]
        return float(np.mean(sent)) / next(iter(self.tasks.values())).clients if sent else 0.0

    def gradients(self, arm: Arm) -> float:
        """Return the gradients that all clients took."""
        return float(np.mean([self.reports[arm, seed].gradients for seed in self.tasks]))

    @property
    def cost(self) -> dict[str, float]:
        """What all runs of the race took together."""
        runs = self.reports.values()
        return {
            "rounds": sum(run.done for run in runs),
            "gradients": sum(run.gradients for run in runs),
            "mb": round(sum(run.megabytes("up") + run.megabytes("down") for run in runs), 3),
            "seconds": round(sum(run.seconds for run in runs), 1),
        }


def weighted_mean(values: Scores, weights: Scores) -> float:
    """Return the mean of what is known."""
    known = ~np.isnan(values) & (weights > 0)
    return float((values[known] * weights[known]).sum() / weights[known].sum()) if known.any() else math.nan


def _has_blown_up(report: Report, rounds: int) -> bool:
    """Return whether a client's own model is not finite any more, which the server's state does not show."""
    found = _figures_after(report, rounds)
    samples, losses = (np.array(values or [], dtype=np.float64) for values in (found.samples, found.losses))
    return bool(len(losses) and not np.isfinite(losses[samples > 0]).all())


def _figures_after(report: Report, rounds: int) -> Figures:
    """Return the scores of clients after so many rounds; one-shot methods have one."""
    wanted = min(rounds, report.rounds)
    for line in report.evaluations:
        if line.round == wanted:
            assert line.personal is not None
            return line.personal["test"]
    raise RunError(f"The run in {report.folder} must have been scored after round {wanted}. It was not.")
