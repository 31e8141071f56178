"""Item inference: the biases of a table of items tell which items a user knows.

One step on binary cross-entropy, or on squared error, moves the bias of item i by -rate (s_i - y_i): up for items that
the user knows, down for those that were drawn as negatives. So random negatives do not hide what is known, and rows
that were not touched are exactly 0. An item counts as found if its bias rose by more than half of what the one that
rose most did.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.experiments.audit.messages import Message, play_message
from atoll.experiments.audit.subject import Subject
from atoll.toolbox.client.items import BIAS


@dataclass(frozen=True)
class Known:
    """How well the items of users were found in their first messages."""

    found: float  # share of a user's items that are named, mean over users
    right: float  # share of the named ones that the user knows
    guessing: float  # share of the items in a message that the user knows
    users: int

    def describe(self) -> str:
        """Return the sentence."""
        give = "give" if self.right > self.guessing else "do not give"
        return (
            f"First messages {give} away what users know: by the sign of the biases {100 * self.found:.0f} % of a "
            f"user's items are named, and {100 * self.right:.0f} % of those named are right (mean of {self.users} "
            f"users; guessing among the rows of a message: {100 * self.guessing:.0f} %)."
        )


def biases_of(message: Message, items: int) -> Tensor | None:
    """Return how far the bias of each item moved; None where the message has none."""
    for field in message.fields.values():
        if BIAS in field:
            moved = field[BIAS].detach().double().cpu()
            if "row" not in field:
                return moved
            rows = field["row"].long().cpu()
            real = rows < items  # the others fill up
            return torch.zeros(items, dtype=moved.dtype).index_add(0, rows[real], moved[real])
    return None


def infer_items(subject: Subject, most: int = 20) -> Known | None:
    """Find the items of users in their first messages; None where nothing of a table is sent."""
    items = subject.task.classes
    assert items is not None
    scores = []
    for client in map(int, subject.clients[:most]):
        rows = subject.rows("train", client)
        moved = biases_of(play_message(subject, client, rows), items)
        if moved is None:
            return None
        named = moved > moved.max().clamp(min=torch.finfo(moved.dtype).tiny) / 2
        known = torch.zeros(items, dtype=torch.bool)
        known[torch.from_numpy(np.asarray(subject.labels(rows)))] = True
        both, sent = (named & known).sum(), moved != 0
        scores.append([
            float(both / known.sum()), float(both / named.sum().clamp(min=1)),
            float((sent & known).sum() / sent.sum().clamp(min=1)),
        ])  # fmt: skip
    found, right, guessing = np.mean(scores, axis=0)
    return Known(float(found), float(right), float(guessing), len(scores))
