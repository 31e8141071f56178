"""Folding a step over the batches of a cohort.

Programs that were traced or compiled run in lanes, see `lanes.py`. Without a program all clients begin together, in the
order of their steps, so at step t the active ones are a prefix and nothing is computed for the others.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from atoll.data.batches import BatchTable, Held, batch_table
from atoll.kernel.cohort import cut_short
from atoll.kernel.errors import CohortError
from atoll.kernel.fingerprints import Unstable
from atoll.kernel.job import LEARNING
from atoll.kernel.network import Variant
from atoll.kernel.params import Stack, Tree, flatten, stacked_leaves, unflatten
from atoll.kernel.randomness import Keys, number
from atoll.kernel.record import is_record, parts_of
from atoll.runtime.engines.folds import Fold, Inputs
from atoll.runtime.engines.lanes import choose_width
from atoll.runtime.engines.plan import Plan, arithmetic, vectorising
from atoll.runtime.engines.programs import Programs
from atoll.runtime.engines.trainings import Trainings, digests
from atoll.runtime.engines.work import Leaves, Timed, Work, forbid_captured_stacks, prepare_networks

if TYPE_CHECKING:
    from atoll.kernel.cohort import Cohort, Step
    from atoll.runtime.engines.together import Together
    from atoll.runtime.population import Population

log = logging.getLogger("atoll.engine")


@dataclass
class Tally:
    """Counts of what a scanner has done, for calibration and for the log."""

    client_steps: int = 0
    seconds: float = 0.0
    planned: int = 0  # client-steps, had no limit cut them short
    gradients: int = 0  # of one batch of one client each
    passes: int = 0  # over each client's training data, to train: epochs times the gradients of a step


class Scanner:
    """Hosts clients of a population and runs their scans and maps as a plan says.

    `limit` cuts every scan short, to measure a plan. `nominal` is the number of clients that a call usually has. With
    `trainings`, training is looked up and kept there. With `together`, scans wait for those of other runs. Only the
    `splits` can be read.
    """

    def __init__(
        self,
        population: Population,
        plan: Plan,
        programs: Programs,
        *,
        nominal: int = 1,
        calls: int = 1,
        limit: int | None = None,
        trainings: Trainings | None = None,
        together: Together | None = None,
        splits: frozenset[str] = LEARNING,
    ) -> None:
        self.readable = splits | {"labels"}
        self.plan, self.programs, self.trainings = plan, programs, trainings
        self.nominal, self.calls, self.limit, self.together = nominal, calls, limit, together
        self.tally, self.memory = Tally(), population.memory
        self._population = population
        self._held: dict[str, tuple[NDArray[np.int64], Held]] = {}  # by split: the last clients, and their samples

    @property
    def passes(self) -> int:
        """The number of times that clients have gone over their training data to train."""
        return self.tally.passes

    @property
    def measures(self) -> bool:
        """Whether this is only a measurement."""
        return self.limit is not None

    def sizes(self, clients: NDArray[np.int64], split: str) -> NDArray[np.int64]:
        """Return how many samples these clients have in a split that can be read."""
        self._require_readable(split)
        return self._population.task.splits[split].sizes(clients)

    def _require_readable(self, split: str) -> None:
        if split not in self.readable:
            raise CohortError(
                f"Only {', '.join(sorted(self.readable - {'labels'}))} may be read here. Got split={split!r}.",
                hint="test data are for evaluation; select on `val`.",
            )

    def without(self, parts: frozenset[str]) -> Scanner:
        """Return the same host with less to read; both share one tally."""
        other = copy(self)
        other.readable = self.readable - parts
        return other

    def _hold(self, clients: NDArray[np.int64], split: str) -> Held:
        """Return the samples of these clients in a split; the scans of one piece of work make them once."""
        task = self._population.task
        if split not in self._held or not np.array_equal(self._held[split][0], clients):
            self._held[split] = clients, task.splits[split].hold(task.x, task.y, clients)
        return self._held[split][1]

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Return what these clients kept before a round."""
        return self.memory.recall(clients, default, before=before)

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Return whether each of these clients kept anything before a round."""
        return self.memory.holds(clients, before=before)

    def beside(self, name: str) -> Scanner:
        """Return the same host with another memory; both share one tally."""
        other = copy(self)
        other.memory = self.memory.beside(name)
        return other

    def scan(
        self,
        cohort: Cohort,
        step: Step,
        carry: Tree,
        given: Tree,
        *,
        epochs: int,
        split: str,
        stream: str | tuple[str, ...],
        batch_size: int,
        shuffle: bool,
        train: bool,
        draws: bool = False,
        exact: bool = False,
    ) -> Tree:
        """Fold a step over batches; see `Cohort.scan`."""
        forbid_captured_stacks(step)
        self._require_readable(split)
        task, network, seed, round = self._population.task, cohort.task.network, cohort.task.seed, cohort.round
        x, y, data, members = self._hold(cohort.clients, split)
        ids = cohort.ids
        steps_each = -(-data.sizes(members) // batch_size)
        share = cohort.work if train and split == "train" else None
        self.tally.planned += int(steps_each.sum()) * epochs
        streams = (stream,) if isinstance(stream, str) else stream
        augment = task.augment if train and split == "train" else None
        keyed = draws or augment is not None or (train and network.draws)
        dropout = Keys.of(ids, seed, "dropout", round, streams[0]) if keyed else None
        vectorised = self._vectorises(cohort)
        variant = Variant(
            train=train,
            columns=self.plan.columns and vectorised,
            channels_last=self.plan.channels_last,
            precision="fp32" if exact else self.plan.precision,
        )
        carry_leaves, carry_structure = flatten(carry)
        given_leaves, given_structure = flatten(given)
        work = Work(
            step, carry_structure, given_structure, network, variant, vectorised, x, y,
            data.has_short_batch(batch_size), dropout is not None,
            functools.partial(number, seed, "draws", round, streams[0], int(cohort.clients[0])),
            augment=augment, streams=None if isinstance(stream, str) else len(stream),
        )  # fmt: skip
        prepare_networks(work)

        def make_tables(first: int, last: int) -> BatchTable:
            """Make the batches of some epochs."""
            each = [Keys.of(ids, seed, "batches", round, one) if shuffle else None for one in streams]
            return _join_tables([
                batch_table(
                    data, members, keys, batch_size=batch_size, epochs=last - first, limit=self.limit,
                    first=first,
                )
                for keys in each
            ])  # fmt: skip

        @arithmetic(variant.precision)
        def run(carry: Leaves, first: int, last: int) -> Leaves:
            """Run some epochs; return the carry."""
            table = make_tables(first, last)
            if share is not None:
                table = replace(table, steps=np.minimum(table.steps, cut_short(steps_each * epochs, share)))
            mask = None if table.valid is None else table.valid.to(cohort.initial_dtype)
            before = torch.from_numpy(steps_each * first).to(ids.device)
            timed = None if dropout is None else Timed(dropout.low, dropout.high, before)
            inputs = Inputs(carry, given_leaves, table.index, mask, timed, table.steps)
            ahead = self.calls * -(-(epochs - first) // (last - first)) if last > first else self.calls
            if self.limit is not None:  # a run takes all steps
                ahead *= max(1, int(steps_each.max(initial=0)) * epochs // self.limit)
            if self.plan.mode != "eager" and vectorised:
                width = choose_width(max(len(cohort), self.nominal), data.evenness(batch_size))
                return self._fold_in_lanes(Fold(self._plan_for(work), work, inputs, width, ahead, round, self.limit))
            order = np.argsort(-table.steps, kind="stable")
            if (order[1:] > order[:-1]).all():
                return self._fold(work, inputs, ahead)
            there = torch.from_numpy(order).to(ids.device)
            back = torch.from_numpy(np.argsort(order)).to(ids.device)
            leaves = self._fold(work, inputs.permute(there, order, stacked_leaves(given_structure)), ahead)
            return [leaf[back] for leaf in leaves]

        trains = train and split == "train"
        end = self.trainings.end(epochs) if self.trainings is not None and trains else epochs

        def finish(leaves: Leaves) -> Tree:
            """Count the passes and return the carry as a tree."""
            if trains:
                self.tally.passes += end * work.gradients[0]
            return unflatten(carry_structure, leaves)

        if self.trainings is None or not trains or share is not None or network.draws_globally:
            return finish(run(carry_leaves, 0, end))
        facts = (streams, batch_size, shuffle, draws)
        try:
            names = digests(cohort, task, work, carry_leaves, given_leaves, facts)
        except Unstable as reason:
            log.info("local training is not kept: %s", reason)
            return finish(run(carry_leaves, 0, end))
        leaves, found = self.trainings.carry_on(names, carry_leaves, epochs, run, work)
        self.tally.gradients += work.gradients[0] * int(steps_each.sum()) * found
        return finish(leaves)

    def _fold_in_lanes(self, fold: Fold) -> Leaves:
        """Return the carry of all clients after a fold, which other runs may join."""
        began = self._clock(fold.inputs.index.device)
        if self.together is not None and not self.measures:
            done, taken = self.together.fold(fold), fold.steps
        else:
            done, taken = fold.run(self.programs)
        self.tally.client_steps += taken
        self.tally.gradients += fold.work.gradients[0] * fold.steps
        self.tally.seconds += self._clock(fold.inputs.index.device) - began
        return done

    def _fold(self, work: Work, inputs: Inputs, calls: int) -> Leaves:
        """Return the carry of all clients, who begin together, sorted by their steps: at step t a prefix is active."""
        steps, index, mask = inputs.steps, inputs.index, inputs.mask
        clients, total = len(steps), int(steps.max(initial=0))
        active = clients - np.searchsorted(np.sort(steps), np.arange(total), side="right")
        turns = np.flatnonzero(np.diff(active)) + 1
        self.tally.client_steps += int(active.sum())
        began = self._clock(index.device)
        carry, done = inputs.carry, list[Leaves]()
        for start, stop in zip([0, *turns], [*turns, total], strict=True) if total else ():
            size = int(active[start])
            if size < len(carry[0]):
                done.append([leaf[size:] for leaf in carry])
            here, given = [leaf[:size] for leaf in carry], work.rows(inputs.given, size)
            timed = inputs.timed and Timed(*(part[:size] for part in inputs.timed))
            example = (
                here, given, index[start, :size], None if mask is None else mask[start, :size],
                *(timed or (None, None, None)),
            )  # fmt: skip
            running = self.programs.get(self._plan_for(work), work, example, int(stop - start) * calls).begin(
                work, here, given, timed
            )
            for t in range(start, stop):
                running.step(index[t, :size], None if mask is None else mask[t, :size], t)
            carry = running.end()
            self.tally.gradients += work.gradients[0] * int(active[start:stop].sum())
        self.tally.seconds += self._clock(index.device) - began
        pieces = [carry, *reversed(done)]
        return carry if len(pieces) == 1 else [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def _plan_for(self, work: Work) -> Plan:
        """Return the plan of a step; a graph reads samples that were just made from a copy, as others follow."""
        if work.x is self._population.task.x or not self.plan.graph:
            return self.plan
        return replace(self.plan, own_data=True)

    def _vectorises(self, cohort: Cohort) -> bool:
        """Return whether clients run under `vmap`: one alone runs plain autograd, which has less overhead.

        Its sums may differ in the last bit from those of a cohort, so in float64, where bits are compared, it runs
        as a cohort of one instead.
        """
        return self.plan.vectorised or (cohort.initial_dtype == torch.float64 and not self.plan.plain)

    def _clock(self, device: torch.device) -> float:
        if self.limit is not None and device.type == "cuda":  # a measurement waits for the device; a run does not
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def map(self, cohort: Cohort, function: Callable[..., Any], values: tuple[Tree, ...]) -> Tree:
        """Map a function over clients; see `Cohort.map`."""
        forbid_captured_stacks(function)
        leaves, structure = flatten(values)
        rows = stacked_leaves(structure)
        made: list[Any] = []

        def one_client(*mine: Tensor) -> Leaves:
            results, shape = flatten(function(*unflatten(structure, mine, one_client=True)))
            made.append(shape)
            return results

        if self._vectorises(cohort) and any(rows):
            with vectorising():
                results = vmap(one_client, in_dims=tuple(0 if row else None for row in rows))(*leaves)
        else:
            each = [
                one_client(*(leaf[k] if row else leaf for leaf, row in zip(leaves, rows, strict=True)))
                for k in range(len(cohort))
            ]
            results = [torch.stack(parts) for parts in zip(*each, strict=True)]
        return _to_stacks(unflatten(made[0], results))


def _join_tables(tables: list[BatchTable]) -> BatchTable:
    """Join tables into one whose batches hold those of all; which places are real depends on sizes alone."""
    if len(tables) == 1:
        return tables[0]
    index = torch.cat([table.index for table in tables], -1)
    valid = [table.valid for table in tables if table.valid is not None]
    return BatchTable(index, torch.cat(valid, -1) if valid else None, tables[0].steps)


def _to_stacks(tree: Tree) -> Tree:
    """Turn what one client returned as Params into a Stack of the cohort."""
    match tree:
        case dict():
            return {name: _to_stacks(part) for name, part in tree.items()}
        case list() | tuple():
            return type(tree)(_to_stacks(part) for part in tree)
        case Tensor() | None | int() | float() | str():
            return tree
        case _ if is_record(tree):
            return replace(tree, **{name: _to_stacks(part) for name, part in parts_of(tree).items()})
    return Stack(tree, tree.layout)
