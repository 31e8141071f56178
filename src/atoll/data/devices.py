"""Devices: how fast each client is, how large a network it can hold, and how long it lasts.

A CSV file says it:

    client,speed,memory,energy
    0,0.25,,
    hospital-a,1,0.2,20

    speed     the share of its local steps that a client takes in a round, above 0 and at most 1
    memory    megabytes for the parameters of its network
    energy    rounds of whole work that it can do; a round of half the work takes half as much

A client is named as the task names it, or by its number. A column may be missing, and so may a value or a client:
then there is no limit.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.kernel.errors import DataError, TaskError
from atoll.kernel.network import Network

Floats = NDArray[np.float64]
MEGABYTE = 1e6


@dataclass(frozen=True, eq=False)
class Devices:
    """One number per client."""

    speed: Floats  # share of its local steps that it takes
    memory: Floats  # megabytes; infinite where there is no limit
    energy: Floats  # rounds of whole work; infinite where there is no limit

    @classmethod
    def read(cls, path: Path | str, clients: int, names: Sequence[str] | None = None) -> Devices:
        """Read the devices of so many clients, which may have names."""
        try:
            with Path(path).open(newline="") as file:
                reader = csv.DictReader(file)
                columns, lines = reader.fieldnames or [], [*reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"Devices must be in a CSV file. {path} cannot be read: {error}.") from None
        known = [one.name for one in fields(cls)]
        if "client" not in columns or not {*columns} <= {"client", *known}:
            raise DataError(
                f"A file of devices must have the column client and any of {', '.join(known)}. {path} has "
                f"{', '.join(columns) or 'none'}."
            )
        found = {"speed": np.ones(clients), "memory": np.full(clients, np.inf), "energy": np.full(clients, np.inf)}
        seen = set[int]()
        for line in lines:
            client = _find(line["client"], clients, names, path)
            if client in seen:
                raise DataError(f"{path} must name every client once. It names {line['client']!r} again.")
            seen.add(client)
            for name in known:
                if line.get(name):
                    found[name][client] = _number(name, line[name], line["client"], path)
        return cls(**found)

    def of(self, clients: NDArray[np.int64]) -> Devices:
        """Return the devices of some clients."""
        return Devices(*(getattr(self, one.name)[clients] for one in fields(self)))

    @property
    def digest(self) -> str:
        """A digest of all numbers."""
        values = b"".join(getattr(self, one.name).tobytes() for one in fields(self))
        return hashlib.blake2b(values, digest_size=8).hexdigest()

    @property
    def tire(self) -> bool:
        """Whether anybody's energy ends."""
        return bool(np.isfinite(self.energy).any())

    def exhausted(self, asked: NDArray[np.int64]) -> NDArray[np.int64]:
        """List the clients that have no energy for another round, after they were asked so often."""
        left = self.energy - asked * self.speed
        return np.flatnonzero(left < self.speed - 1e-9).astype(np.int64)

    def deal(self, networks: Sequence[Network], names: Sequence[str] | None) -> NDArray[np.int64]:
        """Return the number of the largest of the networks that each client can hold."""
        sizes = np.array([sum(leaf.nbytes for leaf in one.initial.values()) / MEGABYTE for one in networks])
        fits = sizes[None, :] <= self.memory[:, None]
        small = np.flatnonzero(~fits.any(axis=1))
        if len(small):
            who = str(small[0]) if names is None else names[small[0]]
            raise TaskError(
                f"Every client must have the memory for a network. {len(small)} of {len(self.memory)} have not: "
                f"client {who} has {self.memory[small[0]]:g} MB, the smallest network takes {sizes.min():.3g} MB.",
                hint="add a smaller one, such as model='mlp:8/mlp:64', or raise `memory`.",
            )
        best: NDArray[np.int64] = np.where(fits, sizes[None, :], -1.0).argmax(axis=1).astype(np.int64)
        return best


def _find(given: str, clients: int, names: Sequence[str] | None, path: Path | str) -> int:
    if names is not None and given in names:
        return list(names).index(given)
    if given.isdecimal() and int(given) < clients:
        return int(given)
    near = get_close_matches(given, names or ())
    hint = f"did you mean {near[0]}?" if near else f"clients have numbers from 0 to {clients - 1}."
    raise DataError(f"{path} must name clients of the task. It names {given!r}.", hint=hint)


def _number(name: str, text: str, client: str, path: Path | str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= (1 if name == "speed" else math.inf):
        expected = "above 0 and at most 1" if name == "speed" else "above 0"
        raise DataError(f"`{name}` in {path} must be a number {expected}. Client {client} has {text!r}.")
    return value
