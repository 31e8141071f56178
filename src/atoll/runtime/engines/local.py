"""The engine of one machine: runs local work one client at a time, in threads, in chunks or as a whole cohort.

Which of these is fastest is measured, see `planning.py`.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.data.task import Task
from atoll.kernel.errors import AtollError, EngineError
from atoll.kernel.job import Done, Job, Lost
from atoll.kernel.network import Precision
from atoll.runtime.cores import count_cores
from atoll.runtime.engines.measuring import limit_cores, one_thread_each
from atoll.runtime.engines.parts import Part, parts_of, sort_by_size, work_of
from atoll.runtime.engines.plan import NotVectorisable, Plan, arithmetic
from atoll.runtime.engines.planning import Planner, parse_strategy
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.engines.together import Together
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench

log = logging.getLogger("atoll.engine")

Clients = NDArray[np.int64]
T = TypeVar("T")


class LocalEngine(Planner):
    """Runs jobs on this machine's CPU or GPU.

    `strategy` is `auto`, `loop`, `threads`, `whole` or `chunk:N`, or a whole plan as logs name it, such as
    `whole traced graph`: then nothing is measured. `compile` is True, False or None for what pays. A reply that takes
    longer than `timeout` seconds counts as lost; a client that never returns is waited for, because work in this
    process cannot be interrupted. With `remember`, what is measured is kept in the user's cache folder for the next
    process, and what is found there is not measured again.
    """

    is_dear = False  # a round can be played again
    secret: bytes | None = None  # noise follows from the seed

    def __init__(
        self,
        *,
        device: str = "auto",
        strategy: str = "auto",
        compile: bool | None = None,  # noqa: A002 - the word users know
        precision: Precision = "fp32",
        dtype: torch.dtype = torch.float32,
        timeout: float | None = None,
        remember: bool = True,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
            raise EngineError(f"`device` must be auto, cpu, cuda, cuda:N or mps. Got {device!r}.")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise EngineError(
                f"Device {device!r} must be present. This machine has no CUDA device.",
                hint="use `device=cpu`.",
            )
        if device == "mps" and not torch.backends.mps.is_available():
            raise EngineError(
                "Device 'mps' must be present. This machine has no Apple GPU, or its torch does not support it.",
                hint="use `device=cpu`.",
            )
        if device == "mps" and dtype == torch.float64:
            raise EngineError("`dtype` must be float32 on Apple GPUs, which have no float64. Got float64.")
        if timeout is not None and not timeout > 0:
            raise EngineError(
                f"`timeout` must be a number of seconds above 0, or None for no limit. Got {timeout!r}.",
                hint="leave out `timeout` to wait for every client.",
            )
        if precision not in ("fp32", "tf32", "bf16"):
            raise EngineError(f"`precision` must be fp32, tf32 or bf16. Got {precision!r}.")
        self.device = torch.device(device)
        self.options: dict[str, Any] = {  # what was asked for, for the run's configuration
            "device": device, "strategy": strategy, "compile": compile, "precision": precision, "timeout": timeout,
        }  # fmt: skip
        grouping, *words = strategy.split() or [""]
        self.strategy, self.chunk = parse_strategy(grouping)
        self.spelled = self._parse_plan(words, precision, compile) if words else None
        self.compile, self.precision, self.dtype, self.timeout = compile, precision, dtype, timeout
        self.remember = remember
        self.threads = count_cores()
        self.programs = Programs()
        self.plans = {}
        self.together: Together | None = None  # while several runs share this engine
        self._moved: dict[Hashable, tuple[Task, Task]] = {}  # the last task, and what became of it here

    def __repr__(self) -> str:
        return f"<LocalEngine on {self.device}: {self.options['strategy']}, {self.precision}>"

    @property
    def channels_last(self) -> bool:
        """Whether images are best laid out as tensor cores read them, where no plan was measured."""
        return self.device.type == "cuda" and self.precision != "fp32"

    @property
    def compiles(self) -> bool:
        """Whether compiling was asked for, whatever it takes."""
        return bool(self.compile) or (self.spelled is not None and self.spelled.mode == "compiled")

    def place(self, task: Task) -> Task:
        """Move the tensors of the task to where this engine computes."""
        if self.device.type == "cuda" and self.precision == "fp32" and self.best_alone(task):
            log.warning("fp32 leaves tensor cores idle: with precision tf32 or bf16 this may be five times as fast")
        if self.together is not None:
            return self.together.place(task)
        # Runs of a comparison have one task: its samples are moved once, and programs that read them are found again.
        key = id(task.x), task.x._version, id(task.y), task.y._version
        if key not in self._moved:
            self._moved = {
                key: (task, task.to(self.device, self.dtype))
            }  # the task stays alive, so no other is its key
        here = self._moved[key][1]
        return task.to(self.device, self.dtype, table=(here.x, here.y, 0))

    def run_together(self, tasks: Sequence[Task], works: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Do works that use this engine for runs on some tasks, side by side; return what each returned or raised.

        They take turns, and scans whose steps agree run as one, so their clients fill the lanes of one program.
        """
        if self.timeout is not None:
            raise EngineError(
                f"Runs side by side wait for each other, so there must be no `timeout`. Got {self.timeout:g} s.",
                hint="leave out `timeout`, or run them one after another: `together=False`.",
            )
        self.together = Together(self.programs, tasks, self.device, self.dtype)
        try:
            return self.together.run(works)
        finally:
            self.together = None

    def clock(self) -> float:
        """Return seconds: this run's own, where several run side by side."""
        return time.perf_counter() if self.together is None else self.together.clock()

    def bench(self, population: Population, round: int) -> Workbench:
        """Return the server's place to work in a round."""
        return Workbench(population, self, round)

    def run(self, job: Job, population: Population) -> Iterator[Done[Any] | Lost]:
        """Do a job; yield the outcomes of all clients, chunk after chunk, in an order that depends on clients alone.

        The clients of a chunk have one architecture and belong to one group, and those of each follow each other.
        """
        yield from require_survivors(self.outcomes(job, population), job)

    def outcomes(self, job: Job, population: Population) -> Iterator[Done[Any] | Lost | Exception]:
        """Do a job as `run` does; yield also what clients raised, whoever is left."""
        for part in parts_of(job, population):
            yield from self._run_part(part)

    # -- running ---------------------------------------------------------------------------------------------------
    def _run_part(self, part: Part) -> Iterator[Done[Any] | Lost | Exception]:
        """Yield the outcomes of all clients of a part, who have one architecture."""
        runs = 1 if self.together is None else self.together.runs
        part = replace(part, clients=sort_by_size(part), usual=max(part.usual, len(part.clients)), runs=runs)
        waiting, plan = part.clients, self._plan(part)
        while len(waiting):
            try:
                for outcome in self._run_chunks(replace(part, clients=waiting), plan):
                    if not isinstance(outcome, Exception):
                        waiting = waiting[len(outcome.clients) :]
                    yield outcome
            except NotVectorisable as reason:  # those that are done stay done; the others go on one at a time
                plan = self.plans[self._key(part)] = self._plan_alone(part, reason)

    def _run_chunks(self, part: Part, plan: Plan) -> Iterator[Done[Any] | Lost | Exception]:
        size = plan.size(len(part.clients))
        chunks = [part.clients[start : start + size] for start in range(0, len(part.clients), size)]
        attempt = self._attempt_in_threads if plan.strategy == "threads" else self._attempt_in_turn
        for clients, outcome in attempt(part, plan, chunks):
            if not isinstance(outcome, Exception):
                yield outcome
            elif len(clients) == 1:
                yield outcome
                yield Lost(clients, f"{type(outcome).__name__}: {outcome}")
            else:  # find out which of them failed
                alone = replace(plan, strategy="loop", chunk=None)
                for client in clients:
                    one = np.array([client])
                    result = self._attempt(part, alone, one)
                    if isinstance(result, Exception):
                        yield result
                        yield Lost(one, f"{type(result).__name__}: {result}")
                    else:
                        yield result

    def _attempt_in_turn(self, part: Part, plan: Plan, chunks: list[Clients]) -> Iterator[tuple[Clients, Any]]:
        for clients in chunks:
            yield clients, self._attempt(part, plan, clients)

    def _attempt_in_threads(self, part: Part, plan: Plan, chunks: list[Clients]) -> Iterator[tuple[Clients, Any]]:
        """Run one chunk per thread; yield results in order, with only a few of them waiting."""
        waiting: deque[tuple[Clients, Future[Any]]] = deque()
        upcoming = iter(chunks)
        with one_thread_each():
            try:
                for clients in itertools.islice(upcoming, 2 * self.threads):
                    waiting.append((clients, self._pool.submit(self._attempt, part, plan, clients)))
                while waiting:
                    clients, future = waiting.popleft()
                    yield clients, future.result()
                    for following in itertools.islice(upcoming, 1):
                        waiting.append((following, self._pool.submit(self._attempt, part, plan, following)))
            finally:  # after an error, nothing may go on in the background
                for _, future in waiting:
                    future.cancel()
                wait([future for _, future in waiting])

    def _attempt(self, part: Part, plan: Plan, clients: Clients) -> Done[Any] | Lost | Exception:
        """Do the work of some clients; an exception of theirs is returned, not raised."""
        scanner = Scanner(
            part.population,
            plan,
            self.programs,
            nominal=plan.size(part.usual),
            calls=self._calls(part, plan),
            trainings=part.population.trainings,
            together=self.together,
            splits=part.job.phase.splits,
        )
        began = time.perf_counter()
        try:
            with torch.no_grad(), arithmetic(plan.precision):
                assignment, cohort = part.prepare(clients, scanner)  # the server's work, for which all cores are there
                with limit_cores(plan):
                    result = work_of(assignment)(cohort)
        except (AtollError, NotVectorisable):
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise EngineError(
                f"The work of {len(clients)} client(s) at a time must fit in memory on {self.device}. It does not: "
                f"{str(error).strip() or type(error).__name__}",
                hint="take a smaller model, batch or cohort, or train fewer clients at a time: `strategy=loop`.",
            ) from error
        except Exception as error:  # noqa: BLE001 - a client may fail in any way, and the round goes on
            log.warning("round %d: work of client(s) %s failed: %s", part.job.round, _list_clients(clients), error)
            return error
        took = time.perf_counter() - began
        if self.timeout is not None and took > self.timeout and part.job.phase.replies:
            reason = f"late: {took:.2f} s, allowed {self.timeout:g} s"
            # The time of several clients says nothing about one of them: they go again, one by one.
            return Lost(clients, reason) if len(clients) == 1 else TimeoutError(reason)
        return Done(clients, result, part.population.memory, assignment.unicast, cohort.notes, scanner.tally.gradients)


def require_survivors(outcomes: Iterable[Done[Any] | Lost | Exception], job: Job) -> Iterator[Done[Any] | Lost]:
    """Yield what became of clients; if all of them are lost, raise what one of them raised."""
    lost, failure = 0, None
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            failure = outcome
            continue
        lost += len(outcome.clients) if isinstance(outcome, Lost) else 0
        yield outcome
    if failure is not None and lost == len(job.clients):
        raise failure  # nobody is left: this is the method's fault, not a client's


def _list_clients(clients: Clients) -> str:
    shown = ", ".join(map(str, clients[:5]))
    return shown if len(clients) <= 5 else f"{shown}, ... ({len(clients)} in all)"
