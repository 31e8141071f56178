"""The coordinator: who has no data and drives the one round loop, with clients that are at sites.

    federation = Federation.begin(terms, key)
    report = coordinate(federation, task, method, transport, folder)

It stops where the transport stops, in the middle of a round if need be, and `resume=True` goes on there: the round is
played again from its checkpoint with the replies of the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.data.task import Task
from atoll.deploy.engine import Federation, SitesEngine, Transport
from atoll.deploy.journal import Journal
from atoll.deploy.keys import PublicKey
from atoll.deploy.masking import require_hidden
from atoll.deploy.tasks import learn_sizes
from atoll.deploy.terms import Place
from atoll.federation import federate
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError
from atoll.records.configuration import Settings
from atoll.records.report import Report
from atoll.records.runs import Run
from atoll.runtime.engines import LocalEngine

JOURNAL = "sites"  # the folder of the journal, in the run's


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
    if more.get("secure", settings.secure) != "none":
        require_hidden(terms)
    sites = SitesEngine(federation, transport, journal, engine=engine, metric=more.get("metric", settings.metric))
    return federate(task, method, settings=settings, engine=sites, folder=folder, resume=resume, **more)


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
