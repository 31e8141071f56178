"""What is sent: it survives the way, is counted, is declared, and holds neither samples nor what clients keep."""

from __future__ import annotations

import torch

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.params import Stack
from atoll.kernel.wrapper import title_of
from atoll.runtime.serialise import from_bytes, to_bytes
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.rehearsal import rehearse
from atoll.testing.conformance.tasks import SIZES, build_task, find_samples
from atoll.testing.conformance.trees import is_telling, list_leaves, require_same
from atoll.testing.conformance.tries import take_client
from atoll.testing.leaks import copy_in, likeness_in

SOME, SEVERAL = 5, 12  # samples whose mean is no sample; whose mean, or gradient, does not even resemble one


def payload_survives_serialisation(method: Algorithm) -> str | None:
    """Check that what is sent survives its way as bytes, and that the ledger counts exactly these bytes."""
    seen = rehearse(method)
    measured: dict[tuple[str, int, int, str], int] = {}
    for (round, client), (update, k) in seen.updates.items():
        sent = dict(update.send)
        if sent and update.weight is not None:  # it travels with them
            sent["weight"] = Stack.of(weight=update.weight)
        for name, stack in sent.items():
            row = stack.client(k)
            message = to_bytes(row)
            require_same(row, from_bytes(message, row.layout), f"Field {name!r} must survive serialisation.")
            measured["up", client, round, name] = len(message)
        for name, tree in (("broadcast", seen.broadcasts[round]), ("unicast", seen.unicasts[round, client])):
            if tree is not None:
                measured["down", client, round, name] = len(to_bytes(tree))
    last = seen.report.algorithm.last_broadcast(seen.report.server)
    if last is not None:
        rounds = len(seen.report.history)
        measured |= {("down", k, rounds - 1, "last broadcast"): len(to_bytes(last)) for k in range(len(SIZES))}
    counted: dict[tuple[str, int, int, str], int] = {
        (message.direction, message.client, message.round, message.field): message.bytes
        for message in seen.report.ledger.messages()
    }
    if counted != measured:
        wrong = min(key for key in counted.keys() | measured.keys() if counted.get(key) != measured.get(key))
        raise ConformanceError(
            f"The ledger must hold the bytes of every message. For {wrong} it says {counted.get(wrong)}, "
            f"serialised it has {measured.get(wrong)}."
        )
    return None if any(key[0] == "up" for key in measured) else "this method sends nothing"


def only_what_is_declared_leaves(method: Algorithm) -> str | None:
    """Check that only declared fields are sent, without what clients keep and without samples, even changed ones."""
    seen, task = rehearse(method), build_task(items_by=method.items_by)
    sends, before, likes = False, set[int](), list[str]()
    for (round, client), (update, k) in sorted(seen.updates.items(), key=lambda one: one[0]):
        undeclared = update.send.keys() - method.sends.keys()
        if undeclared:
            raise ConformanceError(
                f"{title_of(method)} must declare what it sends. It sends {sorted(undeclared)}, declared are "
                f"{sorted(method.sends)}.",
                hint='declare it: sends = {"name": "model"} (or "statistic", "labels").',
            )
        one = take_client(update, k)
        kept, sent = dict(list_leaves(one["keep"])), dict(list_leaves(one["send"]))
        sends |= bool(sent)
        # The first change of what is kept is all of it, and a method may send changes, as SCAFFOLD does.
        comparable = kept if method.one_shot or client in before else {}
        before |= {client} if round >= 0 else set()
        for name, leaf in sent.items():
            declared = name.partition("/")[0] in method.sent_and_kept
            for private, value in comparable.items():
                if not declared and is_telling(value) and value.shape == leaf.shape and torch.equal(value, leaf):
                    raise ConformanceError(
                        f"What is kept must not leave. Client {client} keeps {private} and sends it as {name}.",
                        hint="send what the server needs and keep the rest: Update(send=..., keep=...).",
                    )
        message = sent | ({} if one["weight"] is None else {"weight": one["weight"]})
        samples = task.x[find_samples(task, client)]
        found = copy_in(message, samples) if len(samples) >= SOME else None
        if found is None and len(samples) >= SEVERAL and (like := likeness_in(message, samples)) is not None:
            # Once may be chance: where one sample alone turns a unit on, a gradient is like that sample.
            likes.append(like)
            found = like if len(likes) > 1 else None
        if found is not None:
            raise ConformanceError(
                f"Samples must not leave. Client {client} sends one, or a part of one, in {found}.",
                hint="a scaled, shifted or reordered sample is one still; send statistics of many.",
            )
    for (_, client), notes in seen.notes.items():
        if copy_in(notes, task.x[find_samples(task, client)]) is not None:
            raise ConformanceError(f"Samples must not be written to the log. Client {client} observes a part of one.")
    return None if sends else "this method sends nothing"


def one_shot_methods_upload_once(method: Algorithm) -> str | None:
    """Check that each client of a one-shot method uploads once and downloads once.

    One exchange of statistics may go before, and a download after the upload, for clients that then train on.
    """
    if not method.one_shot:
        return "not a one-shot method"
    messages = list(rehearse(method).report.ledger.messages())
    early = [message for message in messages if message.round < 0]
    if any(message.direction == "up" and message.kind == "model" for message in early):
        raise ConformanceError("Before training, a one-shot method may exchange statistics. Models were uploaded.")
    for some in (early, [message for message in messages if message.round >= 0]):
        for direction in ("up", "down"):
            found = {(message.client, message.round) for message in some if message.direction == direction}
            if len(found) != len({client for client, _ in found}):
                raise ConformanceError(
                    f"A one-shot method must send once {direction} per client. Got (client, round) {sorted(found)}.",
                    hint="before training, statistics may be exchanged once, and no models.",
                )
    remarks = ["after an exchange of statistics"] if early else []
    remarks += ["with a download after the upload"] if any(one.field == "last broadcast" for one in messages) else []
    return "; ".join(remarks) or None
