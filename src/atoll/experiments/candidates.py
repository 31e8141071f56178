"""Which methods are worth a race on a federation: from what its training samples show, and what may leave a client.

Rules of thumb only cut the list short; which method is good is decided by the race. Each rule says on what evidence
it rests: tables of this project, or a paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from atoll.data.task import Task
from atoll.kernel.algorithm import Algorithm

ALWAYS = ("local", "fedavg", "fedavg-ft", "ditto")
ONE_SHOT = ("oneshot-avg", "ensemble", "oneshot-margins", "fafi/margins")
CLUSTERS = "ifca:starts=kmeans++,restarts=10"  # good starts find planted groups, random ones often do not
ALIKE, SKEWED = 0.1, 0.3  # mean Jensen-Shannon divergence of labels, in bits
LARGE = 100  # training samples of the median client
CLOSE, FAR, CONCEPT = 0.02, -0.02, -0.10  # FedAvg minus Local on validation samples, as a share of 1


@dataclass(frozen=True)
class Constraints:
    """What a federation allows."""

    one_shot: bool = False  # clients upload once
    individual_updates: bool = True  # the server may see what a single client sends
    max_mb: float | None = None  # what a client may send and receive in all rounds

    def forbids(self, method: Algorithm) -> str | None:
        """Say why a method is not allowed; None if it is."""
        if not self.individual_updates and not method.sums_suffice:
            return "its server needs what single clients send"
        return None


@dataclass(frozen=True)
class Look:
    """A federation in a few numbers, from training samples alone."""

    clients: int
    samples: float  # of the median client
    divergence: float | None  # of labels, in bits
    shift: float | None  # distance of a client's mean sample from that of all, times sqrt(samples): chance gives 1
    lead: float | None = None  # of FedAvg over Local, as a share of 1 or of Local's error
    public: bool = False

    @classmethod
    def at(cls, task: Task) -> Look:
        """Look at the clients of a task."""
        found = task.statistics
        shift = None
        if found.feature_distance is not None:
            shift = float(np.nanmedian(found.feature_distance * np.sqrt(found.samples)))
        divergence = None if found.divergence is None else float(np.nanmean(found.divergence))
        return cls(task.clients, float(np.median(found.samples)), divergence, shift, public=task.public is not None)

    @property
    def shared(self) -> list[str]:
        """What clients of a real federation would have to share for it."""
        listed = ["how many training samples each client has (sent as a weight anyway)"]
        if self.divergence is not None:
            listed.append("label counts as a secure sum, then each client's divergence from it, as a secure sum")
        if self.shift is not None:
            listed.append("sums of features and of their squares, then each client's distance, as secure sums")
        return [*listed, "validation scores of every client, as sums of scores and their squares"]

    @property
    def sentence(self) -> str:
        """What was seen, in words."""
        words = [f"{self.clients} clients with {self.samples:g} training samples each (median)"]
        if self.divergence is not None:
            kind = "much alike" if self.divergence < ALIKE else "different" if self.divergence < SKEWED else "skewed"
            words.append(f"labels {kind} ({self.divergence:.2f} bits)")
        if self.shift is not None:
            words.append(f"samples {'shifted' if self.shift > 2 else 'alike'} ({self.shift:.1f} times chance)")
        if self.lead is not None:
            words.append(f"FedAvg {100 * self.lead:+.1f} points against training alone after a third of the rounds")
        return "; ".join(words) + "."


def propose(look: Look, constraints: Constraints) -> dict[str, str]:
    """Return the methods to race beside Local and FedAvg, with the reason for each."""
    if constraints.one_shot:
        return dict.fromkeys(ONE_SHOT, "one upload")
    found = dict.fromkeys(ALWAYS[2:], "always")
    for names, reason in _rules(look):
        for name in names:
            found.setdefault(name, reason)
    if len(found) == len(ALWAYS[2:]) + 1:
        found |= dict.fromkeys(("fedper", "fedrod", "apfl"), "no sign of anything special")
    return found


def _rules(look: Look) -> Iterator[tuple[tuple[str, ...], str]]:
    labels, lead = look.divergence, look.lead
    yield ("fedrep",), "a head of its own, trained long, is often best"
    skewed, alike = labels is not None and labels > SKEWED, labels is not None and labels < ALIKE
    if lead is not None and lead > CLOSE and alike:
        yield ("fedprox", "perfedavg", "fedrod"), "one model serves all"
    if lead is not None and lead < FAR and skewed and look.samples >= LARGE:
        yield ("fedrep", "fedper", "pfedme"), "skewed labels, enough samples each"
    if look.samples < LARGE:
        yield ("fedrod", "knn-per", "apfl"), "few samples each"
    if look.shift is not None and look.shift > 2 and not skewed:
        yield ("fedora", CLUSTERS, "fedbn"), "samples differ, labels do not"
    if lead is not None and lead < CONCEPT and (alike or labels is None):
        yield ("fedper", "fedora:similarity=loss", CLUSTERS, "cfl"), "the same samples may mean different things"
    if skewed or labels is None:
        yield ("fedper",), "clients differ in their targets"
    if look.public:
        yield ("feddf",), "public samples"


def normalise_lead(fedavg: float, local: float, *, higher_is_better: bool, share: bool) -> float | None:
    """Return FedAvg's lead over Local as a share of 1; of an error, as a share of Local's."""
    if not (math.isfinite(fedavg) and math.isfinite(local)):
        return None
    if share:
        return (fedavg - local) * (1 if higher_is_better else -1)
    return (local - fedavg) / abs(local) if not higher_is_better and local else None
