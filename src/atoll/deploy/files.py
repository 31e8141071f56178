"""Rounds by file: the smallest deployment there is. Nobody opens a port; people carry files.

The coordinator's folder is a run's folder like any other. It goes on whenever replies are brought: the round loop plays
the round under way again, takes the replies, and stops where the next ones are missing. Then it has written what the
sites need next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.compose import from_record, to_record
from atoll.deploy import messages
from atoll.deploy.coordinator import check_protection, coordinate
from atoll.deploy.engine import Federation
from atoll.deploy.journal import Exchange
from atoll.deploy.keys import Key
from atoll.deploy.schemas import Public, load_public, save_public, task_without_data
from atoll.deploy.terms import Terms
from atoll.federation.report import Report
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError, RefusedError
from atoll.records.files import read_record, write_record
from atoll.records.schema import Record
from atoll.runtime.files import write_whole

ABOUT = "federation.json"
SUFFIX = ".atoll"


class Waiting(Exception):
    """The federation has come as far as it can without more files; says which are there and which are not."""

    def __init__(self, exchange: Exchange, written: Mapping[str, Path], missing: Sequence[str]) -> None:
        super().__init__(f"waiting for {', '.join(missing)}")
        self.exchange, self.written, self.missing = exchange, dict(written), list(missing)

    @property
    def is_result(self) -> bool:
        """Whether what was written is the federation's result, and not a job for another round."""
        return any(name.startswith(("finish", "evaluate")) for name in self.exchange.phases)


@dataclass(eq=False)
class Files:
    """A transport by files: takes replies that were brought, and writes what sites need next."""

    inbox: Sequence[Path]
    out: Path  # the file for all sites; where each needs its own, their names stand before the suffix
    without: Sequence[str] = ()  # sites that are not waited for
    largest: int = messages.LARGEST_BODY
    refused: dict[Path, str] = field(default_factory=dict)  # what was not accepted, and why
    accepted: dict[str, Path] = field(default_factory=dict)
    shares: bool = True
    _used: bool = False

    def exchange(self, jobs: Mapping[str, bytes], exchange: Exchange) -> Iterator[tuple[str, bytes | str]]:
        """Hand on the replies that fit; stop and write the jobs unless everybody has replied."""
        found: dict[str, bytes] = {}
        for path in () if self._used else self.inbox:
            try:
                site, data = self._take(path, jobs, exchange, found)
            except RefusedError as error:
                self.refused[path] = str(error)
                continue
            found[site] = data
            self.accepted[site] = path
            yield site, data
        for site in self.without:
            if site in jobs and site not in found and not self._used:
                yield site, "left out by the coordinator"
        missing = [site for site in jobs if site not in found and (self._used or site not in self.without)]
        nobody = not found and not exchange.replies
        self._used = True
        if missing or nobody:
            raise Waiting(exchange, self.write(exchange), missing or [*jobs])

    def _take(
        self, path: Path, jobs: Mapping[str, bytes], exchange: Exchange, found: Mapping[str, bytes]
    ) -> tuple[str, bytes]:
        """Read a reply; raise RefusedError for what is no reply that is waited for."""
        message = messages.read_file(path, largest=self.largest)
        site = str(message.header.about.get("site", ""))[:80]
        if message.header.kind != "reply":
            raise message.refuse(f"it must be a reply of a site. It is a {message.header.kind}")
        if site in found or site in exchange.replies:
            data = found.get(site) or exchange.replies[site]
            if data == path.read_bytes():
                raise message.refuse(f"it is duplicated: the same reply of {site} is there already")
            raise message.refuse(
                f"there is another reply of {site} already, and they differ",
                hint=f"two sites call themselves {site}: the second needs a name and a key of its own.",
            )
        if site not in jobs:
            raise message.refuse(f"it is foreign: {site or 'nobody'} is not among the sites that were asked")
        data = path.read_bytes()
        assert exchange.check is not None
        try:
            exchange.check(site, data)
        except RefusedError as error:
            raise RefusedError(str(error).replace(f"The reply of {site}", str(path), 1)) from error
        return site, data

    def write(self, exchange: Exchange) -> dict[str, Path]:
        """Write the jobs of an exchange: one file for all sites, or one for each."""
        different = set(exchange.jobs.values())
        if len(different) == 1:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.out, next(iter(different)))
            return dict.fromkeys(exchange.jobs, self.out)
        written = {}
        for site, data in exchange.jobs.items():
            written[site] = self.out.with_name(f"{self.out.stem}-{site}{self.out.suffix or SUFFIX}")
            written[site].parent.mkdir(parents=True, exist_ok=True)
            write_whole(written[site], data)
        return written


@dataclass(frozen=True, eq=False, kw_only=True)
class Begun(Record):
    """What a coordinator's folder holds beside the run."""

    id: str
    terms: Terms
    method: dict[str, Any]
    settings: dict[str, Any]
    coordinator: str  # the public key


def start(
    method: Algorithm, terms: Terms, key: Key, folder: Path, out: Path, settings: Settings | None = None,
    public: Public | None = None,
) -> Waiting:  # fmt: skip
    """Begin a federation by file: write the first job, and everything that is needed to go on, into the folder.

    `public` are samples that everybody may see, for methods that need some.
    """
    if (folder / ABOUT).exists():
        raise DeployError(
            f"A federation must begin in a folder of its own. {folder} holds one already.",
            hint="go on with `atoll round finish`, or choose another `folder`.",
        )

    settings = replace(
        settings or Settings(), rounds=terms.rounds, seed=terms.seed, eval_every=terms.rounds, evaluation="all"
    )
    settings.check(task_without_data(terms, public), method)
    check_protection(settings, method, terms)
    federation = Federation.begin(terms, key)
    folder.mkdir(parents=True, exist_ok=True)
    save_public(public, folder)
    begun = Begun(
        id=federation.id, terms=terms, method=to_record(method), settings=asdict(settings),
        coordinator=key.public.value.hex(),
    )  # fmt: skip
    write_record(folder / ABOUT, begun)
    found = _drive(federation, begun, folder, Files((), out), resume=False)
    assert isinstance(found, Waiting)
    return found


def finish(
    folder: Path, key: Key, replies: Sequence[Path], out: Path, without: Sequence[str] = ()
) -> tuple[Waiting | Report, Files]:
    """Go on with replies that were brought: write the next job or the result, or return the report at the end."""
    if not (folder / ABOUT).exists():
        raise DeployError(
            f"A federation must have been begun in {folder}. It was not.",
            hint="begin one with `atoll round start`, or name its `folder`.",
        )
    begun = read_record(folder / ABOUT, Begun)
    if key.public.value.hex() != begun.coordinator:
        raise DeployError(
            f"The federation in {folder} must go on with the key that it began with. {key.name} is another one.",
            hint="name that `key`: sites take jobs of one coordinator only.",
        )
    unknown = [site for site in without if site not in begun.terms.sites]
    if unknown:
        raise DeployError(f"There is no site {unknown[0]}. There are: {', '.join(begun.terms.sites)}.")
    transport = Files(replies, out, without)
    federation = Federation(begun.id, begun.terms, key)
    resume = (folder / "config.json").exists()
    return _drive(federation, begun, folder, transport, resume=resume), transport


def _drive(federation: Federation, begun: Begun, folder: Path, transport: Files, *, resume: bool) -> Waiting | Report:
    task = task_without_data(begun.terms, load_public(folder))
    try:
        return coordinate(
            federation, task, from_record(begun.method), transport, folder, resume=resume,
            settings=Settings(**begun.settings),
        )  # fmt: skip
    except Waiting as waiting:
        return waiting


def list_replies(places: Sequence[Path]) -> list[Path]:
    """List the files that were brought: those that are named, and all messages in folders."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            found += sorted(path for path in place.iterdir() if path.suffix == SUFFIX)
        elif place.exists():
            found.append(place)
        else:
            raise DeployError(f"Replies must be files or folders of files. There is no {place}.")
    return found
