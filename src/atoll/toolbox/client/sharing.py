"""Models of which a part is private: the rest is shared, and both are trained together."""

from __future__ import annotations

import logging
from typing import Literal

from atoll.kernel.algorithm import Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Part, Stack
from atoll.toolbox.client.sgd import sgd
from atoll.toolbox.client.statistics import PASSES, refresh_statistics

Patch = Literal["yb", "us", "usyb"]  # of batch-norm layers: scales and shifts, running statistics, or both

log = logging.getLogger("atoll.toolbox.client")


def say_what_is_shared(method: object, model: Params, private: Part, otherwise: str = "FedAvg") -> None:
    """Say aloud when a private part leaves all or nothing to share; `all` and `none` say it themselves."""
    name, leaves = type(method).__name__, len(model.part(private))
    if leaves == len(model) and private != "all":
        log.warning(
            "%s shares nothing: %r is the whole model. Every client learns alone: this is Local.", name, private
        )
    if leaves == 0 and private != "none":
        log.warning("%s shares everything: this model has no %r. This is %s.", name, private, otherwise)


def train_with_own(w: Params, cohort: Cohort, private: Part, *, epochs: int, weighting: str) -> Update:
    """Train the shared leaves with each client's own, send the former and keep the latter."""
    w_k = sgd(cohort, start=with_own(w, cohort, private), epochs=epochs)
    shared, own = w_k.without_part(private), w_k.part(private)
    return Update(send={"delta": shared - w}, weight=cohort.weights(weighting), keep=own)


def with_own(w: Params, cohort: Cohort, private: Part) -> Stack:
    """Return the shared leaves with each client's own; a client that never took part has the initial ones."""
    return cohort.recall(default=cohort.initial.part(private)) | cohort.stacked(w)


def batchnorm_patch(model: Params, patch: Patch) -> Params:
    """Return the leaves of batch-norm layers that are a client's own: γ and β, running μ and σ, or all of them."""
    norm = model.part("batchnorm")
    return {"yb": norm.trained, "us": norm.buffers, "usyb": norm}[patch]


def fit_patch(cohort: Cohort, w: Params, patch: Params) -> Stack:
    """Return shared leaves with a patch fitted to new clients, from the one given; statistics need no labels."""
    start = cohort.stacked(w) | patch
    if not patch.trained:
        return start | refresh_statistics(cohort, start).only(patch)
    return sgd(cohort, start=start, epochs=PASSES, only=patch, stream="welcome")
