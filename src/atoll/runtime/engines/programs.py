"""A step made executable: as it is, traced into a flat list of tensor operations, compiled, or as a CUDA graph.

Tracing runs the author's Python once and keeps only the tensor operations, so later steps pay for neither Python nor
`vmap`. Programs are found again by a fingerprint of the step, so a method's step is traced or compiled once for all
rounds; a step that captures tensors has no fingerprint and stays eager.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from atoll.kernel.batch import Batch, gradients_taken
from atoll.kernel.errors import AtollError, CohortError, first_line
from atoll.kernel.fingerprints import Unstable, fingerprint
from atoll.kernel.network import Network, Precision, Variant
from atoll.kernel.params import Stack, Structure, flatten, stacked_leaves, unflatten
from atoll.kernel.randomness import Keys, default_generator

if TYPE_CHECKING:
    from atoll.kernel.batch import Augment
    from atoll.kernel.cohort import Step

log = logging.getLogger("atoll.engine")

Mode = Literal["eager", "traced", "compiled"]
Leaves = list[Tensor]
VARIANTS = ("graph", "columns", "channels_last", "one_core")  # of a plan

# A program pays only if it is called often enough: about the calls it takes to win back what making it costs.
WORTHWHILE_CALLS: dict[Mode, int] = {"eager": 0, "traced": 40, "compiled": 1000}


@dataclass(frozen=True)
class Plan:
    """A plan: how clients are grouped and how their steps run."""

    strategy: Literal["loop", "threads", "chunk", "whole"] = "whole"
    chunk: int | None = None
    mode: Mode = "eager"
    graph: bool = False  # capture as a CUDA graph
    own_data: bool = False  # which reads a copy of the samples, because others come in the next round, as to a server
    columns: bool = False  # convolutions as matrix products
    channels_last: bool = False
    one_core: bool = False  # small steps gain little from several cores, and suffer when others use them
    plain: bool = False  # the step cannot be vectorised, not even for one client
    precision: Precision = "fp32"

    @property
    def vectorised(self) -> bool:
        """Whether several clients share one call of `Algorithm.local`."""
        return self.strategy in ("chunk", "whole") or (self.strategy == "threads" and (self.chunk or 1) > 1)

    def size(self, clients: int) -> int:
        """Return how many clients one call of `Algorithm.local` gets."""
        return min(clients, self.chunk or clients) if self.vectorised else 1

    def __str__(self) -> str:
        grouping = self.strategy if self.chunk is None else f"{self.strategy}:{self.chunk}"
        extras = [name for name in (*VARIANTS, "plain") if getattr(self, name)]
        return " ".join([grouping, self.mode, *extras, self.precision])


class NotVectorisable(Exception):
    """The step or the model uses an operation that cannot run for many clients at once."""


@contextmanager
def vectorising() -> Iterator[None]:
    """Turn whatever fails under `vmap` into NotVectorisable: it may succeed for one client at a time."""
    try:
        yield
    except AtollError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise NotVectorisable(first_line(error)) from error


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Use the GPU's TF32 units only where asked to."""
    if not torch.cuda.is_available():
        yield
        return
    wanted = "tf32" if precision == "tf32" else "ieee"
    places: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = wanted
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


@dataclass(frozen=True)
class Work:
    """One step of one scan, with everything about it that stays the same from batch to batch."""

    step: Step
    carry: Structure
    given: Structure
    network: Network
    variant: Variant
    vectorised: bool
    x: Tensor
    y: Tensor
    masked: bool
    keyed: bool
    seeding: Callable[[int], int]  # step number -> key, for models that draw from torch's own generator
    augment: Augment | None = None  # how training samples are changed
    streams: int | None = None  # how many batches a step gets, as a tuple; None: one batch by itself
    gradients: list[int] = field(default_factory=lambda: [0])  # that one step takes; known once its Python has run

    def one_client(
        self, carry: Leaves, given: Leaves, x: Tensor, y: Tensor, mask: Any, low: Any, high: Any, time: Any
    ) -> Leaves:
        """Run the step for one client and one batch, on flat lists of tensors."""
        keys = Keys(low, high).fold(time) if self.keyed else None
        batch = Batch(x, y, mask, keys, self.network, self.variant, self.vectorised, self.augment)
        batches = batch.view() if self.streams is None else tuple(one.view() for one in batch.split(self.streams))
        before, count = unflatten(self.carry, carry, one_client=True), gradients_taken()
        after, structure = flatten(self.step(before, batches, unflatten(self.given, given, one_client=True)))
        self.gradients[0] = gradients_taken() - count
        _require_same(structure, flatten(before)[1], after, carry)
        return after

    def all_clients(
        self, carry: Leaves, given: Leaves, index: Tensor, mask: Any, low: Any, high: Any, time: Any
    ) -> Leaves:
        """Run the step for every row of `carry`."""
        x, y = self.x[index], self.y[index]
        if not self.vectorised:
            rows = stacked_leaves(self.given)
            alone = [leaf[0] if row else leaf for leaf, row in zip(given, rows, strict=True)]
            own_low, own_high, own_time = (low[0], high[0], time[0]) if self.keyed else (None, None, None)
            own_mask = mask[0] if self.masked else None
            own = [leaf[0] for leaf in carry]
            after = self.one_client(own, alone, x[0], y[0], own_mask, own_low, own_high, own_time)
            return [leaf[None] for leaf in after]
        axes = [0 if row else None for row in stacked_leaves(self.given)]
        masked, keyed = 0 if self.masked else None, 0 if self.keyed else None
        call = vmap(self.one_client, in_dims=(0, axes, 0, 0, masked, keyed, keyed, keyed))
        return call(carry, given, x, y, mask, low, high, time)

    def rows(self, given: Leaves, size: int) -> Leaves:
        """Return `given` for the first `size` clients."""
        return [leaf[:size] if row else leaf for leaf, row in zip(given, stacked_leaves(self.given), strict=True)]


def _require_same(after: Structure, before: Structure, new: Leaves, old: Leaves) -> None:
    if after != before:
        reason = "a step captured a Stack" if "stack" in repr(after) else "names or nesting differ"
        raise CohortError(
            f"A step must return a carry made like the one it was given ({reason}).\n"
            f"given:    {_abbreviate(before)}\nreturned: {_abbreviate(after)}",
            hint="pass what differs between clients in `carry` or `given`; inside a step it is Params.",
        )
    for position, (a, b) in enumerate(zip(new, old, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise CohortError(
                "A step must return a carry of the same shapes and types. "
                f"Leaf {position} was {tuple(b.shape)} {b.dtype}, now it is {tuple(a.shape)} {a.dtype}.",
                hint="a per-client value captured from outside the step often shows like this; use `given`.",
            )


def _abbreviate(structure: Structure) -> str:
    if structure.kind == "rows":
        return "tensor"
    if structure.kind in ("dict", "record"):
        pairs = zip(structure.names, structure.parts, strict=True)
        return "{" + ", ".join(f"{name}: {_abbreviate(part)}" for name, part in pairs) + "}"
    if structure.kind in ("params", "stack"):
        return f"{structure.kind.capitalize()}({', '.join(structure.names[:4])}{', ...' * (len(structure.names) > 4)})"
    return (
        structure.kind if not structure.parts else f"{structure.kind}({', '.join(map(_abbreviate, structure.parts))})"
    )


class Timed(NamedTuple):
    """The clients' keys, in two words, and how many steps each has done before: a step's draws depend on its number."""

    low: Tensor
    high: Tensor
    before: Tensor


class Running:
    """A scan under way: `carry` after the steps so far. This one calls a function that returns new tensors."""

    def __init__(self, call: Callable[..., Leaves], carry: Leaves, given: Leaves, timed: Timed | None) -> None:
        self.carry, self._call, self._given = carry, call, given
        self._timed = timed

    def step(self, index: Tensor, mask: Tensor | None, time: int) -> None:
        """Take one more batch."""
        keys = (None, None, None) if self._timed is None else self._timed._replace(before=self._timed.before + time)
        self.carry = self._call(self.carry, self._given, index, mask, *keys)

    def end(self) -> Leaves:
        """Return the carry, in tensors of its own."""
        return self.carry

    def take(self, lanes: Tensor) -> Leaves:
        """Return the carry of some lanes."""
        return [leaf[lanes] for leaf in self.carry]

    def put(self, lanes: Tensor, carry: Leaves, given: Leaves, timed: Timed | None, stacked: list[bool]) -> None:
        """Let other clients go on in some lanes; of `given`, only what is stacked is theirs."""
        self.carry = [leaf.index_copy(0, lanes, new) for leaf, new in zip(self.carry, carry, strict=True)]
        self._given = [
            leaf.index_copy(0, lanes, new) if row else leaf
            for leaf, new, row in zip(self._given, given, stacked, strict=True)
        ]
        if self._timed is not None and timed is not None:
            pairs = zip(self._timed, timed, strict=True)
            self._timed = Timed(*(old.index_copy(0, lanes, new) for old, new in pairs))


class EagerProgram:
    """Runs the step's own Python for every batch."""

    def begin(self, work: Work, carry: Leaves, given: Leaves, timed: Timed | None) -> Running:
        """Start a scan."""
        return Running(functools.partial(self.call, work), carry, given, timed)

    def call(self, work: Work, *arguments: Any) -> Leaves:
        """Run the step on one batch."""
        if not work.vectorised:
            return work.all_clients(*arguments)
        with vectorising():
            return work.all_clients(*arguments)


class SeededLoop(Running):
    """A scan of a model that draws from torch's own generator: each step draws from its own key."""

    def __init__(self, work: Work, carry: Leaves, given: Leaves, timed: Timed | None) -> None:
        super().__init__(work.all_clients, carry, given, timed)
        self._seeding = work.seeding

    def step(self, index: Tensor, mask: Tensor | None, time: int) -> None:
        """Take one more batch."""
        with default_generator(self._seeding(time)):
            super().step(index, mask, time)


class SeededProgram:
    """The eager program of a model that draws from torch's own generator."""

    def begin(self, work: Work, carry: Leaves, given: Leaves, timed: Timed | None) -> Running:
        """Start a scan."""
        return SeededLoop(work, carry, given, timed)


class TracedProgram:
    """Calls the traced operations; a compiled one overwrites its carry, which saves a pass over memory."""

    def __init__(self, work: Work, example: tuple[Any, ...], *, compiled: bool, in_place: bool) -> None:
        self.in_place = in_place
        counts = len(example[0]), len(example[1])
        carry, given, *rest = example
        optional = [value is not None for value in rest]

        def run_flat(*tensors: Tensor) -> Leaves:
            carry = list(tensors[: counts[0]])
            given = list(tensors[counts[0] : sum(counts)])
            x, y, *some = tensors[sum(counts) :]
            supply = iter(some)
            arguments = [next(supply) if present else None for present in optional]
            after = replace(work, x=x, y=y).all_clients(carry, given, *arguments)  # type: ignore[arg-type]
            if not in_place:
                return after
            for old, new in zip(carry, after, strict=True):
                old.copy_(new)
            return []

        inputs = [*_copy(carry), *_copy(given), work.x, work.y, *(value for value in rest if value is not None)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Every value is described by an empty copy of it. Without a context, each copy makes a mode of its own,
            # which takes longer than the tracing itself.
            with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
                graph = make_fx(run_flat)(*inputs)
            _drop_detaches(graph)
            self._run: Callable[..., Any] = graph
            if compiled:
                self._run = torch.compile(graph, dynamic=False)
                self._run(*inputs)
        self.gradients = work.gradients[0]

    def call(self, work: Work, carry: Leaves, given: Leaves, *rest: Any) -> Leaves:
        """Run the step on one batch; return the new carry, written over the old one if the program is in place."""
        after = self._run(*carry, *given, work.x, work.y, *(value for value in rest if value is not None))
        return carry if self.in_place else [leaf.contiguous() for leaf in after]

    def begin(self, work: Work, carry: Leaves, given: Leaves, timed: Timed | None) -> Running:
        """Start a scan on the data of `work`: the program itself holds none."""
        work.gradients[0] = self.gradients
        mine = _copy(carry) if self.in_place else [leaf.contiguous() for leaf in carry]
        return Running(functools.partial(self.call, work), mine, [leaf.contiguous() for leaf in given], timed)


def _copy(leaves: Leaves) -> Leaves:
    """Copy leaves into plain layout: a traced program holds for one layout of its inputs only."""
    return [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]


def _drop_detaches(graph: torch.fx.GraphModule) -> None:
    """Drop every `detach`: without autograd it means nothing, and would cost a call each."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()


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
        self.carry, self._given = _copy(carry), _copy(given)
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
        with torch.cuda.graph(self._graph, pool=pool):
            after = program.call(*arguments)
            if not program.in_place:
                for old, new in zip(self.carry, after, strict=True):
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
            work.vectorised, work.streams, work.augment, leaves, work.x.device,
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
            return TracedProgram(work, example, compiled=mode == "compiled", in_place=graph or mode == "compiled")
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


def forbid_captured_stacks(step: Callable[..., Any]) -> None:
    """Raise if a step captures a Stack: every client would get the values of all clients."""
    if isinstance(step, functools.partial):
        step = step.func
    if not isinstance(step, FunctionType):
        return
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
        captured = cell.cell_contents
        if isinstance(captured, Stack):
            raise CohortError(
                f"A step must be given per-client values, not capture them. It captures the Stack `{name}`.",
                hint=f"pass it: cohort.scan(step, carry, given={{{name!r}: {name}}}).",
            )
        if isinstance(captured, FunctionType) and captured is not step:
            forbid_captured_stacks(captured)
