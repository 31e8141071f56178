"""The coordinator's journal: every exchange under way, what was asked and which replies were accepted.

A federation that stops in the middle of a round, because files are carried or because the coordinator was killed, goes
on by playing the round again from its checkpoint: the journal has the replies that were there, so nobody is asked twice
and nothing changes. Exchanges that a checkpoint covers are forgotten.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from atoll.deploy import messages
from atoll.deploy.messages import Header, Message
from atoll.records.files import read_record, write_record
from atoll.records.schema import Record
from atoll.runtime.files import read_regular, write_whole


@dataclass(frozen=True, eq=False, kw_only=True)
class Known(Record):
    """What the coordinator knows of the sites."""

    next: int = 0  # the number of the next exchange
    signers: dict[str, str] = field(default_factory=dict)  # the public key of each site that has replied
    counted: dict[str, str] = field(default_factory=dict)  # the last job of which a site's reply was accepted
    samples: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # by site and split, of each client


class Asked(NamedTuple):
    """A job in short."""

    digest: str
    written: datetime
    header: Header


@dataclass(eq=False)
class Exchange:
    """One question to some sites, and their replies so far."""

    number: int
    round: int
    phases: tuple[str, ...]
    jobs: dict[str, bytes]  # by site; several may have the same
    replies: dict[str, bytes] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # sites that do not count, and why
    closed: bool = False
    folder: Path | None = None
    check: Callable[[str, bytes], Message] | None = None  # raises RefusedError for a reply that does not fit

    @cached_property
    def asked(self) -> dict[str, Asked]:
        """What each site was asked, in short."""
        read = {data: messages.read(data) for data in set(self.jobs.values())}
        return {
            site: Asked(read[data].digest, read[data].written, read[data].header) for site, data in self.jobs.items()
        }


class Journal:
    """Exchanges and what is known of sites, in a folder, or in memory for tests."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.known = Known()
        self.exchanges: list[Exchange] = []
        if folder is not None and (folder / "known.json").exists():
            self.known = read_record(folder / "known.json", Known)
            self.exchanges = [
                _load(path) for path in sorted(folder.glob("exchange-*")) if (path / "about.json").exists()
            ]

    def find(self, round: int, phase: str) -> Exchange | None:
        """Return the exchange of a phase in a round, if there was one."""
        for one in reversed(self.exchanges):
            if one.round == round and phase in one.phases:
                return one
        return None

    def open(self, round: int, phases: Sequence[str], jobs: Mapping[str, bytes], number: int) -> Exchange:
        """Write down a question before it is asked."""
        made = Exchange(number, round, tuple(phases), dict(jobs))
        if self.folder is not None:
            made.folder = self.folder / f"exchange-{number:06d}"
            made.folder.mkdir(parents=True, exist_ok=True)
            different = list(dict.fromkeys(jobs.values()))
            for place, data in enumerate(different):
                write_whole(made.folder / f"job-{place}.atoll", data)
            about = {
                "number": number, "round": round, "phases": list(phases),
                "jobs": {site: different.index(data) for site, data in jobs.items()},
            }  # fmt: skip
            write_record(made.folder / "about.json", about)
        self.exchanges.append(made)
        self._know(next=number + 1)
        return made

    def accept(self, exchange: Exchange, site: str, message: Message, data: bytes) -> None:
        """Write down a reply that fits."""
        exchange.replies[site] = data
        if exchange.folder is not None:
            write_whole(exchange.folder / f"reply-{site}.atoll", data)
        samples = message.header.about["samples"]
        self._know(
            signers={**self.known.signers, site: message.header.key}, samples={**self.known.samples, site: samples},
        )  # fmt: skip

    def close(self, exchange: Exchange, lost: Mapping[str, str]) -> None:
        """End an exchange: from now on, replies to it are late."""
        exchange.lost, exchange.closed = dict(lost), True
        counted = {site: exchange.asked[site].digest for site in exchange.replies}
        self._know(counted={**self.known.counted, **counted})
        if exchange.folder is not None:
            write_record(exchange.folder / "closed.json", {"lost": dict(lost)})

    def forget(self, before: int) -> None:
        """Forget exchanges of rounds before one."""
        for one in [one for one in self.exchanges if one.closed and one.round < before]:
            self.exchanges.remove(one)
            if one.folder is not None:
                shutil.rmtree(one.folder, ignore_errors=True)

    def _know(self, **changes: object) -> None:
        self.known = Known.of_json({**self.known.as_json(), **changes})
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_record(self.folder / "known.json", self.known)


def _load(folder: Path) -> Exchange:
    about = read_record(folder / "about.json", dict[str, Any])
    data = [read_regular(folder / f"job-{place}.atoll") for place in range(len(set(about["jobs"].values())))]
    made = Exchange(
        int(about["number"]), int(about["round"]), tuple(about["phases"]),
        {site: data[place] for site, place in about["jobs"].items()}, folder=folder,
    )  # fmt: skip
    for path in sorted(folder.glob("reply-*.atoll")):
        made.replies[path.name.removeprefix("reply-").removesuffix(".atoll")] = read_regular(path)
    closed = folder / "closed.json"
    if closed.exists():
        made.closed, made.lost = True, dict(read_record(closed, dict[str, Any])["lost"])
    return made
