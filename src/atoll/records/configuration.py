"""What decides the numbers of a run: its settings, and its whole configuration as it is written down."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from atoll.algorithms import name_of
from atoll.compose import to_record
from atoll.compose.architectures import check_mixes
from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import CohortError, OneShotError, unknown
from atoll.kernel.fingerprints import Unstable, portable
from atoll.kernel.wrapper import title_of
from atoll.runtime import participation
from atoll.runtime.memory import MEMORIES
from atoll.runtime.participation import Schedule


@dataclass(frozen=True)
class Settings:
    """How a federation is run; together with task and algorithm, everything that decides its numbers."""

    rounds: int = 30
    seed: int = 0
    cohort: int | float | None = None  # clients per round, or their share; all by default
    participation: str = "constant"  # who is there: constant, random:P, diurnal:T, turnover:S or file:PATH
    drop: float = 0.0  # probability that a client of the cohort is lost
    late: float = 0.0  # probability that a reply arrives in a later round
    delay: int = 1  # the most rounds that a late reply needs
    eval_every: int | None = None  # rounds; a tenth of all by default
    evaluation: str = "all"  # "all" clients and the central test set, "central" only, or "none"
    memory: str = "ram"  # where clients keep what they keep: "ram" or "disk"

    def check(self, task: Task, algorithm: Algorithm) -> None:
        """Raise for settings that make no sense for this task and algorithm."""
        if self.rounds < 1:
            raise CohortError(f"`rounds` must be at least 1. Got {self.rounds!r}.")
        if algorithm.one_shot and self.rounds != 1:
            raise OneShotError(
                f"{title_of(algorithm)} uploads once, so `rounds` must be 1. Got rounds={self.rounds}.",
                hint="to train longer on each client, raise its `epochs`.",
            )
        if self.rounds < algorithm.least_rounds:
            raise CohortError(
                f"`rounds` must be at least {algorithm.least_rounds}: with less, a part of {name_of(algorithm)} "
                f"never runs. Got rounds={self.rounds}.",
                hint="raise --rounds, or lower the rounds of the first part.",
            )
        if not 0 <= self.drop < 1:
            raise CohortError(f"`drop` must be a float in [0, 1). Got {self.drop!r}.")
        if not 0 <= self.late < 1:
            raise CohortError(f"`late` must be a float in [0, 1). Got {self.late!r}.")
        if self.delay < 1:
            raise CohortError(f"`delay` must be at least 1 round. Got {self.delay!r}.")
        _ = self.schedule  # its words are read, and a file
        if self.evaluation not in ("all", "central", "none"):
            raise CohortError(f"`evaluation` must be 'all', 'central' or 'none'. Got {self.evaluation!r}.")
        if self.evaluation == "central" and task.central is None:
            raise CohortError("`evaluation='central'` needs a task with a central test set. This one has none.")
        if algorithm.needs_public_data:
            task.public_for(title_of(algorithm))
        check_mixes(algorithm, task.public_facts())
        if self.memory not in MEMORIES:
            raise unknown("memory", self.memory, MEMORIES)
        self.cohort_size(task.clients)

    @cached_property
    def schedule(self) -> Schedule:
        """Who is there; a file is read once."""
        return participation.parse(self.participation)

    def cohort_size(self, clients: int) -> int:
        """How many clients are asked in a round."""
        asked = clients if self.cohort is None else self.cohort
        if isinstance(asked, float):
            if not 0 < asked <= 1:
                raise CohortError(f"`cohort` as a share must be in (0, 1]. Got {asked!r}.")
            asked = max(1, round(asked * clients))
        if not 1 <= asked <= clients:
            raise CohortError(
                f"`cohort` must be between 1 and the number of clients, {clients}. Got {asked}.",
                hint="lower --cohort, or raise --clients.",
            )
        return asked

    def evaluates_after(self, rounds: int) -> bool:
        """Whether clients are evaluated after so many rounds."""
        return self.evaluation != "none" and (rounds % self.every == 0 or rounds == self.rounds)

    @property
    def every(self) -> int:
        """How many rounds there are from one evaluation to the next."""
        return self.eval_every or max(1, self.rounds // 10)


def describe(task: Task, algorithm: Algorithm, settings: Settings) -> dict[str, Any]:
    """The resolved configuration of a run."""
    return {
        "task": {
            "name": task.name,
            "clients": task.clients,
            "metric": task.network.score.facts,
            "data": task.fingerprint,
            **({} if task.augment is None else {"augment": repr(task.augment)}),
            **task.facts,
        },
        "training": asdict(task.training),
        "algorithm": to_record(algorithm),
        "settings": asdict(settings),
        "schedule": participation.fingerprint(settings.participation),
        "model": {"parameters": [one.parameters for one in task.networks] or task.network.parameters},
        "computes": computed_by(task),
    }


def computed_by(task: Task) -> dict[str, str] | None:
    """What the models of a task compute, by all their attributes; None where that cannot be told.

    Of code only names count: a script may be edited before it is run again.
    """
    try:
        functions = [portable(network.function, code=False) for network in task.networks or (task.network,)]
    except Unstable:
        return None
    digest = hashlib.sha256(repr(functions).encode()).hexdigest()[:16]
    return {"torch": torch.__version__, "digest": digest}  # layers of another version may have other attributes


def is_another_model(config: Mapping[str, Any], task: Task) -> bool:
    """Whether the models of a run were others than those of a task, as far as that can be told."""
    before, now = config.get("computes"), computed_by(task)
    return bool(before and now and before["torch"] == now["torch"] and before["digest"] != now["digest"])
