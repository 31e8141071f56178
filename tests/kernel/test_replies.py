import weakref

import numpy as np
import pytest
import torch

from atoll.kernel.algorithm import Arrival, Replies
from atoll.kernel.errors import PayloadError
from atoll.kernel.params import Params, Stack


def arrival(first, rows, weight, **more):
    clients = np.arange(first, first + len(rows))
    fields = {"delta": Stack.of(w=torch.tensor(rows))} | {name: Stack.of(v=value) for name, value in more.items()}
    return Arrival(clients, fields, torch.tensor(weight))


TWO = [arrival(0, [[1.0, 2.0], [3.0, 4.0]], [1.0, 3.0]), arrival(2, [[10.0, 20.0]], [4.0])]


@pytest.mark.parametrize("keep", [True, False])
def test_the_mean_is_weighted(keep):
    # (1 * 1 + 3 * 3 + 4 * 10) / 8 and (1 * 2 + 3 * 4 + 4 * 20) / 8
    assert Replies(TWO, keep=keep).mean("delta")["w"].tolist() == [50 / 8, 94 / 8]


@pytest.mark.parametrize("keep", [True, False])
def test_the_total_is_the_sum_of_weights_before_and_after_a_mean(keep):
    replies = Replies(TWO, keep=keep)
    assert replies.total.item() == 8
    assert replies.mean("delta")["w"].tolist() == [50 / 8, 94 / 8]
    assert replies.total.item() == 8


def test_some_replies_are_as_if_only_these_had_come():
    some = Replies(TWO, keep=True).of(np.array([False, True, True]))
    assert some.clients.tolist() == [1, 2]
    assert some.mean("delta")["w"].tolist() == pytest.approx([(3 * 3 + 4 * 10) / 7, (3 * 4 + 4 * 20) / 7])
    with pytest.raises(PayloadError, match="sums suffice"):
        Replies(TWO, keep=False).of(np.array([True, True, True]))


@pytest.mark.parametrize("keep", [True, False])
def test_equal_weights_are_a_plain_mean(keep):
    same = [part._replace(weight=torch.ones(len(part.clients))) for part in TWO]
    assert Replies(same, keep=keep).mean("delta")["w"].tolist() == pytest.approx([14 / 3, 26 / 3])


@pytest.mark.parametrize("keep", [True, False])
def test_integers_take_the_maximum_over_all_chunks(keep):
    parts = [
        Arrival(np.array([0, 1]), {"delta": Stack.of(n=torch.tensor([[5, 1], [2, 7]]))}, torch.tensor([1.0, 1.0])),
        Arrival(np.array([2]), {"delta": Stack.of(n=torch.tensor([[3, 3]]))}, torch.tensor([9.0])),
    ]
    mean = Replies(parts, keep=keep).mean("delta")
    assert mean["n"].tolist() == [5, 7]
    assert mean["n"].dtype == torch.int64


def test_all_weights_zero_is_a_mean_of_zero():
    assert Replies([arrival(0, [[1.0], [2.0]], [0.0, 0.0])], keep=False).mean("delta")["w"].tolist() == [0.0]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_may_come_from_a_field(keep, dtype):
    # Prototypes of two classes: client 0 has counts (1, 0), client 1 has (3, 0); nobody has the second class.
    prototypes = torch.tensor([[[2.0, 4.0], [9.0, 9.0]], [[6.0, 8.0], [9.0, 9.0]]], dtype=dtype)
    counts = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=dtype)
    fields = {"protos": Stack.of(c=prototypes), "counts": Stack.of(n=counts)}
    mean = Replies([Arrival(np.arange(2), fields, torch.ones(2))], keep=keep).mean("protos", weight="counts")
    assert mean["c"].tolist() == [[(2 + 3 * 6) / 4, (4 + 3 * 8) / 4], [0.0, 0.0]]


def test_late_weights_from_a_field_count_less():
    fields = {"m": Stack.of(a=torch.tensor([2.0])), "n": Stack.of(a=torch.tensor([4.0]))}
    others = {"m": Stack.of(a=torch.tensor([5.0])), "n": Stack.of(a=torch.tensor([1.0]))}
    late, early = (Arrival(np.arange(1), one, torch.ones(1), late=d) for one, d in ((fields, 3), (others, 0)))
    assert Replies([late, early], keep=False).mean("m", weight="n")["a"].item() == (2 * 2 + 5) / 3


def test_weights_from_a_field_may_be_one_per_leaf():
    fields = {"m": Stack.of(a=torch.tensor([2.0, 4.0]), b=torch.tensor([2.0, 4.0]))}
    fields["n"] = Stack.of(a=torch.tensor([1.0, 0.0]), b=torch.tensor([0.0, 1.0]))
    mean = Replies([Arrival(np.arange(2), fields, torch.ones(2))], keep=False).mean("m", weight="n")
    assert (mean["a"].item(), mean["b"].item()) == (2.0, 4.0)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_segments_have_means_of_their_own(keep, dtype):
    # Two segments and leaves of two numbers: the segment axis must not be taken for the leaf's.
    parts = [
        Arrival(
            np.array([k]),
            {
                "delta": Stack.of(w=torch.tensor([row], dtype=dtype), n=torch.tensor([k])),
                "by": Stack.of(s=torch.tensor([s])),
            },
            torch.tensor([weight], dtype=dtype),
        )
        for k, (row, s, weight) in enumerate([([1.0, 2.0], 0, 1.0), ([3.0, 4.0], 0, 3.0), ([5.0, 6.0], 1, 2.0)])
    ]  # fmt: skip
    default = Stack.of(w=torch.full((2, 2), -1.0, dtype=dtype), n=torch.tensor([-1, -1]))
    found = Replies(parts, keep=keep).segment_mean("delta", "by", default)
    assert found["w"].tolist() == [[(1 + 3 * 3) / 4, (2 + 3 * 4) / 4], [5.0, 6.0]]
    assert found["n"].tolist() == [1, 2]  # the largest of each segment


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_segment_keeps_its_default(dtype):
    fields = {"delta": Stack.of(w=torch.tensor([[1.0, 2.0]], dtype=dtype)), "by": Stack.of(s=torch.tensor([2]))}
    default = Stack.of(w=torch.arange(6, dtype=dtype).reshape(3, 2))
    found = Replies([Arrival(np.arange(1), fields, torch.ones(1, dtype=dtype))], keep=True).segment_mean(
        "delta", "by", default
    )
    assert found["w"].tolist() == [[0.0, 1.0], [2.0, 3.0], [1.0, 2.0]]


def test_held_replies_can_be_stacked_in_the_order_of_their_clients():
    replies = Replies(TWO, keep=True)
    assert replies.stack("delta")["w"].tolist() == [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]]
    assert replies.clients.tolist() == [0, 1, 2]
    assert replies.weights.tolist() == [1.0, 3.0, 4.0]


@pytest.mark.parametrize("ask", [lambda r: r.stack("delta"), lambda r: r.clients, lambda r: r.weights])
def test_replies_that_are_added_up_cannot_be_asked_one_by_one(ask):
    with pytest.raises(
        PayloadError, match="sums suffice, so its replies are added up and not held.\nhint: set `sums_suffice"
    ):
        ask(Replies(TWO, keep=False))


def test_replies_that_are_added_up_are_never_read_twice_in_silence():
    replies = Replies(TWO, keep=False)
    assert replies.mean("delta") is replies.mean("delta")  # all plain means are taken in one pass
    with pytest.raises(PayloadError, match="can be read once; they have been read"):
        replies.mean("delta", weight="delta")
    with pytest.raises(PayloadError, match="can be read once; they have been read"):
        replies.segment_mean("delta", "delta", Stack.of(w=torch.zeros(1, 2)))


@pytest.mark.parametrize("keep", [True, False])
def test_a_field_that_nobody_sent_is_named_with_those_there_are(keep):
    with pytest.raises(PayloadError, match="No reply has a field 'proto'. There are: delta."):
        Replies(TWO, keep=keep).mean("proto")


@pytest.mark.parametrize("keep", [True, False])
def test_chunks_of_any_size_give_the_same_bits_in_float64(keep):
    draw = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(17, 33, generator=draw).double(), torch.rand(17, generator=draw).double()
    segments = torch.arange(17) % 3

    def reduced(size, how):
        parts = [
            Arrival(
                np.arange(start, min(start + size, 17)),
                {"d": Stack.of(w=rows[start : start + size]), "s": Stack.of(k=segments[start : start + size])},
                weight[start : start + size],
            )
            for start in range(0, 17, size)
        ]
        return how(Replies(parts, keep=keep))

    for how in (
        lambda r: r.mean("d"),
        lambda r: r.segment_mean("d", "s", Stack.of(w=torch.zeros(3, 33, dtype=torch.float64))),
    ):
        whole = reduced(17, how)["w"]
        for size in (1, 2, 5):
            assert torch.equal(reduced(size, how)["w"], whole)


def test_a_streaming_mean_holds_one_chunk_at_a_time():
    alive: list[weakref.ref[Stack]] = []
    held = []

    def arrivals():
        for first in range(20):
            held.append(sum(one() is not None for one in alive))
            chunk = Stack.of(w=torch.full((1, 4), float(first)))
            alive.append(weakref.ref(chunk))
            yield Arrival(np.array([first]), {"delta": chunk}, torch.ones(1))

    assert Replies(arrivals(), keep=False).mean("delta")["w"].tolist() == [9.5] * 4
    assert max(held) <= 2  # the one just summed and the one before it


def test_no_replies_have_no_mean():
    with pytest.raises(PayloadError, match="No reply has a field 'delta'. There are: none."):
        Replies([], keep=False).mean("delta")


def test_the_layout_of_the_model_comes_back():
    from atoll.kernel.params import Layout

    layout = Layout({"w": "trained"})
    part = Arrival(np.arange(1), {"delta": Stack({"w": torch.ones(1, 2)}, layout)}, torch.ones(1))
    mean = Replies([part], keep=False).mean("delta")
    assert isinstance(mean, Params)
    assert mean.layout is layout


@pytest.mark.parametrize("keep", [True, False])
def test_the_server_may_know_the_segments_and_learns_who_was_where(keep):
    replies = Replies(TWO, keep=keep)
    table = torch.tensor([1, 0, 1, 5])  # of all clients; the last one did not reply
    found = replies.segment_mean("delta", table, Stack.of(w=torch.zeros(2, 2)))
    assert found["w"].flatten().tolist() == pytest.approx([3.0, 4.0, (1 + 4 * 10) / 5, (2 + 4 * 20) / 5])
    clients, segments, weights = replies.members
    assert (clients.tolist(), segments.tolist(), weights.tolist()) == ([0, 1, 2], [1, 0, 1], [1.0, 3.0, 4.0])


@pytest.mark.parametrize("keep", [True, False])
def test_a_late_reply_counts_less_in_a_mean_and_whole_in_a_sum(keep):
    def arrivals():
        for late, value in ((0, 1.0), (3, 5.0)):
            delta = Stack.of(w=torch.tensor([[value]], dtype=torch.float64))
            yield Arrival(np.array([late]), {"delta": delta}, torch.tensor([2.0], dtype=torch.float64), late=late)

    replies = Replies(arrivals(), keep=keep)
    assert replies.sum("delta")["w"].item() == 2 * 1 + 2 * 5
    assert replies.mean("delta")["w"].item() == pytest.approx((2 * 1 + 1 * 5) / (2 + 1))
    assert replies.total.item() == pytest.approx(3)


def test_models_are_what_was_sent_and_what_changed():
    """Two arrivals with other broadcasts, of which the second holds a part of the model by itself for each client."""
    sent = [Params.of(a=torch.tensor(1.0), b=torch.tensor(2.0)), Params.of(a=torch.tensor(10.0), b=torch.tensor(20.0))]
    own = Stack.of(b=torch.tensor([7.0, 8.0]))
    delta = [Stack.of(a=torch.tensor([0.5]), b=torch.tensor([0.5])), Stack.of(a=torch.ones(2), b=torch.ones(2))]
    replies = Replies(
        [Arrival(np.array([4]), {"delta": delta[0]}, torch.ones(1), 1, sent[0]),
         Arrival(np.array([0, 2]), {"delta": delta[1]}, torch.ones(2), 0, sent[1], own)],
        keep=True,
    )  # fmt: skip
    assert replies.models(lambda w, _: w)["a"].tolist() == [1.5, 11.0, 11.0]
    assert replies.where(lambda one: one.unicast is not None).models(lambda _, mine: mine)["b"].tolist() == [8.0, 9.0]
    assert replies.of(np.array([True, False, True])).clients.tolist() == [4, 2]
    assert replies.of(np.array([False, False, True])).models(lambda _, mine: mine)["b"].tolist() == [9.0]


def test_replies_that_were_added_up_answer_for_plain_means_only():
    rows = Stack.of(w=torch.tensor([[1.0], [3.0]]))
    weight = torch.tensor([1.0, 3.0])
    alone = Arrival(np.array([0, 1]), {"delta": rows}, weight)
    summed = Arrival(np.array([2, 3]), {"delta": Stack.of(w=torch.tensor([[10.0]]))}, torch.tensor([4.0]), summed=True)
    replies = Replies([alone, summed], keep=False)
    assert replies.mean("delta")["w"].tolist() == [(1 + 9 + 10) / 8]
    assert replies.sum("delta")["w"].tolist() == [20]
    assert replies.total == 8
    with pytest.raises(PayloadError, match="answer for plain means only"):
        Replies([summed], keep=False).segment_mean("delta", by=torch.zeros(4, dtype=torch.int64), default=rows)
    with pytest.raises(PayloadError, match="answer for plain means only"):
        Replies([summed], keep=False).mean("delta", weight="delta")
