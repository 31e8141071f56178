"""Compression: closed forms of protect.md 6, real bytes, error feedback, and crossings."""

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from atoll import LocalEngine, Recipe, federate
from atoll.algorithms import FML, Ditto, FedAvg, FedProto, Local, Scaffold
from atoll.compose import create
from atoll.kernel.errors import CohortError, HyperparameterError, UnknownName
from atoll.kernel.params import Stack
from atoll.kernel.wrapper import title_of
from atoll.protect.compression import COMPRESSIONS, Form, LowRank, Quantised, Signs, TopK, parse_compression
from atoll.protect.stages import Place, Sent, form_of
from atoll.runtime.memory import RamMemory
from atoll.testing.conformance import play
from atoll.testing.conformance.rehearsal import with_hooks
from atoll.testing.conformance.tasks import build_task
from atoll.toolbox.bits import from_bits, to_bits

WORDS = ["topk:0.3", "randk:0.5", "qsgd:8", "qsgd:4", "qsgd:2", "sign", "lowrank:1"]


def send(stage, rows, round=0, memory=None, clients=None, **leaves):
    """What the server reads in rows that were sent."""
    value = Stack.of(w=rows, **leaves)
    place = Place(round, np.arange(len(rows)) if clients is None else clients, {"delta": "model"}, memory)
    return stage.restore(stage.apply(Sent({"delta": value}, None), place), place).fields["delta"]


def test_what_was_sent_and_what_is_remembered_add_up():
    x = torch.tensor([[0.6, -2, 0.1, 3, -0.2]], dtype=torch.float64)
    memory = RamMemory(1)
    sent = [send(TopK(0.4), x, round, memory)["w"][0] for round in range(4)]
    assert [one.tolist() for one in sent[:3]] == [[0, -2, 0, 3, 0]] * 3
    assert sent[3].tolist() == pytest.approx([2.4, 0, 0, 3, 0])
    mark = form_of(Stack.of(w=x)).mark
    left = memory.beside(f"compress delta {mark}").recall(np.arange(1), Stack.of(cut=x), before=9)["cut"][0]
    assert left.tolist() == pytest.approx([0, -2, 0.4, 0, -0.8])
    assert torch.allclose(sum(sent) + left, 4 * x[0])


def test_what_was_cut_off_of_one_form_is_not_added_to_another():
    memory, body, head = RamMemory(1), torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[8.0, 16.0]])
    first = [send(TopK(0.3), rows, round, memory)["w"].tolist() for round, rows in enumerate([body, head, body])]
    assert first == [[[0, 0, 4]], [[0, 16]], [[0, 4, 0]]]


def test_of_equal_numbers_the_first_ones_are_sent():
    assert send(TopK(0.5), torch.tensor([[1.0, -1.0, 1.0, 1.0]]))["w"].tolist() == [[1, -1, 0, 0]]
    assert send(TopK(0.5), torch.tensor([[1.0, torch.nan, torch.inf, 2.0]]))["w"][0, [0, 3]].tolist() == [0, 0]


def test_signs_keep_the_mean_size():
    x = torch.tensor([[0.5, -2, 0.1, 3, -0.2]], dtype=torch.float64)
    made = send(Signs(), x)["w"]
    assert made.abs().flatten().tolist() == pytest.approx([1.16] * 5, rel=1e-6)
    assert (made.norm() ** 2 / x.norm() ** 2).item() == pytest.approx(0.505865, rel=1e-5)


def test_low_rank_takes_one_step_of_the_power_method():
    matrix = torch.tensor([[2.0, 0], [0, 1], [1, 1]], dtype=torch.float64)

    form, ones = Form({"w": matrix.shape}, torch.float64, None, ("w",)), torch.ones(1, 2, 1, dtype=torch.float64)
    packed, _ = LowRank(1).pack(matrix.reshape(1, -1), form, Place(0, np.arange(1)), "delta", {"right0": ones})
    sign = packed["left0"][0, 0, 0].sign()
    assert (sign * packed["left0"][0, :, 0]).tolist() == pytest.approx([2 / 3, 1 / 3, 2 / 3])
    assert (sign * packed["right0"][0, :, 0]).tolist() == pytest.approx([2, 1])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_numbers_are_right_on_average(bits):
    x = torch.tensor([3, -1, 0, 2, -2.5], dtype=torch.float64)
    clients = np.arange(4000)
    made = send(Quantised(bits), x.expand(4000, 5), clients=clients)["w"]
    level = x.abs() / x.norm() * Quantised(bits).levels
    share = level - level.floor()
    variance = share * (1 - share) * (x.norm() / Quantised(bits).levels) ** 2
    assert torch.allclose(made.mean(0), x, atol=4 * float((variance.max() / 4000).sqrt()) + 1e-6)
    assert torch.allclose(made.var(0), variance, rtol=0.15, atol=1e-6)


def test_four_levels_have_the_variances_of_the_table():
    """Section 6 of protect.md: x = (3, -1, 0, 2, -2.5), s = 4."""

    class Four(Quantised):
        levels = 4

    x, count = torch.tensor([3, -1, 0, 2, -2.5], dtype=torch.float64), 20_000
    made = send(Four(8), x.expand(count, 5), clients=np.arange(count))["w"]
    expected = torch.tensor([0.28125, 0.125, 0, 0.21875, 0.21875], dtype=torch.float64)
    assert torch.allclose(made.var(0), expected, rtol=0.06, atol=1e-6)
    assert torch.allclose(made.mean(0), x, atol=4 * float((expected.max() / count).sqrt()) + 1e-6)


@pytest.mark.parametrize(("bits", "size"), [(1, 3), (1, 16), (2, 5), (4, 7), (8, 4)])
def test_bits_come_back(bits, size):
    numbers = torch.arange(2 * size).reshape(2, size) % 2**bits
    packed = to_bits(numbers, bits)
    assert packed.shape[1] == -(-bits * size // 8)
    assert torch.equal(from_bits(packed, bits, size), numbers)


def test_random_places_are_right_on_average_and_the_same_for_everybody():
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.float64)
    rounds = torch.stack([send(parse_compression("randk:0.5"), x, round)["w"] for round in range(2000)])
    assert torch.allclose(rounds.mean(0), x, atol=0.8)
    assert ((rounds[:, 0] != 0) == (rounds[:, 1] != 0)).all()


@pytest.mark.parametrize("words", WORDS)
def test_clients_send_the_same_however_they_are_grouped(make_task, words):
    task = make_task(dtype=torch.float64)
    whole, one_by_one = (
        federate(
            task,
            Scaffold(),
            rounds=3,
            evaluation="none",
            compress=words,
            engine=LocalEngine(device="cpu", strategy=how, dtype=torch.float64),
        ).server
        for how in ("whole", "loop")
    )
    assert (whole.w - one_by_one.w).norm() == 0


class Normed(nn.Sequential):
    """A network with BatchNorm, whose counters are whole numbers."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("words", WORDS)
def test_a_network_with_batchnorm_is_sent(make_task, words):
    report = federate(make_task(Normed, sizes=(8, 9, 12)), FedAvg(), rounds=3, evaluation="none", compress=words)
    assert report.server["1.num_batches_tracked"] > 0


@pytest.mark.parametrize("words", WORDS)
def test_the_ledger_counts_what_is_packed(make_task, words):
    task = make_task(sizes=(8, 9, 12))
    plain, packed = (
        federate(task, FedAvg(), rounds=1, evaluation="none", compress=one).ledger.by_kind()["up", "model"]
        for one in ("none", words)
    )
    assert packed < plain


def test_everything_sent_is_everything_read(make_task):
    """The neutral value is the method, bit for bit."""
    task = make_task(dtype=torch.float64)
    plain, packed = (
        federate(task, Ditto(), rounds=3, evaluation="none", compress=one).server for one in ("none", "topk:1")
    )
    assert (plain - packed).norm() == 0


def test_statistics_travel_as_they_are(make_task):
    plain, packed = (
        federate(make_task(), FedProto(), rounds=1, evaluation="none", compress=one).ledger.bytes("up")
        for one in ("none", "sign")
    )
    assert plain == packed


@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_what_was_cut_off_survives_a_stop(make_task, tmp_path, memory):
    task = make_task(dtype=torch.float64)
    more = {"rounds": 4, "evaluation": "none", "compress": "lowrank:1", "memory": memory, "cohort": 3}
    whole = federate(task, Ditto(), folder=tmp_path / "whole", **more).server
    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        federate(task, Ditto(), folder=tmp_path / "run", stop=stop, on_round=lambda _: stop.set(), **more)
    assert (whole - federate(task, Ditto(), folder=tmp_path / "run", resume=True, **more).server).norm() == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [("topk:0", HyperparameterError), ("topk:2", HyperparameterError), ("qsgd:3", HyperparameterError),
     ("sign:1", HyperparameterError), ("lowrank:x", HyperparameterError),
     ("lowrank:1000", HyperparameterError), ("top", UnknownName)],
)  # fmt: skip
def test_compressions_that_cannot_be_are_refused(make_task, words, error):
    with pytest.raises(error):
        federate(make_task(), FedAvg(), rounds=1, evaluation="none", compress=words)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_every_compression_is_explained(name):
    assert len((COMPRESSIONS[name].__doc__ or "").split("\n")[0]) > 20


@pytest.mark.parametrize(("method", "warns"), [(FedProto(), True), (FedAvg(), False), (Local(), False)])
def test_a_method_that_sends_no_model_is_warned_of(caplog, method, warns):
    with caplog.at_level("WARNING"):
        play(build_task(), method, 1, compress="topk:0.1")
    assert (f"{title_of(method)} sends no model, so `compress` packs nothing" in caplog.text) == warns


def test_what_was_cut_off_is_remembered_of_one_network_only():
    task, method = build_task(), create("fml@ifca:meme=linear,clusters=2,cluster_rounds=1")
    with pytest.raises(CohortError, match="FML@ifca sends models of one network first and of another one later"):
        play(task, method, 3, compress="topk:0.5")
    play(task, method, 3, compress="qsgd:8")
    play(task, create("fml@ifca:clusters=2,cluster_rounds=1"), 3, compress="topk:0.5")


def test_a_rank_is_judged_by_the_network_that_travels():
    task = Recipe(clients=2, samples=60, model="mlp:32").build()  # matrices of 32 x 64; what travels, of 10 x 64
    federate(task, FML(meme="linear"), rounds=1, evaluation="none", compress="lowrank:8")
    with pytest.raises(HyperparameterError, match="at most 8"):
        federate(task, FML(meme="linear"), rounds=1, evaluation="none", compress="lowrank:9")
    federate(task, FML(), rounds=1, evaluation="none", compress="lowrank:9")


def test_what_was_cut_off_of_one_model_is_not_added_to_another():
    """A client that changes from model 0 to 1 and back: each gets what was cut off from its own changes."""
    memory, stage = RamMemory(2), TopK(0.3)
    changes = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]])
    found = []
    for round, of_model in enumerate([[0, 1], [1, 1], [0, 1]]):
        place = Place(round, np.arange(2), {"delta": "model"}, memory, of_model=torch.tensor(of_model))
        sent = stage.apply(Sent({"delta": Stack.of(w=changes)}, None), place)
        found.append(stage.restore(sent, place).fields["delta"]["w"].tolist())
    assert found == [[[0, 0, 4], [0, 0, 9]], [[0, 0, 4], [0, 10, 0]], [[0, 4, 0], [0, 0, 18]]]


@pytest.mark.parametrize("words", ["topk:0.3", "qsgd:4", "sign", "lowrank:1"])
def test_states_and_statistics_travel_whole(words):
    stage, rows = parse_compression(words), torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(0))
    fields = {name: Stack.of(w=rows) for name in ("delta", "square", "sums", "labels")}
    place = Place(0, np.arange(1), {"delta": "model", "square": "state", "sums": "statistic", "labels": "labels"})
    out = stage.restore(stage.apply(Sent(fields, None), place), place).fields
    assert not torch.equal(out["delta"]["w"], rows)
    assert all(torch.equal(out[name]["w"], rows) for name in ("square", "sums", "labels"))


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        ("mtfl-adam", {"delta": "model", "mean": "state", "square": "state"}),
        ("regmean", {"rest": "model", "products": "statistic", "grams": "statistic"}),
        ("fedpac", {"delta": "model", "head": "state"}),
        ("fedsmoo", {"delta": "model", "dual": "state"}),
        ("fedgen-local", {"decoder": "state"}),
        ("fedora-items", {"vector": "state"}),
        ("maml", {"gradient": "model"}),
        ("scaffold", {"delta": "model", "change": "model"}),
    ],
)
def test_a_field_says_whether_it_is_a_change_or_a_state(method, kinds):
    """What is remembered is added to the next message: right for changes, and for nothing else."""
    assert kinds.items() <= create(method).sends.items()


@pytest.mark.parametrize("words", ["topk:0.3", "qsgd:4", "sign", "lowrank:1"])
def test_moments_of_adam_stay_what_they_are(make_task, words):
    """Packed as changes were, squares and means no longer belonged together, and steps became as large as one likes."""
    more = {"rounds": 6, "evaluation": "none", "progress": False}
    task = make_task(sizes=(8, 8, 8), dtype=torch.float64)
    report = federate(task, "mtfl-adam:private=none", compress=words, **more)
    plain = federate(task, "mtfl-adam:private=none", **more)
    assert (report.server.w - plain.server.w).norm() < 2
    assert {entry.kind for entry in report.ledger.entries if entry.field in ("mean", "square")} == {"state"}


def test_feedback_in_clusters_is_that_of_the_cluster(make_task):
    """IFCA by hand: what a client remembers of cluster 0 is added when it sends changes of cluster 0 again."""
    task = make_task(sizes=(6, 7, 8, 9), dtype=torch.float64, lr=1.0)
    made, arrived = {}, {}

    def local(inner, broadcast, cohort):
        update = inner.local(broadcast, cohort)
        for k, client in enumerate(cohort.clients.tolist()):
            made[cohort.round, client] = int(update.send["cluster"]["cluster"][k]), flat(update.send["delta"], k)
        return update

    def note(round, arrival):
        for k, client in enumerate(arrival.clients.tolist()):
            arrived[round, client] = flat(arrival.fields["delta"], k)

    method = with_hooks(create("ifca:clusters=2,weighting=uniform"), {"local": local})
    engine = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
    federate(task, method, rounds=9, compress="topk:0.2", on_reply=note, evaluation="none", engine=engine)
    rest, changed = {}, 0
    for round, client in sorted(arrived):
        cluster, delta = made[round, client]
        p = delta + rest.get((client, cluster), 0.0)
        kept = sorted(range(len(p)), key=lambda i: (-abs(p[i]), i))[: math.ceil(0.2 * len(p))]
        expected = torch.zeros_like(p)
        expected[kept] = p[kept]
        assert torch.allclose(arrived[round, client], expected, atol=1e-12)
        rest[client, cluster] = p - expected
        changed += round > 0 and made[round - 1, client][0] != cluster
    assert changed  # somebody did change


def flat(value, row):
    return torch.cat([leaf[row].flatten() for leaf in value.values()])
