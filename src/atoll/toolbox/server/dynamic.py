"""Dynamic regularisation: the server of FedDyn, and of methods that train otherwise but are corrected by the same h.

    h <- h - alpha / N sum_k (theta_k - w),        w <- mean_k theta_k - h / alpha

The sum is over those who replied, the mean too; h is the mean of all clients' -q_k, whoever is absent or late.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.kernel.algorithm import Replies
from atoll.kernel.params import Params
from atoll.kernel.record import record
from atoll.kernel.task import Facts


@record
class Dynamic:
    """The server's state."""

    w: Params
    h: Params
    clients: int  # N


def begin(task: Facts) -> Dynamic:
    """Return the state before the first round."""
    w = task.network.initial
    return Dynamic(w, w.zeros(), task.clients)


def move(state: Dynamic, replies: Replies, alpha: float) -> Dynamic:
    """Return the state after a round; all replies count alike."""
    delta = replies.mean("delta")
    h = state.h - replies.sum("delta").trained * (alpha / state.clients)
    return replace(state, w=state.w + delta - h / alpha, h=h)
