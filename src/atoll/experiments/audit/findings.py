"""`audit`: attack a finished run, and say what was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.experiments.audit.canaries import OneRun, audit_promise, require_promise
from atoll.experiments.audit.contribution import Contribution, require_deltas, value_clients
from atoll.experiments.audit.inversion import Picture, count_small_classes, invert
from atoll.experiments.audit.items import Known, infer_items
from atoll.experiments.audit.labels import Labelled, infer_labels
from atoll.experiments.audit.membership import Attacked, Inside, infer_membership
from atoll.experiments.audit.page import render_page
from atoll.experiments.audit.properties import Property, infer_properties
from atoll.experiments.audit.sample_canaries import audit_samples, require_sample_promise
from atoll.experiments.audit.subject import Models, Subject, describe_method
from atoll.federation.report import Report
from atoll.kernel.errors import AtollError, HyperparameterError, PrivacyError, RunError, first_line, unknown
from atoll.records.files import write_record

ATTACKS = ("membership", "uploads", "inversion", "labels", "properties")
OF_MESSAGES = {"inversion", "labels", "properties"}
Notify = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Audit:
    """What attacks on a run found."""

    about: dict[str, Any]
    membership: list[Attacked] = field(default_factory=list)
    promise: OneRun | None = None
    pictures: list[Picture] = field(default_factory=list)
    labels: Labelled | None = None
    properties: Property | None = None
    contribution: Contribution | None = None
    notes: list[str] = field(default_factory=list)  # what could not be tried, and why
    items: Known | None = None  # of recommenders, whose classes are items
    ceiling: float | None = None  # the largest TPR at 1 % FPR that the promise allows

    @property
    def sentences(self) -> list[str]:
        """A sentence for each finding."""
        found = [_describe_membership(one, self.ceiling) for one in self.membership]
        found += [] if self.promise is None else [self.promise.describe()]
        found += _describe_pictures(self.pictures)
        found += [] if self.labels is None else [_describe_labels(self.labels)]
        found += [] if self.items is None else [self.items.describe()]
        found += [] if self.properties is None else [self.properties.describe()]
        found += [] if self.contribution is None else [self.contribution.describe()]
        return [*found, *self.notes]

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
            "inversion": [
                {name: value for name, value in vars(one).items() if name not in ("found", "true")}
                | {"succeeds": one.succeeds}
                for one in self.pictures
            ],
            "labels": None if self.labels is None else asdict(self.labels),
            "items": None if self.items is None else asdict(self.items),
            "properties": None if self.properties is None else asdict(self.properties),
            "contribution": None if self.contribution is None else self.contribution.as_json(),
            "sentences": self.sentences,
        }

    def save(self, folder: Path | str) -> dict[str, Path]:
        """Write audit.json and audit.html to a folder; return where they are."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = {"figures": folder / "audit.json", "page": folder / "audit.html"}
        write_record(paths["figures"], self.figures(), indent=1)
        paths["page"].write_text(render_page(self), encoding="utf-8")
        return paths


def audit(
    run: Report | Path | str,
    *,
    attacks: Sequence[str] = ATTACKS,
    references: int = 2,
    canaries: int = 0,
    contribution: bool = False,
    clients: Sequence[int | str] | None = None,
    trust: bool = False,
    on_step: Notify | None = None,
) -> Audit:
    """Attack a finished run, given as its report or its folder, and return what was found.

    Membership inference trains `references` shadow federations, each as long as the run, an even number; with 0, other
    clients' personal models are its references. With `canaries`, the run's promise of privacy is checked in one more
    run. With `contribution`, the run is played once more, and every client's replies are valued. `clients` are
    audited, by name or number; else all, or a hundred of more. `on_step` is told what is begun.
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
    about_samples = bool(subject.report.sample_epsilons) and subject.live.settings.dp == "none"
    if canaries and about_samples:  # what cannot be done is said before anything is trained
        require_sample_promise(subject, canaries)
    elif canaries:
        require_promise(subject, canaries)
    if contribution:
        require_deltas(subject)
    tell = on_step or (lambda _: None)
    membership, notes = list[Attacked](), list[str]()
    if {"membership", "uploads"} & {*attacks}:
        membership = _infer(subject, attacks, references, notes, tell)
    promise = None
    if canaries:
        tell("run with canaries")
        promise = audit_samples(subject, canaries) if about_samples else audit_promise(subject, canaries)
    pictures, labels, items, properties, refused = list[Picture](), None, None, None, list[AtollError]()
    try:
        if "inversion" in attacks:
            tell("inversion")
            pictures = _rebuild(subject, notes)
        if "labels" in attacks:
            tell("labels")
            labels = None if subject.task.recommends else infer_labels(subject)
            items = infer_items(subject) if subject.task.recommends else None
            notes += [_explain_hidden(subject)] * (labels is None and items is None)
        if "properties" in attacks:
            tell("properties")
            properties = infer_properties(subject)
            notes += [PROPERTIES_HIDDEN] * (properties is None)
    except (PrivacyError, RunError) as error:
        if set(attacks) <= OF_MESSAGES and promise is None and not contribution:
            raise  # nothing else was asked for
        refused.append(error)
    notes += [first_line(error) for error in refused]
    valued = None
    if contribution:
        tell("contributions")
        valued = value_clients(subject)
    return Audit(
        describe_method(subject), membership, promise, pictures, labels, properties, valued, notes,
        items, _find_ceiling(subject),
    )  # fmt: skip


PROPERTIES_HIDDEN = "No property was sought in messages: that takes 8 clients or more, of two kinds, that send numbers."


def _explain_hidden(subject: Subject) -> str:
    return (
        f"{subject.report.label} sends neither a head nor label counts, so labels were not sought; what else it sends "
        "may still tell."
    )


def _rebuild(subject: Subject, notes: list[str]) -> list[Picture]:
    if not subject.task.x.is_floating_point():
        notes.append("Inversion was not tried: samples are no continuous numbers.")
        return []
    pictures, small = invert(subject), count_small_classes(subject)
    if small is not None:
        one, two, three = small
        notes.append(
            f"{subject.report.label} sends class means: {one} of them are of one sample, and so its features; {two} "
            f"are of two samples, {three} of three."
        )
    if not pictures:
        notes.append(f"Inversion was not tried: {subject.report.label} sends no model whose change could be followed.")
    return pictures


def count_steps(attacks: Sequence[str], references: int, canaries: int, *, contribution: bool = False) -> int:
    """Count what `on_step` is told."""
    of_models = {"membership", "uploads"} & {*attacks}
    return bool(of_models) * references + len(of_models) + bool(canaries) + contribution + len(OF_MESSAGES & {*attacks})


def _infer(subject: Subject, attacks: Sequence[str], references: int, notes: list[str], tell: Notify) -> list[Attacked]:
    if not subject.sides:
        notes.append("Membership was not tried: no client has training and test samples of one class.")
        return []
    shadows = []
    for number in range(references):
        tell(f"shadow federation {number + 1} of {references}")
        shadows.append(subject.shadow(number, uploads="uploads" in attacks))
    found = list[Attacked]()
    if "membership" in attacks:
        tell("membership inference")
        found += _infer_from_models(subject, shadows, notes)
    if "uploads" in attacks:
        tell("membership inference from uploads")
        found += _infer_from_uploads(subject, shadows, notes)
    return found


def _infer_from_uploads(subject: Subject, shadows: Sequence[tuple[Models, Inside]], notes: list[str]) -> list[Attacked]:
    secure = subject.live.settings.secure
    if secure != "none":
        notes.append(f"No upload was attacked: under secure={secure!r} nobody has single messages.")
        return []
    if not subject.with_uploads.uploaded:
        notes.append(f"No upload was attacked: a message of {subject.report.label} does not hold a whole model.")
        return []
    return infer_membership(subject, "uploaded", shadows)


def _infer_from_models(subject: Subject, shadows: Sequence[tuple[Models, Inside]], notes: list[str]) -> list[Attacked]:
    models, found = subject.models, list[Attacked]()
    if models.shared is None:
        notes.append(f"{subject.report.label} has no shared model, so only personal ones were attacked.")
    elif not models.personal:
        notes.append(f"Clients of {subject.report.label} deploy the shared model, so there are no personal ones.")
    for kind, there in (("shared", models.shared is not None), ("personal", bool(models.personal))):
        found += infer_membership(subject, kind, shadows) if there else []
    return found


def _find_ceiling(subject: Subject) -> float | None:
    privacy = subject.live.settings.privacy
    if privacy is None:
        return None
    settings = subject.live.settings
    epsilon = privacy.spent(settings.share_asked(subject.task.clients), settings.rounds)["pld"]
    return min(1.0, math.exp(min(epsilon, 50)) * 0.01 + privacy.delta)


def _describe_pictures(pictures: Sequence[Picture]) -> list[str]:
    found = []
    for attack, samples in dict.fromkeys((one.attack, one.samples) for one in pictures):
        mine = [one for one in pictures if (one.attack, one.samples) == (attack, samples)]
        right = [one for one in mine if one.succeeds]
        middle, baseline = (float(np.median([getattr(one, name) for one in mine])) for name in ("psnr", "baseline"))
        asked = [one.label for one in mine if one.label is not None]
        alike = [one.ssim for one in mine if one.ssim is not None]
        shape = f", SSIM {np.median(alike):.2f}" if alike else ""
        known = "" if not asked else " Its class was" if samples == 1 else " Their classes were"
        found.append(
            f"{WAYS[attack]} of a message made of {samples} sample{'s' * (samples > 1)} in {mine[0].steps} "
            f"step{'s' * (mine[0].steps > 1)}: {len(right)} of {len(mine)} samples are rebuilt better than by the mean "
            f"sample of other clients (median {middle:.1f} dB{shape}; the mean sample {baseline:.1f} dB)."
            + (f"{known} found in {sum(asked)} of {len(asked)} cases." if asked else "")
        )
    return found


def _describe_labels(labels: Labelled) -> str:
    better = "give" if labels.distance < labels.guessing else "do not give"
    return (
        f"First messages {better} class shares away: those found differ from the true ones by {labels.distance:.2f} "
        f"(half the L1 distance, mean of {labels.clients} clients), the shares of all clients together by "
        f"{labels.guessing:.2f}; best known is client {labels.worst}, {labels.least:.2f}."
    )


WAYS = {
    "first layer": "From the first layer",
    "cosine": "By following the update",
    "features": "From class means and the model beside them",
}
WHOSE = {
    "shared": "the shared model",
    "personal": "personal models",
    "uploaded": "what the server rebuilds from each client's last message",
}
NAMES = {"rmia": "RMIA", "calibrated": "the calibrated loss", "loss": "the loss alone", "lira": "LiRA"}


def _describe_membership(one: Attacked, ceiling: float | None) -> str:
    apart = "tells members apart" if one.auc.low > 0.5 else "cannot tell members apart from others"
    found = (
        f"On {WHOSE[one.model]} {NAMES[one.attack]} {apart}: AUC "
        f"{one.auc}, at 1 % false alarms {100 * one.tpr.value:.1f} % of members are found "
        f"[{100 * one.tpr.low:.1f}, {100 * one.tpr.high:.1f}] (guessing: 0.5 and 1 %); mean over clients "
        f"{one.mean:.3f}, most for client {one.client} {one.most:.3f}; {one.members} members."
    )
    if one.model == "shared" and ceiling is not None and ceiling < 1:
        found += f" The promise allows at most {100 * ceiling:.1f} %."
    return found
