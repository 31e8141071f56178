"""Masks among neighbours: exact sums with all drop-outs that are promised, what it takes to uncover one, refusals."""

import itertools
import threading

import numpy as np
import pytest
import torch
from privacy.test_masks import require_noise

from atoll import LocalEngine, federate
from atoll.algorithms import Ditto, FedAvg
from atoll.federation.report import Report
from atoll.kernel.errors import AtollError, PrivacyError, SumLost
from atoll.kernel.randomness import generator
from atoll.protect.masks import (
    MaskingClient,
    default_threshold,
    join_shares,
    message_bytes,
    neighbours_of,
    sum_masked,
    threshold_among,
)
from atoll.protect.secure import parse_secure

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
SIZES = (5, 9, 12, 7, 3, 8, 4, 6, 2, 11)
PHASES = ("keyed", "gone", "silent")


def draw_inputs(clients, count=40):
    draw = generator(0, "words")
    return {who: draw.integers(2**32, size=count, dtype=np.uint32) for who in clients}


def plain_sum(given):
    return sum(one.astype(np.uint64) for one in given.values()).astype(np.uint32)


def choose_most(around, spare, most):
    """Choose drop-outs, one after another, while no neighbourhood loses more than it may."""
    chosen = set()
    for who in around:
        more = chosen | {who}
        if len(more) <= most and all(len(near & more) <= spare for near in around.values()):
            chosen = more
    return sorted(chosen)


def add_up(clients, k, lost, phase, round=0):
    """Run the protocol with drop-outs in a phase; return its sum, and the one that it should be."""
    sending = [who for who in clients if who not in lost or phase == "silent"]
    given = draw_inputs(sending)
    return sum_masked(given, round, neighbours=k, **{phase: lost}), plain_sum(given)


def agree(count, k, round=0):
    """Return clients that have each other's shares."""
    around = neighbours_of(range(count), k, 0, round)
    least = default_threshold(count)
    clients = {who: MaskingClient(who, round, threshold_among(k, least), least=least) for who in range(count)}
    keys = {who: one.publish_keys() for who, one in clients.items()}
    sealed = {who: one.send_shares({v: keys[v] for v in around[who]}) for who, one in clients.items()}
    for who, one in clients.items():
        one.take_shares({other: sealed[other][who] for other in around[who] - {who}})
    return clients, around


def is_connected(around, honest):
    """Return whether clients who are left can reach each other by masks."""
    honest = set(honest)
    reached, front = set(), {min(honest)} if honest else set()
    while front:
        reached |= front
        front = {other for who in front for other in around[who] & honest} - reached
    return reached == honest


# -- the ring --------------------------------------------------------------------------------------------------------
def test_neighbours_are_mutual_as_many_as_asked_for_and_drawn_anew():
    clients = [3, 5, 8, 13, 21, 34, 55, 89, 90, 91, 92]
    around = neighbours_of(clients, 4, 7, 2)
    assert around == neighbours_of(reversed(clients), 4, 7, 2)
    assert sorted(around) == clients
    for who, near in around.items():
        assert len(near) == 5
        assert who in near
        assert all(who in around[other] for other in near)
    assert around != neighbours_of(clients, 4, 7, 3)
    assert around != neighbours_of(clients, 4, 8, 2)


@pytest.mark.parametrize("k", [0, 6, 8, 20])
def test_with_no_more_others_than_neighbours_all_have_masks_with_all(k):
    assert neighbours_of(range(7), k, 0, 0) == dict.fromkeys(range(7), frozenset(range(7)))
    assert message_bytes(7, k) == message_bytes(7)
    assert threshold_among(k, default_threshold(7)) == default_threshold(7)
    assert np.array_equal(*add_up(range(7), k, [1, 4], "gone"))
    with pytest.raises(SumLost, match="At least 5 of 7 clients"):
        add_up(range(7), k, [1, 4, 5], "gone")


@pytest.mark.parametrize(("count", "k"), [(6, 4), (7, 4), (9, 4), (10, 6), (11, 8)])
def test_fewer_than_k_clients_cannot_cut_the_ring_and_k_can(count, k):
    around = neighbours_of(range(count), k, 0, 1)

    def can_cut(size):
        return any(
            not is_connected(around, set(range(count)) - set(some))
            for some in itertools.combinations(range(count), size)
        )

    assert not any(can_cut(size) for size in range(k))
    assert can_cut(k)


@pytest.mark.parametrize(("count", "k"), [(10, 4), (11, 6), (12, 8)])
def test_in_a_round_with_a_sum_it_takes_helpers_of_the_server_to_cut_the_ring(count, k):
    """By brute force: no neighbourhood has lost more than it may, and there are fewer than 2t - k - 2 helpers."""
    around, everybody, t = neighbours_of(range(count), k, 0, 0), set(range(count)), default_threshold(k + 1)
    assert 2 * t - k - 2 >= 2
    for lost in range(count - default_threshold(count) + 1):
        for gone in map(set, itertools.combinations(everybody, lost)):
            if any(len(near & gone) > k + 1 - t for near in around.values()):
                continue
            for helpers in itertools.combinations(everybody - gone, 2 * t - k - 3):
                assert is_connected(around, everybody - gone - set(helpers))


@pytest.mark.parametrize(("count", "k"), [(14, 4), (30, 8), (100, 20)])
def test_as_many_helpers_as_are_said_to_cut_the_ring_can(count, k):
    """Two places of k/2 clients each: as many of them are gone as a round bears, the others help the server."""
    around, t = neighbours_of(range(count), k, 0, 0), default_threshold(k + 1)
    ring = walk(around, k)
    places = [ring[: k // 2], ring[count // 2 : count // 2 + k // 2]]
    spare = k + 1 - t
    gone = {who for place in places for who in place[:spare]}
    helpers = {who for place in places for who in place[spare:]}
    assert len(helpers) == 2 * t - k - 2
    assert all(len(near & gone) <= spare for near in around.values())
    assert not is_connected(around, set(range(count)) - gone - helpers)


def walk(around, k):
    """Return the clients in the order of the ring: who stands beside another one shares most neighbours with it."""
    ring = [0]
    while len(ring) < len(around):
        beside = [other for other in around[ring[-1]] - {*ring} if len(around[ring[-1]] & around[other]) == k]
        ring.append(min(beside))
    return ring


# -- sums ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("count", "k"), [(11, 4), (15, 4), (20, 6), (23, 8)])
def test_the_sum_is_exact_with_none_one_and_the_most_drop_outs_in_each_phase(count, k, phase):
    spare = k + 1 - default_threshold(k + 1)
    around = neighbours_of(range(count), k, 0, 0)
    most = choose_most(around, spare, count - default_threshold(count))
    assert len(most) > spare
    for lost in ([], most[:1], most):
        found, expected = add_up(range(count), k, lost, phase)
        assert np.array_equal(found, expected)


def test_the_sum_is_exact_with_drop_outs_in_all_phases_at_once():
    around = neighbours_of(range(23), 8, 0, 5)
    one, two, three, *more = choose_most(around, 2, 23 - default_threshold(23))
    given = draw_inputs(who for who in range(23) if who not in {one, two})
    found = sum_masked(given, 5, neighbours=8, keyed=[one], gone=[two], silent=[three, *more])
    assert np.array_equal(found, plain_sum(given))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("k", [4, 8])
def test_one_drop_out_too_many_in_a_neighbourhood_and_there_is_no_sum(phase, k):
    t, around = default_threshold(k + 1), neighbours_of(range(20), k, 0, 0)
    near = sorted(around[7] - {7})
    assert 20 - (k + 2 - t) >= default_threshold(20)
    assert np.array_equal(*add_up(range(20), k, near[: k + 1 - t], phase))
    with pytest.raises(SumLost, match=f"At least {t} of the {k + 1} clients of every neighbourhood must stay"):
        add_up(range(20), k, near[: k + 2 - t], phase)


def test_for_twenty_neighbours_of_a_hundred_figures_are_those_of_the_guide():
    """15 of 21 must stay: any 6 may drop out, whoever they are."""
    assert default_threshold(21) == 15
    assert default_threshold(100) == 67
    assert 2 * 15 - 20 - 2 == 8
    around = neighbours_of(range(100), 20, 0, 0)
    together = sorted(around[0])[:6]
    assert np.array_equal(*add_up(range(100), 20, together, "gone"))
    keys, sealed, share = 8 + 64, 8 + 8 + 12 + 66 + 16, 33
    assert message_bytes(100, 20) == {
        "up": keys + 20 * sealed + 8 + 21 * share, "down": 21 * keys + 20 * sealed + 2 * 100 * 8
    }  # fmt: skip
    assert message_bytes(100, 20)["up"] == 2973
    assert message_bytes(100)["up"] == 14270


# -- secrecy ---------------------------------------------------------------------------------------------------------
def test_a_client_holds_shares_of_its_neighbours_only():
    clients, around = agree(12, 4)
    for who, one in clients.items():
        assert one._shares.keys() == around[who]
        stranger = min(around.keys() - around[who])
        with pytest.raises(PrivacyError, match="is not for client"):
            one.take_shares({stranger: bytes(94)})
        seeds, keys = one.help_unmask(range(12), [])
        assert seeds.keys() == around[who]
        assert not keys


def test_it_takes_t_neighbours_to_rebuild_a_clients_secrets():
    clients, around = agree(12, 8)
    t = default_threshold(9)
    held = {who: clients[who]._shares[0] for who in sorted(around[0] - {0})}
    secrets = [int.from_bytes(one, "big") for one in (clients[0]._seed, clients[0]._masking.private_bytes_raw())]
    for part, secret in enumerate(secrets):
        shares = {who: both[part] for who, both in held.items()}
        assert all(join_shares(dict(some)) == secret for some in itertools.combinations(shares.items(), t))
        assert not any(join_shares(dict(some)) == secret for some in itertools.combinations(shares.items(), t - 1))


def test_an_input_under_masks_of_neighbours_looks_like_noise():
    clients, _ = agree(9, 4)
    require_noise(clients[1])


def test_a_client_helps_only_if_enough_of_all_are_in_the_sum():
    """Its neighbourhood alone does not do: the noise of a promise is made of more than two thirds of all."""
    clients, around = agree(20, 4)
    one = clients[3]
    near = sorted(around[3])
    far = [who for who in range(20) if who not in near]
    there = [*near, *far[: 13 - len(near)]]
    with pytest.raises(PrivacyError, match="At least 14 of all clients must be in the sum. 13 are"):
        one.help_unmask(there, far[13 - len(near) :])
    with pytest.raises(PrivacyError, match="At least 4 clients must be in the sum"):
        one.help_unmask([*near[:3], *far], near[3:])
    one.help_unmask([*there, far[-1]], far[13 - len(near) : -1])


# -- in a federation ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [FedAvg(), Ditto()])
@pytest.mark.parametrize("more", [{}, {"compress": "randk:0.3"}, {"cohort": 8}], ids=["plain", "randk", "cohort"])
def test_masks_among_neighbours_change_no_bit(make_task, method, more):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    states = [
        federate(
            task, method, rounds=3, evaluation="none", engine=ENGINE, secure=words,
            faults=lambda round, clients: clients == round, **more,
        ).server
        for words in ("sums", "masks", "masks:neighbours=4")
    ]  # fmt: skip
    assert (states[0] - states[2]).norm() == 0
    assert (states[1] - states[2]).norm() == 0


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(make_task, tmp_path):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 4, "evaluation": "none", "engine": ENGINE, "secure": "masks:neighbours=4,clip=5"}
    whole = federate(task, FedAvg(), **more).server
    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        federate(task, FedAvg(), folder=tmp_path / "run", stop=stop, on_round=lambda _: stop.set(), **more)
    resumed = federate(task, FedAvg(), folder=tmp_path / "run", resume=True, **more)
    assert (whole - resumed.server).norm() == 0
    assert Report.read(tmp_path / "run").settings.secure == "masks:neighbours=4,clip=5"


def test_noise_in_shares_needs_as_many_clients_as_without_neighbours(make_task):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {
        "rounds": 2, "evaluation": "none", "engine": ENGINE, "dp": "client:epsilon=8,delta=1e-2",
        "faults": lambda round, clients: clients == 3,
    }  # fmt: skip
    all_others, neighbours = (
        federate(task, FedAvg(), secure=words, **more) for words in ("masks", "masks:neighbours=4")
    )
    assert (all_others.server - neighbours.server).norm() == 0
    assert all_others.privacy == neighbours.privacy


def test_a_round_without_a_sum_leaves_the_server_as_it_was(make_task):
    around = neighbours_of(range(10), 4, 0, 0)
    lost = sorted(around[5])[:2]
    report = federate(
        make_task(sizes=SIZES), FedAvg(), rounds=1, evaluation="none", secure="masks:neighbours=4",
        faults=lambda _, clients: np.isin(clients, lost),
    )  # fmt: skip
    assert report.history[0]["replied"] == 0
    assert report.history[0]["lost"]["too few were left to read their sum"] == 8


def test_the_ledger_counts_keys_and_shares_of_neighbours(make_task):
    report = federate(make_task(sizes=SIZES), FedAvg(), rounds=1, evaluation="none", secure="masks:neighbours=4")
    keys = {entry.direction: entry.bytes for entry in report.ledger.entries if entry.field == "keys"}
    assert keys == message_bytes(10, 4)
    assert all(size < message_bytes(10)[way] for way, size in keys.items())


@pytest.mark.parametrize(
    ("words", "more", "text"),
    [
        ("masks:neighbours=5", {}, "must be even.*Got 5"),
        ("masks:neighbours=2", {}, "at least 4, or 0 for all others. Got 2"),
        ("masks:neighbours=-4", {}, "at least 4, or 0 for all others. Got -4"),
        ("masks:neighbours=4.5", {}, "must be a whole number. Got '4.5'"),
        ("masks:neighbours", {}, "must be a whole number"),
        ("sums:neighbours=4", {}, "Only masks are shared with neighbours. Got neighbours=4 of sums"),
        ("ckks:neighbours=4", {}, "Only masks are shared with neighbours"),
        ("masks:neighbours=4", {"drop": 0.25}, "At least 4 of the 5 clients of every neighbourhood.*about 3.8 do"),
        ("masks:neighbours=4", {"drop": 0.4}, "At least 7 of 10 clients must stay"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_round(make_task, words, more, text):
    with pytest.raises(AtollError, match=text):
        federate(make_task(sizes=SIZES), FedAvg(), rounds=1, evaluation="none", secure=words, **more)


def test_words_say_how_many_neighbours_there_are():
    assert parse_secure("masks").neighbours == 0
    assert parse_secure("masks:neighbours=0") == parse_secure("masks")
    assert parse_secure("masks:neighbours=20,clip=5").neighbours == 20
    assert parse_secure("masks:neighbours=20").adder(3) == parse_secure("masks:neighbours=20").adder(3)
