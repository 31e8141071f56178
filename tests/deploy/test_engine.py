"""The one round loop drives sites as it drives one machine: the same bits, whoever is lost."""

import numpy as np
import pytest
import torch
from deploy.tools import Rehearsal

from atoll.compose import create
from atoll.deploy.engine import InProcess
from atoll.deploy.store import Store
from atoll.kernel.params import flatten
from atoll.testing.conformance.tasks import build_task


@pytest.fixture
def rehearsal(tmp_path):
    return Rehearsal(tmp_path)


def same(one, other):
    mine, theirs = flatten(one)[0], flatten(other)[0]
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def messages(report):
    return sorted((one.direction, one.client, one.round, one.field, one.bytes) for one in report.ledger.messages())


@pytest.mark.parametrize(
    ("name", "kind", "asked"),
    [
        ("ditto", "odd", {}),
        ("fedamp", "plain", {"cohort": 3}),
        ("fedpac", "odd", {"cohort": 3, "late": 0.3}),  # BatchNorm and late replies
        ("ditto@ifca:clusters=2,cluster_rounds=1", "plain", {"eval_every": 1}),
        ("fedrep", "plain", {"faults": lambda round, clients: clients == 5}),  # absent for the last step
    ],
)
def test_sites_give_the_bits_of_a_simulation(name, kind, asked, tmp_path) -> None:
    sites, method = Rehearsal(tmp_path, task=build_task(kind)), create(name)
    report, simulated = (run(method, evaluation="all", **asked) for run in (sites.run, sites.simulate))
    assert same(report.server, simulated.server)
    np.testing.assert_array_equal(report.scores(), simulated.scores())
    assert messages(report) == messages(simulated)


@pytest.mark.parametrize("metric", ["auroc", "f1"])
def test_figures_that_are_no_means_are_taken_at_the_sites(metric, tmp_path) -> None:
    sites, method = Rehearsal(tmp_path, task=build_task("odd")), create("ditto")
    report, simulated = (
        run(method, evaluation="all", metric=metric, eval_every=1) for run in (sites.run, sites.simulate)
    )
    for mine, theirs in zip(report.evaluations, simulated.evaluations, strict=True):
        for split in ("val", "test"):
            np.testing.assert_array_equal(mine.personal[split].clients, theirs.personal[split].clients)
            np.testing.assert_array_equal(mine.personal[split].variances, theirs.personal[split].variances)
    assert np.isnan(report.scores()).any() == np.isnan(simulated.scores()).any()
    assert np.isnan(report.evaluations[-1].personal["test"].micro)


def test_what_clients_keep_is_at_their_sites_only(rehearsal) -> None:
    report, simulated = rehearsal.run(create("ditto")), rehearsal.simulate(create("ditto"))
    assert report.population.memory.save(round=3) is None
    kept = simulated.population.memory.save(round=3)["kept"]
    for name, place in rehearsal.places.items():
        (folder,) = [path for path in (rehearsal.folder / name).iterdir() if path.is_dir()]
        store = Store(folder)
        memory = store.memory(store.load(), 6, rehearsal.task.network.layout, pending=True)
        own = memory.save(round=3)
        assert own["clients"].tolist() == place.clients
        for leaf in kept:
            assert torch.equal(own["kept"][leaf], kept[leaf][place.clients])


class Straggling(InProcess):
    """One site works in a round, but its reply comes too late."""

    def __init__(self, sites, late, in_round):
        super().__init__(sites)
        self.late, self.in_round = late, in_round

    def exchange(self, jobs, exchange):
        for site, reply in super().exchange(jobs, exchange):
            if site == self.late and exchange.round == self.in_round and exchange.phases == ("local",):
                continue
            yield site, reply


def test_a_straggler_goes_back_to_what_counted(rehearsal) -> None:
    late = Straggling(rehearsal.sites, "site-1", 1)
    report = rehearsal.run(create("ditto"), transport=late, evaluation="all")
    clients = rehearsal.places["site-1"].clients
    lost = rehearsal.simulate(
        create("ditto"), evaluation="all", faults=lambda round, asked: (round == 1) & np.isin(asked, clients)
    )
    assert report.history[1]["lost"] == {"site-1: no reply": 2}
    assert same(report.server, lost.server)
    np.testing.assert_array_equal(report.scores(), lost.scores())


def test_a_coordinator_that_was_killed_goes_on_in_the_middle_of_a_round(rehearsal, tmp_path) -> None:
    from atoll.deploy.coordinator import coordinate

    class Killed(InProcess):
        def exchange(self, jobs, exchange):
            for place, (site, reply) in enumerate(super().exchange(jobs, exchange)):
                if place == 2 and exchange.round == 1 and exchange.phases == ("local",):
                    raise ConnectionAbortedError
                yield site, reply

    folder, method = tmp_path / "run", create("ditto")
    asked = {"engine": rehearsal.engine().local, "evaluation": "all"}
    with pytest.raises(ConnectionAbortedError):
        coordinate(rehearsal.federation, rehearsal.elsewhere(), method, Killed(rehearsal.sites), folder, **asked)
    report = coordinate(
        rehearsal.federation, rehearsal.elsewhere(), method, InProcess(rehearsal.sites), folder, resume=True, **asked
    )
    simulated = rehearsal.simulate(method, evaluation="all")
    assert same(report.server, simulated.server)
    np.testing.assert_array_equal(report.scores(), simulated.scores())
    assert messages(report) == messages(simulated)
