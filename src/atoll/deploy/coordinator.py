"""The coordinator: who has no data and drives the one round loop, with clients that are at sites.

    federation = Federation.begin(terms, key)
    report = coordinate(federation, task, method, transport, folder)

It stops where the transport stops, in the middle of a round if need be, and `resume=True` goes on there: the round is
played again from its checkpoint with the replies of the journal.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from atoll.data.task import Task
from atoll.deploy.engine import SECRET_BYTES, Federation, SitesEngine, Transport
from atoll.deploy.journal import Journal
from atoll.deploy.keys import PublicKey
from atoll.deploy.masking import require_hidden
from atoll.deploy.protection import require_for_sites
from atoll.deploy.tasks import learn_sizes
from atoll.deploy.terms import Place, Terms
from atoll.federation.loop import federate
from atoll.federation.report import Report
from atoll.federation.settings import Settings
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError
from atoll.protect.secure import parse_secure
from atoll.records.runs import Run
from atoll.runtime.engines import LocalEngine
from atoll.runtime.files import read_regular

JOURNAL = "sites"  # the folder of the journal, in the run's
NOISE = "noise.key"  # what the server's noise is drawn from, in the run's folder


def coordinate(
    federation: Federation,
    task: Task,
    method: Algorithm,
    transport: Transport,
    folder: Path,
    *,
    resume: bool = False,
    engine: LocalEngine | None = None,
    **more: Any,
) -> Report:
    """Run a federation whose clients are at sites; the report and the run's folder are those of any other run.

    `task` is one of `task_elsewhere`. `more` goes to `federate`: settings, `on_round`, `stop`.
    """
    terms, journal = federation.terms, Journal(folder / JOURNAL)
    for site, samples in journal.known.samples.items():
        learn_sizes(task, terms.clients_at(site), samples)
    if resume:  # what all checkpoints cover is not played again; exchanges before a round carry earlier numbers
        for oldest in Run.open(folder).checkpoints()[:1]:
            journal.forget(oldest - 1 - method.exchanges)
    settings = replace(more.pop("settings", None) or Settings(), rounds=terms.rounds, seed=terms.seed)
    named = {one.name for one in fields(Settings)} & more.keys()
    settings = replace(settings, **{name: more.pop(name) for name in named})
    check_protection(settings, method, terms)
    secret = keep_secret(folder / NOISE, resume=resume) if settings.dp != "none" else None
    sites = SitesEngine(federation, transport, journal, engine=engine, metric=settings.metric, secret=secret)
    return federate(task, method, settings=settings, engine=sites, folder=folder, resume=resume, **more)


def check_protection(settings: Settings, method: Algorithm, terms: Terms) -> None:
    """Raise for a protection that would protect nobody where clients are at these sites."""
    require_for_sites(settings, method)
    secure = parse_secure(settings.secure)
    if secure is not None:
        require_hidden(terms, secure.neighbours)


def keep_secret(path: Path, *, resume: bool) -> bytes:
    """Draw what the server's noise is made of, or read it: a round that is played again has the same noise.

    Whoever has it can subtract the noise, so only its user can read the file.
    """
    if path.exists():
        secret = read_regular(path, SECRET_BYTES)
        if len(secret) == SECRET_BYTES:
            return secret
    if resume:
        raise DeployError(
            f"The server's noise must be that of the rounds before. {path} is not there, or damaged.",
            hint="put the file back from a backup: other noise on the same sum would give it away.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    secret = secrets.token_bytes(SECRET_BYTES)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    return secret


def seat_sites(sites: Iterable[PublicKey | str], clients: Mapping[str, int] | None = None) -> dict[str, Place]:
    """Give each site its place: clients are numbered in the order of the sites, one each unless told otherwise."""
    places: dict[str, Place] = {}
    number = 0
    for site in sites:
        name, key = (site, "") if isinstance(site, str) else (site.name, site.value.hex())
        if name in places or (key and any(place.key == key for place in places.values())):
            raise DeployError(
                f"Every site must have a name and a key of its own. Two are called {name}, or have its key.",
                hint="make a key with another name for one of them: `atoll keys NAME`.",
            )
        size = (clients or {}).get(name, 1)
        places[name] = Place(clients=[*range(number, number + size)], key=key)
        number += size
    if not places:
        raise DeployError("A federation must have at least 1 site. Got none.")
    return places
