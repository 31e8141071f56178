"""Sample-level differential privacy: gradients with noise (DP-SGD), and statistics with noise.

    g = (sum_i g_i min(1, C / ||g_i||) + N(0, z^2 C^2 I)) / B
    s = sum_i f(x_i) + N(0, z^2 k C^(2p) I),        x_i cut to norm C, ||f(x_i)|| <= C^p, one of k such sums

g_i is the gradient of sample i's own loss, B the batch size of the task, also for a last batch that is smaller.
Momentum, weight decay, proximal terms and clipping of g come after the noise and cost nothing.

Reference: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. "Deep Learning with Differential Privacy." CCS 2016.
https://arxiv.org/abs/1607.00133
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import PrivacyError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.kernel.wrapper import title_of

# Kinds of fields that noise on numbers cannot hide: classes, numbers of clusters or clients, numbers of rows, masks.
UNCOVERED_KINDS = ("labels", "choice", "rows", "mask")


def suggest_promise(method: Algorithm) -> str:
    """Say which promise of privacy goes with a method, in a hint: about clients, about messages, or none."""
    uncovered = sorted(name for name, kind in method.sends.items() if kind in UNCOVERED_KINDS)
    if uncovered and len(uncovered) == len(method.sends):
        return "take a method that sends numbers: `atoll show NAME` says what leaves a client."
    if uncovered:
        names = " and ".join(uncovered)
        return f"if {names} may be public, protect the rest: dp='local:epsilon=50,public={'/'.join(uncovered)}'."
    if method.sums_suffice and not method.defines("prepare"):
        return "protect it at the level of clients instead: dp='client:epsilon=4'."
    return "protect every message instead: dp='local:epsilon=50'."


@dataclass(frozen=True)
class Private:
    """How far a sample's gradient may reach, and the noise on their sum."""

    clip: float  # C; 0: none is cut
    noise: float  # z: standard deviation over C
    stream: str = "private"  # of the noise: that of one training says nothing of another's

    def require(self, task: Facts, *, gradient: Any, radius: Any) -> None:
        """Raise where single samples have no gradient of their own."""
        require_no_batchnorm(task)
        if gradient is not None:
            raise PrivacyError(
                "Under sample-level privacy clients must follow the gradient of their samples' own losses. This method "
                "has a gradient of its own, of several samples together.",
                hint="protect it at the level of clients instead: dp='client:epsilon=4'.",
            )
        if not isinstance(radius, int | float) or radius:
            raise PrivacyError(
                "A sharpness-aware step takes a second gradient, which is not covered by sample-level privacy.",
                hint="leave out one of the two.",
            )

    def gradient(self, w: Params, batch: Batch, only: frozenset[str], size: int) -> tuple[Params, Params, Tensor]:
        """Return the private gradient, w as it is, and the mean loss, which is not covered by any promise."""
        each, loss = batch.sample_gradients(w, only)
        norms = each.norm()
        share = (self.clip / norms.clamp(min=1e-30)).clamp(max=1.0) if self.clip else torch.ones_like(norms)
        if batch.mask is not None:
            share = share * batch.mask.to(share)
        # A sum of products, not a product of matrices: a compiler then need not write the gradients to memory. One draw
        # for all leaves, because every draw is a program of its own to it.
        totals = [(share.to(rows).reshape(-1, *[1] * (rows.dim() - 1)) * rows).sum(0) for rows in each.values()]
        if self.noise:
            sizes = [total.numel() for total in totals]
            drawn = torch.split(self.noise * self.clip * batch.normal(self.stream, sum(sizes)), sizes)
            totals = [total + noise.reshape(total.shape) for total, noise in zip(totals, drawn, strict=True)]
        found = {name: total / size for name, total in zip(each, totals, strict=True)}
        return Params(found, each.layout), w, loss


def require_own_gradients(method: Algorithm, task: Facts) -> None:
    """Raise where samples have no gradients of their own: by the method, or by the network."""
    if not method.follows_samples:
        raise PrivacyError(
            f"For the piece dpsgd, clients must follow the gradient of their samples' own losses. Those of "
            f"{title_of(method)} follow another one: of several samples together, or a second one beside it.",
            hint=suggest_promise(method),
        )
    require_no_batchnorm(task)


def require_no_batchnorm(task: Facts) -> None:
    """Raise where the answer to a sample depends on the others of its batch."""
    if any(network.layout.batchnorm for network in (task.networks or (task.network,))):
        raise PrivacyError(
            "For the piece dpsgd, a network must answer each sample by itself. This one has BatchNorm, which mixes the "
            "samples of a batch.",
            hint="take a network with GroupNorm, such as resnet18-gn.",
        )


# -- statistics --------------------------------------------------------------------------------------------------------


def find_private(cohort: Cohort) -> Private | None:
    """Return the sample-level privacy that a piece has put on the work of a cohort; None without any."""
    return next((change.private for change in cohort.changes if change.private is not None), None)


def cut_rows(cohort: Cohort) -> Callable[[Tensor], Tensor]:
    """Return what each sample's features must pass before they are added up: cut to norm C, or as they are."""
    private = find_private(cohort)
    return _keep if private is None or not private.clip else _Cut(private.clip)


def _keep(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True)
class _Cut:
    """Scale rows down to a largest norm; a value, so steps with the same one are the same program."""

    norm: float

    def __call__(self, rows: Tensor) -> Tensor:
        scale: Tensor = (self.norm / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
        return rows * scale


def release(
    cohort: Cohort, fields: str | tuple[str, ...], take: Callable[[Cohort], Stack], powers: Mapping[str, int]
) -> Stack:
    """Take statistics of samples; return them as they may leave clients: with noise, under sample-level privacy.

    One sample, whose features were cut to norm C by `cut_rows`, moves each leaf by at most C to the power that is
    declared for it: 0 for counts, 1 for sums of features, 2 for sums of their products. That is all a method says of
    its sensitivity. All leaves are one Gaussian, and cost as much as one pass of training; what is made of them costs
    nothing. Counts stay at least 0. `fields` are those that are covered by it, and sent.
    """
    private, value = find_private(cohort), take(cohort.covered)
    if private is None:
        return value
    covered = (fields,) if isinstance(fields, str) else fields
    for change in cohort.changes:
        change.released.append(covered)
    return disturb(cohort, "/".join(covered), value, powers, private)


def disturb(cohort: Cohort, where: str, value: Stack, powers: Mapping[str, int], private: Private) -> Stack:
    """Add noise to every leaf, for its share in what one sample moves all leaves together."""
    if powers.keys() != value.keys():
        raise PrivacyError(
            f"A release must declare the sensitivity of each leaf. It has {', '.join(value)}, declared are "
            f"{', '.join(powers)}."
        )
    together = len(powers) ** 0.5
    noisy = {}
    for leaf, rows in value.items():
        drawn = np.stack([
            generator(cohort.task.seed, "release", cohort.round, client, where, leaf).standard_normal(rows.shape[1:])
            for client in cohort.clients.tolist()
        ])  # fmt: skip
        size = private.noise * together * private.clip ** powers[leaf]
        found = rows + size * torch.from_numpy(drawn).to(rows)
        noisy[leaf] = found if powers[leaf] else found.clamp(min=0)
    return Stack(noisy, value.layout)
