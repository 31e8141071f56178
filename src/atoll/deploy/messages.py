"""What travels: one envelope for all messages, a JSON header that is signed and a body of safetensors.

    8 bytes    ATOLL, the version of the form, and a line end
    8 bytes    the length of the header
    ...        the header: JSON, with the length and the digest of the body
    64 bytes   the Ed25519 signature of everything above
    ...        the body: safetensors, nothing that could be executed

Lengths are compared with what is allowed before anything is read, and the signature and the digest before anything is
made of the body. Whatever else arrives ends in a RefusedError that names where it came from and why.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import torch

from atoll.deploy.keys import NAME, Key, PublicKey
from atoll.kernel.errors import AtollError, RefusedError
from atoll.kernel.params import Layout, Tree
from atoll.kernel.sources import code_digest
from atoll.records.schema import Record, SchemaError
from atoll.runtime import serialise
from atoll.runtime.files import open_regular

Kind = Literal["join", "job", "reply"]
FORM = 1
MAGIC = b"ATOLL\x00" + bytes([FORM]) + b"\n"
SIGNATURE = 64  # bytes
LARGEST_HEADER = 16 * 2**20
LARGEST_BODY = 2 * 2**30
AHEAD = timedelta(minutes=15)  # by which a clock may be ahead of another one


@dataclass(frozen=True, eq=False, kw_only=True)
class Header(Record):
    """What a message says about itself; the signature covers it, and through the digest also the body."""

    kind: str
    federation: str  # a number drawn when it was begun
    sender: str
    key: str  # the sender's public key
    number: int  # of the exchange that the message belongs to: they are numbered from 0
    round: int
    written: str  # when, in UTC
    versions: dict[str, str]
    about: dict[str, Any]  # what a message of this kind says
    bytes: int  # of the body
    sha256: str  # of the body

    def check(self) -> None:
        """Raise SchemaError unless the fields hold what they should."""
        if self.kind not in get_args(Kind):
            raise SchemaError(f"kind must be one of {', '.join(get_args(Kind))}. It is {self.kind!r}")
        if not NAME.fullmatch(self.sender):
            raise SchemaError(f"sender must be a name. It is {self.sender[:80]!r}")
        for name, value, length in (
            ("key", self.key, 64),
            ("sha256", self.sha256, 64),
            ("federation", self.federation, 32),
        ):
            if len(value) != length or not set(value) <= set("0123456789abcdef"):
                raise SchemaError(f"{name} must be {length} hexadecimal digits")
        if self.bytes < 0 or self.number < 0:
            raise SchemaError("bytes and number must not be negative")


@dataclass(frozen=True, eq=False)
class Message:
    """A message whose form, digest and signature are right. Whether its sender may send it is not known yet."""

    header: Header
    digest: str  # of header and body: what other messages call it by
    body: bytes
    origin: str  # where it was read, for errors

    @property
    def sender(self) -> PublicKey:
        """Who signed it."""
        return PublicKey(self.header.sender, bytes.fromhex(self.header.key))

    @cached_property
    def written(self) -> datetime:
        """When it was written, by the sender's clock."""
        try:
            return datetime.fromisoformat(self.header.written).astimezone(UTC)
        except (ValueError, OverflowError) as error:
            raise self.refuse(f"it must say when it was written. It says {self.header.written[:40]!r}") from error

    def tree(self, layout: Layout | None, device: torch.device | str = "cpu") -> Tree:
        """Return what the body holds."""
        with self.guarding():
            return serialise.from_bytes(self.body, layout, device)

    def refuse(self, reason: str, *, hint: str | None = None) -> RefusedError:
        """Make the error that says why this message is not accepted."""
        return RefusedError(f"{self.origin} ({self.header.kind} of {self.header.sender}): {reason}.", hint=hint)

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Turn whatever goes wrong while a message is read into its refusal."""
        try:
            yield
        except RefusedError:
            raise
        except (AtollError, SchemaError) as error:
            raise self.refuse(f"it is not what it should be: {str(error).splitlines()[0]}") from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise self.refuse(f"it is not what it should be ({type(error).__name__})") from error


def write(
    kind: Kind, key: Key, *, federation: str, number: int, round: int, about: dict[str, Any], tree: Tree,
    written: datetime | None = None,
) -> bytes:  # fmt: skip
    """Return a message, signed."""
    body = serialise.to_bytes(tree, about="")
    public = key.public
    header = Header(
        kind=kind, federation=federation, sender=public.name, key=public.value.hex(), number=number, round=round,
        written=(written or now()).isoformat(timespec="seconds"), versions=versions(), about=about, bytes=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
    )  # fmt: skip
    text = json.dumps(header.as_json(), separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    return head + key.sign(head) + body


def read(data: bytes, origin: str = "The message", *, largest: int = LARGEST_BODY) -> Message:
    """Read a message from bytes; raise RefusedError for anything that is not one."""
    return _read(io.BytesIO(data), len(data), origin, largest)


def read_file(path: Path, *, largest: int = LARGEST_BODY) -> Message:
    """Read a message from a file; raise RefusedError for anything that is not one."""
    try:
        with open_regular(path, largest=largest + LARGEST_HEADER + 16 + SIGNATURE) as file:
            size = path.stat().st_size
            return _read(file, size, str(path), largest)
    except OSError as error:
        raise RefusedError(f"{path}: it must be readable: {error.strerror}.") from error
    except RefusedError:
        raise
    except AtollError as error:
        raise RefusedError(f"{path}: {error}") from error


def _read(file: BinaryIO, size: int, origin: str, largest: int) -> Message:
    def refuse(reason: str) -> RefusedError:
        return RefusedError(f"{origin}: {reason}.")

    start = file.read(16)
    if len(start) < 16 or start[:6] != MAGIC[:6] or start[7:8] != MAGIC[7:]:
        raise refuse("it must be a message of Atoll. It does not begin like one")
    if start[6] != FORM:
        raise RefusedError(
            f"{origin}: it must have the form {FORM} of messages. It has {start[6]}.",
            hint="sender and receiver need versions of Atoll with the same form of messages: "
            f"{'this one is' if start[6] > FORM else 'the sender is'} the older one.",
        )
    length = int.from_bytes(start[8:], "little")
    if length > LARGEST_HEADER or length > size - 16 - SIGNATURE:
        raise refuse(
            f"its header must fit in it and have at most {LARGEST_HEADER:,} bytes. It is said to have {length:,}"
        )
    text = file.read(length)
    signature = file.read(SIGNATURE)
    try:
        header = Header.of_json(json.loads(text))
    except (ValueError, RecursionError, TypeError) as error:  # SchemaError is a ValueError
        reason = str(error) if isinstance(error, SchemaError) else "it is no JSON"
        raise refuse(f"its header cannot be read: {reason[:300]}") from error
    if header.bytes > largest:
        raise refuse(f"its body must have at most {largest:,} bytes. It is said to have {header.bytes:,}")
    there = size - 16 - length - SIGNATURE
    if header.bytes != there:
        raise refuse(f"it must be whole. {header.bytes:,} bytes of body are said to follow, {there:,} do")
    sender = PublicKey(header.sender, bytes.fromhex(header.key))
    if not sender.verify(signature, start + text):
        raise refuse(f"its header was altered, or it was not signed by who it says, {header.sender}")
    body = file.read(header.bytes)
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise refuse("its body was altered or damaged: the digest does not hold")
    return Message(header, hashlib.sha256(start + text).hexdigest(), body, origin)


def require_in_time(message: Message, *, after: datetime | None = None) -> None:
    """Raise if a message was written in the future, or before what it answers: then a clock is off."""
    here = now()
    if message.written > here + AHEAD:
        raise message.refuse(
            f"it was written at {message.written:%Y-%m-%d %H:%M} UTC, and here it is {here:%Y-%m-%d %H:%M} UTC",
            hint=f"one of the clocks is off: set the clock of this machine, or that of {message.header.sender}.",
        )
    if after is not None and message.written < after - AHEAD:
        raise message.refuse(
            f"it was written at {message.written:%Y-%m-%d %H:%M} UTC, before what it answers "
            f"({after:%Y-%m-%d %H:%M} UTC)",
            hint=f"set the clock of {message.header.sender}, then let it answer again.",
        )


def require_version(message: Message) -> str | None:
    """Raise if the sender has an Atoll whose numbers differ; return a remark if it differs and does not matter."""
    here, there, who = versions(), message.header.versions, message.header.sender
    if here.get("code") == there.get("code"):
        return None
    mine, theirs = here["atoll"], there.get("atoll", "unknown")
    if mine.split(".")[:2] != theirs.split(".")[:2]:
        raise message.refuse(
            f"{who} has Atoll {theirs}, this is Atoll {mine}: they may compute differently, and that matters",
            hint=f"install the same version: pip install 'atoll=={theirs}' here, or {mine} at {who}.",
        )
    what = f"Atoll {theirs}" if theirs != mine else f"Atoll {mine} with other code"
    return f"{who} has {what}, this is Atoll {mine}: its messages have the same form, numbers may differ in last digits"


@functools.cache
def versions() -> dict[str, str]:
    """Return what decides whether two sides understand each other."""
    return {"atoll": metadata.version("atoll"), "code": code_digest(), "torch": torch.__version__}


def now() -> datetime:
    """Return the time, in UTC."""
    return datetime.now(UTC)
