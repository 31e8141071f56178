"""Protected messages at sites: packed, cut or masked where the clients are, with the bits of a simulation."""

import numpy as np
import pytest
import torch
from deploy.test_engine import Straggling, messages, same
from deploy.tools import Rehearsal

from atoll.compose import create
from atoll.deploy import messages as envelopes
from atoll.deploy.engine import InProcess
from atoll.deploy.masking import require_hidden
from atoll.deploy.protection import require_for_sites
from atoll.deploy.terms import Place, Terms
from atoll.federation.settings import Settings
from atoll.kernel.errors import DeployError, RefusedError
from atoll.kernel.params import flatten
from atoll.testing.conformance.tasks import build_task


class Overhearing(InProcess):
    """Keeps what arrives at the coordinator, and loses sites in a phase as told."""

    def __init__(self, sites, lose=None):
        super().__init__(sites)
        self.lose, self.arrived = lose or {}, []

    def exchange(self, jobs, exchange):
        for site, reply in super().exchange(jobs, exchange):
            if site in self.lose.get(exchange.phases[0], ()):
                continue
            self.arrived.append((exchange.phases[0], site, reply))
            yield site, reply


def both(folder, name="fedavg", *, task=None, transport=None, **settings):
    sites = Rehearsal(folder, task=task)
    carrier = None if transport is None else transport(sites.sites)
    report = sites.run(create(name), transport=carrier, evaluation="all", **settings)
    return report, sites.simulate(create(name), evaluation="all", **settings), carrier


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "words", ["topk:0.2", "qsgd:4", "lowrank:1", *(pytest.param(one, marks=SLOW) for one in ("randk:0.3", "sign"))]
)
def test_packed_messages_have_the_bits_of_a_simulation(tmp_path, words):
    report, simulated, _ = both(tmp_path, "ditto", compress=words)
    assert same(report.server, simulated.server)
    np.testing.assert_array_equal(report.scores(), simulated.scores())
    assert messages(report) == messages(simulated)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedamp", {"cohort": 3}),  # single replies, and one message for each site
        pytest.param("fedora", {}, marks=SLOW),  # an exchange before the first round
        pytest.param("scaffold", {"cohort": 4}, marks=SLOW),
        pytest.param("fedper+prox", {}, marks=SLOW),
        pytest.param("ditto@ifca:clusters=2,cluster_rounds=1", {}, marks=SLOW),
    ],
)
def test_error_feedback_crosses_methods(tmp_path, name, settings):
    report, simulated, _ = both(tmp_path, name, compress="topk:0.2", **settings)
    assert same(report.server, simulated.server)
    assert messages(report) == messages(simulated)


def test_batchnorm_and_whole_numbers_pass(tmp_path):
    report, simulated, _ = both(tmp_path, compress="sign", task=build_task("odd"))
    assert same(report.server, simulated.server)


def test_what_was_cut_off_goes_back_where_a_reply_did_not_count(tmp_path):
    sites = Rehearsal(tmp_path)
    late = Straggling(sites.sites, "site-1", 1)
    report = sites.run(create("fedavg"), transport=late, compress="topk:0.2")
    clients = sites.places["site-1"].clients
    lost = sites.simulate(
        create("fedavg"), compress="topk:0.2", faults=lambda round, asked: (round == 1) & np.isin(asked, clients)
    )
    assert same(report.server, lost.server)


def test_a_message_that_is_not_what_was_agreed_is_refused(tmp_path):
    class Forging(InProcess):
        """Answers in the name of a site, with a message that was changed."""

        def __init__(self, rehearsal, change):
            super().__init__(rehearsal.sites)
            self.keys, self.change = rehearsal.keys, change

        def exchange(self, jobs, exchange):
            for site, honest in super().exchange(jobs, exchange):
                reply, message = honest, envelopes.read(honest)
                if site == "site-0" and exchange.phases == ("local",):
                    tree, about = message.tree(None), dict(message.header.about)
                    self.change(tree, about)
                    header = message.header
                    reply = envelopes.write(
                        "reply", self.keys[site], federation=header.federation, number=header.number,
                        round=header.round, about=about, tree=tree,
                    )  # fmt: skip
                yield site, reply

    def outside(tree, about):
        tree[0][0]["result"]["delta"]["packed.index"][:] = 10**6

    def huge(tree, about):
        about["forms"][0][0]["delta"]["shapes"] = {"a": [2**40]}

    def long(tree, about):
        tree[0][0]["result"]["delta"] = tree[0][0]["result"]["delta"].map(lambda leaf: leaf * 100)

    def weighing(tree, about):
        tree[0][0]["weight"] = torch.ones(1, dtype=torch.float64)

    for number, (change, settings, said) in enumerate(
        [
            (outside, {"compress": "topk:0.2"}, "not what it should be"),
            (huge, {"compress": "topk:0.2"}, "once it is unpacked"),
            (long, {"dp": "client:noise=1,clip=0.1,delta=0.01"}, "must be cut to norm 0.1"),
            (weighing, {"dp": "client:noise=1,clip=100,delta=0.01"}, "must not tell a weight"),
        ]
    ):
        sites = Rehearsal(tmp_path / str(number), rounds=1)
        report = sites.run(create("fedavg"), transport=Forging(sites, change), evaluation="none", **settings)
        (reason,) = report.history[0]["lost"]
        assert said in reason
        assert report.history[0]["replied"] == 5


# -- sums under masks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["ditto", *(pytest.param(one, marks=SLOW) for one in ("fedavg", "scaffold", "fedper"))]
)
def test_masks_give_the_bits_of_a_simulation(tmp_path, name):
    report, simulated, _ = both(tmp_path, name, secure="masks:most=20")
    plain = Rehearsal(tmp_path / "plain").simulate(create(name), secure="sums:most=20", evaluation="all")
    assert same(report.server, simulated.server)
    assert same(report.server, plain.server)
    np.testing.assert_array_equal(report.scores(), simulated.scores())
    assert messages(report) == messages(simulated)


def test_masks_with_packed_messages_and_cohorts(tmp_path):
    report, simulated, _ = both(tmp_path, secure="masks", compress="randk:0.5", cohort=5)
    assert same(report.server, simulated.server)
    assert messages(report) == messages(simulated)


def test_the_coordinator_never_sees_what_a_single_client_sent(tmp_path):
    """What arrives are keys, sealed shares, words under masks, and shares of seeds."""
    sites = Rehearsal(tmp_path, rounds=1)
    plain = sites.simulate(create("fedavg"), secure="sums", evaluation="none")
    seen = {}
    sites.simulate(
        create("fedavg"), secure="sums", evaluation="none",
        on_reply=lambda round, arrival: seen.update({int(arrival.clients[0]): arrival}),
    )  # fmt: skip
    ears = Overhearing(sites.sites)
    report = sites.run(create("fedavg"), transport=ears, secure="masks", evaluation="none")
    assert same(report.server, plain.server)
    assert [*dict.fromkeys(phase for phase, _, _ in ears.arrived)] == [
        "masks keys",
        "masks shares",
        "local",
        "masks unmask",
    ]
    words = {
        client: torch.cat([leaf.flatten() for leaf in arrival.fields["delta"].values()]).to(torch.int64)
        for client, arrival in seen.items()
    }
    assert len(words) == 6
    for phase, _, reply in ears.arrived:
        message = envelopes.read(reply)
        assert message.header.about["samples"] == dict.fromkeys(
            ("train", "val", "test"), [0] * len(message.header.about["samples"]["train"])
        )
        assert not any(map(any, message.header.about["gradients"]))  # with batches of one they are sizes
        leaves = [leaf for leaf in flatten(message.tree(None))[0] if leaf.numel() >= 8]
        assert not any(leaf.is_floating_point() for leaf in leaves)
        if phase != "local":
            continue
        for one in message.tree(None)[0]:
            for row, client in enumerate(one["clients"].tolist()):
                masked = one["result"]["delta"]["masked"][row].to(torch.int64)
                difference = (masked - words[client]) % 2**32
                assert len(difference.unique()) > len(difference) // 2  # one mask for each word
                assert one["weight"] is None
    sealed = [envelopes.read(reply).tree(None) for phase, _, reply in ears.arrived if phase == "masks unmask"]
    assert all(len(one["keys"]) == 0 for one in sealed)  # nobody is gone, so no masking key is told


@pytest.mark.parametrize("phase", ["masks keys", "masks shares", "local", "masks unmask"])
@pytest.mark.parametrize("lost", [("site-0",), pytest.param(("site-0", "site-2"), marks=SLOW)])
def test_sites_may_drop_out_in_every_phase(tmp_path, phase, lost):
    """Of six clients, five must stay: one may go; with two gone the round has no sum, and the next one goes on."""
    sites = Rehearsal(tmp_path, rounds=1)
    report = sites.run(
        create("fedavg"), transport=Overhearing(sites.sites, {phase: lost}), secure="masks", evaluation="none"
    )
    clients = [client for site in lost for client in sites.places[site].clients]
    line = report.history[0]
    if len(lost) == 1:
        gone = clients if phase != "masks unmask" else []
        expected = sites.simulate(
            create("fedavg"), secure="sums", evaluation="none", faults=lambda _, asked: np.isin(asked, gone)
        )
        assert same(report.server, expected.server)
        assert line["replied"] == 6 - len(gone)
        assert sum(line["lost"].values()) == len(gone)
    else:
        assert line["replied"] == 0
        assert sum(line["lost"].values()) == 6
        assert "too few were left to read their sum" in line["lost"]
        untouched = create("fedavg").start(sites.task.public_facts(0))
        assert same(report.server, untouched)


def test_a_site_takes_each_step_once_and_forgets_its_secrets(tmp_path):
    sites = Rehearsal(tmp_path, rounds=1)
    jobs = {}

    class Keeping(InProcess):
        def exchange(self, some, exchange):
            jobs.setdefault(exchange.phases[0], dict(some))
            if exchange.phases[0] == "masks unmask":
                assert [*tmp_path.glob("site-1/*/masks.json")]
            yield from super().exchange(some, exchange)

    sites.run(create("fedavg"), transport=Keeping(sites.sites), secure="masks", evaluation="none")
    assert not [*tmp_path.glob("*/*/masks.json")]
    with pytest.raises(RefusedError, match="outdated"):
        sites.sites["site-1"].answer(jobs["local"]["site-1"])
    # a coordinator that asks for the words of a round again, under a number of its own
    old = envelopes.read(jobs["local"]["site-1"])
    again = envelopes.write(
        "job", sites.key, federation=old.header.federation, number=99, round=0, about=old.header.about,
        tree=old.tree(sites.task.network.layout),
    )  # fmt: skip
    with pytest.raises(RefusedError, match="made no keys for it"):
        sites.sites["site-1"].answer(again)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stages": [], "masked": False}, "protected as in the rounds before"),
        ({"masked": False}, "protected as in the rounds before"),
        ({}, "must leave under masks"),
    ],
)
def test_a_site_does_not_give_up_its_protection(tmp_path, change, said):
    sites = Rehearsal(tmp_path, rounds=2)
    jobs = {}

    class Keeping(InProcess):
        def exchange(self, some, exchange):
            jobs.setdefault((exchange.round, exchange.phases[0]), dict(some))
            yield from super().exchange(some, exchange)

    sites.run(create("fedavg"), transport=Keeping(sites.sites), secure="masks", evaluation="none")
    old = envelopes.read(jobs[1, "local"]["site-1"])
    about = {**old.header.about, "masks": None, **change}
    naked = envelopes.write(
        "job", sites.key, federation=old.header.federation, number=99, round=1, about=about,
        tree=old.tree(sites.task.network.layout),
    )  # fmt: skip
    with pytest.raises(RefusedError, match=said):
        sites.sites["site-1"].answer(naked)


@SLOW
@pytest.mark.parametrize("words", ["masks", "masks:neighbours=4"])
def test_a_coordinator_that_was_killed_goes_on_in_the_middle_of_the_protocol(tmp_path, words):
    from atoll.deploy.coordinator import coordinate

    class Killed(InProcess):
        at = ""

        def exchange(self, jobs, exchange):
            for place, (site, reply) in enumerate(super().exchange(jobs, exchange)):
                if place == 2 and exchange.round == 1 and exchange.phases == (self.at,):
                    raise ConnectionAbortedError
                yield site, reply

    sites = Rehearsal(tmp_path)
    asked = {"engine": sites.engine().local, "secure": words, "evaluation": "all"}
    folder, killed = tmp_path / "run", Killed(sites.sites)
    for number, at in enumerate(("masks keys", "masks shares", "local", "masks unmask")):
        killed.at = at
        with pytest.raises(ConnectionAbortedError):
            coordinate(sites.federation, sites.elsewhere(), create("ditto"), killed, folder, resume=number > 0, **asked)
    report = coordinate(
        sites.federation, sites.elsewhere(), create("ditto"), InProcess(sites.sites), folder, resume=True, **asked
    )
    simulated = sites.simulate(create("ditto"), secure=words, evaluation="all")
    assert same(report.server, simulated.server)


def test_few_sites_cannot_hide_in_a_sum(tmp_path):
    from atoll.deploy.coordinator import coordinate

    sites = Rehearsal(tmp_path, groups=((0, 1, 2), (3, 4, 5)))
    with pytest.raises(DeployError, match="at least 3 sites"):
        coordinate(
            sites.federation, sites.elsewhere(), create("fedavg"), InProcess(sites.sites), tmp_path / "run",
            engine=sites.engine().local, secure="masks",
        )  # fmt: skip
    places = {name: Place(clients=[*some]) for name, some in (("a", range(7)), ("b", [7]), ("c", [8]))}
    with pytest.raises(DeployError, match="more than two thirds.*a has 7 of 9"):
        require_hidden(Terms(name="x", clients=9, sites=places, rounds=1, training={}))


@pytest.mark.parametrize("words", ["masks", "masks:neighbours=4"])
def test_the_ledger_counts_the_bytes_that_travel(tmp_path, words):
    """With one client at each site, keys and shares in messages have as many bytes as the ledger says."""
    sites = Rehearsal(tmp_path, rounds=1, groups=tuple((k,) for k in range(6)))

    class Counting(Overhearing):
        down = 0

        def exchange(self, jobs, exchange):
            relay = envelopes.read(jobs["site-0"]).tree(None)["relay"]
            self.down += sum(leaf.nbytes for leaf in flatten(relay)[0])
            yield from super().exchange(jobs, exchange)

    ears = Counting(sites.sites)
    report = sites.run(create("fedavg"), transport=ears, secure=words, evaluation="none")
    up = sum(
        leaf.nbytes
        for phase, site, reply in ears.arrived
        if site == "site-0" and phase != "local"
        for leaf in flatten(envelopes.read(reply).tree(None))[0]
    )
    counted = {entry.direction: entry.bytes for entry in report.ledger.entries if entry.field == "keys"}
    assert counted == {"up": up, "down": ears.down}


# -- noise that nobody can repeat ------------------------------------------------------------------------------------
NOISY = {
    "local": {"dp": "local:noise=2,clip=0.5,delta=1e-2"},
    "client": {"dp": "client:noise=2,clip=0.5,delta=1e-2"},
    "shares": {"dp": "client:noise=2,clip=0.5,delta=1e-2", "secure": "masks"},
}


def delta_of(report):
    leaves = flatten(report.server)[0]
    return torch.cat([leaf.flatten().double() for leaf in leaves if leaf.is_floating_point()])


@pytest.mark.parametrize("kind", NOISY)
def test_noise_at_sites_does_not_follow_from_the_seed(tmp_path, kind):
    """Twice the same federation: what differs is noise, of the size that is promised."""
    first, second = (
        Rehearsal(tmp_path / name, rounds=1).run(create("fedavg"), evaluation="none", **NOISY[kind]) for name in "ab"
    )
    simulated = Rehearsal(tmp_path / "c", rounds=1).simulate(create("fedavg"), evaluation="none", **NOISY[kind])
    difference = delta_of(first) - delta_of(second)
    # of six clients, each with noise of its own; the server's on the sum; or six shares, of which five make up as much
    size = {"local": 6**0.5 / 6, "client": 1 / 6, "shares": (6 / 5) ** 0.5 / 6}[kind] * 2 * 0.5
    count = len(difference)
    error = 4 / (2 * count) ** 0.5
    assert difference.std() == pytest.approx(2**0.5 * size, rel=error)
    assert (delta_of(first) - delta_of(simulated)).std() == pytest.approx(2**0.5 * size, rel=error)
    drawn = "by the server, which is trusted with it" if kind == "client" else "at each site from the operating system"
    assert f"drawn {drawn}" in first.privacy[0]
    assert "drawn from the run's seed (simulated)" in simulated.privacy[0]


def test_the_servers_noise_is_the_same_when_a_round_is_played_again(tmp_path):
    """Other noise on the same sum would give it away; what it is drawn from is kept for its user alone."""
    from atoll.deploy.coordinator import NOISE, coordinate

    class Killed(InProcess):
        def __init__(self, sites):
            super().__init__(sites)
            self.alive, self.seen = False, []

        def exchange(self, jobs, exchange):
            if exchange.phases[0].startswith("evaluate"):
                self.seen.append(envelopes.read(jobs["site-0"]).tree(sites.task.network.layout)["broadcast"])
                if not self.alive:
                    raise ConnectionAbortedError
            yield from super().exchange(jobs, exchange)

    sites = Rehearsal(tmp_path, rounds=1)
    asked = {"engine": sites.engine().local, "evaluation": "all", **NOISY["client"]}
    folder, killed = tmp_path / "run", Killed(sites.sites)
    arguments = (sites.federation, sites.elsewhere(), create("fedavg"), killed, folder)
    with pytest.raises(ConnectionAbortedError):
        coordinate(*arguments, **asked)
    key = folder / NOISE
    assert key.stat().st_mode & 0o777 == 0o600
    secret = key.read_bytes()
    assert len(secret) == 32
    key.unlink()
    with pytest.raises(DeployError, match="noise must be that of the rounds before"):
        coordinate(*arguments, resume=True, **asked)
    key.write_bytes(secret)
    killed.alive = True
    report = coordinate(*arguments, resume=True, **asked)
    assert same(killed.seen[0], report.server)


def test_a_site_sends_no_more_messages_than_its_noise_was_found_for(tmp_path):
    sites = Rehearsal(tmp_path, rounds=2)
    jobs = {}

    class Keeping(InProcess):
        def exchange(self, some, exchange):
            jobs.setdefault((exchange.round, exchange.phases[0]), dict(some))
            yield from super().exchange(some, exchange)

    sites.run(create("fedavg"), transport=Keeping(sites.sites), evaluation="none", **NOISY["local"])
    old = envelopes.read(jobs[1, "local"]["site-1"])
    again = envelopes.write(
        "job", sites.key, federation=old.header.federation, number=99, round=1, about=old.header.about,
        tree=old.tree(sites.task.network.layout),
    )  # fmt: skip
    with pytest.raises(RefusedError, match="found for 2 of them, and as many have left already"):
        sites.sites["site-1"].answer(again)


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("fedavg", {"secure": "sums"}, "hides nothing"),
        ("fedavg", {"secure": "ckks"}, "sites have no key together"),
        ("fedavg", {"attack": "sign-flip:0.2"}, "Attacks are played in simulations"),
        ("fedavg", {"dp": "client:noise=1,clip=adaptive"}, "A clip that adapts is simulated"),
        ("fedavg", {"dp": "client:noise=1", "cohort": "poisson:0.5"}, "nothing is gained by chance"),
        ("fedavg+dpsgd", {}, "would protect no sample"),
    ],
)
def test_what_would_be_a_lie_at_sites_is_refused(method, settings, said):
    with pytest.raises(DeployError, match=said):
        require_for_sites(Settings(**settings), create(method))


def test_a_rule_bears_a_hostile_site(tmp_path):
    report, simulated, _ = both(tmp_path, aggregate="median")
    assert same(report.server, simulated.server)
