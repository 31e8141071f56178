"""Folds: scans that are ready to run. Folds of several runs whose steps agree are joined, and run as one.

A fold is the step of a scan with all it needs: what every client begins with, its batches, and how often it steps. In
a joined fold the clients of all runs stand side by side; what one run gives to all of its clients, such as a step size
or the server's model, is looked up by the client's run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.fingerprints import Unstable, fingerprint
from atoll.runtime.engines.lanes import Lanes, place
from atoll.runtime.engines.plan import Plan, arithmetic
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.work import Leaves, Timed, Work, prepare_networks


@dataclass(frozen=True)
class Inputs:
    """The inputs of a fold: one row per client, and one per step and client for `index` and `mask`."""

    carry: Leaves
    given: Leaves
    index: Tensor
    mask: Tensor | None
    timed: Timed | None
    steps: NDArray[np.int64]
    run: Tensor | None = None  # of each client, where several runs give different things to all of their clients

    def permute(self, there: Tensor, order: NDArray[np.int64], rows: list[bool]) -> Inputs:
        """Return the clients in another order."""
        return Inputs(
            [leaf[there] for leaf in self.carry],
            [leaf[there] if row else leaf for leaf, row in zip(self.given, rows, strict=True)],
            self.index[:, there],
            None if self.mask is None else self.mask[:, there],
            self.timed and Timed(*(part[there] for part in self.timed)),
            self.steps[order],
        )


@dataclass(frozen=True)
class Fold:
    """A scan that is ready to run in lanes."""

    plan: Plan
    work: Work
    inputs: Inputs
    width: int  # lanes
    calls: int  # how often such a fold comes
    round: int = 0
    limit: int | None = None  # ticks after which a measurement ends

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.inputs.steps)

    @property
    def steps(self) -> int:
        """The number of steps of all clients."""
        return int(self.inputs.steps.sum())

    @property
    def bytes(self) -> int:
        """How much memory its clients' values take."""
        return sum(leaf[:1].nbytes for leaf in self.inputs.carry) * self.clients

    def key(self) -> Hashable:
        """Return what folds must have in common to be joined; nothing is like a step that nobody can compare."""
        work, inputs = self.work, self.inputs
        try:
            step = fingerprint(work.step)
        except Unstable:
            return id(self)
        given = [leaf[0] if row else leaf for leaf, row in zip(inputs.given, work.stacked, strict=True)]
        values = [*(leaf[0] for leaf in inputs.carry), *given]
        return (
            self.plan, step, work.carry, work.given, work.network.signature, work.variant, work.vectorised,
            work.streams, work.augment, work.masked, work.keyed, work.x.data_ptr(), work.y.data_ptr(),
            inputs.index.shape[2:], tuple((tuple(value.shape), value.dtype) for value in values),
        )  # fmt: skip

    def run(self, programs: Programs) -> tuple[Leaves, int]:
        """Run all clients, of whom `width` train at a time, by one program; return their carry and the steps taken."""
        work, inputs = self.work, self.inputs
        device = inputs.index.device
        lanes = Lanes(inputs.steps, self.width)
        if not lanes.ticks:
            return inputs.carry, 0
        ticks = lanes.ticks if self.limit is None else min(lanes.ticks, self.limit)
        client, step = (place(table[:ticks], device) for table in lanes.table)
        index = inputs.index[step, client]  # [tick, lane, sample]
        mask = None if inputs.mask is None else inputs.mask[step, client]
        carry, given, timed = self._rows(place(lanes.first, device), 0)
        example = (carry, given, index[0], None if mask is None else mask[0], *(timed or (None, None, None)))
        running = programs.get(self.plan, work, example, ticks * self.calls).begin(work, carry, given, timed)
        done, turns = [leaf.clone() for leaf in inputs.carry], lanes.turns(device)
        for tick in range(ticks):
            running.step(index[tick], None if mask is None else mask[tick], tick)
            if (turn := turns.get(tick + 1)) is None:
                continue
            for kept, result in zip(done, running.take(turn.lanes), strict=True):
                kept.index_copy_(0, turn.ended, result)
            if len(turn.begin):
                running.put(turn.lanes[: len(turn.begin)], *self._rows(turn.begin, tick + 1), work.stacked)
        return done, lanes.busy(ticks)

    def _rows(self, clients: Tensor, tick: int) -> tuple[Leaves, Leaves, Timed | None]:
        """Return what some clients begin with; their own first step is at this tick."""
        inputs, stacked = self.inputs, self.work.stacked
        rows = clients if inputs.run is None else inputs.run[clients]
        at = [clients if row else rows for row in self.work.per_client]
        given = [leaf[some] if row else leaf for leaf, some, row in zip(inputs.given, at, stacked, strict=True)]
        timed = inputs.timed and Timed(*(part[clients] for part in inputs.timed))
        if timed is not None:
            timed = timed._replace(before=timed.before - tick)
        return [leaf[clients] for leaf in inputs.carry], given, timed


def join(folds: Sequence[Fold], width: int) -> Fold:
    """Join folds that have a key in common, in so many lanes."""
    first, *others = folds
    if not others:
        return replace(first, width=width)
    every = [fold.inputs for fold in folds]
    longest = max(len(inputs.index) for inputs in every)

    def join_tables(tables: Sequence[Tensor]) -> Tensor:
        """Join tables of [step, client, sample]; steps that a client does not take are never read."""
        return torch.cat([F.pad(table, (0, 0, 0, 0, 0, longest - len(table))) for table in tables], 1)

    given = [
        torch.cat(leaves) if row else torch.stack(leaves)
        for row, *leaves in zip(first.work.per_client, *(inputs.given for inputs in every), strict=True)
    ]
    counts = torch.tensor([fold.clients for fold in folds])
    kind = next((inputs.mask.dtype for inputs in every if inputs.mask is not None), None)
    masks = [  # a run whose clients have full batches only has none
        torch.ones_like(inputs.index, dtype=kind) if inputs.mask is None else inputs.mask for inputs in every
    ]
    timed = [inputs.timed for inputs in every if inputs.timed is not None]
    inputs = Inputs(
        [torch.cat(leaves) for leaves in zip(*(inputs.carry for inputs in every), strict=True)],
        given,
        join_tables([inputs.index for inputs in every]),
        None if kind is None else join_tables(masks),
        Timed(*(torch.cat(parts) for parts in zip(*timed, strict=True))) if timed else None,
        np.concatenate([inputs.steps for inputs in every]),
        torch.arange(len(folds)).repeat_interleave(counts).to(every[0].index.device),
    )
    return replace(first, work=replace(first.work, apart=True), inputs=inputs, width=width)


def run_joined(folds: Sequence[Fold], programs: Programs, width: int) -> list[Leaves]:
    """Run folds as one; return the carry of each."""
    joined = join(folds, width)
    prepare_networks(joined.work)
    with torch.no_grad(), arithmetic(joined.work.variant.precision):
        done, _ = joined.run(programs)
    for fold in folds:
        fold.work.gradients[0] = joined.work.gradients[0]
    ends = np.cumsum([fold.clients for fold in folds])
    return [[leaf[end - fold.clients : end] for leaf in done] for fold, end in zip(folds, ends, strict=True)]
