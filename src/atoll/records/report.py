"""A `Report` is the evidence of one run: every round, every client, every byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.references import bibtex

if TYPE_CHECKING:
    from atoll.data.task import Task
    from atoll.kernel.algorithm import Algorithm
    from atoll.kernel.engine import Engine
    from atoll.kernel.params import Params, Tree
    from atoll.records.configuration import Settings
    from atoll.runtime.channel import Ledger
    from atoll.runtime.population import Population


@dataclass(frozen=True, eq=False)
class Report:
    """What `federate` returns."""

    task: Task
    algorithm: Algorithm
    settings: Settings
    history: list[dict[str, Any]]  # one entry per round, as in metrics.jsonl
    ledger: Ledger
    server: Tree
    population: Population
    engine: Engine
    outcomes: NDArray[np.float64] | None = None  # the score of every test sample after the last round

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rounds in which clients were evaluated."""
        return [line for line in self.history if "evaluation" in line]

    def scores(self, split: str = "test", model: str = "personal") -> NDArray[np.float64]:
        """Every client's score after the last round."""
        return np.array(self.evaluations[-1]["evaluation"][model][split]["clients"])

    def summary(self, split: str = "test", model: str = "personal") -> dict[str, float]:
        """Mean, worst and so on after the last round."""
        found = self.evaluations[-1]["evaluation"][model][split]
        return {name: value for name, value in found.items() if isinstance(value, float)}

    def welcome(self, x: Any, y: Any = None) -> Params:
        """The model of a client that took no part, from its samples, and its targets if it has them."""
        from atoll.metrics.newcomers import welcome

        here, seed, rounds = self.population.task, self.settings.seed, self.settings.rounds
        return welcome(self.engine, self.algorithm, self.server, here, x, y, seed=seed, round=rounds)

    @property
    def citations(self) -> str:
        """BibTeX of the method that was used."""
        return bibtex(self.algorithm.cites)
