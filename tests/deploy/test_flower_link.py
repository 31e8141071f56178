"""The carrier: envelopes go to sites and come back, whoever is killed, late, gone or too large."""

import threading
import time

import httpx
import pytest
from deploy.conftest import SITES, make_node, open_link, serving

from atoll.deploy.network import Arrived, Missing
from atoll.kernel.errors import PayloadError


def reverse(envelope: bytes) -> bytes:
    return envelope[::-1]


def test_every_site_gets_its_own_envelope_and_its_reply_is_known_by_name(keys, link):
    nodes = [serving(make_node(keys, link, name), reverse) for name in SITES]
    with nodes[0], nodes[1], nodes[2]:
        sent = {name: name.encode() * 3_000_000 for name in SITES}  # several chunks of Flower
        found = list(link.exchange(sent, timeout=30, grace=10))
    assert not [one for one in found if isinstance(one, Missing)]
    assert {one.site: one.envelope for one in found} == {name: reverse(one) for name, one in sent.items()}
    assert link.connected() == set()
    state = link._state
    assert not state.message_ins_store
    assert not state.message_res_store
    assert not state.object_store.store


def test_who_is_not_there_is_missing_with_a_reason_and_the_others_count(keys, link):
    with serving(make_node(keys, link, "Ulm"), reverse):
        found = {one.site: one for one in link.exchange({"Ulm": b"ab", "Lund": b"cd"}, timeout=30, grace=0.5)}
    assert found["Ulm"] == Arrived("Ulm", b"ba")
    assert found["Lund"] == Missing("Lund", "not connected for 1 s")


@pytest.mark.parametrize("where", ["PullObject", "ConfirmMessageReceived", "PushMessages", "PushObject"])
def test_a_site_that_freezes_and_wakes_goes_on_where_it_was(keys, link, where):
    """catches: a reply that is let go of because its site was not heard of for a while."""
    node = make_node(keys, link, "Ulm")
    call, frozen = getattr(node._client, where), []

    def call_after_a_while(request):
        if not frozen:
            frozen.append("Ulm")
            with node._beating:
                while link.connected():
                    time.sleep(0.05)
                time.sleep(0.5)  # so the server has noticed, too
        return call(request)

    setattr(node._client, where, call_after_a_while)
    with serving(node, reverse):
        found = list(link.exchange({"Ulm": b"ab" * 3_000_000}, timeout=12, grace=8))
    assert frozen
    assert found == [Arrived("Ulm", b"ba" * 3_000_000)]


def test_a_reply_that_is_whole_before_its_site_is_heard_of_again_counts_once(keys, link):
    """catches: a site that is asked once more, or missing as well, after its reply arrived."""
    node, answered = make_node(keys, link, "Ulm"), []
    push = node._client.PushObject

    def push_without_a_sign_of_life(request):
        while link.connected():
            time.sleep(0.05)
        time.sleep(0.3)  # so the server has noticed, too
        return push(request)

    def answer(envelope: bytes) -> bytes:
        answered.append(len(envelope))
        node._beating.acquire()
        return reverse(envelope)

    node._client.PushObject = push_without_a_sign_of_life
    with serving(node, answer):
        try:
            found = list(link.exchange({"Ulm": b"ab" * 1_000}, timeout=12, grace=6))
        finally:
            node._beating.release()
    assert found == [Arrived("Ulm", b"ba" * 1_000)]
    assert answered == [2_000]


def test_a_reply_that_comes_late_is_not_counted_and_does_not_answer_the_next_message(keys, link):
    slow = threading.Event()

    def answer(envelope: bytes) -> bytes:
        if envelope == b"first":
            slow.wait(10)
        return envelope.upper()

    with serving(make_node(keys, link, "Ulm"), answer):
        assert list(link.exchange({"Ulm": b"first"}, timeout=1, grace=5)) == [Missing("Ulm", "no reply within 1 s")]
        slow.set()
        assert list(link.exchange({"Ulm": b"second"}, timeout=20, grace=5)) == [Arrived("Ulm", b"SECOND")]


def test_a_site_that_fails_says_why_and_goes_on(keys, link, caplog):
    def answer(envelope: bytes) -> bytes:
        if envelope == b"bad":
            raise PayloadError("The column 'age' is missing.")
        if envelope == b"full":
            raise OSError(28, "No space left on device")
        if envelope == b"bug":
            raise ZeroDivisionError("division by zero")
        return envelope

    with serving(make_node(keys, link, "Ulm"), answer):

        def ask(envelope: bytes):
            return next(iter(link.exchange({"Ulm": envelope}, timeout=20, grace=5)))

        assert ask(b"bad") == Missing("Ulm", "The column 'age' is missing.")
        assert ask(b"full") == Missing("Ulm", "this site cannot work: No space left on device")
        assert ask(b"bug") == Missing("Ulm", "this site failed: ZeroDivisionError: division by zero")
        assert ask(b"fine") == Arrived("Ulm", b"fine")


def test_a_question_of_a_process_that_ended_takes_no_message_from_the_next_one(link):
    state, node, found = link._state, link._nodes["Ulm"], []
    state.activate_node(node, 30)
    question = threading.Thread(target=lambda: found.append(state.get_message_ins(node, None)))
    question.start()  # and whoever asked is killed, and started again
    state.deactivate_node(node)
    state.activate_node(node, 30)
    state.post(link._run, node, b"work", 60)
    question.join(10)
    assert found == [[]]
    assert len(state.get_message_ins(node, None)) == 1


@pytest.mark.parametrize("moment", ["working", "replying"])
def test_a_site_that_is_killed_and_comes_back_is_asked_again(keys, link, moment):
    asked: list[str] = []
    first = make_node(keys, link, "Ulm")

    def die(*_) -> bytes:  # no sign of life, no goodbye: what kill -9 looks like from outside
        asked.append("first")
        first._client.close()
        raise SystemExit

    def serve_until_death() -> None:
        with pytest.raises((SystemExit, RuntimeError)):
            first.serve(die if moment == "working" else reverse, threading.Event())

    if moment == "replying":  # the reply is announced, and its bytes never come
        first._client.PushObject = die
    dying = threading.Thread(target=serve_until_death)
    dying.start()
    found: list = []
    asking = threading.Thread(
        target=lambda: found.extend(link.exchange({"Ulm": b"abc"}, timeout=30, grace=20)), daemon=True
    )
    asking.start()
    dying.join(10)
    with serving(make_node(keys, link, "Ulm"), lambda envelope: asked.append("second") or reverse(envelope)):
        asking.join(20)
    assert found == [Arrived("Ulm", b"cba")]
    assert asked == ["first", "second"]
    assert not link._state.object_store.store


@pytest.mark.parametrize("call", ["PullMessages", "PullObject", "ConfirmMessageReceived", "PushMessages", "PushObject"])
def test_what_is_lost_on_the_way_is_sent_again(keys, link, call):
    """The answer to one request does not arrive, though the server has done what it asked for."""
    node = make_node(keys, link, "Ulm")
    real, lost = getattr(node._client, call), []

    def lose_once(request):
        found = real(request)
        if not lost and (call != "PullMessages" or found.messages_list):
            lost.append(call)
            raise httpx.ReadError("the connection was cut")
        return found

    setattr(node._client, call, lose_once)
    with serving(node, reverse):
        assert list(link.exchange({"Ulm": b"abc"}, timeout=20, grace=10)) == [Arrived("Ulm", b"cba")]
    assert lost == [call]
    assert not link._state.object_store.store


def test_two_processes_with_one_key_are_not_both_let_in(keys, caplog):
    served: list[str] = []
    with (
        caplog.at_level("WARNING", logger="atoll"),
        open_link(keys, patience=60) as link,  # however busy the machine is, the first one does not count as gone
        serving(make_node(keys, link, "Ulm"), lambda envelope: served.append("one") or envelope),
    ):
        list(link.exchange({"Ulm": b"1"}, timeout=20, grace=5))
        with serving(make_node(keys, link, "Ulm"), lambda envelope: served.append("two") or envelope):
            for _ in range(3):
                assert list(link.exchange({"Ulm": b"2"}, timeout=20, grace=5)) == [Arrived("Ulm", b"2")]
    assert set(served) == {"one"}
    assert "another process uses its key" in caplog.text


def test_nodes_outlive_the_server(keys):
    with open_link(keys) as first:
        port = first.port
        node = make_node(keys, first, "Ulm")
        with serving(node, reverse):
            assert list(first.exchange({"Ulm": b"ab"}, timeout=20, grace=5)) == [Arrived("Ulm", b"ba")]
            first.__exit__(None, None, None)
            with open_link(keys, port=port) as second:
                assert list(second.exchange({"Ulm": b"cd"}, timeout=20, grace=10)) == [Arrived("Ulm", b"dc")]


def test_a_reply_that_is_too_large_is_refused_before_it_is_sent(keys):
    def answer(envelope: bytes) -> bytes:
        return b"".join(bytes([index]) * 5 * 2**20 for index in range(12)) if envelope == b"much" else envelope

    with open_link(keys, largest=3 * 2**20) as link, serving(make_node(keys, link, "Ulm"), answer):
        reason = "A message must have at most 3,145,728 bytes. This one announces more."
        assert list(link.exchange({"Ulm": b"much"}, timeout=20, grace=5)) == [Missing("Ulm", reason)]
        assert not link._state.object_store.store
        assert list(link.exchange({"Ulm": b"few"}, timeout=20, grace=5)) == [Arrived("Ulm", b"few")]


def test_the_order_of_replies_is_the_order_in_which_they_come(keys, link):
    def sleepy(seconds: float):
        return lambda envelope: time.sleep(seconds) or envelope

    with serving(make_node(keys, link, "Ulm"), sleepy(1.0)), serving(make_node(keys, link, "Lund"), sleepy(0)):
        found = [one.site for one in link.exchange({"Ulm": b"a", "Lund": b"b"}, timeout=20, grace=5)]
    assert found == ["Lund", "Ulm"]


def test_plain_text_works_where_both_sides_say_so_and_keys_are_still_asked_for(keys):
    with open_link(keys, certificate=None) as link, serving(make_node(keys, link, "Ulm", authority=None), reverse):
        assert list(link.exchange({"Ulm": b"ab"}, timeout=20, grace=5)) == [Arrived("Ulm", b"ba")]
