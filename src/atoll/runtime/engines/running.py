"""Steps under way: the step's own Python, or the operations it was traced to, batch after batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from atoll.kernel.randomness import default_generator
from atoll.runtime.engines.overwriting import overwrite_operands
from atoll.runtime.engines.plan import vectorising
from atoll.runtime.engines.work import Leaves, Timed, Work

Compile = Callable[[torch.fx.GraphModule, Leaves], Callable[..., Any]]  # traced operations, and an example of inputs


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


class RunningAlone(Running):
    """A scan of one client, by a program that knows of no others."""

    def end(self) -> Leaves:
        """Return the carry of a cohort of one."""
        return [leaf[None] for leaf in self.carry]


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
    """Calls the traced operations, or what `compile` makes of them.

    With `in_place` all of its carry is written where it was, unless a value moves within it: so a CUDA graph finds it
    again, and compiled code saves a pass over memory. Otherwise it overwrites what it may, and returns where all is.
    """

    def __init__(self, work: Work, example: tuple[Any, ...], *, compile: Compile | None, in_place: bool) -> None:  # noqa: A002
        self.in_place = in_place
        self._alone = not work.vectorised and not in_place
        counts = len(example[0]), len(example[1])
        carry, given, *rest = example
        optional = [value is not None for value in rest]

        def run_flat(*tensors: Tensor) -> Leaves:
            carry = [leaf[None] if self._alone else leaf for leaf in tensors[: counts[0]]]
            given = list(tensors[counts[0] : sum(counts)])
            x, y, *some = tensors[sum(counts) :]
            supply = iter(some)
            arguments = [next(supply) if present else None for present in optional]
            after = replace(work, x=x, y=y).all_clients(carry, given, *arguments)  # type: ignore[arg-type]
            self.in_place = in_place and not _moves(carry, after)
            if not self.in_place:
                return [leaf[0] for leaf in after] if self._alone else after
            for old, new in zip(carry, after, strict=True):
                old.copy_(new)
            return []

        def make_inputs() -> Leaves:
            """Copy the example, because what overwrites its carry also does so while it is traced and compiled."""
            some = (value for value in rest if value is not None)
            return [*self._own(carry), *copy_leaves(given), work.x, work.y, *some]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Every value is described by an empty copy of it. Without a context, each copy makes a mode of its own,
            # which takes longer than the tracing itself.
            with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
                graph = make_fx(run_flat)(*make_inputs())
            _drop_idle_views(graph)
            if compile is None and not in_place:
                overwrite_operands(graph, len(carry))
            self._run: Callable[..., Any] = graph if compile is None else compile(graph, make_inputs())
        self.gradients = work.gradients[0]

    def call(self, work: Work, carry: Leaves, given: Leaves, *rest: Any) -> Leaves:
        """Run the step on one batch; return the new carry, written over the old one if the program is in place."""
        after = self._run(*carry, *given, work.x, work.y, *(value for value in rest if value is not None))
        return carry if self.in_place else [leaf.contiguous() for leaf in after]

    def begin(self, work: Work, carry: Leaves, given: Leaves, timed: Timed | None) -> Running:
        """Start a scan on the data of `work`: the program itself holds none."""
        work.gradients[0] = self.gradients
        running = RunningAlone if self._alone else Running
        given = [leaf.contiguous() for leaf in given]
        return running(functools.partial(self.call, work), self._own(carry), given, timed)

    def _own(self, carry: Leaves) -> Leaves:
        """Copy a carry, as it will be overwritten; of a client alone, without the axis of clients."""
        return copy_leaves([leaf[0] for leaf in carry] if self._alone else carry)


def _moves(before: Leaves, after: Leaves) -> bool:
    """Return whether a value moves to another place, whose own place may be overwritten before it is read.

    The compiler takes no care of that, not even if the value is copied first.
    """
    places = [leaf.untyped_storage().data_ptr() for leaf in before]
    return any(
        leaf.untyped_storage().data_ptr() in places[:number] + places[number + 1 :] for number, leaf in enumerate(after)
    )


def copy_leaves(leaves: Leaves) -> Leaves:
    """Copy leaves into plain layout: a traced program holds for one layout of its inputs only."""
    return [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]


VIEWS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("detach", "default"), ("expand", "default"), ("permute", "default"), ("select", "int"), ("squeeze", "dim"),
        ("squeeze", "dims"),
        ("t", "default"), ("transpose", "int"), ("unsqueeze", "default"), ("view", "default"),
        ("_unsafe_view", "default"),
    )
)  # fmt: skip


def _drop_idle_views(graph: torch.fx.GraphModule) -> None:
    """Drop views that lead back to a tensor as it was: `vmap` and autograd leave many, and each would cost a call."""
    for node in graph.graph.nodes:
        if node.target not in VIEWS:
            continue
        source = node
        while source.target in VIEWS:
            source = source.args[0]
            if _layout(source) == _layout(node):
                node.replace_all_uses_with(source)
                break
    for node in reversed(graph.graph.nodes):  # what led to them may be of no use either
        if node.target in VIEWS and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()


def _layout(node: torch.fx.Node) -> tuple[torch.Size, tuple[int, ...]]:
    value = node.meta["val"]
    return value.shape, value.stride()
