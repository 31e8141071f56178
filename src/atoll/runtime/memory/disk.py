"""The memory of clients in one SQLite file: for more clients than RAM holds, and intact after `kill -9`.

Rows are (piece, client, round), so a run resumed at an earlier round does not see what later rounds kept; a checkpoint
removes what it supersedes. Rows hold a checksum, and the file the number of rounds after which it was saved last: a
resumed run finds what was kept, or is refused.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.errors import CohortError, RunError
from atoll.kernel.params import Tree, flatten, unflatten
from atoll.runtime.files import open_regular, require_no_link
from atoll.runtime.serialise import from_bytes, to_bytes

LARGEST = 2**62  # bytes: what clients keep has no limit


class DiskMemory:
    """One row per piece, client and round; a cohort is read and written in one transaction."""

    def __init__(self, path: Path) -> None:
        self._path, self._piece = path, ""
        for beside in ("", "-wal", "-shm"):
            file = path.with_name(path.name + beside)
            require_no_link(file)
            if file.exists():
                open_regular(file, largest=LARGEST).close()
        with self._reading():
            self._connection = sqlite3.connect(path, check_same_thread=False)
            self.close = weakref.finalize(self, self._connection.close)  # by itself, when nobody holds the memory
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS kept (piece TEXT, client INTEGER, round INTEGER, tree BLOB, checksum TEXT, "
                "PRIMARY KEY (piece, client, round))"
            )
            columns = [column for _, column, *_ in self._connection.execute("PRAGMA table_info(kept)")]
            if "checksum" not in columns:  # an older run's
                self._connection.execute("ALTER TABLE kept ADD COLUMN checksum TEXT")

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Recall what clients kept last; see `Memory.recall`."""
        leaves, structure = flatten(default)
        newest = [self._newest("tree", client, before) for client in clients]
        found: dict[int, bytes] = {position: row[0] for position, row in enumerate(newest) if row is not None}
        if not found:
            return default
        mixed = [leaf.clone() for leaf in leaves]
        for position, message in found.items():
            kept = from_bytes(message)
            if len(kept) != len(mixed):
                raise CohortError("`recall` must be given a default made like what was kept.")
            for leaf, row_of_leaf in zip(mixed, kept, strict=True):
                leaf[position] = row_of_leaf.to(leaf.device)
        return unflatten(structure, mixed)

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Return who kept anything; see `Memory.holds`."""
        return np.array([self._newest("round", client, before) is not None for client in clients], dtype=np.bool_)

    def _newest(self, column: str, client: np.int64, before: int) -> tuple[Any, ...] | None:
        """Return a column of what a client kept last, before a round."""
        row: tuple[Any, ...] | None = self._connection.execute(
            f"SELECT {column} FROM kept WHERE piece = ? AND client = ? AND round < ? ORDER BY round DESC LIMIT 1",
            (self._piece, int(client), before),
        ).fetchone()
        return row

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Keep a tree per client; see `Memory.keep`."""
        leaves = [leaf.detach().cpu() for leaf in flatten(tree)[0]]
        rows = [
            (self._piece, int(client), round, to_bytes([leaf[position] for leaf in leaves]))
            for position, client in enumerate(clients)
        ]
        sealed = [(*row, _checksum(*row)) for row in rows]
        try:
            with self._connection:
                self._connection.executemany(
                    "INSERT OR REPLACE INTO kept (piece, client, round, tree, checksum) VALUES (?, ?, ?, ?, ?)", sealed
                )
        except sqlite3.OperationalError as error:
            raise RunError(
                f"What clients keep must be written to {self._path}. It cannot be: {error}.",
                hint=f"make room, then continue with `atoll resume {self._path.parent}`.",
            ) from error

    def save(self, *, round: int, changes: bool = False) -> Tree:
        """Flush the rows to disk; those that an older checkpoint could need stay. See `Memory.save`."""
        with self._reading():
            self._connection.execute(f"PRAGMA user_version = {int(round)}")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return None

    def load(self, saved: Sequence[Tree], *, round: int) -> None:
        """Drop the rows of later rounds; raise RunError if the file is older or a row is damaged. See `Memory.load`."""
        with self._reading(), self._connection:
            (saved_after,) = self._connection.execute("PRAGMA user_version").fetchone()
            if 0 < saved_after < round:  # an older run's file does not say
                raise RunError(
                    f"A run must be resumed with what its clients kept. {self._path} is of round {saved_after}, the "
                    f"checkpoint of round {round}.",
                    hint="put the file back, or begin a new run in another folder.",
                )
            self._connection.execute("DELETE FROM kept WHERE round >= ?", (round,))
            for *row, checksum in self._connection.execute("SELECT piece, client, round, tree, checksum FROM kept"):
                if checksum is not None and checksum != _checksum(*row):
                    raise RunError(
                        f"A run must be resumed with what its clients kept. In {self._path}, what client {row[1]} kept "
                        "is damaged.",
                        hint="put the file back, or begin a new run in another folder.",
                    )

    def holders(self, *, before: int) -> int | None:
        """Count who kept anything, in all pieces together; see `Memory.holders`."""
        question = "SELECT COUNT(*) FROM (SELECT DISTINCT piece, client FROM kept WHERE round < ?)"
        with self._reading():
            return int(self._connection.execute(question, (before,)).fetchone()[0])

    def prune(self, *, round: int) -> None:
        """Remove what the checkpoint at `round` supersedes; see `Memory.prune`."""
        with self._connection:
            self._connection.execute(
                "DELETE FROM kept WHERE EXISTS (SELECT 1 FROM kept AS newer WHERE newer.piece = kept.piece "
                "AND newer.client = kept.client AND newer.round > kept.round AND newer.round < ?)",
                (round,),
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what SQLite says about a damaged file into an error that names it."""
        try:
            yield
        except (sqlite3.DatabaseError, TypeError) as error:
            raise RunError(
                f"What clients keep must be in a whole SQLite file. {self._path} is none: {error}.",
                hint="put the file back, or begin a new run in another folder.",
            ) from error

    def beside(self, name: str) -> DiskMemory:
        """Return a memory of other rows in the same file; see `Memory.beside`."""
        apart = copy.copy(self)
        apart._piece = f"{self._piece}/{name}"
        return apart


def _checksum(piece: str, client: int, round: int, tree: bytes) -> str:
    found = hashlib.blake2b(f"{piece}|{client}|{round}|".encode(), digest_size=16)
    found.update(tree)
    return found.hexdigest()
