"""A `Recipe` is a task in words: enough to build it, and to build it again when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from atoll.data import datasets, partition
from atoll.data.datasets import Dataset
from atoll.data.task import Task, Training
from atoll.errors import RunError


@dataclass(frozen=True)
class Recipe:
    """Which data, how it is dealt to clients, which model, and how clients take their steps."""

    dataset: str = "digits"
    partition: str = "dirichlet:0.3"
    clients: int = 20
    model: str = "auto"
    seed: int = 0  # of the model's initial values, and of the partition unless it has its own
    partition_seed: int | None = None
    data: str | None = None  # the folder of the data sets; ATOLL_DATA by default
    training: Training = field(default_factory=Training)

    def build(self) -> Task:
        """The task."""
        dealt = partition.parse(self.partition)
        return Task.build(
            _load(self.dataset, self.data),
            dealt,
            clients=self.clients,
            model=None if self.model == "auto" else self.model,
            seed=self.seed,
            partition_seed=self.partition_seed,
            training=self.training,
            facts={"recipe": self.words},
        )

    def seeded(self, seed: int) -> Recipe:
        """The same with another seed."""
        return replace(self, seed=seed)

    @property
    def words(self) -> dict[str, Any]:
        """What a run's configuration says about its task; the training stands there by itself."""
        return {name: value for name, value in asdict(self).items() if name != "training"}

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Recipe:
        """The recipe of a run, from its configuration."""
        words = config["task"].get("recipe")
        if words is None:
            raise RunError(
                f"Only a task that was built from a recipe can be built again. {config['task']['name']!r} was not.",
                hint="build the task in Python and continue with federate(task, ..., folder=..., resume=True).",
            )
        return cls(**words, training=Training(**config["training"]))


@lru_cache(maxsize=2)  # a comparison builds one task per seed from the same samples
def _load(dataset: str, data: str | None) -> Dataset:
    return datasets.load(dataset, None if data is None else Path(data))
