"""Which row of a file holds what a client kept in which round: in RAM, 16 bytes for each client.

A row that no checkpoint needs any more is a free slot, and the next client's values are written over it. So a file
neither grows with the rounds nor has anything moved about in it: to keep a value is to write one place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NOBODY = -1


@dataclass
class _Piece:
    """The rows of one piece of a method: the newest of each client, and older ones where there are any."""

    slot: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    round: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    older: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by client: (round, slot), oldest first

    def make_room(self, clients: int) -> None:
        """Have room for so many clients; twice as many, so growing costs little."""
        more = max(clients, 2 * len(self.slot)) - len(self.slot) if clients > len(self.slot) else 0
        if more:
            self.slot = np.concatenate([self.slot, np.full(more, NOBODY, dtype=np.int64)])
            self.round = np.concatenate([self.round, np.zeros(more, dtype=np.int64)])


class Slots:
    """The rows of a file, by piece and client."""

    def __init__(self) -> None:
        self.known = False  # whether the rows of the file were read
        self._pieces: dict[int, _Piece] = {}
        self._free: list[int] = []
        self._size = 0  # of the file, in rows
        self.last = -sys.maxsize  # the last round of which there is a row

    def load(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Begin with the rows of a file: their slots, pieces, clients and rounds."""
        self._pieces, self._size, self.last, self.known = {}, 0, -sys.maxsize, True
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        table = table[np.lexsort((table[:, 1], table[:, 3]))]
        for some in np.split(table, np.flatnonzero(np.diff(table[:, [1, 3]], axis=0).any(axis=1)) + 1):
            if len(some):
                self.fill(int(some[0, 1]), some[:, 2], int(some[0, 3]), some[:, 0].tolist())
        self._free = np.setdiff1d(np.arange(self._size), table[:, 0]).tolist()

    def find(self, piece: int, clients: NDArray[np.int64], before: int) -> list[int]:
        """Return the slot of what each client kept last before a round; NOBODY if it kept nothing."""
        own = self._piece(piece, clients)
        slots = own.slot[clients]
        for place in np.flatnonzero((slots != NOBODY) & (own.round[clients] >= before)).tolist():
            versions = own.older.get(int(clients[place]), [])
            slots[place] = next((slot for round, slot in reversed(versions) if round < before), NOBODY)
        found: list[int] = slots.tolist()
        return found

    def choose(self, piece: int, clients: NDArray[np.int64], round: int) -> list[int]:
        """Return where to write what clients keep in a round: over their own row of it, in a free slot, or at the end.

        Nothing counts before `fill` says so.
        """
        own = self._piece(piece, clients)
        again = (own.slot[clients] != NOBODY) & (own.round[clients] == round)
        slots, new = own.slot[clients], int((~again).sum())
        free = self._free[:new]
        slots[~again] = [*free, *range(self._size, self._size + new - len(free))]
        chosen: list[int] = slots.tolist()
        return chosen

    def fill(self, piece: int, clients: NDArray[np.int64], round: int, slots: Sequence[int]) -> None:
        """Say that what clients kept in a round is in these slots; rounds of a client come in their order."""
        own, at = self._piece(piece, clients), np.asarray(slots, dtype=np.int64)
        before = own.slot[clients]
        for place in np.flatnonzero((before != NOBODY) & (before != at)).tolist():
            client = int(clients[place])
            own.older.setdefault(client, []).append((int(own.round[client]), int(before[place])))
        own.slot[clients], own.round[clients] = at, round
        taken = {*slots}
        self._free = [slot for slot in self._free if slot not in taken]
        self._size = max(self._size, int(at.max(initial=-1)) + 1)
        self.last = max(self.last, round)

    def prune(self, round: int) -> None:
        """Free the slots of what was kept before a client's newest value of the rounds before `round`."""
        for own in self._pieces.values():
            for client, versions in [*own.older.items()]:
                rounds = [*(when for when, _ in versions), int(own.round[client])]
                needed = max((place for place, when in enumerate(rounds) if when < round), default=0)
                self._free += [slot for _, slot in versions[:needed]]
                own.older[client] = versions[needed:]
                if not own.older[client]:
                    del own.older[client]
        self._free.sort()

    def count(self) -> int:
        """Count the clients that have a row, in all pieces together."""
        return sum(int((own.slot != NOBODY).sum()) for own in self._pieces.values())

    def _piece(self, piece: int, clients: NDArray[np.int64]) -> _Piece:
        own = self._pieces.setdefault(piece, _Piece())
        own.make_room(int(clients.max(initial=-1)) + 1)
        return own
