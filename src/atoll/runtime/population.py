"""All clients of a federation, as an engine holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from atoll.data.task import Task
from atoll.kernel.engine import Memory
from atoll.kernel.network import Network


@dataclass(frozen=True)
class Population:
    """All clients, as the engine holds them: the task on its device, what clients keep, and the seed."""

    task: Task
    memory: Memory
    seed: int

    @property
    def device(self) -> torch.device:
        """Where the data live."""
        return self.task.x.device

    def of_architecture(self, number: int) -> Population:
        """The same as clients of one architecture see it: with their network, and a memory for their models."""
        if self.task.architecture is None:
            return self
        task, memory = self.task.by_architecture[number], self.memory.beside(f"architecture {number}")
        return replace(self, task=task, memory=memory)

    def with_memory(self, memory: Memory) -> Population:
        """Return the same clients with another memory."""
        return replace(self, memory=memory)

    def with_network(self, network: Network) -> Population:
        """Return the same clients with another network of the same leaves."""
        return replace(self, task=replace(self.task, network=network))
