"""A server: it waits for its sites, writes the terms with those that are there, and drives the one round loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.data.task import Task
from atoll.deploy import messages
from atoll.deploy.coordinator import coordinate, seat_sites
from atoll.deploy.engine import Federation
from atoll.deploy.flower.certificates import ServerKeys
from atoll.deploy.flower.link import Arrived, Link
from atoll.deploy.flower.wire import describe_work, write_question
from atoll.deploy.journal import Exchange
from atoll.deploy.keys import PublicKey
from atoll.deploy.terms import Place, Terms
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError, RefusedError
from atoll.records.files import read_record, write_record
from atoll.records.report import Report
from atoll.records.schema import Record

log = logging.getLogger("atoll.deploy")

FEDERATION = "federation.json"  # in the run's folder: what a resumed server must know
WriteTerms = Callable[[Mapping[str, Place]], tuple[Terms, Task]]  # for the sites that take part


@dataclass(frozen=True, eq=False, kw_only=True)
class Begun(Record):
    """A federation that was begun: its number, its terms, and how it was asked for."""

    id: str
    terms: dict[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)


def read_begun(folder: Path) -> Begun:
    """Read what a server began in a folder; raise if it began nothing there."""
    if not (folder / FEDERATION).exists():
        raise DeployError(
            f"A server can go on only with what it has begun. {folder} holds no {FEDERATION}.",
            hint="begin it without `resume`, or name the folder of the run with `out`.",
        )
    return read_record(folder / FEDERATION, Begun)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the server waits, in seconds."""

    join: float = 600.0  # for sites, before the first round
    reply: float = 3600.0  # for the replies of a round
    grace: float = 60.0  # in a round, for a site that is not connected


class Fleet:
    """Carries the messages of the round loop over a link."""

    shares = False

    def __init__(self, link: Link, patience: Patience) -> None:
        self.link, self.patience = link, patience

    def exchange(self, jobs: Mapping[str, bytes], exchange: Exchange) -> Iterator[tuple[str, bytes | str]]:
        """Send each site its job; yield its reply, or why there is none."""
        begun, what = time.monotonic(), describe_work(exchange.phases, exchange.round)
        for one in self.link.exchange(jobs, timeout=self.patience.reply, grace=self.patience.grace):
            if isinstance(one, Arrived):
                log.info("%s: %s replied after %.1f s", what, one.site, time.monotonic() - begun)
                yield one.site, one.envelope
            else:
                log.warning("%s: %s is lost: %s", what, one.site, one.reason)
                yield one.site, one.reason.splitlines()[0]


def serve(
    link: Link, keys: ServerKeys, method: Algorithm, write_terms: WriteTerms, folder: Path, *,
    question: Mapping[str, Any], sites: int | None = None, patience: Patience | None = None, resume: bool = False,
    asked: Mapping[str, Any] | None = None, **more: Any,
) -> Report:  # fmt: skip
    """Run a federation with the sites that join; `resume` goes on with one whose server ended.

    `question` is what sites are told before they join, such as the schema. As soon as `sites` of them have joined (all
    that have a key, by default) the first round begins. `asked` is written down beside the terms. `more` goes to
    `coordinate`.
    """
    patience = patience or Patience()
    if resume:
        begun = read_begun(folder)
        terms = Terms.of_json(begun.terms)
        federation, (_, task) = Federation(begun.id, terms, keys.key), write_terms(terms.sites)
        log.info("going on with %s", ", ".join(terms.sites))
    else:
        joined = gather_sites(link, keys, question, sites or len(keys.members), patience.join)
        terms, task = write_terms(seat_sites([keys.members[name].public for name in joined], joined))
        federation = Federation.begin(terms, keys.key)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(folder / FEDERATION, Begun(id=federation.id, terms=terms.as_json(), asked=dict(asked or {})))
    transport, again = Fleet(link, patience), resume and (folder / "config.json").exists()
    report = coordinate(federation, task, method, transport, folder, resume=again, **more)
    dismiss_sites(link, federation)
    return report


def gather_sites(link: Link, keys: ServerKeys, question: Mapping[str, Any], least: int, wait: float) -> dict[str, int]:
    """Ask sites that connect to join, until there are enough; return how many clients each of them has."""
    if least > len(keys.members):
        raise DeployError(
            f"The server must know enough sites: {least} shall take part, and there are keys of {len(keys.members)}.",
            hint="make keys for the others, or lower `sites`.",
        )
    until, joined, refused = time.monotonic() + wait, dict[str, int](), set[str]()
    asking = write_question("join", **question)
    log.info("waiting for %d of the sites %s", least, ", ".join(keys.members))
    while len(joined) < least:
        new = link.connected() - joined.keys() - refused
        for one in link.exchange(dict.fromkeys(sorted(new), asking), timeout=300, grace=5):
            if not isinstance(one, Arrived):
                refused.add(one.site)
                log.warning("%s does not take part: %s", one.site, one.reason)
                continue
            try:
                joined[one.site] = _read_joining(one.envelope, keys.members[one.site].public)
            except RefusedError as error:
                refused.add(one.site)
                log.warning("%s does not take part: %s", one.site, error)
        if len(refused) > len(keys.members) - least or time.monotonic() > until:
            raise DeployError(
                f"{least} sites must join within {wait:g} s. {len(joined)} did"
                f"{': ' + ', '.join(joined) if joined else ''}; refused: {', '.join(sorted(refused)) or 'none'}; not "
                f"there: {', '.join(sorted(keys.members.keys() - joined.keys() - refused)) or 'none'}.",
                hint="mend what the warnings name, or begin with fewer: `sites`.",
            )
        if len(joined) < least and not new:
            time.sleep(0.1)
    return {name: joined[name] for name in keys.members if name in joined}


def _read_joining(envelope: bytes, public: PublicKey) -> int:
    """Return how many clients a site has; raise RefusedError if it may not join."""
    message = messages.read(envelope, f"The answer of {public.name}")
    if message.header.kind != "join" or message.header.key != public.value.hex():
        raise message.refuse(f"it was not signed with the key of {public.name}")
    messages.require_in_time(message)
    remark = messages.require_version(message)
    if remark:
        log.warning("%s", remark)
    with message.guarding():
        clients = message.header.about["clients"]
        if not isinstance(clients, int) or not 1 <= clients <= 1_000_000:
            raise message.refuse("it must say how many clients it has")
        return clients


def dismiss_sites(link: Link, federation: Federation) -> None:
    """Tell the sites that are there that the federation is over."""
    over = write_question("done", federation=federation.id)
    there = link.connected() & federation.terms.sites.keys()
    for _ in link.exchange(dict.fromkeys(there, over), timeout=20, grace=5):
        pass
