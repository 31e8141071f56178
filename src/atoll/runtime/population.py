"""All clients of a federation, as an engine holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from atoll.data.task import Task
from atoll.kernel.engine import Memory
from atoll.kernel.network import Network
from atoll.kernel.task import Facts

if TYPE_CHECKING:
    from atoll.runtime.engines.trainings import Trainings

MANY_CLIENTS = 10_000  # beyond, a sample of clients is scored unless all are asked for, and records count, not list


@dataclass(frozen=True, repr=False)
class Population:
    """All clients, as the engine holds them: the task on its device, what clients keep, and the seed."""

    task: Task
    memory: Memory
    seed: int
    trainings: Trainings | None = None  # where what was trained is kept, to be found by other runs

    def __repr__(self) -> str:
        return f"<Population of {self.task!r}, seed {self.seed}>"

    @cached_property
    def facts(self) -> Facts:
        """The public facts of the task."""
        return self.task.public_facts(self.seed)

    def of_architecture(self, number: int) -> Population:
        """Return the clients of one architecture: with their network, and a memory for their models."""
        if self.task.architecture is None:
            return self
        task, memory = self.task.by_architecture[number], self.memory.beside(f"architecture {number}")
        return replace(self, task=task, memory=memory)

    def with_network(self, network: Network) -> Population:
        """Return the same clients with another network of the same leaves."""
        return replace(self, task=replace(self.task, network=network))
