"""The ledger: every message with its direction, client, round, field, kind and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

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
    """Messages of one round that differ in their client only, written together."""

    direction: Direction
    round: int
    field: str
    kind: str
    bytes: int  # of each message
    clients: tuple[int, ...]

    def messages(self) -> Iterator[Message]:
        """Yield the messages one by one."""
        for client in self.clients:
            yield Message(self.direction, client, self.round, self.field, self.kind, self.bytes)

    def as_json(self) -> dict[str, Any]:
        """Return the entry for the run's folder."""
        return asdict(self)


class Ledger:
    """All entries of a run, and their sums."""

    def __init__(self, entries: list[Entry] | None = None) -> None:
        self.entries: list[Entry] = list(entries or ())

    def record(self, entry: Entry) -> None:
        """Write an entry; nothing is written for messages without bytes."""
        if entry.clients and entry.bytes:
            self.entries.append(entry)

    def messages(self) -> Iterator[Message]:
        """Yield every message."""
        for entry in self.entries:
            yield from entry.messages()

    def bytes(self, direction: Direction) -> int:
        """Return all bytes in one direction."""
        return sum(entry.bytes * len(entry.clients) for entry in self.entries if entry.direction == direction)

    def by_kind(self) -> dict[tuple[Direction, str], int]:
        """Return all bytes by direction and kind."""
        sums: dict[tuple[Direction, str], int] = defaultdict(int)
        for entry in self.entries:
            sums[entry.direction, entry.kind] += entry.bytes * len(entry.clients)
        return dict(sums)

    def bytes_in_round(self, round: int) -> dict[str, int]:
        """Return the bytes down and up in one round."""
        sums = {"down": 0, "up": 0}
        for entry in reversed(self.entries):
            if entry.round < round:
                break
            if entry.round == round:
                sums[entry.direction] += entry.bytes * len(entry.clients)
        return sums
