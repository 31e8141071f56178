"""Clients at sites, which are reached by messages alone and hold nobody else's samples."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from atoll.algorithms import file_of
from atoll.compose import from_record, to_record
from atoll.data.task import Task
from atoll.deploy.engine import Federation, InProcess, SitesEngine
from atoll.deploy.keys import Key
from atoll.deploy.site import BuildTask, Site
from atoll.deploy.store import Store
from atoll.deploy.tasks import task_elsewhere
from atoll.deploy.terms import Place, write_terms
from atoll.federation.loop import federate
from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import AtollError
from atoll.kernel.params import Tree
from atoll.runtime.engines.measuring import one_thread_each
from atoll.testing.conformance.engines import find_engine
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.playing import ROUNDS, read_kept, train
from atoll.testing.conformance.tasks import build_task
from atoll.testing.conformance.trees import require_same
from atoll.testing.conformance.tries import PURE

SITES = {"north": [0, 3], "south": [1], "west": [2, 4, 5]}  # and their clients


def sites_agree(method: Algorithm) -> str | None:
    """Check that clients at sites, reached by signed messages alone, give the same bits as on one machine."""
    if not is_named(method):
        return "not checked: a method travels by its name or file, and this one has neither"
    here = train(method, evaluation="all", eval_every=ROUNDS)
    with tempfile.TemporaryDirectory() as folder, one_thread_each():
        report, kept = play_at_sites(method, build_task(items_by=method.items_by), Path(folder))
    lost = {reason for line in report.history for reason in line["lost"]}
    if lost:
        raise ConformanceError(f"Every site must be able to take part. Some were lost: {'; '.join(sorted(lost))}")
    message = "Clients at sites must give the same numbers as on one machine."
    require_same(here.server, report.server, message, PURE)
    require_same(read_kept(here.population.memory), kept, "Sites must keep what clients keep on one machine.", PURE)
    scores = [one.history[-1]["evaluation"]["personal"]["test"]["losses"] for one in (here, report)]
    if not np.allclose(scores[0], scores[1], rtol=1e-12, atol=0, equal_nan=True):  # sums over a batch are rounded
        raise ConformanceError(
            f"Models at sites must score as on one machine. Test losses are {scores[1]}, not {scores[0]}."
        )
    counted = [sorted(one.ledger.messages()) for one in (here, report)]
    if counted[0] != counted[1]:
        raise ConformanceError("The ledger must hold the same messages with sites as on one machine. It does not.")
    return None


def is_named(method: Algorithm) -> bool:
    """Return whether a method can be made again from how it is written down."""
    try:
        written = to_record(method)
        return to_record(from_record(written)) == written  # a file is read anew, so its class is another one
    except (AtollError, ValueError, TypeError):
        return False


def play_at_sites(method: Algorithm, task: Task, folder: Path) -> tuple[Report, dict[str, Tree]]:
    """Run a method at sites in this process; return the report, and what clients keep."""
    places = {name: Place(clients=clients) for name, clients in SITES.items()}
    facts, rounds = task.public_facts(0), 1 if method.one_shot else ROUNDS
    terms = write_terms(facts, places, rounds=rounds, largest=facts.largest)
    file = file_of(method)
    sites = {
        name: Site(
            Key.make(name), _own_task(task, place), folder / name, engine=find_engine("loop"), needs_validation=False,
            allowed=[] if file is None else [file],
        )
        for name, place in places.items()
    }  # fmt: skip
    there = task_elsewhere(
        task.name, task.network, task.x[0], task.y[0], clients=task.clients, classes=task.classes,
        training=task.training, public=task.public, recommends=task.recommends,
    )  # fmt: skip
    federation = Federation.begin(terms, Key.make("coordinator"))
    engine = SitesEngine(federation, InProcess(sites), engine=find_engine("whole"))
    report = federate(there, method, engine=engine, rounds=rounds, eval_every=rounds)
    kept: dict[str, Tree] = {}
    for name in sites:
        store = Store(folder / name / federation.id)
        state = store.load()
        assert state is not None
        kept |= read_kept(store.memory(state, task.clients, task.network.layout, pending=True))
    return report, kept


def _own_task(task: Task, place: Place) -> BuildTask:
    own = task.of(np.array(place.clients))
    return lambda *_: own
