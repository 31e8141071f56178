"""Every client's model on every client's own data, vectorised as training is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.algorithm import Algorithm
from atoll.batch import Batch
from atoll.cohort import Cohort, Population
from atoll.data.task import Task
from atoll.engines.local import Done, Job, LocalEngine
from atoll.models.network import Variant
from atoll.params import Params, Stack, Tree

LARGEST_BATCH = 256


@dataclass(frozen=True)
class ClientScores:
    """Scores of all clients on one split; `score` is the accuracy where there are classes. NaN: no samples."""

    score: NDArray[np.float64]
    loss: NDArray[np.float64]
    samples: NDArray[np.int64]

    @property
    def macro(self) -> float:
        """The mean over clients."""
        return float(np.nanmean(self.score)) if self._any else float("nan")

    @property
    def micro(self) -> float:
        """The mean over samples."""
        if not self._any:
            return float("nan")
        return float(np.nansum(self.score * self.samples) / self.samples.sum())

    @property
    def worst(self) -> float:
        """The worst client."""
        return float(np.nanmin(self.score)) if self._any else float("nan")

    @property
    def bottom(self) -> float:
        """The mean of the worst tenth of the clients, at least one."""
        known = np.sort(self.score[self.samples > 0])
        return float(known[: -(-len(known) // 10)].mean()) if len(known) else float("nan")

    @property
    def spread(self) -> float:
        """The standard deviation over clients."""
        return float(np.nanstd(self.score)) if self._any else float("nan")

    @property
    def _any(self) -> bool:
        return bool((self.samples > 0).any())

    def summary(self) -> dict[str, float]:
        """The figures of one split."""
        known = self.samples > 0
        loss = float(np.nanmean(self.loss)) if known.any() else float("nan")
        return {
            "macro": self.macro,
            "micro": self.micro,
            "worst": self.worst,
            "bottom10": self.bottom,
            "std": self.spread,
            "loss": loss,
        }


def evaluate(
    engine: LocalEngine,
    population: Population,
    algorithm: Algorithm,
    server: Tree,
    *,
    round: int,
    model: str = "personal",
    calls: int = 1,
    splits: tuple[str, ...] = ("val", "test"),
) -> dict[str, ClientScores]:
    """Scores of all clients, for their personal models or for the shared one."""
    everybody = np.arange(population.task.clients)

    def work(cohort: Cohort) -> dict[str, Stack]:
        if model == "personal":
            # The method makes the model without the test data, which only `_score` reads.
            w = algorithm.personalize(server, replace(cohort, splits=cohort.splits - {"test"}))
        else:
            shared = algorithm.shared(server)
            assert shared is not None
            w = shared
        return {split: _score(cohort, w, split) for split in splits}

    job = Job(
        population,
        everybody,
        round,
        work,
        phase=("evaluate", model, algorithm),
        calls=calls,
        splits=frozenset({"train", "val", "test"}),
    )
    scores = {split: np.full((2, len(everybody)), np.nan) for split in splits}
    for outcome in engine.run(job):
        if isinstance(outcome, Done):
            for split, stack in outcome.result.items():
                rows = torch.stack([stack["score"], stack["loss"]]).double().cpu().numpy()
                scores[split][:, outcome.cohort.clients] = rows
    return {
        split: ClientScores(*_means(sums, sizes := population.task.splits[split].sizes(everybody)), sizes)
        for split, sums in scores.items()
    }


def _means(sums: NDArray[np.float64], sizes: NDArray[np.int64]) -> tuple[Any, Any]:
    means = np.divide(sums, sizes, out=np.full_like(sums, np.nan), where=sizes > 0)
    return means[0], means[1]


def _score(cohort: Cohort, w: Params | Stack, split: str) -> Stack:
    # The largest client of all decides, not of this chunk, so that every chunking sums in the same order.
    largest = int(np.diff(cohort.population.task.splits[split].offsets).max(initial=1))
    batch_size = max(1, min(largest, LARGEST_BATCH))
    start = Params.of(score=0.0, loss=0.0)
    scored: Stack = cohort.scan(
        _score_step, start, given=w, split=split, batch_size=batch_size, shuffle=False, train=False
    )
    return scored


def _score_step(carry: Params, batch: Batch, w: Params) -> Params:
    outputs = batch.outputs(w)
    score, loss = batch.network.score(outputs, batch.y), batch.network.loss(outputs, batch.y)
    return Params.of(score=carry["score"] + batch.total(score), loss=carry["loss"] + batch.total(loss))


def evaluate_central(engine: LocalEngine, task: Task, w: Params, batch_size: int = 10_000) -> dict[str, float]:
    """The shared model on the server's own test set."""
    assert task.central is not None
    x, y = task.central
    totals = np.zeros(2)
    with torch.no_grad():
        for start in range(0, len(x), batch_size):
            part = slice(start, start + batch_size)
            variant = Variant(train=False, precision=engine.precision)
            outputs = Batch(x[part], y[part], None, None, task.network, variant).outputs(w)
            both = [task.network.score(outputs, y[part]).sum(), task.network.loss(outputs, y[part]).sum()]
            totals += torch.stack(both).double().cpu().numpy()
    return {"score": totals[0] / len(x), "loss": totals[1] / len(x)}
