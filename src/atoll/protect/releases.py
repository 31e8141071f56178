"""The ledger beside the account: whatever left a client is a release, and each of them must have been counted.

A promise counts one message of a client in a round, with the fields that its method declares, and the messages before
its first round where the promise covers these. The ledger has every message that really left. What it has beyond that
was not counted, and a promise that leaves it out would be a lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from atoll.kernel.errors import PrivacyError
from atoll.protect.adaptive import COUNTED
from atoll.protect.ledger import Entry


def require_counted(entries: Iterable[Entry], fields: Set[str], *, exchanges: int) -> None:
    """Raise for what left clients beyond one message a round of these fields, and `exchanges` before the first."""
    seen: set[tuple[int, str, int]] = set()
    for entry in entries:
        if entry.direction == "down" or entry.kind == "protocol":
            continue
        where = f"in round {entry.round}, {entry.field!r} of {entry.count} client(s)"
        if entry.field not in fields | {COUNTED}:
            raise PrivacyError(f"Something left clients that no promise covers: {where}.")
        if entry.round < -exchanges:
            raise PrivacyError(f"Something left clients before the first round that was not counted: {where}.")
        for client in entry.clients or ():
            if (key := (entry.round, entry.field, client)) in seen:
                raise PrivacyError(
                    f"A client must send a field once in a round, which is what is counted. It did twice: {where}."
                )
            seen.add(key)


def count_most(entries: Iterable[Entry], *, exchanges: int) -> int | None:
    """Return the most messages that one client sent; None where the ledger does not list clients."""
    rounds: dict[int, set[int]] = {}
    for entry in entries:
        if entry.direction == "up" and entry.kind != "protocol" and entry.round >= 0:
            if entry.clients is None:
                return None
            rounds.setdefault(entry.round, set()).update(entry.clients)
    sent = Counter(client for clients in rounds.values() for client in clients)
    return exchanges + max(sent.values(), default=0)
