"""The memory of clients in one SQLite file: for more clients than RAM holds, and intact after `kill -9`.

A row is what one client kept in one round, as plain bytes; what these are, `forms` says once for all clients. Its `id`
is made of the piece, the client and the round, so the newest row of a client is found by one search, and a run resumed
at an earlier round does not see what later rounds kept. A checkpoint removes what it supersedes. Rows hold a checksum,
and the file the number of rounds after which it was saved last: a resumed run finds what was kept, or is refused.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import CohortError, RunError
from atoll.kernel.params import Tree, flatten, unflatten
from atoll.runtime.files import open_regular, require_no_link
from atoll.runtime.serialise import from_bytes

LARGEST = 2**62  # bytes: what clients keep has no limit
ROUNDS, CLIENTS, PIECES = 2**22, 2**31, 2**9  # that an id can tell apart
BEFORE = 2**10  # rounds before the first one, in which clients prepare
ROW = "id INTEGER PRIMARY KEY, piece INTEGER, client INTEGER, round INTEGER, form INTEGER, tree BLOB, checksum BLOB"
SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS kept ({ROW})",
    "CREATE TABLE IF NOT EXISTS pieces (piece INTEGER PRIMARY KEY, name TEXT UNIQUE)",
    "CREATE TABLE IF NOT EXISTS forms (form INTEGER PRIMARY KEY, leaves TEXT UNIQUE)",
    "CREATE TABLE IF NOT EXISTS holders (id INTEGER PRIMARY KEY, first INTEGER)",  # since which round
)
PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=NORMAL",
    "wal_autocheckpoint=16384",  # pages, 64 MiB: not after every round
    "cache_size=-65536",  # KiB
)


class DiskMemory:
    """One row per piece, client and round; a cohort is read and written in one transaction."""

    def __init__(self, path: Path) -> None:
        self._path, self._piece = path, 0
        for beside in ("", "-wal", "-shm"):
            file = path.with_name(path.name + beside)
            require_no_link(file)
            if file.exists():
                open_regular(file, largest=LARGEST).close()
        self._written = list[_Written]()  # since the last pruning, in all pieces
        self._forms = dict[int, _Form]()
        self._holders = _Holders()
        with self._reading():
            self._connection = sqlite3.connect(path, check_same_thread=False)
            self.close = weakref.finalize(self, self._connection.close)  # by itself, when nobody holds the memory
            for pragma in PRAGMAS:
                self._connection.execute(f"PRAGMA {pragma}")
            with self._connection:
                self._connection.execute("BEGIN")
                columns = [column for _, column, *_ in self._connection.execute("PRAGMA table_info(kept)")]
                if columns and "form" not in columns:
                    self._convert("checksum" in columns)
                for statement in SCHEMA:
                    self._connection.execute(statement)
                self._connection.execute("INSERT OR IGNORE INTO pieces VALUES (0, '')")
            self._count_holders()

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Recall what clients kept last; see `Memory.recall`."""
        leaves, structure = flatten(default)
        found: dict[int, list[tuple[int, bytes]]] = {}  # by form
        for position, row in enumerate(self._newest("form, tree", clients, before)):
            if row is not None:
                found.setdefault(row[0], []).append((position, row[1]))
        if not found:
            return default
        mixed = [leaf.clone() for leaf in leaves]
        for number, rows in found.items():
            kept = self._form(number).read([tree for _, tree in rows])
            if len(kept) != len(mixed):
                raise CohortError("`recall` must be given a default made like what was kept.")
            where = torch.tensor([position for position, _ in rows])
            for leaf, values in zip(mixed, kept, strict=True):
                leaf[where.to(leaf.device)] = values.to(leaf.device)
        return unflatten(structure, mixed)

    def holds(self, clients: NDArray[np.int64], *, before: int) -> NDArray[np.bool_]:
        """Return who kept anything; see `Memory.holds`."""
        return np.array([row is not None for row in self._newest("round", clients, before)], dtype=np.bool_)

    def _newest(self, columns: str, clients: NDArray[np.int64], before: int) -> Iterator[tuple[int, bytes] | None]:
        """Yield columns of what each client kept last, before a round; None for one that kept nothing."""
        question = f"SELECT {columns} FROM kept WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT 1"
        first = _make_ids(self._piece, clients, -BEFORE).tolist()
        last = _make_ids(self._piece, clients, min(before, ROUNDS - BEFORE - 1)).tolist()
        for between in zip(first, last, strict=True):
            yield self._connection.execute(question, between).fetchone()

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Keep a tree per client; see `Memory.keep`."""
        form, trees = _Form.write(flatten(tree)[0])
        try:
            with self._connection:
                new = self._insert(self._piece, clients, form, trees, round)
        except sqlite3.OperationalError as error:
            raise RunError(
                f"What clients keep must be written to {self._path}. It cannot be: {error}.",
                hint=f"make room, then continue with `atoll resume {self._path.parent}`.",
            ) from error
        self._written.append(_Written(self._piece, np.array(clients), round))
        self._holders.count += new
        self._holders.last = max(self._holders.last, round)

    def _insert(
        self, piece: int, clients: NDArray[np.int64], form: _Form, trees: Sequence[memoryview], round: int
    ) -> int:
        """Write the rows of some clients; return how many of these had none before."""
        number, ids = self._number("forms", "form", form.text), _make_ids(piece, clients, round).tolist()
        self._connection.executemany(
            "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (one, piece, client, round, number, tree, _checksum(one, number, tree))
                for one, client, tree in zip(ids, clients.tolist(), trees, strict=True)
            ),
        )
        owners = ((one // ROUNDS, round) for one in ids)
        return self._connection.executemany("INSERT OR IGNORE INTO holders VALUES (?, ?)", owners).rowcount

    def _number(self, table: str, column: str, name: str) -> int:
        """Return the number of a form or a piece; a new one gets the next."""
        named = "leaves" if table == "forms" else "name"
        self._connection.execute(f"INSERT OR IGNORE INTO {table} ({named}) VALUES (?)", (name,))
        question = f"SELECT {column} FROM {table} WHERE {named} = ?"
        return int(self._connection.execute(question, (name,)).fetchone()[0])

    def _form(self, number: int) -> _Form:
        if number not in self._forms:
            found = self._connection.execute("SELECT leaves FROM forms WHERE form = ?", (number,)).fetchone()
            self._forms[number] = _Form(found[0])
        return self._forms[number]

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
            self._connection.execute("DELETE FROM holders WHERE first >= ?", (round,))
            self._count_holders()
            self._written.clear()
            before = -1
            for one, form, tree, checksum in self._connection.execute("SELECT id, form, tree, checksum FROM kept"):
                piece, client, kept_in = _read_id(one)
                if checksum != _checksum(one, form, tree):
                    raise RunError(
                        f"A run must be resumed with what its clients kept. In {self._path}, what client {client} kept "
                        "is damaged.",
                        hint="put the file back, or begin a new run in another folder.",
                    )
                if one // ROUNDS == before // ROUNDS:  # it has an older row, which is to be pruned
                    self._written.append(_Written(piece, np.array([client]), kept_in))
                before = one

    def holders(self, *, before: int) -> int | None:
        """Count who kept anything, in all pieces together; see `Memory.holders`."""
        if before > self._holders.last:  # nobody began later, so there is nothing to look up
            return self._holders.count
        question = "SELECT COUNT(*) FROM holders WHERE first < ?"
        with self._reading():
            return int(self._connection.execute(question, (before,)).fetchone()[0])

    def _count_holders(self) -> None:
        count, last = self._connection.execute("SELECT COUNT(*), MAX(first) FROM holders").fetchone()
        self._holders.count, self._holders.last = int(count), -BEFORE if last is None else int(last)

    def prune(self, *, round: int) -> None:
        """Remove what the checkpoint at `round` supersedes; see `Memory.prune`."""
        done = [one for one in self._written if one.round < round]
        with self._connection:
            for piece, clients, newest in done:
                first, last = (_make_ids(piece, clients, when).tolist() for when in (-BEFORE, newest))
                ranges = zip(first, last, strict=True)
                self._connection.executemany("DELETE FROM kept WHERE id >= ? AND id < ?", ranges)
        self._written[:] = [one for one in self._written if one.round >= round]

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

    def _convert(self, checked: bool) -> None:
        """Copy the rows of an older run's file, which say themselves what they hold; some have no checksums."""
        self._connection.execute("ALTER TABLE kept RENAME TO older")
        for statement in SCHEMA:
            self._connection.execute(statement)
        column = "checksum" if checked else "NULL"
        for name, client, round, message, checksum in self._connection.execute(
            f"SELECT piece, client, round, tree, {column} FROM older"
        ):
            if checksum is not None and checksum != _older_checksum(name, client, round, message):
                raise RunError(
                    f"A run must be resumed with what its clients kept. In {self._path}, what client {client} kept is "
                    "damaged.",
                    hint="put the file back, or begin a new run in another folder.",
                )
            form, trees = _Form.write([leaf[None] for leaf in from_bytes(message)])
            piece = self._number("pieces", "piece", name) if name else 0
            self._insert(piece, np.array([client]), form, trees, round)
        self._connection.execute("DROP TABLE older")

    def beside(self, name: str) -> DiskMemory:
        """Return a memory of other rows in the same file; see `Memory.beside`."""
        apart = copy.copy(self)
        (mine,) = self._connection.execute("SELECT name FROM pieces WHERE piece = ?", (self._piece,)).fetchone()
        with self._connection:
            apart._piece = self._number("pieces", "piece", f"{mine}/{name}")
        return apart


@dataclass
class _Holders:
    """How many clients kept anything, in all pieces, and the last round in which anybody did."""

    count: int = 0
    last: int = -BEFORE


class _Written(NamedTuple):
    """Rows that were written: in which piece, of whom, and in which round."""

    piece: int
    clients: NDArray[np.int64]
    round: int


class _Form:
    """The types and shapes of the leaves that one client keeps, and where their bytes are in a row."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.leaves = [(getattr(torch, name), tuple(shape)) for name, shape in json.loads(text)]

    @classmethod
    def write(cls, leaves: Sequence[Tensor]) -> tuple[_Form, list[memoryview]]:
        """Return the form of stacked leaves, and the bytes of each client."""
        # Copied: one row of an expanded leaf counts as contiguous, and cannot be seen as bytes.
        here = [leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for leaf in leaves]
        form = cls(json.dumps([[str(leaf.dtype).removeprefix("torch."), [*leaf.shape[1:]]] for leaf in here]))
        if not here:
            raise CohortError("A method must keep at least one tensor.", hint="leave out `keep` to keep nothing.")
        table = torch.cat([leaf.flatten().view(torch.uint8).reshape(len(leaf), -1) for leaf in here], dim=1).numpy()
        return form, [memoryview(row) for row in table]

    def read(self, trees: Sequence[bytes]) -> list[Tensor]:
        """Return the leaves of some clients, stacked."""
        table = torch.from_numpy(np.frombuffer(bytearray(b"".join(trees)), dtype=np.uint8)).reshape(len(trees), -1)
        found, start = [], 0
        for dtype, shape in self.leaves:
            stop = start + int(np.prod(shape)) * dtype.itemsize
            own = table[:, start:stop].flatten().clone()  # bytes of one type, aligned as it needs
            found.append(own.view(dtype).reshape(len(trees), *shape))
            start = stop
        return found


def _make_ids(piece: int, clients: NDArray[np.int64], round: int) -> NDArray[np.int64]:
    """Return the numbers of rows: sorted by piece, client and round."""
    if not (piece < PIECES and -BEFORE <= round < ROUNDS - BEFORE and clients.max(initial=0) < CLIENTS):
        raise RunError(
            f"A memory on disk can tell apart {PIECES} pieces of a method, {CLIENTS:,} clients and {ROUNDS - BEFORE:,} "
            f"rounds. Got piece {piece}, client {clients.max(initial=0)} and round {round}.",
            hint="keep it in RAM: memory='ram'.",
        )
    numbers: NDArray[np.int64] = (piece * CLIENTS + np.asarray(clients, dtype=np.int64)) * ROUNDS + (round + BEFORE)
    return numbers


def _read_id(number: int) -> tuple[int, int, int]:
    """Return the piece, the client and the round of a row."""
    owner, round = divmod(number, ROUNDS)
    return (*divmod(owner, CLIENTS), round - BEFORE)


def _checksum(number: int, form: int, tree: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(number.to_bytes(8, "little") + form.to_bytes(8, "little"), digest_size=16)
    found.update(tree)
    return found.digest()


def _older_checksum(piece: str, client: int, round: int, tree: bytes) -> str:
    found = hashlib.blake2b(f"{piece}|{client}|{round}|".encode(), digest_size=16)
    found.update(tree)
    return found.hexdigest()
