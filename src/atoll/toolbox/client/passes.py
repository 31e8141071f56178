"""Passes over samples that take no gradient: these need not keep to the batches of training."""

from __future__ import annotations

from atoll.kernel.cohort import Cohort, even_batch

AT_ONCE = 64  # samples; what a client lacks of them is filled up


def many_at_once(cohort: Cohort, split: str = "train") -> int:
    """Return how many samples of a split to look at together: all that a client has, or an even part of too many."""
    return even_batch(cohort.task.largest[split], AT_ONCE)
