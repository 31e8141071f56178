"""The parts of a job: clients that can train together, who have one architecture and belong to one group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.kernel.cohort import Cohort, width_for
from atoll.kernel.job import Assignment, Job
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.population import Population

Clients = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """A job's clients of one architecture and one group, and the population they belong to."""

    job: Job
    population: Population
    clients: Clients
    usual: int
    runs: int = 1  # side by side, which share programs

    @property
    def task(self) -> Task:
        """The task, as these clients have it."""
        return self.population.task

    @property
    def name(self) -> str:
        """The name of this work in logs."""
        return f"{self.job.phase.name} {self.job.method}"

    def prepare(self, clients: Clients, scanner: Scanner) -> tuple[Assignment, Cohort]:
        """Return the assignment of some clients, and these clients as the work sees them."""
        assignment = self.job.assign(clients)
        return assignment, Cohort(self.population.facts, clients, self.job.round, scanner, assignment.unicast)


def work_of(assignment: Assignment) -> Callable[[Cohort], Any]:
    """Return the work that an assignment asks for; no client's code in it can end the program."""

    def work(cohort: Cohort) -> Any:
        try:
            return assignment.run(cohort)
        except SystemExit as error:
            raise RuntimeError(f"a client's code ended itself (exit code {error.code})") from error

    return work


def parts_of(job: Job, population: Population) -> list[Part]:
    """Divide a job into parts: the clients of each architecture and group."""
    whole = Part(job, population, np.asarray(job.clients, dtype=np.int64), job.usual)
    parts, architecture = [whole], population.task.architecture
    if architecture is not None:
        divided = _divide(whole, architecture)
        parts = [replace(part, population=population.of_architecture(number)) for number, part in divided]
    parts = parts if job.groups is None else [one for part in parts for _, one in _divide(part, job.groups)]
    if not job.method.items_by:
        return parts
    return [one for part in parts for _, one in _divide(part, class_sizes(part.task))]


def class_sizes(task: Task) -> NDArray[np.int64]:
    """Return each client's number of training samples, as a power of two: users of one size have messages of one size.

    A few users know a hundred times as many items as most. Together with these, all messages would be so long.
    """
    sizes = task.splits["train"].sizes(np.arange(task.clients))
    widths: NDArray[np.int64] = np.array([width_for(size) for size in sizes.tolist()], dtype=np.int64)
    return widths


def _divide(part: Part, numbers: NDArray[np.int64]) -> list[tuple[int, Part]]:
    """Divide a part by the number of each client; all clients of the population have one."""
    mine = numbers[part.clients]
    usual = {number: min(part.usual, int((numbers == number).sum())) for number in np.unique(mine).tolist()}
    return [(number, replace(part, clients=part.clients[mine == number], usual=n)) for number, n in usual.items()]


def sort_by_size(part: Part) -> Clients:
    """Sort clients by falling number of training samples, so those trained together take equally many steps."""
    clients = np.sort(part.clients)
    sizes = part.task.splits["train"].sizes(clients)
    ordered: Clients = clients[np.argsort(-sizes, kind="stable")]
    return ordered
