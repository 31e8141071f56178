"""An audit of a promise of client-level privacy in one run: a lower bound of epsilon beside the promised one.

The federation is run once more with M canary clients added. Each has a random direction u of norm 1, and is in with
probability 1/2; whenever a round asks one that is in, it sends C u, the largest message that passes the clip. Whoever
sees the model's way from beginning to end scores every canary by <w_T - w_0, u>, and guesses "in" for the highest
scores and "out" for the lowest. How many guesses are right bounds epsilon from below, with an error of at most 5 %.

A bound far below the promise is no flaw of the promise: few canaries and rounds cannot show more. A bound above it
says that the mechanism is broken.

References: Steinke, Nasr, Jagielski, NeurIPS 2023 (one run); Andrew et al., ICLR 2024 (canary clients).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.batches import Split, find_offsets
from atoll.data.task import Task
from atoll.experiments.audit.measures import LEVEL, lower_bound
from atoll.experiments.audit.subject import Subject
from atoll.federation.loop import federate
from atoll.kernel.errors import PrivacyError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.protect.client_level import ClientPrivacy
from atoll.protect.local_level import LocalPrivacy
from atoll.protect.stages import Place, Sent, Stage
from atoll.protect.words import parse_privacy

FEWEST = 10
REHEARSALS = 20
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of canaries that are guessed


@dataclass(frozen=True)
class Chirp(Stage):
    """Canary clients, those from number `first` on, send a direction of their own, of norm `norm`."""

    first: int
    norm: float
    seed: int

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Replace what canaries send; see `Stage.apply`."""
        rows = np.flatnonzero(place.clients >= self.first)
        if not len(rows):
            return sent
        fields = {name: dict(value.items()) for name, value in sent.fields.items()}
        for row in rows:
            shapes = {(name, leaf): value[row] for name, one in fields.items() for leaf, value in one.items()}
            for (name, leaf), part in draw_direction(self.seed, int(place.clients[row]), shapes).items():
                value = fields[name][leaf].clone()
                value[row] = self.norm * part.to(value)
                fields[name][leaf] = value
        made = {name: Stack(fields[name], sent.fields[name].layout) for name in fields}
        return sent._replace(fields=made)


def draw_direction(seed: int, canary: int, like: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """Draw a canary's direction: one vector of norm 1 over all floating-point leaves; other leaves are 0."""
    drawn = {
        key: torch.from_numpy(generator(seed, "canary", canary, *key).standard_normal(tuple(leaf.shape)))
        if leaf.is_floating_point()
        else torch.zeros_like(leaf)
        for key, leaf in like.items()
    }
    length = math.sqrt(sum(float(part.double().square().sum()) for part in drawn.values()))
    return {key: part / length if part.is_floating_point() else part for key, part in drawn.items()}


@dataclass(frozen=True)
class OneRun:
    """What canaries showed."""

    canaries: int
    guesses: int
    right: int
    delta: float
    lower: float
    promised: float
    level: float = LEVEL
    unit: str = "client"  # or sample: what a canary is

    @property
    def holds(self) -> bool:
        """Whether the promise is not refuted."""
        return self.lower <= self.promised

    def describe(self) -> str:
        """Say what was found in a sentence."""
        found = (
            f"With {self.canaries} canary {self.unit}s, {self.right} of {self.guesses} guesses were right, so epsilon "
            f"is at least {self.lower:.2f} at delta {self.delta:g} (error {self.level:.0%}); promised is "
            f"{self.promised:.2f}."
        )
        return found if self.holds else f"{found} The promise does not hold: the mechanism leaks more than it says."


def add_canaries(task: Task, canaries: int) -> Task:
    """Return the task with clients that have one sample of client 0; what they train is never sent."""
    splits = {}
    for name, split in task.splits.items():
        each = 1 if name == "train" else 0
        sizes = np.concatenate([np.diff(split.offsets), np.full(canaries, each, dtype=np.int64)])
        extra = task.splits["train"].order[:1].repeat(canaries * each)
        splits[name] = Split(torch.cat([split.order, extra.to(split.order)]), find_offsets(sizes))
    return replace(task, splits=splits, names=None, groups=None, scaling=None, unseen=None)


def require_promise(subject: Subject, canaries: int) -> ClientPrivacy:
    """Return what the run promises; raise where canaries cannot check it."""
    settings = subject.live.settings
    privacy = settings.privacy
    if isinstance(privacy, LocalPrivacy):
        raise PrivacyError(
            "Canary clients are sought in what the server releases. Under local privacy every message has noise of its "
            "own, and their sum shows next to nothing.",
            hint="leave out `canaries`; membership, inversion and labels attack single messages.",
        )
    if not isinstance(privacy, ClientPrivacy):
        raise PrivacyError(
            "Canaries check a promise of privacy. This run makes none.",
            hint="run it with dp='client:epsilon=4' or with +dpsgd, or leave out `canaries`.",
        )
    if privacy.quantile is not None:
        raise PrivacyError(
            "Canaries send the largest message that passes the clip, which must be known before. This run's adapts.",
            hint="audit a run with a number as `clip`.",
        )
    if canaries < FEWEST:
        raise PrivacyError(f"`canaries` must be at least {FEWEST}: fewer show nothing. Got {canaries}.")
    if settings.compress != "none":
        raise PrivacyError(
            f"Canaries send a direction of their own, and cannot be packed by `{settings.compress}`.",
            hint="audit a run without `compress`.",
        )
    if not isinstance(subject.live.server, Params):
        raise PrivacyError(
            f"Canaries read the way of one shared model. The server of {subject.report.label} keeps something else."
        )
    return privacy


def audit_promise(subject: Subject, canaries: int) -> OneRun:
    """Run the federation once more with canary clients; return what they show."""
    settings, task, method = subject.live.settings, subject.task, subject.report.algorithm
    privacy = require_promise(subject, canaries)
    share = settings.share_asked(task.clients)
    within = generator(subject.seed, "canaries in").random(canaries) < 0.5
    asked = replace(settings, evaluation="none", memory="auto", dp=_with_noise(settings.dp, share, settings.rounds))
    made = federate(
        add_canaries(task, canaries), method, settings=asked, engine=subject.live.engine, progress=False,
        stages=[Chirp(task.clients, privacy.clip, subject.seed)],
        faults=functools.partial(_lose, first=task.clients, within=within),
    )  # fmt: skip
    scores = score_canaries(subject, made.server, task.clients, canaries)
    noise = privacy.resolve(share, settings.rounds).noise
    assert noise is not None
    guesses = choose_guesses(canaries, share * math.sqrt(settings.rounds) / noise, privacy.delta, subject.seed)
    right = count_right(scores, within, guesses // 2)
    promised = privacy.spent(share, settings.rounds)["pld"]
    return OneRun(
        canaries, guesses, right, privacy.delta, lower_bound(canaries, guesses, right, privacy.delta), promised
    )


def _with_noise(words: str, share: float, rounds: int) -> str:
    """Return the words of a promise by its noise, which must not depend on how many clients there are."""
    found = parse_privacy(words)
    assert isinstance(found, ClientPrivacy)
    made = found.resolve(share, rounds)
    public = f",public={made.public}" if made.public else ""
    return f"client:noise={made.noise!r},delta={made.delta!r},clip={made.clip!r}{public}"


def _lose(round: int, clients: NDArray[np.int64], *, first: int, within: NDArray[np.bool_]) -> NDArray[np.bool_]:  # noqa: ARG001
    """Return who is lost: canaries that are out."""
    lost = np.zeros(len(clients), dtype=bool)
    theirs = clients >= first
    lost[theirs] = ~within[clients[theirs] - first]
    return lost


def score_canaries(subject: Subject, server: object, first: int, canaries: int) -> NDArray[np.float64]:
    """Return <w_T - w_0, u> for every canary."""
    assert isinstance(server, Params)
    initial = subject.method.networks(subject.live.population.facts)[-1].initial
    moves = {
        ("delta", name): (leaf - initial[name].to(leaf)).double().cpu()
        for name, leaf in server.items()
        if leaf.is_floating_point()
    }
    scores = []
    for canary in range(first, first + canaries):
        direction = draw_direction(subject.seed, canary, moves)
        scores.append(sum(float((moves[key] * part).sum()) for key, part in direction.items()))
    return np.array(scores)


def choose_guesses(canaries: int, mu: float, delta: float, seed: int) -> int:
    """Choose how many guesses to make, before a score is seen: as many as bound epsilon best in a rehearsal.

    In it, scores are normal, and those of canaries that are in lie mu higher: what the mechanism's noise leads to
    expect.
    """
    rng = generator(seed, "rehearsal of canaries")
    rehearsals = [(rng.random(canaries) < 0.5, rng.standard_normal(canaries)) for _ in range(REHEARSALS)]
    halves = sorted({max(1, round(canaries * share / 2)) for share in SHARES})

    def bound(half: int) -> float:
        rights = [count_right(noise + mu * within, within, half) for within, noise in rehearsals]
        return float(np.mean([lower_bound(canaries, 2 * half, right, delta) for right in rights]))

    return 2 * max(halves, key=bound)


def count_right(scores: NDArray[np.float64], within: NDArray[np.bool_], half: int) -> int:
    """Guess "in" for the highest scores and "out" for the lowest, `half` each; return how many guesses are right."""
    order = np.argsort(scores, kind="stable")
    return int((~within[order[:half]]).sum() + within[order[-half:]].sum())
