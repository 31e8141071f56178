"""Several runs side by side, whose clients share the lanes of one program.

One run with unequal clients leaves a GPU half idle: when few of its clients are left, most lanes are empty. Seeds,
hyperparameters and methods of a comparison fill them. Each run is a thread with a loop, a server and a folder of its
own, and only one of them goes on at a time, until it comes to a scan. When all have come to one, those that are
furthest behind run, and as one with them all whose steps agree (`folds.py`), so runs stay in step with each other. A
run does not notice: it gets the numbers that it would get alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from atoll.data.task import Task
from atoll.runtime.engines.folds import Fold, run_joined
from atoll.runtime.engines.measuring import limit_cores
from atoll.runtime.engines.plan import keep_arithmetic
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.work import Leaves

log = logging.getLogger("atoll.engine")

T = TypeVar("T")
MEMORY_SHARE = 0.25  # of what is free on a GPU may go to the values of the clients of one joined fold
WIDER = 1.5  # a program with up to so many times the lanes that are needed is used, rather than another one made


@dataclass(eq=False)
class Companion(Generic[T]):
    """One of the runs, and where it stands."""

    work: Callable[[], T]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fold: Fold | None = None  # what it waits for
    key: Hashable = None  # of the fold
    answer: Leaves | Exception | None = None
    seconds: float = 0.0  # for which it worked, with its share of what was done together
    since: float = 0.0
    ended: bool = False
    result: T | BaseException | None = None


class Together:
    """Lets runs take turns, and runs their scans together."""

    def __init__(self, programs: Programs, tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> None:
        self._programs, self._pool = programs, Pool(tasks, device, dtype)
        self._back = threading.Semaphore(0)
        self._companions: dict[int, Companion[Any]] = {}  # by their threads
        self._going: Companion[Any] | None = None
        self._stopping = False
        self.runs = 1  # how many there are
        self._widths: dict[Hashable, set[int]] = {}

    def place(self, task: Task) -> Task:
        """Return a task where its runs compute; its samples lie in one table with those of the other runs."""
        return self._pool.place(task)

    def run(self, works: Sequence[Callable[[], T]]) -> list[T | BaseException]:
        """Do all works, in turns; return what each of them returned or raised."""
        companions = [Companion(work) for work in works]
        self.runs = len(companions)
        for companion in companions:
            threading.Thread(target=self._live, args=(companion,), daemon=True).start()
        try:
            while going := [one for one in companions if not one.ended]:
                ready = [one for one in going if one.fold is None]
                for one in ready:
                    self._let_go_on(one)
                if not ready:
                    self._run_next_group(going)
        except BaseException:  # such as Ctrl-C: no run may go on in the background
            self._stopping = True
            if self._going is not None:
                self._back.acquire()
            for one in companions:
                while not one.ended:
                    self._let_go_on(one)
            raise
        return [one.result for one in companions]  # type: ignore[misc]

    def fold(self, fold: Fold) -> Leaves:
        """Wait until all other runs have come to a scan, too; return the carry after this one."""
        me = self._companions[threading.get_ident()]
        me.fold, me.key = fold, fold.key()
        with keep_arithmetic():
            self._stand_back(me)
            me.go.acquire()
        if self._stopping:
            raise KeyboardInterrupt("stopped while other runs were under way")
        answer, me.answer = me.answer, None
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    def clock(self) -> float:
        """Return the seconds that this run has taken: of what is done together, it counts its share of the steps."""
        me = self._companions.get(threading.get_ident())
        now = time.perf_counter()
        return now if me is None else me.seconds + now - me.since

    # -- taking turns ----------------------------------------------------------------------------------------------
    def _live(self, me: Companion[Any]) -> None:
        self._companions[threading.get_ident()] = me
        me.go.acquire()
        try:
            me.result = me.work()
        except BaseException as error:  # noqa: BLE001 - whoever asked for the run decides what to make of it
            me.result = error
        me.ended = True
        self._stand_back(me)

    def _let_go_on(self, one: Companion[Any]) -> None:
        """Let a run go on until it comes to its next scan or ends."""
        one.since, self._going = time.perf_counter(), one
        one.go.release()
        self._back.acquire()
        self._going = None

    def _stand_back(self, me: Companion[Any]) -> None:
        me.seconds += time.perf_counter() - me.since
        self._back.release()

    # -- scans -----------------------------------------------------------------------------------------------------
    def _run_next_group(self, waiting: Sequence[Companion[Any]]) -> None:
        """Run the scans of those runs that are furthest behind, and of all whose steps agree with theirs."""
        groups: dict[Hashable, list[tuple[Companion[Any], Fold]]] = {}
        for one in waiting:
            assert one.fold is not None
            groups.setdefault(one.key, []).append((one, one.fold))
        group = min(groups.values(), key=lambda group: (min(_progress(fold) for _, fold in group), len(group)))
        group = group[: self._count_fitting([fold for _, fold in group])]
        folds = [fold for _, fold in group]
        began = time.perf_counter()
        answers = self._run(group[0][0].key, folds)
        took = time.perf_counter() - began
        steps = sum(fold.steps for fold in folds)
        for (one, fold), answer in zip(group, answers, strict=True):
            one.seconds += took * fold.steps / max(steps, 1)
            one.fold, one.key, one.answer = None, None, answer

    def _run(self, key: Hashable, folds: list[Fold]) -> Sequence[Leaves | Exception]:
        """Run folds as one; return the carry of each, or why there is none."""
        try:
            with limit_cores(folds[0].plan):
                answers = run_joined(folds, self._programs, self._width(key, folds))
            if folds[0].inputs.index.is_cuda:
                torch.cuda.synchronize()  # so each run's clock counts its own share
        except torch.OutOfMemoryError as error:
            if len(folds) == 1:
                return [error]
            log.warning("%d runs do not fit in memory together, and go on one after another", len(folds))
            torch.cuda.empty_cache()
            return [answer for fold in folds for answer in self._run(key, [fold])]
        except Exception as error:  # noqa: BLE001 - each run deals with it as if it were alone
            return [error] * len(folds)
        return answers

    def _width(self, key: Hashable, folds: list[Fold]) -> int:
        """Return how many lanes these folds get: their own ones together, or those of a program that nearly fits."""
        needed = sum(fold.width for fold in folds)
        known = self._widths.setdefault(key, set())
        fitting = [width for width in known if needed <= width <= WIDER * needed]
        width = min(fitting, default=needed)
        known.add(width)
        return width

    def _count_fitting(self, folds: list[Fold]) -> int:
        """Return how many folds, but at least one, fit in memory together."""
        device = folds[0].inputs.index.device
        if device.type != "cuda":
            return len(folds)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        total = 0
        for count, fold in enumerate(folds):
            total += fold.bytes
            if total > MEMORY_SHARE * free:
                return max(count, 1)
        return len(folds)


def _progress(fold: Fold) -> tuple[int, bool]:
    """Return how far a run is: it is evaluated after a round, with the number of the next one, in which it trains."""
    return fold.round, fold.work.variant.train


class Pool:
    """The samples of several tasks in one table on a device, where one program can read them."""

    def __init__(self, tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        tables = {(id(task.x), id(task.y)): task for task in tasks}
        kinds = {(task.x.shape[1:], task.x.dtype, task.y.shape[1:], task.y.dtype) for task in tables.values()}
        self._first: dict[tuple[int, int], int] = {}  # row of each table
        if len(kinds) > 1:  # samples of different shapes or types cannot lie in one table
            return
        start = 0
        for name, task in tables.items():
            self._first[name], start = start, start + len(task.x)
        self._tasks = list(tables.values())  # they stay alive, so no other table has their names
        x, y = torch.cat([task.x for task in self._tasks]), torch.cat([task.y for task in self._tasks])
        self._table = self._move(x), self._move(y)

    def _move(self, values: Tensor) -> Tensor:
        return values.to(self._device, self._dtype if values.is_floating_point() else None)

    def place(self, task: Task) -> Task:
        """Return a task on the device, whose samples are some rows of the table."""
        first = self._first.get((id(task.x), id(task.y)))
        return task.to(self._device, self._dtype, table=None if first is None else (*self._table, first))
