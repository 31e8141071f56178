"""LocalItems: one step by hand, nothing sent, and unknown items stay where chance puts them."""

import numpy as np
import torch
from ratings import make_ratings, recommend

from atoll.algorithms.local_items import LocalItems


def test_one_step_by_hand():
    """At 0, every pair pulls by half the step size: known items up, drawn ones down, others not at all."""
    kept = {}

    class Watched(LocalItems):
        def local(self, nothing, cohort):
            update = super().local(nothing, cohort)
            kept.update(zip(cohort.clients.tolist(), update.keep["body.bias"], strict=True))
            return update

    task = make_ratings()
    recommend(task, Watched(rate=0.8), 1)
    part = task.splits["train"]
    for client, numbers in kept.items():
        known = task.y[part.order[part.offsets[client] : part.offsets[client + 1]]]
        others = np.setdiff1d(np.arange(task.classes), known)
        torch.testing.assert_close(numbers[known], torch.full((len(known),), 0.4, dtype=torch.float64))
        assert {round(one, 9) for one in numbers[others].tolist()} <= {0.0, -0.4}


def test_nothing_is_sent_and_vectors_are_0():
    report = recommend(make_ratings(), LocalItems(), 3)
    assert not [message for message in report.ledger.messages() if message.direction == "up"]
    assert report.server is None
    assert np.isfinite(report.scores()).all()
