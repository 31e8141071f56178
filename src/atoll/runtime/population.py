"""All clients of a federation, as an engine holds them, and what their work leaves with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.kernel.algorithm import Update
from atoll.kernel.engine import Memory
from atoll.kernel.job import Done
from atoll.kernel.network import Network
from atoll.kernel.params import flatten, stacked_leaves, widest
from atoll.kernel.task import Facts

if TYPE_CHECKING:
    from atoll.runtime.engines.trainings import Trainings

Notes = list[tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]]  # some clients, and their numbers by name
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


def reduce_to_numbers(done: Done[Update]) -> NDArray[np.float64] | None:
    """Return numbers for each client, [number, client], that are finite if all that it returns is; None if all is.

    The first ones are its notes, in order.
    """
    update = done.result
    sent = {} if update.summed else dict(update.send)  # what was added up was finite before
    leaves, structure = flatten([sent, update.keep, dict(update.beside)])
    values = [leaf for leaf, row in zip(leaves, stacked_leaves(structure), strict=True) if row]
    values += [] if update.weight is None or update.summed else [update.weight]
    sums = [leaf.flatten(1).sum(1) if leaf.ndim > 1 else leaf for leaf in values if leaf.is_floating_point()]
    notes = [value.to(widest(value.device)) for value in done.notes.values()]
    if not sums and not notes:
        return None
    # One number per client for each leaf: a sum is finite if all of its terms are.
    numbers: NDArray[np.float64] = torch.stack([*notes, *(one.to(widest(one.device)) for one in sums)]).cpu().numpy()
    return numbers


def keep_at_clients(done: Done[Any], round: int) -> None:
    """Put what an update leaves with the clients into their memory, and what pieces leave into theirs."""
    for name, tree in done.result.beside.items():
        done.memory.beside(name).keep(done.clients, tree, round=round)
    if done.result.keep is not None:
        done.memory.keep(done.clients, done.result.keep, round=round)
