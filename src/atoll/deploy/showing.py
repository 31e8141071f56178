"""What is inside a message, in words and byte for byte, before anybody sends it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.deploy.messages import MAGIC, SIGNATURE, Message
from atoll.deploy.terms import Terms
from atoll.kernel.errors import RefusedError
from atoll.kernel.params import Structure, flatten
from atoll.protect.compression import COMPRESSIONS

PHASES = {
    "local": "a round's work",
    "prepare": "an exchange before the first round",
    "finish": "a last local step, of which nothing is sent",
    "evaluate": "scores of models on the site's own samples: sums and figures, and no sample's score by itself",
}

STEPS = {
    "masks keys": "public keys for a sum under masks",
    "masks shares": "sealed shares of the secrets behind its masks",
    "masks unmask": "shares that remove the masks from the sum, and from no single message",
}
PASSED = {
    "Clip": "cut to a norm",
    "RoundedClip": "cut to a norm",
    "EqualWeights": "counted the same for every client, which tells no sizes",
    "Encode": "written as whole numbers",
    "LocalNoise": "cut to a norm and given noise from this site's operating system",
    "NoiseInShares": "given a share of noise from this site's operating system",
    **{kind.__name__: f"packed by {word}" for word, kind in COMPRESSIONS.items()},
}


@dataclass(frozen=True)
class Line:
    """One part of a message: what it is, what it holds, and how many bytes it has."""

    part: str
    holds: str
    bytes: int


@dataclass(frozen=True)
class Contents:
    """All of a message: sentences, and parts whose bytes sum up to those of the file."""

    sentences: list[str]
    lines: list[Line]

    @property
    def bytes(self) -> int:
        """The length of the whole message."""
        return sum(line.bytes for line in self.lines)


def describe(message: Message) -> Contents:
    """Say what a message is and what it holds."""
    with message.guarding():
        sentences = {"job": _describe_job, "reply": _describe_reply}[message.header.kind](message)
        return Contents([_describe_sender(message), *sentences], _list_parts(message))


def _describe_sender(message: Message) -> str:
    header = message.header
    when = f"before round {header.round + 2}" if header.round < 0 else f"round {header.round + 1}"
    if any(name in ("finish", "evaluate") for name in _phase_names(message)):
        when = f"after round {header.round}"
    return (
        f"A {header.kind} of {header.sender} (key {header.key[:16]}…), federation {header.federation[:8]}…, exchange "
        f"{header.number}, {when}, written {header.written}, Atoll "
        f"{header.versions.get('atoll', 'unknown')}. The signature is that of the key."
    )


def _phase_names(message: Message) -> list[str]:
    return [str(one["phase"]) for one in message.header.about.get("phases", [])]


def _describe_job(message: Message) -> list[str]:
    about = message.header.about
    terms, method = Terms.of_json(about["terms"]), about["method"]
    values = ", ".join(f"{name}={value}" for name, value in method["values"].items())
    sites = ", ".join(
        f"{name}{'' if len(place.clients) == 1 else f' ({len(place.clients)} clients)'}"
        f"{'' if place.key else ' (any key)'}"
        for name, place in terms.sites.items()
    )
    step = about.get("masks")
    steps = [STEPS[step["name"]]] if step is not None and step["name"] in STEPS else []
    asked = "; ".join([*steps, *(_describe_phase(one) for one in about["phases"])])
    file = f"; a file of its own, {method['file'][:16]}" if method["file"] else ""
    rule = ", ".join(f"{name} {value}" for name, value in terms.training.items() if value is not None)
    federation = f"{terms.rounds} round(s), sites {sites}, model {terms.model or 'known to both'}, seed {terms.seed}"
    return [
        f"It asks {', '.join(about['to'])} for: {asked}.",
        f"Method: {method['name']} ({values}){file}.",
        f"The federation: {federation}, {rule}.",
        *_describe_form(terms.form),
        *_describe_protection(about),
        _describe_answer(about),
    ]


def _describe_protection(about: dict[str, Any]) -> list[str]:
    """Say what messages pass before they leave the site."""
    passed = [
        f"{PASSED.get(one['stage'], one['stage'])} ({_shorten(_list_values(one['values']))})"
        if one["values"]
        else PASSED.get(one["stage"], one["stage"])
        for one in about.get("stages", [])
    ]
    if about.get("masked"):
        near = about.get("neighbours", 0)
        shared = f" that a client shares with {near} others" if near else ""
        passed.append(f"put under masks{shared}, so the coordinator reads the sum of all clients only")
    return [f"Before they leave the site, messages are {'; '.join(passed)}."] if passed else []


def _list_values(values: dict[str, Any]) -> str:
    shown = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _describe_answer(about: dict[str, Any]) -> str:
    hides = any(one["stage"] in ("EqualWeights", "Encode") for one in about.get("stages", []))
    told = (
        ""
        if hides
        else ", a weight for each client, how many samples each client has by split, how many gradients it took"
    )
    return (
        f"What the answer will hold: fields that the method declares{told}. Samples, and what clients keep, stay at "
        "the site."
    )


def _describe_form(form: dict[str, Any] | None) -> list[str]:
    if form is None:
        return []
    columns = ", ".join(f"{one['name']} ({one['type']})" for one in form["features"])
    classes = f", one of {', '.join(form['classes'])}" if form["classes"] else ""
    return [f"The data must have the columns {columns}; the target is {form['target']} ({form['kind']}{classes})."]


def _describe_phase(written: dict[str, Any]) -> str:
    name, values = written["phase"], written["values"]
    words = PHASES.get(name, name)
    return words if name != "evaluate" else f"{words} ({values['model']} models, {' and '.join(values['on'])} samples)"


def _describe_reply(message: Message) -> list[str]:
    about = message.header.about
    samples = ", ".join(f"{split} {' and '.join(map(str, counts))}" for split, counts in about["samples"].items())
    lost = [f"client {client}: {reason}" for one in about["lost"] for client, reason in one.items()]
    return [
        f"It is the answer of {about['site']} to job {about['answers'][:16]}….",
        f"It says how many samples each of the site's clients has: {samples}."
        if any(any(counts) for counts in about["samples"].values())
        else "It does not say how many samples the site's clients have.",
        f"It says how many gradients were computed: {gradients}."
        if (gradients := sum(sum(some) for some in about["gradients"]))
        else "It does not say how many gradients were computed.",
        *([f"It says which clients failed, and why: {'; '.join(lost)}."] if lost else []),
        "Nothing else leaves the site: no sample, nothing that clients keep, no training loss.",
    ]


def _list_parts(message: Message) -> list[Line]:
    """List all parts of a message: the envelope, the header by field, and the body by tensor."""
    header = message.header.as_json()
    text = json.dumps(header, separators=(",", ":")).encode()
    fields = {name: len(json.dumps(value, separators=(",", ":")).encode()) for name, value in header.items()}
    names = len(text) - sum(fields.values())
    lines = [Line("envelope", "the word ATOLL, the version of the form, the header's length", len(MAGIC) + 8)]
    lines += [Line(f"header: {name}", _shorten(header[name]), size) for name, size in fields.items()]
    lines.append(Line("header: names", "the names of these fields", names))
    lines.append(Line("signature", "Ed25519", SIGNATURE))
    length = int.from_bytes(message.body[:8], "little")
    lines.append(Line("body: table", "names, types and shapes of the tensors", 8 + length))
    leaves, structure = flatten(message.tree(None))
    for path, leaf in zip(_list_paths(structure), leaves, strict=True):
        kind = str(leaf.dtype).removeprefix("torch.")
        lines.append(Line(f"body: {path}", f"{kind} [{', '.join(map(str, leaf.shape))}]", leaf.nbytes))
    if sum(line.bytes for line in lines) != len(MAGIC) + 8 + len(text) + SIGNATURE + len(message.body):
        raise RefusedError(f"{message.origin}: it holds bytes that belong to nothing.")
    return lines


def _list_paths(structure: Structure, above: str = "") -> Iterator[str]:
    """Yield where each tensor of a tree stands: the names that lead to it."""
    if structure.kind in ("tensor", "rows"):
        yield above
    elif structure.kind in ("params", "stack"):
        yield from (f"{above}/{name}" for name in structure.names)
    else:
        names = structure.names or tuple(str(number) for number in range(len(structure.parts)))
        for name, part in zip(names, structure.parts, strict=True):
            yield from _list_paths(part, f"{above}/{name}" if above else name)


def _shorten(value: Any, most: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"
