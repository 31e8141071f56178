"""Secure sums: exact with every drop-out that the protocol bears, secret, and refused where they would not be."""

import itertools

import numpy as np
import pytest
import torch

from atoll import LocalEngine, Recipe, federate
from atoll.algorithms import AFL, IFCA, Ditto, FedAMP, FedAvg, FedPer, Scaffold
from atoll.kernel.errors import AtollError, PrivacyError
from atoll.kernel.randomness import generator
from atoll.protect.masks import (
    PRIME,
    MaskingClient,
    default_threshold,
    join_shares,
    mask_words,
    split_secret,
    sum_masked,
)
from atoll.protect.secure import Secure, _from_words, _to_words

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
SIZES = (5, 9, 12, 7, 3)


def inputs(clients, count=50):
    draw = generator(0, "words")
    return {who: draw.integers(2**32, size=count, dtype=np.uint32) for who in clients}


def plain_sum(given):
    return sum(one.astype(np.uint64) for one in given.values()).astype(np.uint32)


@pytest.mark.parametrize("gone", [(), (7,), (7, 9)])
@pytest.mark.parametrize("silent", [(), (2,)])
def test_the_sum_is_exact_whoever_drops_out(gone, silent):
    given = inputs([0, 1, 2, 4, 5, 6, 8])
    if len(given) - len(silent) < default_threshold(len(given) + len(gone)):
        with pytest.raises(PrivacyError, match="must stay to the end"):
            sum_masked(given, 3, gone=gone, silent=silent)
        return
    assert np.array_equal(sum_masked(given, 3, gone=gone, silent=silent), plain_sum(given))


@pytest.mark.parametrize("keyed", [(3,), (3, 7)])
@pytest.mark.parametrize("gone", [(), (5,)])
def test_the_sum_is_exact_after_drop_outs_in_every_phase(keyed, gone):
    """Of ten, seven must stay to the end: the others may leave after their keys, their shares or their input."""
    given = inputs([who for who in range(10) if who not in {*keyed, *gone}])
    silent = [*given][: len(given) - default_threshold(10)]
    found = sum_masked(given, 1, keyed=keyed, gone=gone, silent=silent)
    assert np.array_equal(found, plain_sum(given))


def test_shares_live_in_a_prime_field():
    """Miller and Rabin, with the first bases."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        powers = [pow(base, odd * 2**step, PRIME) for step in range(twos)]
        assert powers[0] == 1 or PRIME - 1 in powers


def test_the_fixed_point_is_the_finest_that_cannot_overflow():
    """m=50, R=1 of protect.md 2.2."""
    secure = Secure("masks", clip=1.0)
    assert secure.scale(50) == 2**25
    assert 50 * (2**25 + 0.5) < 2**31 <= 50 * (2**26 + 0.5)


def test_words_are_numbers_mod_2_to_the_32():
    numbers = torch.tensor(
        [0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**32 + 5, -(2**32) - 7, 2**40 + 3], dtype=torch.float64
    )
    words = _to_words(numbers)
    assert words.dtype == torch.uint32
    assert words.tolist() == [int(one) % 2**32 for one in numbers.tolist()]
    assert torch.equal(_from_words(words), (numbers + 2**31) % 2**32 - 2**31)


def test_one_less_than_the_threshold_is_too_few():
    given = inputs(range(9))
    assert default_threshold(9) == 7
    assert np.array_equal(sum_masked(given, 0, silent=(0, 1)), plain_sum(given))
    with pytest.raises(PrivacyError, match="At least 7 of 9"):
        sum_masked(given, 0, silent=(0, 1, 2))
    with pytest.raises(PrivacyError, match="at least 3"):
        sum_masked(inputs([1, 2]), 0)


def test_fewer_shares_than_needed_tell_nothing():
    """Over a small field, every pair of shares is as likely for one secret as for another."""
    prime = 7

    def pairs(secret):
        return sorted(
            tuple((secret + a * x + b * x * x) % prime for x in (1, 2))
            for a, b in itertools.product(range(prime), repeat=2)
        )

    assert pairs(3) == pairs(5)
    shares = split_secret(12345, range(5), 3)
    assert join_shares({who: shares[who] for who in (4, 0, 2)}) == 12345
    assert join_shares({who: shares[who] for who in (4, 0)}) != 12345


def require_noise(client):
    """What a client sends in place of zeros: even in its highest bits, and unlike a count."""
    masked = client.mask(np.zeros(200_000, dtype=np.uint32))
    top, expected = np.bincount(masked >> 24, minlength=256), len(masked) / 256
    assert ((top - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5
    counting = np.arange(len(masked)) % 1000
    assert abs(np.corrcoef(masked.astype(float), counting)[0, 1]) < 5 / len(masked) ** 0.5


def test_a_masked_input_looks_like_noise():
    clients = {who: MaskingClient(who, 0, 3) for who in range(4)}
    keys = {who: one.publish_keys() for who, one in clients.items()}
    sealed = {who: one.send_shares(keys) for who, one in clients.items()}
    for who, one in clients.items():
        one.take_shares({other: sealed[other][who] for other in clients if other != who})
    require_noise(clients[1])


def test_nobody_gives_both_shares_of_another():
    clients = {who: MaskingClient(who, 0, 3) for who in range(4)}
    keys = {who: one.publish_keys() for who, one in clients.items()}
    sealed = {who: one.send_shares(keys) for who, one in clients.items()}
    one = clients[0]
    one.take_shares({other: sealed[other][0] for other in (1, 2, 3)})
    with pytest.raises(PrivacyError, match="either there or gone"):
        one.help_unmask([1, 2], [2, 3])
    one.help_unmask([1, 2, 3], [])
    with pytest.raises(PrivacyError, match="asked once"):
        one.help_unmask([1, 2], [3])
    with pytest.raises(PrivacyError, match="not for client 0"):
        one.take_shares({1: sealed[1][2]})
    with pytest.raises(PrivacyError, match="not for client 0"):
        one.take_shares({1: sealed[1][0][:-1] + b"x"})
    with pytest.raises(PrivacyError, match="keys of its own"):
        MaskingClient(0, 0, 3).send_shares({**keys, 1: keys[2]})


def test_masks_differ_by_key():
    assert not np.array_equal(mask_words(bytes(32), 8), mask_words(b"1" * 32, 8))


@pytest.mark.parametrize("method", [FedAvg(), Ditto(), FedPer(), Scaffold(), AFL()])
def test_secure_sums_are_the_plain_ones_up_to_rounding_and_masks_change_no_bit(make_task, method):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 1 if method.one_shot else 3, "evaluation": "none", "engine": ENGINE}
    states = [
        federate(task, method, secure=words, **more).server for words in ("none", "sums:most=20", "masks:most=20")
    ]
    plain, sums, masks = (getattr(one, "w", getattr(one, "answer", one)) for one in states)
    assert (sums - masks).norm() == 0
    if not method.one_shot:  # a closed form of moments is as sure as its equations are
        assert (plain - sums).norm() < 1e-4
    assert (plain - sums).norm() > 0


def test_drop_outs_are_recovered_in_a_federation(make_task):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 2, "evaluation": "none", "engine": ENGINE, "faults": lambda _, clients: clients == 3}
    sums, masks = (federate(task, FedAvg(), secure=words, **more).server for words in ("sums", "masks"))
    assert (sums - masks).norm() == 0


def test_the_ledger_has_integers_keys_and_no_weights(make_task):
    task = make_task(sizes=SIZES)
    plain, masked = (
        federate(task, FedAvg(), rounds=1, evaluation="none", secure=words).ledger for words in ("none", "masks")
    )
    fields = {entry.field: entry for entry in masked.entries if entry.direction == "up"}
    assert {*fields} == {"delta", "weight", "keys"}
    assert fields["keys"].bytes > 64
    assert (
        abs(fields["delta"].bytes - next(e.bytes for e in plain.entries if e.field == "delta" and e.direction == "up"))
        < 400
    )


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        (FedAMP(), {}, "hide single replies"),
        (IFCA(), {}, "hide single replies|before their first"),
        (FedAvg(), {"aggregate": "median"}, "Rules compare"),
        (FedAvg(), {"compress": "sign"}, "packed at the same places"),
        (FedAvg(), {"late": 0.3}, "masks of another round"),
        (FedAvg(), {"cohort": 2}, "at least 3 clients"),
        (FedAvg(), {"drop": 0.4}, "At least 4 of 5 clients must stay.*With drop=0.4 about 3.0 do"),
        (FedAvg(), {"secure": "masks:clip=1e9"}, "32 bits leave less"),
        (FedAvg(), {"secure": "mask"}, "masks"),
        (FedAvg(), {"secure": "masks:clip=0"}, "in \\(0, inf\\)"),
    ],
)
def test_what_cannot_be_protected_is_refused_before_the_first_round(make_task, method, settings, text):
    with pytest.raises(AtollError, match=text):
        federate(make_task(sizes=SIZES), method, rounds=12, evaluation="none", **{"secure": "masks", **settings})


@pytest.mark.parametrize("words", ["masks", "ckks"])
def test_clients_of_different_architectures_have_no_sum_together(words):
    task = Recipe("digits", clients=6, samples=120, model="mlp:4/mlp:8").build()
    with pytest.raises(PrivacyError, match="one form for all"):
        federate(task, "fedavg", rounds=1, evaluation="none", secure=words)
