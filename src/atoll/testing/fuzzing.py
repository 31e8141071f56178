"""Messages that nobody wrote: good ones damaged in every way, to see that none is accepted and nothing breaks.

A damaged message is one whose bytes were changed after it was signed: none may be accepted. A crafted one is changed
and then signed anew with a key that is known, as a site that has gone bad could do it: whatever it holds, it is either
refused or a message of the right form. In both cases the only error is a refusal.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from atoll.deploy.engine import InProcess
from atoll.deploy.journal import Exchange
from atoll.deploy.keys import Key
from atoll.deploy.messages import MAGIC, SIGNATURE
from atoll.kernel.errors import DeployError
from atoll.kernel.randomness import generator
from atoll.records.runs import peak_memory

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 1e308, "", "x" * 1000, "../../etc/passwd", "\x00", [], {}, [[]],
    {"a": 1}, "0" * 64, "0" * 32, 0.5, "1999-01-01", "9999-12-31T23:59:59+00:00", [1, "a", None],
)  # fmt: skip
LENGTHS = (0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1)


@dataclass
class Outcome:
    """What became of messages."""

    tried: int = 0
    accepted: int = 0  # damaged ones: there must be none
    fitting: int = 0  # crafted ones that have the right form still
    refused: Counter[str] = field(default_factory=Counter)  # by the beginning of the reason
    errors: list[str] = field(default_factory=list)  # anything but a refusal: there must be none
    grown: int = 0  # bytes by which the process became larger


def fuzz(good: Sequence[bytes], key: Key, receive: Callable[[bytes], object], count: int, seed: int = 0) -> Outcome:
    """Give a receiver so many damaged and crafted messages, made from good ones."""
    found, draw = Outcome(), generator(seed, "fuzz")
    before = peak_memory(torch.device("cpu"))
    for number in range(count):
        crafted = number % 2 == 1
        base = good[int(draw.integers(len(good)))]
        data = craft(base, key, draw) if crafted else damage(base, draw)
        if data == base:
            continue
        found.tried += 1
        try:
            receive(data)
        except DeployError as error:
            found.refused[_shorten(str(error))] += 1
        except Exception as error:  # noqa: BLE001 - this is what must not happen
            found.errors.append(f"{type(error).__name__}: {error}")
        else:
            found.fitting += crafted
            found.accepted += not crafted
    found.grown = peak_memory(torch.device("cpu")) - before
    return found


def damage(data: bytes, draw: np.random.Generator) -> bytes:
    """Change the bytes of a message in one of many ways, and leave the signature as it is."""
    kind, place = int(draw.integers(8)), int(draw.integers(len(data)))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data + draw.bytes(int(draw.integers(1, 100)))
    if kind == 2:
        return draw.bytes(int(draw.integers(0, 500)))
    if kind == 3:  # a length that promises much
        size = LENGTHS[int(draw.integers(len(LENGTHS)))]
        return data[:8] + size.to_bytes(8, "little") + data[16:]
    if kind == 4:
        return MAGIC + draw.bytes(len(data) - len(MAGIC))
    if kind == 5:
        stop = min(len(data), place + int(draw.integers(1, 50)))
        return data[:place] + data[stop:]
    if kind == 6:  # within the header, where most is decided
        place %= 16 + int.from_bytes(data[8:16], "little")
    return data[:place] + bytes([data[place] ^ int(draw.integers(1, 256))]) + data[place + 1 :]


def craft(data: bytes, key: Key, draw: np.random.Generator) -> bytes:
    """Change what a message says, or its body, and sign it anew."""
    length = int.from_bytes(data[8:16], "little")
    header, body = json.loads(data[16 : 16 + length]), data[16 + length + SIGNATURE :]
    kind = int(draw.integers(6))
    if kind <= 2:
        header = change_value(header, draw)
    elif kind == 3:
        body = damage(body, draw)
    elif kind == 4:
        body = change_table(body, draw)
    else:
        header = {name: value for name, value in header.items() if draw.random() > 0.15}
    if isinstance(header, dict) and kind in (3, 4):
        header |= {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    text = json.dumps(header, separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    return head + key.sign(head) + body


def change_table(body: bytes, draw: np.random.Generator) -> bytes:
    """Change the table of tensors that safetensors begins with, and the structure in it."""
    length = int.from_bytes(body[:8], "little")
    try:
        table = json.loads(body[8 : 8 + length])
        structure = json.loads(table["__metadata__"]["structure"])
    except (ValueError, LookupError, TypeError):
        return damage(body, draw)
    if draw.random() < 0.5:
        table = change_value(table, draw)
    else:
        table["__metadata__"]["structure"] = json.dumps(change_value(structure, draw))
    if draw.random() < 0.05:
        table["__metadata__"]["structure"] = "[" * 100_000
    text = json.dumps(table, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + body[8 + length :]


def change_value(value: Any, draw: np.random.Generator) -> Any:
    """Return JSON with one value replaced by an odd one, removed, or moved."""
    changed = copy.deepcopy(value)
    places = list(_list_places(changed))
    if not places:
        return ODD[int(draw.integers(len(ODD)))]
    inside, name = places[int(draw.integers(len(places)))]
    if draw.random() < 0.2:
        del inside[name]
    elif draw.random() < 0.2:
        other, where = places[int(draw.integers(len(places)))]
        inside[name] = copy.deepcopy(other[where])
    else:
        inside[name] = ODD[int(draw.integers(len(ODD)))]
    return changed


def _list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in entries:
        yield value, name
        yield from _list_places(inner)


def _shorten(reason: str) -> str:
    words = reason.splitlines()[0].split(": ", 1)[-1]
    return words[:40]


class Probing(InProcess):
    """A transport that, before it hands on the reply of the first site, has damaged and crafted ones checked."""

    def __init__(self, sites: Mapping[str, Any], keys: Mapping[str, Key], count: int, seed: int = 0) -> None:
        super().__init__(sites)
        self.keys, self.count, self.seed = keys, count, seed
        self.found: list[Outcome] = []  # by exchange

    def exchange(self, jobs: Mapping[str, bytes], exchange: Exchange) -> Iterator[tuple[str, bytes | str]]:
        """Hand on replies, after trying many that nobody wrote."""
        check = exchange.check
        assert check is not None
        for place, (site, reply) in enumerate(super().exchange(jobs, exchange)):
            if place == 0 and isinstance(reply, bytes):
                receive = functools.partial(check, site)
                self.found.append(fuzz([reply, jobs[site]], self.keys[site], receive, self.count, self.seed))
            yield site, reply
