"""The terms of a federation: what coordinator and sites must agree on, told to every site in every job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.data.splits import SPLITS
from atoll.deploy.keys import NAME
from atoll.kernel.errors import DeployError
from atoll.kernel.task import Facts, Training
from atoll.records.schema import Record, SchemaError

# What a site makes room for by what it is told.
MOST = {"clients": 1_000_000, "rounds": 1_000_000, "largest": 10_000_000, "batch_size": 100_000}


@dataclass(frozen=True, eq=False, kw_only=True)
class Place(Record):
    """The place of a site in a federation."""

    clients: list[int]  # their numbers
    key: str = ""  # its public key; empty: whoever comes first takes the place

    def check(self) -> None:
        """Raise SchemaError unless there is a client."""
        if not self.clients:
            raise SchemaError("a site must have at least 1 client")


@dataclass(frozen=True, eq=False, kw_only=True)
class Terms(Record):
    """What all take part in: who, with which data and model, in which way."""

    name: str
    clients: int
    sites: dict[str, Place]
    rounds: int
    seed: int = 0
    training: dict[str, Any]
    model: str | None = None  # by name; None where both sides have it
    form: dict[str, Any] | None = None  # the schema of the data; None where both sides have it
    largest: dict[str, int] | None = None  # the most samples of any client, by split; None: each site's own

    def check(self) -> None:
        """Raise SchemaError unless every client is at one site, and nothing is so large that memory would not do."""
        self._check_sizes()
        numbers = sorted(number for site in self.sites.values() for number in site.clients)
        if len(numbers) != self.clients or numbers != [*range(self.clients)]:
            raise SchemaError("the clients of the sites must be numbered from 0, each once")
        for name in self.sites:
            if not NAME.fullmatch(name):
                raise SchemaError(f"a site must have a name. One is called {name[:80]!r}")

    def _check_sizes(self) -> None:
        largest = max([0, *(self.largest or {}).values()])
        sizes = {"clients": self.clients, "rounds": self.rounds, "largest": largest}
        sizes |= {name: value for name in ("batch_size",) if isinstance(value := self.training.get(name), int)}
        for name, size in sizes.items():
            if not 0 <= size <= MOST[name]:
                raise SchemaError(f"{name} must be at most {MOST[name]:,}. It is {size:,}")
        if self.largest is not None and set(self.largest) != set(SPLITS):
            raise SchemaError(f"largest must have {', '.join(SPLITS)}")
        if self.clients < 1 or self.rounds < 1:
            raise SchemaError("clients and rounds must be at least 1")

    @cached_property
    def digest(self) -> str:
        """What the terms are known by."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    @property
    def rule(self) -> Training:
        """How clients take their steps."""
        return Training(**self.training)

    @cached_property
    def site_of(self) -> dict[int, str]:
        """The site of each client."""
        return {number: name for name, site in self.sites.items() for number in site.clients}

    def clients_at(self, site: str) -> NDArray[np.int64]:
        """Return the numbers of a site's clients."""
        return np.array(self.sites[site].clients, dtype=np.int64)


def write_terms(
    facts: Facts, sites: Mapping[str, Place], *, rounds: int, model: str | None = None,
    form: Mapping[str, Any] | None = None, largest: Mapping[str, int] | None = None,
) -> Terms:  # fmt: skip
    """Return the terms of a federation on a task."""
    if facts.architecture is not None:
        raise DeployError(
            "Sites must have one network together. This task has several architectures.",
            hint="give one model; several architectures run in a simulation.",
        )
    return Terms(
        name=facts.name, clients=facts.clients, sites=dict(sites), rounds=rounds, seed=facts.seed,
        training=asdict(facts.training), model=model, form=None if form is None else dict(form),
        largest=None if largest is None else dict(largest),
    )  # fmt: skip
