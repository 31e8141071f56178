"""Methods by name, as they are written on the command line and in records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from atoll.algorithms import file_of, find_pair, list_methods, list_parts, load_file, name_of
from atoll.compose.hybrids import InClusters
from atoll.compose.pieces import PIECES
from atoll.compose.steps import STEP_SIZE, WithStepSize
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import UnknownName, describe_given, unknown
from atoll.kernel.hyperparameters import Hyperparameter, hyperparameters
from atoll.kernel.wrapper import values_of
from atoll.toolbox.pairs import AnswerPiece

PRESETS = {  # names that others gave to methods with certain values
    "OursV4": "fafi:profile=faithful,temperature=0.5",
    "OursV5": "fafi-bank:profile=faithful,temperature=0.5",
    "OursV6": "fafi-two-stage:profile=faithful,temperature=0.5",
}
ELSEWHERE = {  # hyperparameters that others call otherwise, and what stands for them here
    "alignment_epochs": "`stage_share` says how long the first stage is, as a share of all epochs: 7 of 36 are "
    "stage_share=0.19.",
}


@dataclass(frozen=True)
class Plan:
    """How a method is put together, before it has values: its class, and the plans of the methods inside it."""

    kind: type[Algorithm]
    added: str = ""  # to the name of the method inside
    inside: Mapping[str, Plan] = field(default_factory=dict)  # by field

    @property
    def name(self) -> str:
        """What such a method is called: `ditto+gate`."""
        return self.inside["inner"].name + self.added if self.inside else name_of(self.kind)

    @property
    def title(self) -> str:
        """What messages call it: `Ditto+gate`."""
        return self.inside["inner"].title + self.added if self.inside else self.kind.__name__

    @property
    def hyperparameters(self) -> dict[str, Hyperparameter]:
        """Those of all methods in it, by name; where several have one, the default of the last counts."""
        found: dict[str, Hyperparameter] = {}
        for plan in self.inside.values():
            found |= plan.hyperparameters
        return found | {one.name: one for one in hyperparameters(self.kind)}

    def build(self, values: Mapping[str, Any]) -> Algorithm:
        """Make the method: what is inside first."""
        known = self.hyperparameters
        for name in values:
            if name not in known:
                raise unknown(f"hyperparameter of {self.name}", name, known)
        defaults = {name: one.default for name, one in known.items() if one.default is not MISSING}
        return self._build(known, {**defaults, **values})

    def _build(self, known: Mapping[str, Hyperparameter], values: Mapping[str, Any]) -> Algorithm:
        inside = {name: plan._build(known, values) for name, plan in self.inside.items()}
        own = [one for one in hyperparameters(self.kind) if one.name in values]
        # One that means something else here keeps its default: whatever wraps both refuses them, and says why.
        meant = [one.name for one in own if one.means_the_same_as(known[one.name])]
        return self.kind(**inside, **{name: values[name] for name in meant})


def read(name: str) -> Plan:
    """Read a method's name or file (`./mine.py`), with pieces (`fedper+prox`), inside clusters (`ditto@ifca`).

    One-shot methods are also named as pairs of a training and an answer: `fafi/margins`. Both may have pieces of their
    own: `fafi+bank/features+refined`.
    """
    name, at, finder = _spell_out(name).partition(":")[0].partition("@")
    if at:
        inside = {"finder": read(finder), "inner": read(name)}
        return Plan(InClusters, f"@{inside['finder'].name}", inside)
    before, slash, last = name.rpartition("/")  # in a pair, what stands before the answer belongs to the training
    last, *pieces = re.split(r"\+(?=[a-z]+(?:\+|$))", last)
    of_answers = list_parts(AnswerPiece) if slash else {}
    name = "+".join([f"{before}{slash}{last}", *(piece for piece in pieces if piece in of_answers)])
    plan = Plan(load_file(Path(name)) if name.endswith(".py") else _find(name))
    for piece in (piece for piece in pieces if piece not in of_answers):
        if piece not in PIECES:
            raise unknown("piece", piece, {*PIECES, *of_answers})
        plan = Plan(PIECES[piece], f"+{piece}", {"inner": plan})
    return plan


def _with_step_size(plan: Plan, values: Iterable[str]) -> Plan:
    """Return the plan of a method with a step size of its own, if there is one among the values."""
    given = STEP_SIZE in values and STEP_SIZE not in plan.hyperparameters
    return Plan(WithStepSize, inside={"inner": plan}) if given else plan


def _find(name: str) -> type[Algorithm]:
    if "/" in name:
        return find_pair(name)
    methods = list_methods()
    if name not in methods:
        raise unknown("algorithm", name, {*methods, *PRESETS})
    return methods[name]


def create(text: str, /, **more: str) -> Algorithm:
    """Make a method from what is written on the command line: `ditto`, `ditto:lam=0.1,epochs=2`, `ditto+gate`.

    Beside the hyperparameters of the method, `lr` is a step size of its own: `ditto:lr=0.05`. A preset stands for a
    method with values, to which others may be added: `OursV5:epochs=36`.
    """
    name, _, rest = _spell_out(text).partition(":")
    # A number that follows belongs to the value before it, such as the widths of a network: `fml:meme=mlp:16,8`.
    pairs = [*filter(None, re.split(r",(?!\d)", rest)), *(f"{key}={value}" for key, value in more.items())]
    plan = _with_step_size(read(name), [pair.partition("=")[0] for pair in pairs])
    known, values = plan.hyperparameters, {}
    for pair in pairs:
        key, given, value = pair.partition("=")
        if key not in known:
            error = unknown(f"hyperparameter of {plan.name}", key, {*known, STEP_SIZE})
            raise UnknownName(str(error), hint=ELSEWHERE[key]) if key in ELSEWHERE else error
        if not given:
            raise UnknownName(f"Hyperparameters must be written name=value. Got {pair!r}.")
        values[key] = known[key].parse(plan.title, value)
    return plan.build(values)


def _spell_out(text: str) -> str:
    """Return what a preset stands for, with the values that follow it; other names stay as they are."""
    name, _, more = text.partition(":")
    words = next((words for preset, words in PRESETS.items() if preset.lower() == name.lower()), None)
    return text if words is None else ",".join(filter(None, [words, more]))


def as_method(given: Any) -> Algorithm:
    """Return a method that is given as itself or by its name; raise for anything else."""
    if isinstance(given, Algorithm):
        return given
    if isinstance(given, str):
        return create(given)
    example = f"{given.__name__}()" if isinstance(given, type) and issubclass(given, Algorithm) else "Ditto(lam=0.1)"
    raise UnknownName(
        f"A method must be an algorithm or the name of one. Got {describe_given(given)}.",
        hint=f"write {example}, or a name such as 'ditto:lam=0.1'.",
    )


def to_record(algorithm: Algorithm) -> dict[str, Any]:
    """Write a method down: its name, the file of a user's own, and the values of its hyperparameters."""
    file = file_of(algorithm)
    return {"name": name_of(algorithm), "file": file and str(file), "values": values_of(algorithm)}


def from_record(record: Mapping[str, Any]) -> Algorithm:
    """Make the method that was written down."""
    name, file, values = (upgrade_record(record)[part] for part in ("name", "file", "values"))
    added = re.search(r"[+@].*$", name)  # what a user's own method was put together with
    return _with_step_size(read(f"{file}{added[0] if added else ''}" if file else name), values).build(values)


def upgrade_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Give an older record, whose values stand beside the name, the form that `to_record` writes."""
    if not isinstance(record.get("values"), Mapping):
        values = {name: value for name, value in record.items() if name not in ("name", "file")}
        record = {"name": record["name"], "file": record.get("file"), "values": values}
    return _complete(_split(dict(record)))


def _complete(record: dict[str, Any]) -> dict[str, Any]:
    """Write down what was the only form of a method when it had fewer hyperparameters."""
    if record.get("file") is None and re.match(r"interp(?=$|[+@])", str(record["name"])):
        return record | {"values": {"adapt": "grid", "begin": "own"} | dict(record["values"])}
    return record


def _split(record: dict[str, Any]) -> dict[str, Any]:
    """Name the one of two methods that used to be one, told apart by a value `form`."""
    method = re.match(r"(apfl|pfedme)(?=$|[+@])", str(record["name"]))
    if method is None or "form" not in record["values"]:
        return record
    values = dict(record["values"])
    if values.pop("form") == "published":
        return record | {"values": values}
    unused = ("inner_steps", "eta", "beta") if method[0] == "pfedme" else ()
    name = record["name"].replace(method[0], f"{method[0]}-survey", 1)
    return record | {"name": name, "values": {one: value for one, value in values.items() if one not in unused}}
