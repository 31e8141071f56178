"""The memory of clients in one SQLite file: for more clients than RAM holds, and intact after `kill -9`.

A row is what one client kept in one round, as plain bytes; what these are, `forms` says once for all clients. Which row
is whose is known in RAM (`slots.py`), and read from the file when a run is resumed, which does not see what later
rounds kept. What a checkpoint supersedes is written over. Rows hold a checksum, and the file the number of rounds after
which it was saved last: a resumed run finds what was kept, or is refused.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import CohortError, RunError
from atoll.kernel.params import Tree, flatten, unflatten
from atoll.runtime.files import open_regular, require_no_link
from atoll.runtime.memory.slots import NOBODY, Slots
from atoll.runtime.serialise import from_bytes

NEWEST = 2**62  # a round after all others
LARGEST = 2**62  # bytes: what clients keep has no limit
ROW = "id INTEGER PRIMARY KEY, piece INTEGER, client INTEGER, round INTEGER, form INTEGER, tree BLOB, checksum BLOB"
SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS kept ({ROW})",
    "CREATE TABLE IF NOT EXISTS pieces (piece INTEGER PRIMARY KEY, name TEXT UNIQUE)",
    "CREATE TABLE IF NOT EXISTS forms (form INTEGER PRIMARY KEY, leaves TEXT UNIQUE)",
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
        self._forms = dict[int, _Form]()
        self._slots = Slots()
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

    def recall(self, clients: NDArray[np.int64], default: Tree, *, before: int) -> Tree:
        """Recall what clients kept last; see `Memory.recall`."""
        leaves, structure = flatten(default)
        found: dict[int, list[tuple[int, bytes]]] = {}  # by form
        for position, slot in enumerate(self._rows.find(self._piece, clients, before)):
            if slot != NOBODY:
                form, message = self._connection.execute("SELECT form, tree FROM kept WHERE id = ?", (slot,)).fetchone()
                found.setdefault(form, []).append((position, message))
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
        return np.array([slot != NOBODY for slot in self._rows.find(self._piece, clients, before)], dtype=np.bool_)

    def keep(self, clients: NDArray[np.int64], tree: Tree, *, round: int) -> None:
        """Keep a tree per client; see `Memory.keep`."""
        slots = self._rows.choose(self._piece, clients, round)
        try:
            with self._connection:
                self._write(slots, self._piece, round, clients.tolist(), flatten(tree)[0])
        except sqlite3.OperationalError as error:
            raise RunError(
                f"What clients keep must be written to {self._path}. It cannot be: {error}.",
                hint=f"make room, then continue with `atoll resume {self._path.parent}`.",
            ) from error
        self._rows.fill(self._piece, clients, round, slots)

    @property
    def _rows(self) -> Slots:
        """Which row is whose; read from the file if there were rows when it was opened."""
        if not self._slots.known:
            with self._reading():
                self._slots.load(self._connection.execute("SELECT id, piece, client, round FROM kept").fetchall())
        return self._slots

    def _write(
        self, slots: Iterable[int], piece: int, round: int, clients: Sequence[int], tree: Sequence[Tensor]
    ) -> None:
        """Write what clients keep, in a piece and a round, into slots of the file."""
        form, rows = _Form.write(tree, len(clients))
        number = self._number("forms", "form", form.text)
        self._connection.executemany(
            "INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (slot, piece, client, round, number, row, _checksum(piece, client, round, number, row))
                for slot, client, row in zip(slots, clients, rows, strict=True)
            ),
        )

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
            found, question = list[tuple[int, int, int, int]](), "SELECT id, piece, client, round, form, tree, checksum"
            for slot, *row, checksum in self._connection.execute(f"{question} FROM kept"):
                if checksum != _checksum(*row):
                    raise _damage_error(self._path, row[1])
                found.append((slot, *row[:3]))
            self._slots.load(found)

    def copy(self, clients: NDArray[np.int64]) -> Tree:
        """Return what some clients keep, here and beside, for another such memory; None if they keep nothing."""
        copied: list[Tree] = []
        with self._reading():
            for piece, name in self._connection.execute("SELECT piece, name FROM pieces").fetchall():
                for slot in self._rows.find(piece, clients, NEWEST):
                    if slot != NOBODY:
                        question = "SELECT client, round, form, tree FROM kept WHERE id = ?"
                        client, round, form, tree = self._connection.execute(question, (slot,)).fetchone()
                        row = torch.from_numpy(np.frombuffer(bytearray(tree), dtype=np.uint8))
                        copied.append({"piece": name, "client": client, "round": round, "row": row,
                                       "form": self._form(form).text})  # fmt: skip
        return copied or None

    def put(self, copied: Tree) -> None:
        """Keep what `copy` returned."""
        for one in copied or ():
            client = np.array([one["client"]])
            with self._connection:
                piece = self._number("pieces", "piece", one["piece"])
                slots = self._rows.choose(piece, client, one["round"])
                leaves = _Form(one["form"]).read([one["row"].numpy().tobytes()])
                self._write(slots, piece, one["round"], client.tolist(), leaves)
            self._rows.fill(piece, client, one["round"], slots)

    def holders(self, *, before: int) -> int | None:
        """Count who kept anything, in all pieces together; see `Memory.holders`."""
        if before > self._rows.last:
            return self._rows.count()
        question = "SELECT COUNT(*) FROM (SELECT DISTINCT piece, client FROM kept WHERE round < ?)"
        with self._reading():
            return int(self._connection.execute(question, (before,)).fetchone()[0])

    def prune(self, *, round: int) -> None:
        """Let what the checkpoint at `round` supersedes be written over; see `Memory.prune`."""
        self._rows.prune(round)

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
        self._connection.execute("INSERT INTO pieces VALUES (0, '')")
        rows = self._connection.execute(f"SELECT piece, client, round, tree, {column} FROM older")
        for slot, (name, client, round, message, checksum) in enumerate(rows):
            if checksum is not None and checksum != _older_checksum(name, client, round, message):
                raise _damage_error(self._path, client)
            leaves = [leaf[None] for leaf in from_bytes(message)]
            self._write([slot], self._number("pieces", "piece", name), round, [client], leaves)
        self._connection.execute("DROP TABLE older")

    def beside(self, name: str) -> DiskMemory:
        """Return a memory of other rows in the same file; see `Memory.beside`."""
        apart = copy.copy(self)
        (mine,) = self._connection.execute("SELECT name FROM pieces WHERE piece = ?", (self._piece,)).fetchone()
        with self._connection:
            apart._piece = self._number("pieces", "piece", f"{mine}/{name}")
        return apart


class _Form:
    """The types and shapes of the leaves that one client keeps, and where their bytes are in a row."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.leaves = [(getattr(torch, name), tuple(shape)) for name, shape in json.loads(text)]

    @classmethod
    def write(cls, leaves: Sequence[Tensor], clients: int) -> tuple[_Form, list[memoryview]]:
        """Return the form of stacked leaves, and the bytes of each of the clients."""
        # Copied: one row of an expanded leaf counts as contiguous, and cannot be seen as bytes.
        here = [leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for leaf in leaves]
        form = cls(json.dumps([[str(leaf.dtype).removeprefix("torch."), [*leaf.shape[1:]]] for leaf in here]))
        if not here:  # such as the norm layers of a network that has none
            return form, [memoryview(b"")] * clients
        table = torch.cat([leaf.flatten().view(torch.uint8).reshape(len(leaf), -1) for leaf in here], dim=1).numpy()
        return form, [memoryview(row) for row in table]

    def read(self, trees: Sequence[bytes]) -> list[Tensor]:
        """Return the leaves of some clients, stacked."""
        if not self.leaves:
            return []
        table = torch.from_numpy(np.frombuffer(bytearray(b"".join(trees)), dtype=np.uint8)).reshape(len(trees), -1)
        found, start = [], 0
        for dtype, shape in self.leaves:
            stop = start + int(np.prod(shape)) * dtype.itemsize
            own = table[:, start:stop].flatten().clone()  # bytes of one type, aligned as it needs
            found.append(own.view(dtype).reshape(len(trees), *shape))
            start = stop
        return found


def _damage_error(path: Path, client: int) -> RunError:
    return RunError(
        f"A run must be resumed with what its clients kept. In {path}, what client {client} kept is damaged.",
        hint="put the file back, or begin a new run in another folder.",
    )


def _checksum(piece: int, client: int, round: int, form: int, tree: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(f"{piece}|{client}|{round}|{form}|".encode(), digest_size=16)
    found.update(tree)
    return found.digest()


def _older_checksum(piece: str, client: int, round: int, tree: bytes) -> str:
    found = hashlib.blake2b(f"{piece}|{client}|{round}|".encode(), digest_size=16)
    found.update(tree)
    return found.hexdigest()
