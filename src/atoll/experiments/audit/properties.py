"""Property inference: what first messages tell about their clients beside classes.

The property is the group that was planted for a client; where there are no groups, whether the client's samples are
brighter than those of the median client (the mean of all their values). The attacker reads all first messages and
knows the property of every client but one: it fits a linear rule to the directions of their messages, and applies it
to the one that is left out.

    alpha = (G + r I)^-1 Y,     G the cosines of the messages less their mean, Y the groups as columns of 0 and 1

Reference: Melis, Song, De Cristofaro, Shmatikov. "Exploiting Unintended Feature Leakage in Collaborative Learning."
IEEE S&P 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binomtest

from atoll.experiments.audit.messages import Message, play_message
from atoll.experiments.audit.subject import Subject

Values = NDArray[np.float64]
FEWEST, MOST = 8, 60  # clients
RIDGE = 0.1
SURE = 0.05


@dataclass(frozen=True)
class Property:
    """How often a property of a client was found in its first message."""

    name: str
    right: int
    clients: int
    guessing: float  # the share of the most frequent value
    chance: float  # p: that guessing is right as often

    def describe(self) -> str:
        """Say what was found in a sentence."""
        tells = "tell" if self.chance < SURE else "do not tell"
        return (
            f"First messages {tells} {self.name}: {self.right} of {self.clients} are found by somebody who knows those "
            f"of all other clients (guessing {self.guessing:.0%}, p = {self.chance:.2g})."
        )


def infer_properties(subject: Subject) -> Property | None:
    """Seek a property of clients in their first messages; None where it cannot be tried."""
    clients = [int(client) for client in subject.clients[:MOST] if len(subject.rows("train", int(client)))]
    if len(clients) < FEWEST:
        return None
    name, values = take_property(subject, clients)
    if len(np.unique(values)) < 2:
        return None
    rows = [flatten_message(play_message(subject, client, subject.rows("train", client))) for client in clients]
    if not len(rows[0]):
        return None
    right = int((leave_one_out(np.stack(rows), values) == values).sum())
    guessing = float(np.unique(values, return_counts=True)[1].max() / len(values))
    chance = float(binomtest(right, len(values), guessing, alternative="greater").pvalue)
    return Property(name, right, len(values), guessing, chance)


def take_property(subject: Subject, clients: list[int]) -> tuple[str, NDArray[np.int64]]:
    """Return what is sought, in words, and its value for each client."""
    groups = subject.task.groups
    if groups is not None and len(np.unique(groups[clients])) > 1:
        return "the planted group of a client", np.asarray(groups[clients], dtype=np.int64)
    means = np.array([
        float(subject.task.x[torch.from_numpy(subject.rows("train", client))].double().mean()) for client in clients
    ])  # fmt: skip
    return "whether a client's samples are brighter than the median client's", (means > np.median(means)).astype(
        np.int64
    )


def flatten_message(message: Message) -> Values:
    """Return all floating-point numbers of a message as one vector: of the change of the model, if there is one."""
    delta = message.delta
    fields = [delta] if delta is not None else [*message.fields.values()]
    parts = [leaf.detach().double().flatten().cpu().numpy() for one in fields for leaf in one.floating.values()]
    return np.concatenate([np.empty(0), *parts])


def leave_one_out(rows: Values, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the value of each row as a linear rule has it that was fitted to all others."""
    rows = rows - rows.mean(0)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(length > 0, length, 1.0)
    cosines, kinds = rows @ rows.T, np.unique(values)
    ones = (values[:, None] == kinds).astype(np.float64)
    found = []
    for out in range(len(rows)):
        others = np.arange(len(rows)) != out
        inner = cosines[np.ix_(others, others)]
        goal = ones[others]
        alpha = np.linalg.solve(inner + RIDGE * np.eye(len(inner)), goal - goal.mean(0))
        found.append(kinds[int(np.argmax(cosines[out, others] @ alpha + goal.mean(0)))])
    return np.array(found)
