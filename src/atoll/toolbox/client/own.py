"""What clients have before they have trained a model of their own."""

from __future__ import annotations

from collections.abc import Callable

from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Stack
from atoll.toolbox.client.statistics import refresh_statistics


def own_or_sent(cohort: Cohort, sent: Callable[[], Stack]) -> Stack:
    """Return each client's own model, or what it would be sent if it has kept none.

    `sent()` gives the trained leaves, and is called only if some client needs them. BatchNorm's statistics are then
    those of the client's own samples.
    """
    own = cohort.recall(default=cohort.initial)
    if cohort.has_kept.all():
        return own
    return own.where(cohort.has_kept, refresh_statistics(cohort, cohort.stacked(cohort.initial) | sent()))
