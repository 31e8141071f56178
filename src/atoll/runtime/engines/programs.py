"""A step made executable: as it is, traced into a flat list of tensor operations, compiled, or as a CUDA graph.

Tracing runs the author's Python once and keeps only the tensor operations, so later steps pay for neither Python nor
`vmap`. Programs are found again by a fingerprint of the step, so a method's step is traced or compiled once for all
rounds; a step that captures tensors has no fingerprint and stays eager. Methods whose steps come to the same operations
share what is compiled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.kernel.errors import first_line
from atoll.kernel.fingerprints import Unstable, fingerprint
from atoll.runtime.engines.compiling import Compiler
from atoll.runtime.engines.plan import Mode, Plan
from atoll.runtime.engines.running import EagerProgram, Running, SeededProgram, TracedProgram, copy_leaves
from atoll.runtime.engines.work import Leaves, Timed, Work

log = logging.getLogger("atoll.engine")

# A program pays only if it is called often enough: about the calls it takes to win back what making it costs.
WORTHWHILE_CALLS: dict[Mode, int] = {"eager": 0, "traced": 40, "compiled": 1000}


class GraphProgram(Running):
    """A CUDA graph over a traced program: a step copies its batch numbers in and replays the graph.

    It reads the samples where they are, or, with `own_data`, from a copy, into which others can be written.
    """

    def __init__(
        self, program: TracedProgram, work: Work, example: tuple[Any, ...], pool: Any, *, own_data: bool
    ) -> None:
        carry, given, index, mask, low, high, time = example
        if own_data:
            work = replace(work, x=work.x.clone(), y=work.y.clone())
        self._own_data, self._work = own_data, work
        self._program = program  # the graph reads its tensors, so they must live as long
        self._gradients = program.gradients
        self.carry, self._given = copy_leaves(carry), copy_leaves(given)
        self._index, self._mask = index.clone(), None if mask is None else mask.clone()
        self._timed = None if low is None else Timed(low.clone(), high.clone(), time.clone())
        self._time = None if time is None else time.clone()
        arguments = (
            work, self.carry, self._given, self._index, self._mask, *(self._timed or (None, None))[:2], self._time
        )  # fmt: skip
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                program.call(*arguments)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may be reading tensors to write them to disk, which has nothing to do with what is captured.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            after = program.call(*arguments)
            if not program.in_place:  # a value may be on its way to another place
                for old, new in zip(self.carry, [leaf.clone() for leaf in after], strict=True):
                    old.copy_(new)

    def begin(self, work: Work, carry: Leaves, given: Leaves, timed: Timed | None) -> Running:
        """Start a scan: the values are copied to where the graph reads them."""
        work.gradients[0] = self._gradients
        if self._own_data:
            self._work.x.copy_(work.x)
            self._work.y.copy_(work.y)
        for mine, theirs in zip(self.carry, carry, strict=True):
            mine.copy_(theirs)
        for mine, theirs in zip(self._given, given, strict=True):
            mine.copy_(theirs)
        for kept, now in zip(self._timed or (), timed or (), strict=True):
            kept.copy_(now)
        return self

    def step(self, index: Tensor, mask: Tensor | None, time: int) -> None:
        """Take one more batch."""
        self._index.copy_(index)
        if self._mask is not None and mask is not None:
            self._mask.copy_(mask)
        if self._timed is not None:
            torch.add(self._timed.before, time, out=self._time)
        self._graph.replay()

    def end(self) -> Leaves:
        """Return the carry, in tensors of its own."""
        return [leaf.clone() for leaf in self.carry]

    def put(self, lanes: Tensor, carry: Leaves, given: Leaves, timed: Timed | None, stacked: list[bool]) -> None:
        """Let other clients go on in some lanes, where the graph reads."""
        for mine, theirs in zip(self.carry, carry, strict=True):
            mine.index_copy_(0, lanes, theirs)
        for mine, theirs, row in zip(self._given, given, stacked, strict=True):
            if row:
                mine.index_copy_(0, lanes, theirs)
        for kept, now in zip(self._timed or (), timed or (), strict=True):
            kept.index_copy_(0, lanes, now)


Program = EagerProgram | SeededProgram | TracedProgram | GraphProgram


def on_gpu(x: Tensor) -> bool:
    """Return whether graphs can be captured here; a function, so tests can pretend."""
    return x.is_cuda


class Graphs:
    """CUDA graphs that share their scratch memory, because they never run at the same time."""

    def __init__(self, *, own_data: bool) -> None:
        self.own_data, self.captured = own_data, dict[Hashable, Program]()
        self._pool: Any = None

    def get(self, key: Hashable, program: TracedProgram, work: Work, example: tuple[Any, ...]) -> Program:
        """Return the program as a graph; capture it now if it is new."""
        if key not in self.captured:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                self.captured[key] = GraphProgram(program, work, example, self._pool, own_data=self.own_data)
            except Exception as error:  # noqa: BLE001 - a step that cannot be captured can still run
                log.warning("step cannot be captured as a CUDA graph and runs without one (%s)", first_line(error))
                self.captured[key] = program
        return self.captured[key]


class Programs:
    """All programs made so far."""

    def __init__(self) -> None:
        self._made: dict[Hashable, TracedProgram | EagerProgram] = {}
        self.compiler = Compiler()
        self._lock = threading.Lock()
        self._read: Hashable = None  # the clients' data, which their graphs read
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Forget all graphs and what they read; their scratch memory must not be used again either."""
        self._of_clients, self._of_servers = Graphs(own_data=False), Graphs(own_data=True)

    def get(self, plan: Plan, work: Work, example: tuple[Any, ...], calls: int) -> Program:
        """Return the program for these shapes; make it now if it is new and `calls` calls will pay for it.

        Tracing always pays for a server, which does the same in every round.
        """
        if work.network.draws_globally:
            return SeededProgram()
        if plan.mode == "eager":
            return EagerProgram()
        try:
            print_of_step = fingerprint(work.step)
        except Unstable as reason:
            log.info("step %s stays eager: %s", getattr(work.step, "__qualname__", work.step), reason)
            return EagerProgram()
        graph = plan.graph and on_gpu(work.x)
        leaves = tuple(
            None if leaf is None else (tuple(leaf.shape), leaf.dtype)
            for leaf in (*example[0], *example[1], *example[2:], work.x, work.y)
        )
        key = (
            graph, print_of_step, work.carry, work.given, work.network.signature, work.variant,
            work.vectorised, work.streams, work.augment, work.apart, leaves, work.x.device,
            torch.get_num_threads(),  # compiled code is made for so many
        )  # fmt: skip
        modes: tuple[Mode, ...] = ("compiled", "traced")
        with self._lock:
            for mode in modes[modes.index(plan.mode) :]:
                pays = calls >= WORTHWHILE_CALLS[mode] or (mode == "traced" and plan.own_data)
                if (mode, key) not in self._made and pays:
                    self._made[mode, key] = self._make(mode, graph, work, example)
                program = self._made.get((mode, key))
                if program is not None:
                    return self._capture((mode, key), program, work, example, plan) if graph else program
        return EagerProgram()

    def _make(self, mode: Mode, graph: bool, work: Work, example: tuple[Any, ...]) -> TracedProgram | EagerProgram:
        EagerProgram().call(work, *example)  # a fault of the step itself must show as such
        try:
            compiler = self.compiler if mode == "compiled" else None
            return TracedProgram(work, example, compile=compiler, in_place=graph or compiler is not None)
        except Exception as error:  # noqa: BLE001 - whatever stops the compiler must not stop the run
            return _fall_back(error, mode)

    def _capture(
        self, key: Hashable, program: TracedProgram | EagerProgram, work: Work, example: tuple[Any, ...], plan: Plan
    ) -> Program:
        """Capture the program as a CUDA graph; clients' graphs on other data than those of `work` are forgotten.

        A server has other samples in every round, so its graphs have data of their own.
        """
        if isinstance(program, EagerProgram):
            return program
        if plan.own_data:
            return self._of_servers.get(key, program, work, example)
        data = (work.x.data_ptr(), work.y.data_ptr())
        if data != self._read:
            self._forget_graphs()
            self._read = data
        return self._of_clients.get(key, program, work, example)


def _fall_back(error: Exception, wanted: str) -> EagerProgram:
    log.warning("step stays eager: it cannot be %s (%s)", wanted, first_line(error))
    return EagerProgram()
