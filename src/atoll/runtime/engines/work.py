"""One step of a scan, for one client and for all: what programs are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.func import vmap

from atoll.kernel.batch import Batch, gradients_taken
from atoll.kernel.errors import CohortError
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Stack, Structure, flatten, stacked_leaves, unflatten
from atoll.kernel.randomness import Keys

if TYPE_CHECKING:
    from atoll.kernel.batch import Augment
    from atoll.kernel.cohort import Step


Leaves = list[Tensor]


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
    apart: bool = False  # whether each client has a copy of everything that is given, because their runs differ
    gradients: list[int] = field(default_factory=lambda: [0])  # that one step takes; known once its Python has run

    @functools.cached_property
    def per_client(self) -> list[bool]:
        """Which of what is given is different for every client."""
        return stacked_leaves(self.given)

    @functools.cached_property
    def stacked(self) -> list[bool]:
        """Which of what is given has a row for every client that runs."""
        return [row or self.apart for row in self.per_client]

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
            alone = [leaf[0] if row else leaf for leaf, row in zip(given, self.stacked, strict=True)]
            own_low, own_high, own_time = (low[0], high[0], time[0]) if self.keyed else (None, None, None)
            own_mask = mask[0] if self.masked else None
            own = [leaf[0] for leaf in carry]
            after = self.one_client(own, alone, x[0], y[0], own_mask, own_low, own_high, own_time)
            return [leaf[None] for leaf in after]
        axes = [0 if row else None for row in self.stacked]
        masked, keyed = 0 if self.masked else None, 0 if self.keyed else None
        call = vmap(self.one_client, in_dims=(0, axes, 0, 0, masked, keyed, keyed, keyed))
        return call(carry, given, x, y, mask, low, high, time)

    def rows(self, given: Leaves, size: int) -> Leaves:
        """Return `given` for the first `size` clients."""
        return [leaf[:size] if row else leaf for leaf, row in zip(given, self.stacked, strict=True)]


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


def prepare_networks(work: Work) -> None:
    """Make this thread's copies of the networks that a step asks: the clients' own, and those bound to it.

    Inside `vmap` they cannot be made.
    """
    for network in (work.network, *_bound_networks(work.step)):
        network.prepare(work.variant)


def _bound_networks(step: Any) -> Iterator[Network]:
    """Yield the networks that are bound to a step, or to one inside it."""
    if isinstance(step, functools.partial):
        for bound in (*step.args, *step.keywords.values()):
            if isinstance(bound, Network):
                yield bound
            yield from _bound_networks(bound)


def forbid_captured_stacks(step: Callable[..., Any]) -> None:
    """Raise if a step captures a Stack: every client would get the values of all clients."""
    if isinstance(step, functools.partial):
        for bound in step.args:
            if isinstance(bound, FunctionType):
                forbid_captured_stacks(bound)
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
