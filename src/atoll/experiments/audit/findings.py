"""`audit`: attack a finished run, and say what was found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.experiments.audit.canaries import OneRun, audit_promise
from atoll.experiments.audit.membership import Attacked, infer_membership
from atoll.experiments.audit.page import render_page
from atoll.experiments.audit.subject import Subject, describe_method
from atoll.kernel.errors import HyperparameterError, unknown
from atoll.privacy import parse_privacy
from atoll.records.report import Report

ATTACKS = ("membership",)
Notify = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Audit:
    """What attacks on a run found."""

    about: dict[str, Any]
    membership: list[Attacked] = field(default_factory=list)
    promise: OneRun | None = None
    notes: list[str] = field(default_factory=list)  # what could not be tried, and why
    ceiling: float | None = None  # the largest TPR at 1 % FPR that the promise allows

    @property
    def sentences(self) -> list[str]:
        """A sentence for each finding."""
        found = [_describe_membership(one, self.ceiling) for one in self.membership]
        return [*found, *([] if self.promise is None else [self.promise.describe()]), *self.notes]

    @property
    def holds(self) -> bool:
        """Whether no promise was refuted."""
        return self.promise is None or self.promise.holds

    def figures(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        return {
            "about": self.about,
            "membership": [asdict(one) for one in self.membership],
            "promise": None if self.promise is None else asdict(self.promise) | {"holds": self.promise.holds},
            "sentences": self.sentences,
        }

    def save(self, folder: Path | str) -> dict[str, Path]:
        """Write audit.json and audit.html to a folder; return where they are."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = {"figures": folder / "audit.json", "page": folder / "audit.html"}
        paths["figures"].write_text(json.dumps(self.figures(), indent=1, allow_nan=True) + "\n", encoding="utf-8")
        paths["page"].write_text(render_page(self), encoding="utf-8")
        return paths


def audit(
    run: Report | Path | str,
    *,
    attacks: Sequence[str] = ATTACKS,
    references: int = 2,
    canaries: int = 0,
    clients: Sequence[int | str] | None = None,
    trust: bool = False,
    on_step: Notify | None = None,
) -> Audit:
    """Attack a finished run, given as its report or its folder, and return what was found.

    Membership inference trains `references` shadow federations, each as long as the run, an even number; with 0, other
    clients' personal models are its references. With `canaries`, the run's promise of privacy is checked in one more
    run. `clients` are audited, by name or number; else all, or a hundred of more. `on_step` is told what is begun.
    """
    for attack in attacks:
        if attack not in ATTACKS:
            raise unknown("attack", attack, ATTACKS)
    if references < 0 or references % 2:
        raise HyperparameterError(
            f"`references` must be an even number of at least 0: they come in pairs, and what one has seen the other "
            f"has not. Got {references}."
        )
    subject = Subject.open(run, clients=clients, trust=trust)
    tell = on_step or (lambda _: None)
    membership, notes = list[Attacked](), list[str]()
    if "membership" in attacks:
        membership = _infer(subject, references, notes, tell)
    promise = None
    if canaries:
        tell("run with canaries")
        promise = audit_promise(subject, canaries)
    return Audit(describe_method(subject), membership, promise, notes, _find_ceiling(subject))


def count_steps(attacks: Sequence[str], references: int, canaries: int) -> int:
    """Count what `on_step` is told."""
    return ("membership" in attacks) * (references + 1) + bool(canaries) + len(set(attacks) - {"membership"})


def _infer(subject: Subject, references: int, notes: list[str], tell: Notify) -> list[Attacked]:
    if not subject.sides:
        notes.append("Membership was not tried: no client has training and test samples of one class.")
        return []
    shadows = []
    for number in range(references):
        tell(f"shadow federation {number + 1} of {references}")
        shadows.append(subject.shadow(number))
    tell("membership inference")
    models, found = subject.models, []
    if models.shared is None:
        notes.append(f"{subject.report.label} has no shared model, so only personal ones were attacked.")
    elif not models.personal:
        notes.append(f"Clients of {subject.report.label} deploy the shared model, so there are no personal ones.")
    for kind, there in (("shared", models.shared is not None), ("personal", bool(models.personal))):
        found += infer_membership(subject, kind, shadows) if there else []
    return found


def _find_ceiling(subject: Subject) -> float | None:
    privacy = parse_privacy(subject.live.settings.dp)
    if privacy is None:
        return None
    settings = subject.live.settings
    epsilon = privacy.spent(settings.share_asked(subject.task.clients), settings.rounds)["pld"]
    return min(1.0, math.exp(min(epsilon, 50)) * 0.01 + privacy.delta)


NAMES = {"rmia": "RMIA", "calibrated": "the calibrated loss", "loss": "the loss alone", "lira": "LiRA"}


def _describe_membership(one: Attacked, ceiling: float | None) -> str:
    apart = "tells members apart" if one.auc.low > 0.5 else "cannot tell members apart from others"
    found = (
        f"On {'the shared model' if one.model == 'shared' else 'personal models'} {NAMES[one.attack]} {apart}: AUC "
        f"{one.auc}, at 1 % false alarms {100 * one.tpr.value:.1f} % of members are found "
        f"[{100 * one.tpr.low:.1f}, {100 * one.tpr.high:.1f}] (guessing: 0.5 and 1 %); mean over clients "
        f"{one.mean:.3f}, most for client {one.client} {one.most:.3f}; {one.members} members."
    )
    if one.model == "shared" and ceiling is not None and ceiling < 1:
        found += f" The promise allows at most {100 * ceiling:.1f} %."
    return found
