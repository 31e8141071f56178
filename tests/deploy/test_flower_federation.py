"""A federation over the network gives the bits of a simulation: real TLS, real signatures, one process."""

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from deploy.conftest import SITES, make_node, open_link
from deploy.test_engine import messages, same
from deploy.tools import Rehearsal, engine

from atoll.compose import create
from atoll.deploy import messages as envelopes
from atoll.deploy.certificates import ServerKeys, SiteKeys
from atoll.deploy.client import NOBODY, Attendant
from atoll.deploy.coordinator import seat_sites
from atoll.deploy.server import Patience, _read_joining, begin, serve
from atoll.deploy.site import Site
from atoll.deploy.terms import write_terms
from atoll.federation.settings import Settings
from atoll.kernel.errors import DataError, DeployError, RefusedError

CLIENTS = {"Lund": 2, "Porto": 1, "Ulm": 3}


class Network:
    """A small task whose clients are at nodes in threads, which join by themselves."""

    def __init__(self, folder, keys, *, rounds=3):
        self.folder, self.keys, self.rounds = folder, keys, rounds
        self.rehearsal = Rehearsal(folder, rounds=rounds)
        self.task, self.results = self.rehearsal.task, []
        self.places, self.protected = seat_sites(SITES, CLIENTS), {}
        self.patience, self.alone = Patience(join=30, reply=30, grace=15), threading.Lock()

    def simulate(self, method):
        return self.rehearsal.simulate(method, evaluation="all", **self.protected)

    def attendant(self, name, **more):
        mine = SiteKeys.read(self.keys / "sites" / name)
        own = self.task.of(np.array(self.places[name].clients))
        site = Site(
            mine.key, lambda terms: own, self.folder / name, site=name, coordinator=mine.coordinator.value.hex(),
            engine=engine(), needs_validation=False,
        )  # fmt: skip
        answer = site.answer_message

        def answer_alone(message):  # Python 3.11 cannot read source code in several threads at once
            with self.alone:
                return answer(message)

        site.answer_message = answer_alone
        prepare = more.pop("prepare", lambda question: own.clients)
        return Attendant(mine.key, site, prepare, lambda message, reply: self.results.append(name), **more)

    def write_terms(self, places):
        facts = self.task.of(np.concatenate([place.clients for place in places.values()])).public_facts(0)
        return write_terms(facts, places, rounds=self.rounds, largest=facts.largest)

    def build_task(self, terms):
        return self.rehearsal.elsewhere().of(np.arange(terms.clients))

    def serve(self, link, method, folder, *, resume=False, question=None, sites=None, **more):
        keys, patience = ServerKeys.read(self.keys / "server"), self.patience
        if not resume:
            settings = Settings(rounds=self.rounds, evaluation="all", **self.protected)
            begin(
                link, keys, method, settings, self.write_terms, folder, question=question or {}, sites=sites,
                patience=patience,
            )  # fmt: skip
        return serve(link, keys, folder, patience=patience, build_task=self.build_task, engine=engine(), **more)

    def start(self, held, link, name, **more):
        attendant = self.attendant(name, **more)
        thread = threading.Thread(target=attendant.attend, args=(make_node(self.keys, link, name),), daemon=True)
        thread.start()
        held.callback(thread.join, 20)
        held.callback(attendant.stop.set)
        return attendant, thread


@pytest.fixture
def network(tmp_path, keys):
    return Network(tmp_path, keys)


@pytest.mark.parametrize(
    "name",
    [
        "ditto",
        pytest.param("fedamp", marks=pytest.mark.slow),
        pytest.param("ditto@ifca:clusters=2,cluster_rounds=1", marks=pytest.mark.slow),
        pytest.param("fedora", marks=pytest.mark.slow),
        pytest.param("oneshot-margins:epochs=2", marks=pytest.mark.slow),
    ],
)
def test_sites_on_a_network_give_the_bits_of_a_simulation(name, tmp_path, keys):
    method = create(name)
    network = Network(tmp_path, keys, rounds=1 if method.one_shot else 3)
    with ExitStack() as held, open_link(keys) as link:
        threads = [network.start(held, link, site)[1] for site in SITES]
        report = network.serve(link, method, tmp_path / "run")
        for thread in threads:
            thread.join(20)  # sites leave when they are told that it is over
            assert not thread.is_alive()
    simulated = network.simulate(method)
    assert same(report.server, simulated.server)
    np.testing.assert_array_equal(report.scores(), simulated.scores())
    assert messages(report) == messages(simulated)
    assert sorted(network.results) == [*SITES]


def test_packed_messages_under_masks_on_a_network(network, tmp_path, keys):
    network.protected = {"compress": "randk:0.5", "secure": "masks"}
    with ExitStack() as held, open_link(keys) as link:
        for site in SITES:
            network.start(held, link, site)
        report = network.serve(link, create("ditto"), tmp_path / "run")
    simulated = network.simulate(create("ditto"))
    assert same(report.server, simulated.server)
    assert messages(report) == messages(simulated)


def test_private_sums_on_a_network(network, tmp_path, keys):
    network.protected = {"secure": "masks", "dp": "client:noise=1,delta=1e-2"}
    with ExitStack() as held, open_link(keys) as link:
        for site in SITES:
            network.start(held, link, site)
        report = network.serve(link, create("fedavg"), tmp_path / "run")
    assert "drawn at each site from the operating system's generator" in report.privacy[0]
    assert not same(report.server, network.simulate(create("fedavg")).server)  # nobody can repeat the noise


def test_a_protection_that_would_be_a_lie_ends_before_the_first_round(network, tmp_path, keys):
    network.protected = {"secure": "sums"}
    with ExitStack() as held, open_link(keys) as link:
        for site in SITES:
            network.start(held, link, site)
        with pytest.raises(DeployError, match="hides nothing"):
            network.serve(link, create("fedavg"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_site_whose_data_do_not_fit_is_left_out_and_named(network, tmp_path, keys, caplog):
    def misfit(question):
        raise DataError(f"Column `{question['column']}` must hold numbers, as the schema says. It holds text.")

    with ExitStack() as held, open_link(keys) as link, caplog.at_level("WARNING", logger="atoll"):
        network.start(held, link, "Porto", prepare=misfit)
        while "Porto" not in link.connected():
            time.sleep(0.02)
        for site in ("Lund", "Ulm"):
            network.start(held, link, site)
        report = network.serve(link, create("fedavg"), tmp_path / "run", sites=2, question={"column": "age"})
    assert "Porto does not take part: Column `age` must hold numbers" in caplog.text
    assert report.finished


def test_too_few_sites_end_the_wait_with_their_names(network, tmp_path, keys):
    network.patience = Patience(join=1.0)
    with ExitStack() as held, open_link(keys) as link:
        network.start(held, link, "Ulm")
        with pytest.raises(
            DeployError, match="3 sites must join within 1 s. 1 did: Ulm; refused: none; not there: Lund, Porto"
        ):
            network.serve(link, create("fedavg"), tmp_path / "run")


def test_a_server_that_ended_goes_on_where_it_was(network, tmp_path, keys):
    method, folder = create("ditto"), tmp_path / "run"

    class Ended(Exception):
        pass

    def end_after(round):
        if round.round == 1:
            raise Ended

    with ExitStack() as held:
        with open_link(keys) as link:
            port = link.port
            for site in SITES:
                network.start(held, link, site)
            with pytest.raises(Ended):
                network.serve(link, method, folder, on_round=end_after)
        with open_link(keys, port=port) as link:
            report = network.serve(link, method, folder, resume=True)
    simulated = network.simulate(method)
    assert same(report.server, simulated.server)
    np.testing.assert_array_equal(report.scores(), simulated.scores())


def test_a_site_that_is_gone_for_a_round_is_lost_for_that_round_and_named(network, tmp_path, keys):
    network.patience = Patience(join=30, reply=30, grace=1.0)
    with ExitStack() as held, open_link(keys) as link:
        leaving, _ = network.start(held, link, "Porto")
        for site in ("Lund", "Ulm"):
            network.start(held, link, site)

        def leave(round):
            if round.round == 1:
                leaving.stop.set()

        report = network.serve(link, create("ditto"), tmp_path / "run", on_round=leave)
    lost = [line["lost"] for line in report.history]
    assert lost[0] == {}
    assert [*lost[2]] == ["Porto: not connected for 1 s"]
    assert report.finished


def test_a_site_that_mended_its_data_and_is_started_again_joins(network, tmp_path, keys, caplog):
    network.patience = Patience(join=30)

    def misfit(question):
        raise DataError("Column `age` must hold numbers.")

    with ExitStack() as held, open_link(keys) as link, caplog.at_level("WARNING", logger="atoll"):
        wrong, thread = network.start(held, link, "Porto", prepare=misfit)
        mended = threading.Event()

        def mend():
            while "Porto does not take part" not in caplog.text:
                mended.wait(0.05)
            wrong.stop.set()
            thread.join(20)
            for site in SITES:
                network.start(held, link, site)

        held.callback((mending := threading.Thread(target=mend)).join, 20)
        mending.start()
        report = network.serve(link, create("fedavg"), tmp_path / "run")
    assert [line["replied"] for line in report.history] == [6, 6, 6]


def test_a_site_of_another_version_does_not_join(keys, monkeypatch):
    mine = SiteKeys.read(keys / "sites" / "Ulm")
    about = {"federation": NOBODY, "number": 0, "round": 0, "about": {"clients": 1}, "tree": None}
    assert _read_joining(envelopes.write("join", mine.key, **about), mine.key.public) == 1
    with monkeypatch.context() as patch:
        patch.setattr(envelopes, "versions", lambda: {"atoll": "9.9.0", "code": "?", "torch": "?"})
        newer = envelopes.write("join", mine.key, **about)
    with pytest.raises(RefusedError, match="Ulm has Atoll 9.9.0, this is Atoll .* and that matters"):
        _read_joining(newer, mine.key.public)
    other = SiteKeys.read(keys / "sites" / "Lund")
    with pytest.raises(RefusedError, match="it was not signed with the key of Ulm"):
        _read_joining(envelopes.write("join", other.key, **about), mine.key.public)
