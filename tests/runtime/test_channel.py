import json

import numpy as np
import pytest
import torch

from atoll import LocalEngine, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.local import Local
from atoll.algorithms.scaffold import Scaffold
from atoll.kernel.algorithm import Replies, Update
from atoll.kernel.errors import HyperparameterError, PayloadError, RunError
from atoll.kernel.params import Layout, Params, Stack
from atoll.protect.channel import Channel
from atoll.protect.ledger import Entry, Ledger
from atoll.protect.stages import Clip, Stage
from atoll.records.schema import parse
from atoll.runtime.serialise import to_bytes

CLIENTS = np.array([3, 5])


def up(channel, send, algorithm=None, weight=None):
    return channel.up(algorithm or FedAvg(), CLIENTS, Update(send=send, weight=weight), 2)


def test_bytes_are_those_of_the_serialised_payload():
    channel = Channel()
    delta = Stack.of(a=torch.ones(2, 100), b=torch.zeros(2, dtype=torch.int64))
    up(channel, {"delta": delta})
    alone = len(to_bytes(delta.client(0)))
    assert [tuple(message) for message in channel.ledger.messages()] == [
        ("up", 3, 2, "delta", "model", alone), ("up", 5, 2, "delta", "model", alone),
    ]  # fmt: skip


def test_a_broadcast_counts_once_per_client_and_nothing_counts_for_nothing():
    channel, w = Channel(), Params.of(w=torch.ones(10))
    channel.broadcast(w, CLIENTS, 0)
    channel.broadcast(None, CLIENTS, 0)
    channel.broadcast(w, CLIENTS[:0], 0)
    assert channel.ledger.bytes("down") == 2 * len(to_bytes(w))
    assert channel.ledger.bytes("up") == 0


def test_a_broadcast_of_several_models_counts_all_of_them():
    channel, clusters = Channel(), Stack.of(w=torch.ones(3, 10))
    channel.broadcast(clusters, CLIENTS, 0)
    assert channel.ledger.bytes("down") == 2 * len(to_bytes(clusters))


def test_the_weight_of_a_reply_is_a_message_too():
    channel = Channel()
    up(channel, {"delta": Stack.of(w=torch.ones(2, 1))}, weight=torch.ones(2))
    assert channel.ledger.by_kind()["up", "statistic"] == 2 * len(to_bytes(Params.of(weight=torch.ones(()))))


def test_a_unicast_counts_each_clients_own_part():
    channel = Channel()
    channel.unicast(Stack.of(w=torch.ones(2, 10)), CLIENTS, 0)
    assert channel.ledger.bytes("down") == 2 * len(to_bytes(Params.of(w=torch.ones(10))))


def test_a_field_that_is_not_declared_does_not_leave():
    with pytest.raises(PayloadError) as error:
        up(Channel(), {"labels": Stack.of(y=torch.ones(2))})
    assert str(error.value) == (
        "FedAvg sends a field 'labels' that it does not declare.\n"
        'hint: declare it: sends = {"labels": "model"} (or "state", "statistic", "labels").'
    )


@pytest.mark.parametrize("value", [Params.of(w=1.0), Stack.of(w=torch.ones(3, 1)), torch.ones(2)])
def test_a_field_must_have_one_row_per_client(value):
    with pytest.raises(PayloadError, match="Field 'delta' must be a Stack with one row per client, 2. Got"):
        up(Channel(), {"delta": value})


def test_a_weight_must_have_one_value_per_client():
    with pytest.raises(PayloadError, match=r"`weight` must have one value per client, 2. Got shape \(3,\)."):
        up(Channel(), {"delta": Stack.of(w=torch.ones(2, 1))}, weight=torch.ones(3))


def test_without_a_weight_all_count_the_same():
    assert up(Channel(), {"delta": Stack.of(w=torch.ones(2, 1))}).weight.tolist() == [1.0, 1.0]


def test_clipping_shortens_long_deltas_and_leaves_short_ones():
    arrived = up(Channel([Clip(5.0)]), {"delta": Stack.of(w=torch.tensor([[30.0, 40.0], [3.0, 4.0]]))})
    # 5 / 50 of the first, all of the second
    assert torch.allclose(arrived.fields["delta"]["w"], torch.tensor([[3.0, 4.0], [3.0, 4.0]]), atol=1e-6)


def test_clipping_measures_everything_that_leaves():
    """A statistic of BatchNorm, or a second field, is as good a place for a large number as a weight."""
    layout = Layout({"w": "trained", "mean": "buffer"})
    delta = Stack({"w": torch.tensor([[3.0], [0.0]]), "mean": torch.tensor([[4.0], [1.0]])}, layout)
    pace = Stack.of(c=torch.tensor([[12.0], [2.0]]), steps=torch.tensor([7, 8]))
    arrived = up(Channel([Clip(6.5)]), {"delta": delta, "change": pace}, Scaffold())
    assert arrived.fields["delta"]["w"].tolist() == [[1.5], [0.0]]
    assert arrived.fields["delta"]["mean"].tolist() == [[2.0], [1.0]]
    assert arrived.fields["change"]["c"].tolist() == [[6.0], [2.0]]
    assert arrived.fields["change"]["steps"].tolist() == [7, 8]


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_clip_must_be_positive(norm):
    with pytest.raises(HyperparameterError, match=r"`norm` of Clip must be a float in \(0, inf\). Got"):
        Clip(norm)


def test_clipping_to_nothing_keeps_the_server_where_it_is(make_task):
    task = make_task()
    w = federate(task, FedAvg(), rounds=2, evaluation="none", stages=[Clip(1e-9)]).server
    assert (w - task.network.initial).norm().item() < 1e-8
    assert (federate(task, FedAvg(), rounds=2, evaluation="none").server - task.network.initial).norm().item() > 1e-2


def test_sums_per_round_and_by_kind():
    ledger = Ledger()
    for entry in (
        Entry("down", 0, "broadcast", "model", 100, (0, 1)), Entry("up", 0, "delta", "model", 80, (0, 1)),
        Entry("up", 1, "protos", "statistic", 7, (0,)), Entry("up", 1, "delta", "model", 80, ()),
    ):  # fmt: skip
        ledger.record(entry)
    assert ledger.bytes_in_round(0) == {"down": 200, "up": 160}
    assert ledger.bytes_in_round(1) == {"down": 0, "up": 7}
    assert ledger.by_kind() == {("down", "model"): 200, ("up", "model"): 160, ("up", "statistic"): 7}
    assert len(ledger.entries) == 3  # a message to nobody is not written


@pytest.mark.parametrize("strategy", ["whole", "loop", "chunk:2"])
def test_a_run_is_counted_the_same_in_every_strategy(make_task, strategy):
    task = make_task()
    report = federate(task, Ditto(), rounds=2, evaluation="none", engine=LocalEngine(strategy=strategy))
    model = len(to_bytes(task.network.initial))
    weight = len(to_bytes(Params.of(weight=torch.ones(()))))
    assert report.ledger.by_kind() == {
        ("down", "model"): 2 * 4 * model, ("up", "model"): 2 * 4 * model, ("up", "statistic"): 2 * 4 * weight
    }  # fmt: skip
    assert [line["bytes"] for line in report.history] == [{"down": 4 * model, "up": 4 * (model + weight)}] * 2
    assert sorted((m.round, m.client) for m in report.ledger.messages() if m.field == "delta") == [
        (round, client) for round in range(2) for client in range(4)
    ]


def test_training_alone_sends_nothing(make_task):
    assert federate(make_task(), Local(), rounds=2, evaluation="none").ledger.entries == []


def test_what_is_kept_never_passes_the_channel(make_task):
    seen = []

    class Watch(Stage):
        def apply(self, sent, place):
            seen.append(set(sent.fields))
            return sent

    federate(make_task(), Ditto(), rounds=1, evaluation="none", stages=[Watch()])
    assert seen == [{"delta"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replies_without_a_weight_count_alike_in_the_type_of_what_is_sent(dtype):
    """With float32 weights, a mean of float64 replies would be right to eight digits only."""
    delta = Stack.of(count=torch.ones(2, dtype=torch.int64), a=torch.full((2, 3), 0.1, dtype=dtype))
    arrival = up(Channel(), {"delta": delta})
    assert arrival.weight.dtype == dtype
    third = arrival._replace(late=2)  # 1 / sqrt(3) has no short form
    mean = Replies([arrival, third], keep=False).mean("delta")["a"]
    assert torch.allclose(mean, torch.tensor(0.1, dtype=dtype), rtol=0, atol=1e-15 if dtype == torch.float64 else 1e-7)


# -- very many clients -------------------------------------------------------------------------------------------------


def test_a_ledger_that_counts_has_one_entry_per_round_and_field():
    listed, counting = Ledger(), Ledger(listed=False)
    for round in (-1, 0, 1):
        for clients in ((0, 1, 2), (3, 4), (5,)):
            for ledger in (listed, counting):
                ledger.record(Entry("down", round, "broadcast", "model", 40, clients))
                ledger.record(Entry("up", round, "delta", "model", 40 if clients != (5,) else 24, clients))
                ledger.record(Entry("up", round, "weight", "statistic", 8, clients))
                ledger.record(Entry("up", round, "nothing", "model", 0, clients))
    assert len(listed.entries) == 27
    assert [(one.direction, one.field, one.bytes, one.count, one.clients) for one in counting.entries[:4]] == [
        ("down", "broadcast", 40, 6, None), ("up", "delta", 40, 5, None), ("up", "weight", 8, 6, None),
        ("up", "delta", 24, 1, None),
    ]  # fmt: skip
    assert len(counting.entries) == 12
    assert counting.by_kind() == listed.by_kind()
    for round in (-1, 0, 1):
        assert counting.bytes_in_round(round) == listed.bytes_in_round(round)
    assert [counting.bytes(way) for way in ("up", "down")] == [listed.bytes(way) for way in ("up", "down")]


def test_counted_messages_have_no_clients():
    ledger = Ledger(listed=False)
    ledger.record(Entry("up", 3, "delta", "model", 40, (1, 2)))
    with pytest.raises(RunError, match="The ledger has 2 counted messages of field 'delta' in round 3"):
        list(ledger.messages())


def test_entries_are_read_as_they_were_written():
    entry = Entry("up", 3, "delta", "model", 40, (1, 2))
    written = {"direction": "up", "round": 3, "field": "delta", "kind": "model", "bytes": 40}
    assert json.loads(json.dumps(entry.as_json())) == {**written, "clients": [1, 2]}  # as before entries could count
    assert entry.drop_clients().as_json() == {**written, "count": 2}
    for one in (entry, entry.drop_clients()):
        assert parse(Entry, json.loads(json.dumps(one.as_json()))) == one
