"""Sums under masks among neighbours where clients are at sites: the bits of a simulation, and a ring of their own."""

import itertools

import numpy as np
import pytest
import torch
from deploy.test_engine import messages, same
from deploy.test_protection import Overhearing
from deploy.tools import Rehearsal

from atoll.compose import create
from atoll.deploy import messages as envelopes
from atoll.deploy.demands import list_demands
from atoll.deploy.engine import InProcess
from atoll.deploy.masking import require_hidden
from atoll.deploy.showing import describe
from atoll.deploy.terms import Place, Terms
from atoll.federation.settings import Settings
from atoll.kernel.errors import DeployError, RefusedError
from atoll.protect.masks import neighbours_of
from atoll.testing.conformance.tasks import build_task

SIZES = (13, 1, 12, 5, 6, 2, 7, 4, 9, 3, 8)
GROUPS = ((0,), (1, 2), (3,), (4, 5), (6,), (7,), (8,), (9,), (10,))
WORDS = "masks:neighbours=4"
PHASES = ["masks keys", "masks shares", "local", "masks unmask"]


def rehearse(folder, **more):
    return Rehearsal(folder, task=build_task(sizes=SIZES), **{"groups": GROUPS, **more})


class Keeping(InProcess):
    """Keeps the jobs of a run."""

    def __init__(self, sites):
        super().__init__(sites)
        self.jobs = {}

    def exchange(self, jobs, exchange):
        self.jobs.setdefault((exchange.round, exchange.phases[0]), dict(jobs))
        yield from super().exchange(jobs, exchange)


@pytest.mark.parametrize("more", [{}, {"compress": "randk:0.5", "cohort": 9}], ids=["all", "cohort"])
def test_masks_among_neighbours_give_the_bits_of_a_simulation(tmp_path, more):
    sites = rehearse(tmp_path)
    report = sites.run(create("ditto"), secure=WORDS, evaluation="all", **more)
    simulated = sites.simulate(create("ditto"), secure=WORDS, evaluation="all", **more)
    plain = sites.simulate(create("ditto"), secure="sums", evaluation="all", **more)
    assert same(report.server, simulated.server)
    assert same(report.server, plain.server)
    assert messages(report) == messages(simulated)


def find_pair(sites, *, apart):
    """Find two sites of one client each that do not share a neighbourhood, or that do."""
    around = neighbours_of(range(len(SIZES)), 4, 0, 0)
    single = {name: place.clients[0] for name, place in sites.places.items() if len(place.clients) == 1}
    return next(
        pair
        for pair in itertools.combinations(single, 2)
        if apart == all(len(near & {single[name] for name in pair}) <= 1 for near in around.values())
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("lost", ["one", "apart", "near", "four"])
def test_sites_may_drop_out_in_every_phase(tmp_path, phase, lost):
    """Of eleven clients eight must stay, and four of each neighbourhood; who sends no keys is not in the ring."""
    sites = rehearse(tmp_path, rounds=1)
    pair = ("site-2", "site-4") if lost == "four" else find_pair(sites, apart=lost == "apart")
    some = {"one": pair[:1], "four": ("site-1", *pair, "site-5")}.get(lost, pair)
    carrier = Overhearing(sites.sites, {phase: some})
    report = sites.run(create("fedavg"), transport=carrier, secure=WORDS, evaluation="none")
    clients = sorted(client for site in some for client in sites.places[site].clients)
    line = report.history[0]
    if lost in ("one", "apart") or (lost == "near" and phase == PHASES[0]):
        gone = [] if phase == PHASES[3] else clients
        expected = sites.simulate(
            create("fedavg"), secure="sums", evaluation="none", faults=lambda _, asked: np.isin(asked, gone)
        )
        assert same(report.server, expected.server)
        assert line["replied"] == len(SIZES) - len(gone)
    else:
        assert line["replied"] == 0
        assert "too few were left to read their sum" in line["lost"]
        asked = {name for name, _, _ in carrier.arrived}
        assert PHASES[3] not in asked or phase == PHASES[3]  # no share is asked for that would remove masks
        assert same(report.server, create("fedavg").start(sites.task.public_facts(0)))


def test_a_site_takes_no_other_ring_than_its_own(tmp_path):
    """A coordinator that would choose who holds a client's shares: it names others in the ring, or gives other keys."""
    sites = rehearse(tmp_path, rounds=1)

    class Lying(InProcess):
        change = None

        def exchange(self, jobs, exchange):
            changed = {site: self.lie(job) for site, job in jobs.items()} if exchange.phases == (PHASES[1],) else jobs
            for site, job in changed.items():
                try:
                    yield site, self.sites[site].answer(job)
                except RefusedError as error:
                    refused.append(str(error))
                    yield site, str(error)

        def lie(self, job):
            old = envelopes.read(job)
            tree = old.tree(sites.task.network.layout)
            self.change(tree["relay"])
            return envelopes.write(
                "job", sites.key, federation=old.header.federation, number=old.header.number, round=0,
                about=old.header.about, tree=tree,
            )  # fmt: skip

    def shrink(relay):  # the keys of fewer than a client's neighbours
        relay["clients"], relay["keys"] = relay["clients"][1:], relay["keys"][1:]

    def choose(relay):  # the ring is of those whose keys are given: everybody's neighbours are the same ones
        relay["ring"] = relay["clients"]

    def repeat(relay):  # a ring that looks larger than it is
        relay["ring"] = torch.cat([relay["ring"], relay["ring"][:1]])

    def invent(relay):  # a client that nobody is
        relay["ring"] = torch.cat([relay["ring"], relay["ring"].new_tensor([99])])

    for change, said in (
        (repeat, "clients of the federation, each once"),
        (invent, "clients of the federation, each once"),
        (shrink, "all its neighbours must be there"),
        (choose, "at least 8 clients must be in a round"),
    ):
        refused, sites = [], rehearse(tmp_path / change.__name__, rounds=1)
        lying = Lying(sites.sites)
        lying.change = change
        report = sites.run(create("fedavg"), transport=lying, secure=WORDS, evaluation="none")
        assert said in refused[0]
        assert report.history[0]["replied"] == 0


@pytest.mark.parametrize("neighbours", [0, 6, 3])
def test_a_site_does_not_give_up_its_neighbours(tmp_path, neighbours):
    sites = rehearse(tmp_path, rounds=2)
    kept = Keeping(sites.sites)
    sites.run(create("fedavg"), transport=kept, secure=WORDS, evaluation="none")
    old = envelopes.read(kept.jobs[1, PHASES[0]]["site-1"])
    other = envelopes.write(
        "job", sites.key, federation=old.header.federation, number=99, round=1,
        about={**old.header.about, "neighbours": neighbours}, tree=old.tree(sites.task.network.layout),
    )  # fmt: skip
    with pytest.raises(RefusedError, match="protected as in the rounds before|must be even"):
        sites.sites["site-1"].answer(other)


def test_who_is_in_the_sum_must_be_in_the_ring_and_enough(tmp_path):
    """A coordinator that names too few, or makes clients up, gets no shares."""
    sites = rehearse(tmp_path, rounds=1)
    refused = {}

    class Asking(InProcess):
        def exchange(self, jobs, exchange):
            if exchange.phases == (PHASES[3],):
                near = neighbours_of(range(11), 4, 0, 0)[3]  # of the client of site-2
                far = [who for who in range(11) if who not in near]
                for site, there, gone in (("site-0", [*range(12)], []), ("site-2", [*near, *far[:2]], far[2:])):
                    with pytest.raises(RefusedError) as caught:
                        sites.sites[site].answer(self.ask(jobs[site], there, gone))
                    refused[site] = str(caught.value)
            yield from super().exchange(jobs, exchange)

        def ask(self, job, there, gone):
            old = envelopes.read(job)
            tree = old.tree(sites.task.network.layout)
            tree["relay"] = {"there": torch.tensor(there), "gone": torch.tensor(gone, dtype=torch.int64)}
            return envelopes.write(
                "job", sites.key, federation=old.header.federation, number=old.header.number, round=0,
                about=old.header.about, tree=tree,
            )  # fmt: skip

    sites.run(create("fedavg"), transport=Asking(sites.sites), secure=WORDS, evaluation="none")
    assert "either in the sum or gone" in refused["site-0"]
    assert "At least 8 of all clients must be in the sum. 7 are" in refused["site-2"]


def test_noise_in_shares_goes_with_neighbours(tmp_path):
    report = rehearse(tmp_path, rounds=1).run(
        create("fedavg"), secure=WORDS, dp="client:epsilon=8,delta=1e-2", evaluation="none"
    )
    assert report.history[0]["replied"] == 11
    assert "the 8 without whom there is no sum" in report.privacy[0]


def test_a_site_with_many_clients_could_hold_enough_shares(tmp_path):
    places = {name: Place(clients=[*some]) for name, some in (("a", range(4)), ("b", range(4, 7)), ("c", range(7, 9)))}
    terms = Terms(name="x", clients=9, sites=places, rounds=1, training={})
    require_hidden(terms)
    require_hidden(terms, 8)
    with pytest.raises(DeployError, match="No site must have 4 clients or more: with 4 neighbours.*a has 4"):
        require_hidden(terms, 4)


def test_what_neighbours_mean_is_said_before_the_first_job_and_in_it(tmp_path):
    sites = rehearse(tmp_path, rounds=1)
    said = " ".join(list_demands(create("fedavg"), sites.task, settings=Settings(secure="masks:neighbours=20")))
    assert "masks with 20 others: 15 of these who help the server uncover it" in said
    assert "more than 6 of such a neighbourhood of 21" in said
    kept = Keeping(sites.sites)
    sites.run(create("fedavg"), transport=kept, secure=WORDS, evaluation="none")
    shown = describe(envelopes.read(kept.jobs[0, "local"]["site-0"]))
    assert "masks that a client shares with 4 others" in " ".join(shown.sentences)
