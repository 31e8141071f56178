"""Trying a plan on the first steps of real work, which has no side effects, because local work is a pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from atoll.runtime.engines.figures import Measured
from atoll.runtime.engines.parts import Clients, Part, work_of
from atoll.runtime.engines.plan import Plan, arithmetic
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.scan import Scanner

FORCED = 10**9  # calls ahead of a plan that is being measured or was asked for: its programs are always made


@dataclass(frozen=True)
class Trial:
    """A plan, tried on the first clients of a part, in a pool of so many threads if it asks for threads."""

    plan: Plan
    part: Part
    programs: Programs
    threads: int
    pool: Callable[[], Executor]
    calls: int = FORCED  # that are ahead, if a program is made only where it pays

    def take(self, limit: int) -> Measured:
        """Take the first steps of every scan, at most `limit`; make the programs that are missing."""
        return self._take(limit)[0]

    def measure(self, matters: Callable[[Measured], bool]) -> Measured:
        """Time the plan as exactly as the figure `matters`, after one step that makes its programs."""
        first = self.take(limit=1)  # it also makes the programs, and so takes longer than the others
        if not matters(first):
            return replace(first, rough=True)
        # The better of two, so a moment in which the machine was busy elsewhere decides nothing.
        rough, seconds, steps = min((self._take(limit=2) for _ in range(2)), key=lambda one: one[1:])
        if not steps or seconds >= 0.2 or not matters(rough):
            return replace(rough, rough=bool(steps) and seconds < 0.2)
        # Too short to trust: take as many steps as fit into a fifth of a second.
        limit = int(np.clip(0.4 / max(seconds, 1e-6), 2, 64))
        found = [self._take(limit)]
        found += [self._take(limit) for _ in range(int(np.clip(0.2 / max(found[0][1], 1e-6), 1, 8)))]
        return min((one for one, *_ in found), key=lambda one: one.seconds)

    def _take(self, limit: int) -> tuple[Measured, float, int]:
        """Take some steps; return what follows, the seconds and the client-steps taken."""
        groups = self._groups()
        scanners = [
            Scanner(
                self.part.population,
                self.plan,
                self.programs,
                calls=self.calls,
                limit=limit,
                splits=self.part.job.phase.splits,
            )
            for _ in groups
        ]

        def run(position: int) -> None:
            with torch.no_grad(), arithmetic(self.plan.precision):
                assignment, cohort = self.part.prepare(groups[position], scanners[position])
                with limit_cores(self.plan):
                    work_of(assignment)(cohort)

        if self.plan.strategy == "threads":
            with one_thread_each():
                list(self.pool().map(run, range(len(groups))))
        else:
            run(0)
        seconds = max(scanner.tally.seconds for scanner in scanners)
        steps = sum(scanner.tally.client_steps for scanner in scanners)
        planned = sum(scanner.tally.planned for scanner in scanners)
        samples = self.part.task.splits["train"].sizes(self.part.clients)
        share = samples[: sum(map(len, groups))].sum() / max(samples.sum(), 1)
        return Measured(self.plan, seconds / max(steps, 1), planned / max(share, 1e-9)), seconds, steps

    def _groups(self) -> list[Clients]:
        """Return the clients of the first calls: one call, or one in each thread."""
        clients = self.part.clients
        size = self.plan.size(len(clients))
        workers = self.threads if self.plan.strategy == "threads" else 1
        return [clients[start : start + size] for start in range(0, min(workers * size, len(clients)), size)]


def limit_cores(plan: Plan) -> AbstractContextManager[None]:
    """Use one core for a plan that asks for it; in threads, each has one already."""
    return one_thread_each() if plan.one_core else nullcontext()


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let several threads share the cores, with one core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
