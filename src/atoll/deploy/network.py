"""What carries envelopes between a server and its sites: a network is any module with `listen` and `connect`.

    [project.entry-points."atoll.networks"]
    flower = "atoll.deploy.flower"

A network reads no envelope. It must know sites by the public keys of their connections, and nobody else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from atoll.kernel.errors import PayloadError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Arrived:
    """A reply: the envelope that a site sent."""

    site: str
    envelope: bytes


@dataclass(frozen=True)
class Missing:
    """A site that did not reply, and why."""

    site: str
    reason: str


class Link(Protocol):
    """The server's side: where sites fetch their messages and bring their replies."""

    host: str
    port: int

    def __enter__(self) -> Self:
        """Begin to listen."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        ...

    def connected(self) -> set[str]:
        """Return the names of the sites that are there now."""
        ...

    def count_connections(self, site: str) -> int:
        """Return how often a site has connected: a process that is started again connects again."""
        ...

    def exchange(self, envelopes: Mapping[str, bytes], *, timeout: float, grace: float) -> Iterator[Arrived | Missing]:
        """Send each site its envelope and yield the replies as they come, and who is missing.

        A site that is not there is waited for, `grace` seconds; one that comes back is sent its envelope again. After
        `timeout` seconds whoever has not replied is missing.
        """
        ...


class Node(Protocol):
    """A site's side: its connection to the server."""

    def serve(self, answer: Callable[[bytes], bytes], stop: threading.Event) -> None:
        """Answer envelopes until `stop` is set, whatever happens to the connection in between."""
        ...


class Network(Protocol):
    """Both sides."""

    def listen(
        self, address: tuple[str, int], sites: Mapping[str, bytes], certificate: tuple[Path, Path] | None
    ) -> Link:
        """Return the server's side at an address; `sites` are the public keys of their connections (PEM), by name.

        Without a `certificate` (a file of it and one of its key) nothing is encrypted.
        """
        ...

    def connect(self, server: str, key: ec.EllipticCurvePrivateKey, authority: Path | None) -> Node:
        """Return a site's side to `server`, as HOST:PORT; without the certificate of an `authority`, in plain text."""
        ...


def write_question(say: str, **more: Any) -> bytes:
    """Write what the server says to a site beside jobs: `join`, or `done`."""
    return json.dumps({"say": say, **more}).encode()


def read_question(envelope: bytes) -> dict[str, Any] | None:
    """Read what the server says beside jobs; None if it is a job."""
    if not envelope.startswith(b"{"):
        return None
    try:
        found = json.loads(envelope)
    except (ValueError, RecursionError):
        raise PayloadError("What the server says must be JSON. This is not.") from None
    if not isinstance(found, dict) or not isinstance(found.get("say"), str):
        raise PayloadError("What the server says must have a word for it. This has none.")
    return found


def describe_work(phases: Sequence[str], round: int) -> str:
    """Return what sites are asked for in words: rounds are counted from 1, and scores come after them."""
    if all(phase.startswith(("evaluate", "finish")) for phase in phases):
        return f"scores after round {round}"
    return f"round {round + 1}" if round >= 0 else f"exchange {round} before the first round"
