"""What is sent: it survives the way, is counted, is declared, and holds neither samples nor what clients keep."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import torch
from torch import Tensor

from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.params import Stack
from atoll.kernel.wrapper import title_of
from atoll.runtime.serialise import from_bytes, to_bytes
from atoll.testing.conformance.errors import ConformanceError
from atoll.testing.conformance.playing import LONG
from atoll.testing.conformance.rehearsal import Rehearsal, rehearse
from atoll.testing.conformance.tasks import CLASSES, NINE, find_samples, task_for
from atoll.testing.conformance.trees import is_telling, list_leaves, require_same
from atoll.testing.conformance.tries import TRIED_EVERY, take_client
from atoll.testing.leaks import EXACTLY, LONGEST_STRIDE, copy_in, likeness_in, signs_in

TELLS_LABELS = ("labels", "statistic")  # kinds of fields that may say which labels a client has
ENOUGH = 7  # clients, for a rule of four numbers to be no chance
TINY, EXACT = 1e-12, 1e-7
SOME, SEVERAL = 5, 12  # samples whose mean is no sample; whose mean, or gradient, does not even resemble one


LARGE = sum(size >= SEVERAL for size in NINE)  # clients whose messages are compared with whole samples


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
        measured |= {("down", k, rounds - 1, "last broadcast"): len(to_bytes(last)) for k in range(len(NINE))}
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
    seen, task = rehearse(method), task_for(method)
    sends, before, exact = False, set[int](), 0
    likes: dict[tuple[int, str], int] = {}  # by round and leaf: how many clients send what is like a sample
    signs: dict[int, list[Tensor]] = {}  # by round: where a client's message has the signs of a sample
    for (round, client), (update, k) in sorted((seen.updates | seen.far).items(), key=lambda one: one[0]):
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
        if len(samples) >= SOME:
            signs.setdefault(round, []).append(signs_in(sent, samples))
        strides = LONGEST_STRIDE if round % TRIED_EVERY == 0 or round >= LONG else 1
        like = likeness_in(message, samples, strides=strides) if found is None and len(samples) >= SEVERAL else None
        if like is not None:
            # It may be chance: where one sample alone is far from its label, a gradient is like that sample. But not
            # to nine digits, and not for all clients in two rounds.
            likes[round, like] = likes.get((round, like), 0) + 1
            exact += likeness_in(message, samples, EXACTLY, strides) is not None
            found = like if exact > 1 or sum(clients == LARGE for clients in likes.values()) > 1 else None
        if found is not None:
            raise ConformanceError(
                f"Samples must not leave. Client {client} sends one, or a part of one, in {found}.",
                hint="a scaled, shifted or reordered sample is one still; send statistics of many.",
            )
    require_no_signs(signs.values())
    for (_, client), notes in seen.notes.items():
        if copy_in(notes, task.x[find_samples(task, client)]) is not None:
            raise ConformanceError(f"Samples must not be written to the log. Client {client} observes a part of one.")
    if not method.items_by:
        require_no_labels(method, seen, task)
    return None if sends else "this method sends nothing"


def require_no_signs(rounds: Iterable[list[Tensor]]) -> None:
    """Raise if the same numbers of a message have the signs of a sample in two rounds, for all clients but one.

    A sample may have nearly all of its numbers on one side, and then its signs tell nothing.
    """
    alike = [torch.stack(one).sum(0) >= len(one) - 1 for one in rounds if len({len(places) for places in one}) == 1]
    for one, other in combinations(alike, 2):
        if len(one) == len(other) and bool((one & other).any()):
            raise ConformanceError(
                "Samples must not leave. The signs of some numbers that clients send are those of a sample's numbers, "
                f"from place {int((one & other).int().argmax())} on.",
                hint="send what was learned as it is.",
            )


def require_no_labels(method: Algorithm, seen: Rehearsal, task: Task) -> None:
    """Raise if labels leave in what does not say so: in the weight, the log, or a field that is no statistic."""
    known = list_secrets(task)
    rounds = sorted({round for round, _ in (*seen.updates, *seen.far)})
    for round in rounds:
        rows: dict[str, dict[int, Tensor]] = {}
        for (when, client), (update, k) in (seen.updates | seen.far).items():
            if when != round:
                continue
            one = take_client(update, k)
            hidden = {name: tree for name, tree in one["send"].items() if method.sends.get(name) not in TELLS_LABELS}
            found = dict(list_leaves(hidden)) | ({} if one["weight"] is None else {"weight": one["weight"]})
            noted = {f"log {name}": value for name, value in seen.notes.get((round, client), {}).items()}
            for name, leaf in (found | noted).items():
                rows.setdefault(name, {})[client] = leaf.double().flatten()
        for name, by_client in rows.items():
            if len({len(row) for row in by_client.values()}) != 1 or len(by_client) < ENOUGH:
                continue
            values, clients = torch.stack([*by_client.values()]), [*by_client]
            told = next((what for what, table in known.items() if tells(values, table[clients])), None)
            if told is not None:
                where = "the log" if name.startswith("log ") else "what is sent"
                raise ConformanceError(
                    f"Labels must not leave unless a field says so. The {told} of clients follow from {name} in "
                    f"{where} (round {round}).",
                    hint='declare a field of its own: sends = {"labels": "labels"} (or "statistic").',
                )


def list_secrets(task: Task) -> dict[str, Tensor]:
    """Return what labels are, by what it is called: a row of numbers for each client; the first one is its size."""
    found: dict[str, list[Tensor]] = {}
    train = task.splits["train"]
    for client in range(task.clients):
        own = task.y[train.order[train.offsets[client] : train.offsets[client + 1]]]
        for words, y in (("label counts", own), ("label counts of all splits", task.y[find_samples(task, client)])):
            counts = torch.bincount(y, minlength=CLASSES).double()
            found.setdefault(words, []).append(counts)
            found.setdefault(words.replace("counts", "shares"), []).append(counts / counts.sum().clamp(min=1))
        found.setdefault("most frequent labels", []).append(torch.bincount(own, minlength=CLASSES).argmax()[None])
        found.setdefault("sums of labels", []).append(own.sum()[None])
    return {what: torch.stack(rows).double() for what, rows in found.items()}


def tells(values: Tensor, secret: Tensor) -> bool:
    """Say whether a number of a message is a sum of what is secret, by one rule for all clients, and not of its total.

    How many samples a client has is no secret. An exact rule for nine clients is no chance.
    """
    ones = torch.ones(len(secret), 1, dtype=torch.float64)
    total = torch.cat([ones, secret.sum(1, keepdim=True)], 1) if secret.shape[1] > 1 else ones
    spread = (values - values.mean(0)).norm(dim=0)
    open_rest = _rest(values, total)
    secret_rest = _rest(values, torch.cat([ones, secret], 1))
    worth = spread > TINY * values.abs().amax(0).clamp(min=1e-300)
    return bool((worth & (open_rest > 1e-4 * spread) & (secret_rest < EXACT * spread)).any())


def _rest(values: Tensor, by: Tensor) -> Tensor:
    """Return how much of each column is no weighted sum of some others."""
    basis = torch.linalg.svd(by, full_matrices=False)
    keep = 1e-9 * basis.S[0] < basis.S
    u = basis.U[:, keep]
    rest: Tensor = (values - u @ (u.T @ values)).norm(dim=0)
    return rest


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
