"""Jobs and replies as messages hold them: which phases of which method, for which clients, and what came of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.compose import from_record, to_record
from atoll.deploy.assignments import PHASES as WORK
from atoll.deploy.masking import Step, read_neighbours, read_step
from atoll.deploy.messages import LARGEST_BODY, Message
from atoll.deploy.protection import read_forms, read_stages, require_passed, write_forms, write_stages
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import DeployError, PayloadError
from atoll.kernel.job import AssignedJob, AtTheEnd, Done, Finish, Phase
from atoll.kernel.params import Layout, Stack, Tree, flatten
from atoll.kernel.sources import own_digest
from atoll.metrics.evaluation import KEPT, Evaluate
from atoll.protect.stages import Form, Place, Sent, Stage

Clients = NDArray[np.int64]
PHASES: dict[str, Any] = {**WORK, "evaluate": Evaluate}  # what sites may be asked to do
INSTALLED = re.compile(r"[a-z0-9_+@/-]{1,200}")  # a method by name; a file never is


def write_phase(phase: Phase) -> dict[str, Any]:
    """Write a phase down: its name and its values."""
    name = type(phase).__name__.lower()
    if PHASES.get(name) is not type(phase):
        raise PayloadError(f"Only {', '.join(PHASES)} are sent to sites. Got {phase!r}.")
    return {"phase": name, "values": asdict(phase)}  # type: ignore[call-overload]


def read_phase(written: Mapping[str, Any]) -> Phase:
    """Make the phase that was written down."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in written["values"].items()}
    made: Phase = PHASES[written["phase"]](**values)
    return made


def write_method(method: Algorithm) -> dict[str, Any]:
    """Write a method down; of a user's own file, the digest stands for it, and never its text."""
    found = to_record(method)
    return found if found["file"] is None else {**found, "file": own_digest(Path(found["file"]))}


def read_method(message: Message, allowed: Mapping[str, Path]) -> Algorithm:
    """Make the method that a job names, from what is installed here; a file only if it is among the `allowed` ones."""
    with message.guarding():
        record = dict(message.header.about["method"])
        name, file = str(record["name"]), record["file"]
        if not INSTALLED.fullmatch(name):
            raise message.refuse("it must name a method that is installed. It names none")
        if file is not None:
            if file not in allowed:
                raise message.refuse(
                    f"it asks for a method of somebody's own, {name}, whose file is not allowed here",
                    hint="read the file; if you trust it, `allow` it.",
                )
            return from_record({**record, "file": str(allowed[file])})
        return _make_installed(json.dumps(record, sort_keys=True))


@lru_cache(maxsize=64)
def _make_installed(record: str) -> Algorithm:
    """Make a method by its name; the same one comes with every job of a federation."""
    return from_record(json.loads(record))


@dataclass(frozen=True, eq=False)
class Part:
    """Clients of one site and one group, and what each of them is sent by itself."""

    clients: Clients
    unicast: Tree = None


@dataclass(frozen=True, eq=False)
class Order:
    """What a site is asked to do: some phases, one after another, on what was sent once."""

    phases: tuple[Phase, ...]
    method: Algorithm
    round: int
    broadcast: Tree
    parts: tuple[Part, ...]
    stages: tuple[Stage, ...] = ()  # that replies of this federation pass before they leave
    masked: bool = False  # whether they leave under masks only
    neighbours: int = 0  # with how many others a client has masks; 0: with all
    step: Step | None = None  # of a sum under masks
    relay: Tree = None  # what other clients sent for this step

    def write(self) -> tuple[dict[str, Any], Tree]:
        """Return the order as a header and a body hold it."""
        about = {
            "phases": [write_phase(one) for one in self.phases],
            "method": write_method(self.method),
            "clients": [one.clients.tolist() for one in self.parts],
            "stages": write_stages(self.stages),
            "masked": self.masked,
            "neighbours": self.neighbours,
            "masks": None if self.step is None else asdict(self.step),
        }
        tree = {
            "broadcast": self.broadcast,
            "parts": [{"clients": torch.from_numpy(one.clients), "unicast": one.unicast} for one in self.parts],
            "relay": self.relay,
        }
        return about, tree

    @classmethod
    def read(cls, message: Message, layout: Layout, allowed: Mapping[str, Path], own: Clients) -> Order:
        """Read an order, as far as it is for the clients of a site."""
        method = read_method(message, allowed)  # first: its file defines the records that are read next
        tree = message.tree(layout)
        with message.guarding():
            phases = tuple(read_phase(one) for one in message.header.about["phases"])
            parts = [Part(one["clients"].cpu().numpy().astype(np.int64), one["unicast"]) for one in tree["parts"]]
            mine = tuple(one for one in parts if np.isin(one.clients, own).all())
            about = message.header.about
            step = None if about["masks"] is None else read_step(about["masks"])
            return cls(
                phases, method, message.header.round, tree["broadcast"], mine, read_stages(about["stages"]),
                bool(about["masked"]), read_neighbours(about), step, tree["relay"],
            )  # fmt: skip

    def jobs(self, phase: Phase) -> list[AssignedJob]:
        """Return the jobs of a phase, one for each part."""
        return [
            AssignedJob(phase, self.method, None, part.clients, self.round, given=self.broadcast, each=part.unicast)
            for part in self.parts
        ]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of some clients' work in one phase: an update, or sums."""

    clients: Clients
    result: Tree  # of an update, its fields by name; of an evaluation, sums by split; None: nothing
    weight: torch.Tensor | None
    gradients: int
    forms: Mapping[str, Form] = field(default_factory=dict)  # what packed fields were

    @property
    def sent(self) -> Sent:
        """The update as it left its clients."""
        return Sent(self.result, self.weight, self.forms)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a site replies: by phase, what came of its clients' work and who failed; and how many samples it has."""

    outcomes: tuple[tuple[Outcome, ...], ...]
    lost: tuple[Mapping[int, str], ...]
    samples: Mapping[str, list[int]]  # of each of the site's clients, by split

    def without_costs(self) -> Answer:
        """Return the same without how many gradients it took."""
        return replace(self, outcomes=tuple(tuple(replace(one, gradients=0) for one in some) for some in self.outcomes))

    def write(self) -> tuple[dict[str, Any], Tree]:
        """Return the answer as a header and a body hold it."""
        about = {
            "samples": {split: list(map(int, counts)) for split, counts in self.samples.items()},
            "lost": [{str(client): reason for client, reason in one.items()} for one in self.lost],
            "gradients": [[one.gradients for one in some] for some in self.outcomes],
            "forms": [[write_forms(one.forms) for one in some] for some in self.outcomes],
        }
        tree = [
            [{"clients": torch.from_numpy(one.clients), "result": one.result, "weight": one.weight} for one in some]
            for some in self.outcomes
        ]
        return about, tree

    @classmethod
    def read(
        cls, message: Message, layout: Layout, *, phases: Sequence[Phase], method: Algorithm, asked: Sequence[int],
        own: Clients, device: torch.device, stages: Sequence[Stage] = (), seed: int = 0, largest: int = LARGEST_BODY,
    ) -> Answer:  # fmt: skip
        """Read the answer of a site with its `own` clients, of which some were `asked` to do phases of a method.

        What it holds must have passed all `stages`, and not need more than `largest` bytes once it is unpacked.
        """
        tree = message.tree(layout, device)
        with message.guarding():
            about = message.header.about
            samples = {split: [int(one) for one in counts] for split, counts in about["samples"].items()}
            if set(samples) != {"train", "val", "test"} or any(
                len(counts) != len(own) or min(counts) < 0 for counts in samples.values()
            ):
                raise message.refuse("it must say how many samples each client has, by split")
            lost = [{int(client): str(why)[:300] for client, why in one.items()} for one in about["lost"]]
            outcomes, gradients, forms = [], about["gradients"], about["forms"]
            if not len(tree) == len(lost) == len(gradients) == len(forms) == len(phases):
                raise message.refuse(f"it must answer {len(phases)} phase(s)")
            for phase, some, failed, costs, packed in zip(phases, tree, lost, gradients, forms, strict=True):
                found = tuple(
                    Outcome(
                        one["clients"].cpu().numpy().astype(np.int64), one["result"], one["weight"], int(cost),
                        read_forms(message, form, layout, largest),
                    )
                    for one, cost, form in zip(some, costs, packed, strict=True)
                )  # fmt: skip
                there = sorted([*failed, *(int(k) for one in found for k in one.clients)])
                if there != sorted(asked):
                    raise message.refuse(f"it must answer for the clients {[*asked]}, each once. It does for {there}")
                for one in found:
                    _require_fit(message, phase, one, method, stages, seed)
                outcomes.append(found)
            return cls(tuple(outcomes), tuple(lost), samples)


def _require_fit(
    message: Message, phase: Phase, one: Outcome, method: Algorithm, stages: Sequence[Stage], seed: int
) -> None:
    """Raise unless what came of some clients' work has a row for each, is finite, and is what the method declares."""
    result, rows = one.result, len(one.clients)
    if result is not None and not isinstance(result, dict):
        raise message.refuse("what is sent must be fields with names")
    fields: Mapping[str, Any] = result or {}
    if isinstance(phase, Evaluate) and set(fields) != set(phase.on):
        raise message.refuse(f"it must hold the scores of {', '.join(phase.on)}")
    for name, value in fields.items():
        if not isinstance(value, Stack) or (len(value) and value.clients != rows):
            raise message.refuse(f"{name} must have one row for each of {rows} client(s)")
    if one.weight is not None and (not isinstance(one.weight, torch.Tensor) or one.weight.shape != (rows,)):
        raise message.refuse(f"weight must have one number for each of {rows} client(s)")
    if not isinstance(phase, AtTheEnd) and result is not None:
        place = Place(message.header.round, one.clients, method.sends, None, seed)
        fields = require_passed(message, one.sent, stages, place).fields
    for leaf in flatten([dict(fields), one.weight])[0]:
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise message.refuse("it must be finite. It holds numbers that are not")
    if one.weight is not None and bool((one.weight < 0).any()):
        raise message.refuse("weight must not be negative")


def outcome_of(phase: Phase, done: Done[Any], sent: Sent | None = None) -> Outcome:
    """Return what leaves a site of some clients' work; what they keep and what they observed stays.

    Of an update it is what they `sent` once it had passed all stages.
    """
    if sent is not None:
        return Outcome(done.clients, dict(sent.fields), sent.weight, done.gradients, sent.forms)
    result: Tree = done.result
    if isinstance(phase, Finish) and result is not None:  # it is what clients keep: only that there is one leaves
        result = {}
    if isinstance(phase, Evaluate) and any(name in KEPT for stack in done.result.values() for name in stack):
        raise DeployError(
            "Only sums and figures of scores leave a site. The job asks for the scores of single samples.",
        )
    return Outcome(done.clients, result, None, done.gradients)
