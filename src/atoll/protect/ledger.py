"""The ledger: every message with its direction, client, round, field, kind and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from atoll.kernel.errors import RunError

Direction = Literal["down", "up"]


class Message(NamedTuple):
    """One field of one message to or from one client."""

    direction: Direction
    client: int
    round: int
    field: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Entry:
    """Messages of one round that differ in their client only, written together.

    An entry lists its clients; where a federation has very many, it only counts them.
    """

    direction: Direction
    round: int
    field: str
    kind: str
    bytes: int  # of each message
    clients: tuple[int, ...] | None
    count: int = 0  # messages; those of listed clients by default

    def __post_init__(self) -> None:
        if self.clients is not None:
            object.__setattr__(self, "count", len(self.clients))

    @property
    def total(self) -> int:
        """The bytes of all messages."""
        return self.bytes * self.count

    def drop_clients(self) -> Entry:
        """Return the entry without the list of its clients."""
        return replace(self, clients=None)

    def messages(self) -> Iterator[Message]:
        """Yield the messages one by one."""
        if self.clients is None:
            raise RunError(
                f"Single messages must have clients that are listed. The ledger has {self.count} counted messages of "
                f"field {self.field!r} in round {self.round}, because there are so many clients.",
                hint="sums are there: `bytes`, `by_kind`, `bytes_in_round`.",
            )
        for client in self.clients:
            yield Message(self.direction, client, self.round, self.field, self.kind, self.bytes)

    def as_json(self) -> dict[str, Any]:
        """Return the entry for the run's folder."""
        found = asdict(self)
        del found["clients" if self.clients is None else "count"]
        return found


class Ledger:
    """All entries of a run, and their sums; unless `listed`, clients are counted: an entry per round and field."""

    def __init__(self, entries: list[Entry] | None = None, *, listed: bool = True) -> None:
        self.entries: list[Entry] = list(entries or ())
        self.listed = listed

    def __repr__(self) -> str:
        sums = [f"{self.bytes(way) / 1e6:.1f} MB {way}" for way in ("up", "down")]
        return f"<Ledger of {sum(entry.count for entry in self.entries):,} messages: {', '.join(sums)}>"

    def record(self, entry: Entry) -> None:
        """Write an entry; nothing is written for messages without bytes."""
        if not entry.total:
            return
        if self.listed:
            self.entries.append(entry)
            return
        entry = entry.drop_clients()
        for place in range(len(self.entries) - 1, -1, -1):
            before = self.entries[place]
            if before.round < entry.round:
                break
            if replace(before, count=entry.count) == entry:
                self.entries[place] = replace(entry, count=before.count + entry.count)
                return
        self.entries.append(entry)

    def messages(self) -> Iterator[Message]:
        """Yield every message."""
        for entry in self.entries:
            yield from entry.messages()

    def bytes(self, direction: Direction) -> int:
        """Return all bytes in one direction."""
        return sum(entry.total for entry in self.entries if entry.direction == direction)

    def by_kind(self) -> dict[tuple[Direction, str], int]:
        """Return all bytes by direction and kind."""
        sums: dict[tuple[Direction, str], int] = defaultdict(int)
        for entry in self.entries:
            sums[entry.direction, entry.kind] += entry.total
        return dict(sums)

    def bytes_in_round(self, round: int) -> dict[str, int]:
        """Return the bytes down and up in one round."""
        sums = {"down": 0, "up": 0}
        for entry in reversed(self.entries):
            if entry.round < round:
                break
            if entry.round == round:
                sums[entry.direction] += entry.total
        return sums
