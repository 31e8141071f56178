"""Encrypted sums: what they come to, how far off, what they cost, and who can read what."""

import pickle
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from atoll import LocalEngine, federate
from atoll.algorithms.afl import AFL
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedamp import FedAMP
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.ifca import IFCA
from atoll.algorithms.scaffold import Scaffold
from atoll.kernel.errors import AtollError, PrivacyError
from atoll.kernel.randomness import generator
from atoll.protect.encrypted import FLOOD, SEALED, SLOTS, ClientsKey, add_ciphertexts, error_bound

tenseal = pytest.importorskip("tenseal")

ENGINE = LocalEngine(device="cpu", dtype=torch.float64, strategy="whole eager")
SIZES = (8, 20, 13, 9, 17, 11)
MESSAGE = 262_292  # bytes of a ciphertext: two polynomials of 8192 coefficients, in two primes of 8 bytes


@pytest.fixture(scope="module")
def key():
    return ClientsKey()


@pytest.mark.parametrize(("count", "size"), [(5, 0.01), (SLOTS, 1.0), (SLOTS + 1, 10.0)])
def test_a_sum_is_within_its_bound(key, count, size):
    rows = size * generator(0, "rows").standard_normal((7, count))
    sealed = add_ciphertexts(key.parameters, [key.encrypt(row) for row in rows])
    found = key.decrypt(sealed, count)
    rounding = 64 * np.finfo(np.float64).eps * np.abs(rows).sum(0).max()
    assert np.abs(found - rows.sum(0)).max() <= error_bound(7) + rounding
    assert error_bound(7) < 1e-20
    assert [len(one) for one in sealed] == [MESSAGE] * -(-count // SLOTS)


def test_the_server_has_no_key_and_cannot_read(key):
    """It gets some bytes of parameters; with these it can add up, and not decrypt or encrypt."""
    assert len(key.parameters) < 200
    context = tenseal.context_from(key.parameters)
    assert not context.has_secret_key()
    assert not context.has_public_key()
    (message,) = key.encrypt(np.ones(3))
    with pytest.raises(Exception, match="secret_key"):
        tenseal.ckks_vector_from(context, message).decrypt()
    other = ClientsKey()
    assert np.abs(other.decrypt([message], 3) - 1).max() > 1e3  # another key reads noise
    assert key.encrypt(np.ones(3)) != [message]  # the same numbers never look the same
    bytes_ = np.frombuffer(message, dtype=np.uint8)[200:]
    assert stats.entropy(np.bincount(bytes_, minlength=256)) > 0.9 * np.log(256)
    assert "_context" not in pickle.loads(pickle.dumps(key)).__dict__  # noqa: S301


@pytest.mark.parametrize("method", [FedAvg(), Ditto(), FedPer(), Scaffold(), AFL()])
def test_encrypted_sums_are_the_plain_ones(make_task, method):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 1 if method.one_shot else 2, "evaluation": "none", "engine": ENGINE}
    # a closed form of moments is as sure as its equations are; large moments must not be cut
    words = "ckks:most=20,clip=1000" if method.one_shot else "ckks:most=20"
    plain, sealed = (federate(task, method, secure=one, **more).server for one in ("none", words))
    plain, sealed = (getattr(one, "w", getattr(one, "answer", one)) for one in (plain, sealed))
    difference = (plain - sealed).norm()
    assert 0 < difference < (1e-3 if method.one_shot else 1e-6)


def test_what_is_told_has_noise_that_drowns_the_error(make_task):
    """The mean of one round: the noise of decryption over the sum of weights, and nothing else to be seen."""
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 1, "evaluation": "none", "engine": ENGINE}
    states = [federate(task, FedAvg(), secure=one, **more).server for one in ("none", "ckks:most=20,clip=1000")]
    difference = torch.cat([(states[0][leaf] - states[1][leaf]).flatten() for leaf in states[0]]).numpy()
    train = task.splits["train"].sizes(np.arange(task.clients))
    size = FLOOD / (train / 20).sum()
    assert difference.std() == pytest.approx(size, rel=4 / (2 * len(difference)) ** 0.5)
    assert np.abs(difference).max() < 6 * size + 1e-9 * size
    assert FLOOD / error_bound(1000) > 2**30


def test_the_ledger_has_the_bytes_of_ciphertexts(make_task):
    task = make_task(sizes=SIZES)
    report = federate(task, FedAvg(), rounds=2, evaluation="none", secure="ckks", faults=lambda _, some: some == 3)
    numbers = sum(leaf.numel() for leaf in report.server.values() if leaf.is_floating_point()) + 1
    up = [entry for entry in report.ledger.entries if entry.direction == "up"]
    ((message, told),) = {(up[0].bytes, one.bytes) for one in up if one.field == "sum"}
    assert {one.field for one in up} == {SEALED, "sum"}
    assert told == 8 * numbers
    assert 0 <= message - -(-numbers // SLOTS) * MESSAGE < 200  # the table of tensors comes on top
    assert sum(one.count for one in up if one.field == SEALED) == 2 * 5
    opened = [one for one in report.ledger.entries if one.field == "sum" and one.direction == "down"]
    assert [(one.bytes, one.count) for one in opened] == [(-(-numbers // SLOTS) * MESSAGE, 1)] * 2


def test_any_number_may_drop_out_but_few_cannot_hide(make_task):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 1, "evaluation": "none", "engine": ENGINE}
    half, few = (lambda _, some: some < 3), (lambda _, some: some < 4)
    plain, sealed = (federate(task, FedAvg(), secure=one, faults=half, **more).server for one in ("none", "ckks"))
    assert (plain - sealed).norm() < 1e-4
    report = federate(task, FedAvg(), secure="ckks", faults=few, **more)
    assert report.history[0]["replied"] == 0
    assert "too few were left to read their sum" in report.history[0]["lost"]


def test_a_comparison_of_methods_that_send_different_parts(make_task):
    """Every run has a key and forms of its own."""
    from atoll.federation.settings import Settings

    settings = Settings(rounds=1, evaluation="none", secure="ckks")
    for method in (FedAvg(), FedPer()):
        federate(make_task(sizes=SIZES), method, settings=settings)


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        (FedAMP(), {}, "hide single replies"),
        (IFCA(), {}, "hide single replies|before their first"),
        (FedAvg(), {"aggregate": "median"}, "Rules compare"),
        (FedAvg(), {"compress": "randk:0.5"}, "packing saves nothing"),
        (FedAvg(), {"attack": "sign-flip:0.2"}, "messages that the server can read"),
        (FedAvg(), {"dp": "client:noise=1,delta=1e-2"}, "needs masks"),
        (FedAvg(), {"late": 0.3}, "not in the sum that was decrypted"),
        (FedAvg(), {"cohort": 2}, "at least 3 clients"),
        (FedAvg(), {"secure": "ckks:clip=1e9"}, "to be decrypted"),
        (FedAvg(), {"secure": "ckks:kind=1"}, "value of secure sums"),
    ],
)
def test_what_cannot_be_encrypted_is_refused_before_the_first_round(make_task, method, settings, text):
    with pytest.raises(AtollError, match=text):
        federate(make_task(sizes=SIZES), method, rounds=12, evaluation="none", **{"secure": "ckks", **settings})


def test_without_the_library_a_sentence_says_what_to_install(make_task, monkeypatch):
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(PrivacyError, match="need tenseal") as caught:
        federate(make_task(sizes=SIZES), FedAvg(), rounds=1, secure="ckks")
    assert "atoll[ckks]" in str(caught.value)
