"""A job can leave the process: what clients are sent survives being written down, and leads to the same bits."""

import numpy as np
import pytest
import torch

from atoll import LocalEngine, Recipe, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.scaffold import Scaffold, Sent
from atoll.compose import create, from_record
from atoll.deploy import assignments
from atoll.deploy.assignments import PHASES, from_bytes, to_bytes
from atoll.kernel import record
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import PayloadError
from atoll.kernel.job import Finish, Job, Local, Prepare
from atoll.kernel.params import flatten
from atoll.metrics.newcomers import Welcome
from atoll.runtime.engines.parts import Part
from atoll.runtime.serialise import to_bytes as as_message

METHODS = [
    "ditto", "scaffold", "fedora", "fedamp", "apfl", "fedrep", "pfedhn:hidden=8", "fedper+prox", "ditto+gate",
    "ditto@ifca:clusters=2,cluster_rounds=1", "fafi:epochs=1", "fedcgs", "fedgen:server_steps=2", "mocha", "fedfomo",
]  # fmt: skip


@pytest.fixture(scope="module")
def task():
    return Recipe(clients=4, partition="dirichlet:0.5", model="mlp:6", samples=160).build()


def leaves(report):
    memory = report.population.memory.save(round=report.settings.rounds)
    return [*flatten(report.server)[0], *flatten(memory)[0]]


@pytest.mark.parametrize("name", METHODS)
def test_clients_that_get_it_by_file_do_the_same(task, name, monkeypatch) -> None:
    engine = LocalEngine(device="cpu", dtype=torch.float64, strategy="chunk:3 eager")
    run = {"rounds": 1 if create(name).one_shot else 3, "engine": engine}
    plain = federate(task, name, **run)
    prepare, carried = Part.prepare, []

    def by_file(part: Part, clients, scanner):
        assignment, cohort = prepare(part, clients, scanner)
        if type(assignment.phase) not in PHASES.values():
            return assignment, cohort
        again = from_bytes(to_bytes(assignment), cohort.task.network.layout)
        carried.append(again.phase.name)
        sent = Cohort(cohort.task, again.clients, again.round, scanner, again.unicast)
        return again, sent

    monkeypatch.setattr(Part, "prepare", by_file)
    engine.plans.clear()
    sent = federate(task, name, **run)
    assert "local" in carried
    assert all(torch.equal(one, other) for one, other in zip(leaves(plain), leaves(sent), strict=True))
    np.testing.assert_array_equal(plain.scores(), sent.scores())


@pytest.mark.parametrize("phase", [Local(), Prepare(-2), Finish()])
def test_nothing_is_lost_on_the_way(task, phase) -> None:
    facts = task.public_facts(seed=3)
    assignment = Job(phase, Ditto(lam=0.3), facts.network.initial, np.array([2, 0]), 7).assign(np.array([2, 0]))
    again = from_bytes(to_bytes(assignment), facts.network.layout)
    assert (again.phase, again.method, again.round, again.clients.tolist()) == (phase, Ditto(lam=0.3), 7, [2, 0])
    assert again.broadcast.layout == assignment.broadcast.layout
    assert all(torch.equal(again.broadcast[name], leaf) for name, leaf in assignment.broadcast.items())


def test_the_methods_file_is_read_before_what_it_defines(task, monkeypatch) -> None:
    facts, clients = task.public_facts(), np.array([1])
    job = Job(Local(), Scaffold(), Scaffold().start(facts), clients, 0)
    message, known = to_bytes(job.assign(clients)), dict(record._KNOWN)
    monkeypatch.setattr(record, "_KNOWN", {})  # as in a process that has not imported it
    with pytest.raises(PayloadError, match="None is called atoll.algorithms.scaffold.Sent"):
        from_bytes(message, facts.network.layout)

    def importing(written):
        record._KNOWN.update(known)
        return from_record(written)

    monkeypatch.setattr(assignments, "from_record", importing)
    again = from_bytes(message, facts.network.layout)
    assert type(again.broadcast) is Sent
    assert torch.equal(again.broadcast.w["head.weight"], facts.network.initial["head.weight"])


def test_a_phase_of_the_simulation_stays_here() -> None:
    job = Job(Welcome(labelled=True), FedAvg(), None, np.array([0]), 0)
    with pytest.raises(PayloadError, match="Only local, prepare, finish are sent to clients. Got Welcome"):
        to_bytes(job.assign(np.array([0])))


@pytest.mark.parametrize(
    "message",
    [
        b"", b"no message", as_message({"about": "{}"}), as_message({}, about="{}"), as_message({"x": 1}, about="[]"),
        as_message({}, about='{"phase": "local", "values": {}, "method": {"name": "local", "values": {}}, "round": 0}'),
    ],
    ids=range(6),
)  # fmt: skip
def test_what_is_no_assignment_is_refused(task, message) -> None:
    with pytest.raises(PayloadError, match="must"):
        from_bytes(message, task.network.layout)
