"""The memory of clients in RAM or on the GPU: one growing block per leaf, so recalling a cohort is one gather."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import CohortError
from atoll.kernel.params import Structure, Tree, flatten, unflatten


class RamMemory:
    """A block of rows, handed out as clients first keep something, so memory grows with the clients seen."""

    def __init__(self, clients: int) -> None:
        self._beside: dict[str, RamMemory] = {}
        self._row = np.full(clients, -1, dtype=np.int64)
        self._rows = 0
        self._blocks: list[Tensor] = []
        self._structure: Structure | None = None
        self._changed = np.zeros(clients, dtype=np.bool_)  # who kept something since changes were saved
        self._saved = 0  # rows in the changes saved so far, superseded ones included

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Recall what clients kept last; see `Memory.recall`."""
        rows = self._row[clients]
        known = rows >= 0
        if self._structure is None or not known.any():
            return default
        leaves, structure = flatten(default)
        if structure != self._structure:
            raise CohortError(
                "`recall` must be given a default made like what was kept.",
                hint="compare the names and nesting of `Update.keep` with those of `default`.",
            )
        if known.all():
            at = torch.from_numpy(rows)
            return unflatten(structure, [block[at.to(block.device)] for block in self._blocks])
        where, at = torch.from_numpy(np.flatnonzero(known)), torch.from_numpy(rows[known])
        recalled = []
        for leaf, block in zip(leaves, self._blocks, strict=True):
            mixed = leaf.clone()
            mixed[where.to(leaf.device)] = block[at.to(block.device)]
            recalled.append(mixed)
        return unflatten(structure, recalled)

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Return who kept anything; see `Memory.holds`."""
        return self._row[clients] >= 0

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Keep a tree per client; see `Memory.keep`."""
        leaves, structure = flatten(tree)
        if self._structure is None:
            self._structure = structure
            self._blocks = [leaf.new_empty((0, *leaf.shape[1:])) for leaf in leaves]
        if structure != self._structure:
            raise CohortError("A method must keep a tree of the same names and nesting in every round.")
        new = clients[self._row[clients] < 0]
        self._row[new] = np.arange(self._rows, self._rows + len(new))
        self._rows += len(new)
        self._changed[clients] = True
        at = torch.from_numpy(self._row[clients])
        for number, leaf in enumerate(leaves):
            block = self._blocks[number]
            if len(block) < self._rows:  # double: growing then costs little per client
                room = min(max(self._rows, 2 * len(block)), len(self._row))
                block = torch.cat([block, leaf.new_empty((room - len(block), *leaf.shape[1:]))])
                self._blocks[number] = block
            block[at.to(block.device)] = leaf

    def save(self, *, round: int, changes: bool = False) -> Tree:
        """Return copies of the rows for a checkpoint; see `Memory.save`."""
        if not changes:
            return self._take()
        pieces = [*self._pieces()]
        rows, changed = sum(one._rows for one in pieces), sum(int(one._changed.sum()) for one in pieces)
        if not changed:
            return None
        whole = changed == rows or self._saved + changed >= 2 * rows  # so files hold at most twice what lives
        taken = self._take() if whole else self._take(changed=True)
        self._saved = rows if whole else self._saved + changed
        for one in pieces:
            one._changed.fill(False)
        return {"whole": whole, **taken}

    def copy(self, clients: NDArray[np.int64]) -> Tree:
        """Return what some clients keep, here and beside, for another such memory; None if nobody keeps anything."""
        wanted = np.zeros(len(self._row), dtype=np.bool_)
        wanted[clients] = True
        return self._take(wanted)

    def put(self, copied: Tree) -> None:
        """Keep what `copy` returned."""
        if copied is not None:
            self._put_back(copied, 0)

    def _take(self, wanted: NDArray[np.bool_] | None = None, *, changed: bool = False) -> Tree:
        """Copy the rows of all clients that kept something, of those `wanted`, or that did since changes were saved."""
        taken = {name: one._take(wanted, changed=changed) for name, one in self._beside.items()}
        beside = {name: one for name, one in taken.items() if one is not None}
        if self._structure is None and not beside:
            return None
        chosen = self._changed if changed else self._row >= 0
        owners = np.flatnonzero(chosen if wanted is None else chosen & wanted)
        rows = torch.from_numpy(self._row[owners])
        blocks = [block[rows.to(block.device)] for block in self._blocks]
        kept = None if self._structure is None else unflatten(self._structure, blocks)
        return {"clients": torch.from_numpy(owners), "kept": kept, "beside": beside}

    def holders(self, *, before: int) -> int | None:
        """Return None, as a checkpoint holds all of it; see `Memory.holders`."""
        return None

    def prune(self, *, round: int) -> None:
        """Do nothing, as only the newest is held; see `Memory.prune`."""

    def load(self, saved: Sequence[Tree], *, round: int) -> None:
        """Put back what `save` returned; see `Memory.load`."""
        self._row.fill(-1)
        self._changed.fill(False)
        self._rows, self._blocks, self._structure, self._beside, self._saved = 0, [], None, {}, 0
        rows = sum(self._put_back(one, round) for one in saved)
        if all("whole" in one for one in saved):  # they were changes: the next ones build on them
            self._saved = rows
            for piece in self._pieces():
                piece._changed.fill(False)

    def _put_back(self, saved: Tree, round: int) -> int:
        """Keep again what was saved, here and beside; return how many rows that were."""
        if saved["kept"] is not None:
            self.keep(saved["clients"].cpu().numpy(), saved["kept"], round=round)
        apart = [self.beside(name)._put_back(one, round) for name, one in saved["beside"].items()]
        return len(saved["clients"]) + sum(apart)

    def beside(self, name: str) -> RamMemory:
        """Return a memory of its own for a piece; see `Memory.beside`."""
        return self._beside.setdefault(name, RamMemory(len(self._row)))

    def _pieces(self) -> Iterator[RamMemory]:
        """Yield this memory and all beside it."""
        yield self
        for one in self._beside.values():
            yield from one._pieces()
