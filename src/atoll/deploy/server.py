"""A server: it waits for its sites, writes the terms with those that are there, and drives the one round loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.compose import from_record, to_record
from atoll.data.task import Task
from atoll.deploy import messages
from atoll.deploy.certificates import ServerKeys
from atoll.deploy.coordinator import check_protection, coordinate, seat_sites
from atoll.deploy.engine import Federation
from atoll.deploy.files import ABOUT, Begun
from atoll.deploy.journal import Exchange
from atoll.deploy.keys import PublicKey
from atoll.deploy.network import Arrived, Link, describe_work, write_question
from atoll.deploy.schemas import Public, load_public, save_public, task_without_data
from atoll.deploy.terms import Place, Terms
from atoll.federation.report import Report
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError, RefusedError
from atoll.records.files import read_record, write_record

log = logging.getLogger("atoll.deploy")

WriteTerms = Callable[[Mapping[str, Place]], Terms]  # for the sites that take part


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


def begin(
    link: Link, keys: ServerKeys, method: Algorithm, settings: Settings, write_terms: WriteTerms, folder: Path, *,
    question: Mapping[str, Any], sites: int | None = None, patience: Patience | None = None,
    public: Public | None = None,
) -> None:  # fmt: skip
    """Wait for sites and begin a federation with those that join: write down its terms in a run's folder.

    `question` is what sites are told before they join. As soon as `sites` of them have joined, all that have a key by
    default, the terms are written and nobody else can join.
    """
    if (folder / ABOUT).exists():
        raise DeployError(
            f"A federation must begin in a folder of its own. {folder} holds one already.",
            hint="go on with it with `resume`, or choose another folder.",
        )
    joined = gather_sites(link, keys, question, sites or len(keys.members), (patience or Patience()).join)
    terms = write_terms(seat_sites([keys.members[name].public for name in joined], joined))
    check_protection(settings, method, terms)
    folder.mkdir(parents=True, exist_ok=True)
    save_public(public, folder)
    begun = Begun(
        id=Federation.begin(terms, keys.key).id, terms=terms, method=to_record(method), settings=asdict(settings),
        coordinator=keys.key.public.value.hex(),
    )  # fmt: skip
    write_record(folder / ABOUT, begun)


def read_begun(folder: Path, keys: ServerKeys) -> Begun:
    """Read what a server began in a folder; raise if it began nothing there, or with another key."""
    if not (folder / ABOUT).exists():
        raise DeployError(
            f"A server can go on only with what it has begun. {folder} holds no {ABOUT}.",
            hint="begin it without `resume`, or name the folder of the run with `out`.",
        )
    begun = read_record(folder / ABOUT, Begun)
    if begun.coordinator != keys.key.public.value.hex():
        raise DeployError(
            f"The federation in {folder} must go on with the key that it began with. {keys.key.name}.key is another.",
            hint="put the key back from a backup: sites take jobs of one coordinator only.",
        )
    return begun


def serve(
    link: Link, keys: ServerKeys, folder: Path, *, patience: Patience | None = None,
    build_task: Callable[[Terms], Task] | None = None, **more: Any,
) -> Report:  # fmt: skip
    """Run the federation that was begun in a folder, from the beginning or from where its server ended.

    `more` goes to `coordinate`.
    """
    begun = read_begun(folder, keys)
    federation, again = Federation(begun.id, begun.terms, keys.key), (folder / "config.json").exists()
    log.info("%s with %s", "going on" if again else "beginning", ", ".join(begun.terms.sites))
    task = build_task(begun.terms) if build_task else task_without_data(begun.terms, load_public(folder))
    report = coordinate(
        federation, task, from_record(begun.method), Fleet(link, patience or Patience()), folder, resume=again,
        settings=Settings(**begun.settings), **more,
    )  # fmt: skip
    dismiss_sites(link, federation)
    return report


def gather_sites(link: Link, keys: ServerKeys, question: Mapping[str, Any], least: int, wait: float) -> dict[str, int]:
    """Ask sites that connect to join, until there are enough; return how many clients each of them has."""
    if least > len(keys.members):
        raise DeployError(
            f"The server must know enough sites: {least} shall take part, and there are keys of {len(keys.members)}.",
            hint="make keys for the others, or lower `sites`.",
        )
    until, joined, refused = time.monotonic() + wait, dict[str, int](), dict[str, int]()
    asking = write_question("join", **question)
    log.info("waiting for %d of the sites %s", least, ", ".join(keys.members))
    while len(joined) < least:
        # Who was refused is asked again once it is started again: what was wrong may have been mended.
        there = {name: link.count_connections(name) for name in link.connected() - joined.keys()}
        new = sorted(name for name, count in there.items() if refused.get(name) != count)
        for one in link.exchange(dict.fromkeys(new, asking), timeout=300, grace=5):
            try:
                if not isinstance(one, Arrived):
                    raise RefusedError(one.reason)
                joined[one.site] = _read_joining(one.envelope, keys.members[one.site].public)
                refused.pop(one.site, None)
            except RefusedError as error:
                refused[one.site] = there[one.site]
                log.warning("%s does not take part: %s", one.site, error)
        if len(joined) < least and time.monotonic() > until:
            raise DeployError(
                f"{least} sites must join within {wait:g} s. {len(joined)} did"
                f"{': ' + ', '.join(joined) if joined else ''}; refused: {', '.join(sorted(refused)) or 'none'}; not "
                f"there: {', '.join(sorted(keys.members.keys() - joined.keys() - refused.keys())) or 'none'}.",
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
