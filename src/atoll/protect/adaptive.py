"""A clip that follows a quantile of the norms of clients' messages, from noisy counts of those that were not cut.

    b_k = 1 if ||x_k|| <= C else 0,     b = 1/2 + (sum of (b_k - 1/2) + N(0, s^2)) / (q N),     C <- C exp(-eta (b - g))

Every count is a release: with noise z_x on the messages, where 1 / z^2 = 1 / z_x^2 + 1 / (2 s)^2, count and messages of
a round together cost as much as one Gaussian with noise z. C depends on what was released before, and on nothing else.

Reference: Andrew, Thakkar, McMahan, Ramaswamy. "Differentially Private Learning with Adaptive Clipping." NeurIPS 2021,
Algorithm 1. https://arxiv.org/abs/1905.03871
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.kernel.params import Params, Stack
from atoll.protect.stages import Place, Sent, Stage, cut_to, joint_norms

COUNTED = "unclipped"  # the field in which clients say whether their message was cut
PACE = 0.2  # eta
LEAST_SHARE = 1 / 20  # of the expected cohort: the least noise on the count


@dataclass
class Quantile:
    """C as it is now, and the share of messages that is to stay whole."""

    norm: float  # C
    share: float  # g

    def follow(self, uncut: float) -> None:
        """Move C: down where more messages stay whole than wanted, up where fewer do."""
        self.norm *= math.exp(-PACE * (uncut - self.share))

    def save(self) -> Params:
        """Return C for a checkpoint."""
        return Params.of(norm=torch.tensor(self.norm, dtype=torch.float64))

    def load(self, state: Params) -> None:
        """Go on with the C of a checkpoint."""
        self.norm = float(state["norm"])


@dataclass(frozen=True)
class AdaptiveClip(Stage):
    """Scale messages down to C as it is now, and say whether that changed anything: 1/2 if not, -1/2 if so."""

    quantile: Quantile

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Scale the message down, and add what is counted; see `Stage.apply`."""
        norms = joint_norms(sent.fields)
        if not norms.ndim:
            return sent
        whole = (norms <= self.quantile.norm).to(norms) - 0.5
        fields = cut_to(self.quantile.norm, sent.fields, norms)
        return sent._replace(fields={**fields, COUNTED: Stack.of(whole=whole)})


def count_noise(noise: float, expected: float) -> float:
    """Return s, the noise on the count: a twentieth of a cohort, never so little that it takes the budget."""
    return max(LEAST_SHARE * expected, noise)


def message_noise(noise: float, count: float) -> float:
    """Return z_x: with it on messages and `count` on the count, both together cost as much as `noise`."""
    return 1 / math.sqrt(noise**-2 - (2 * count) ** -2)


def share_uncut(total: Tensor | float, drawn: float, expected: float) -> float:
    """Return the noisy share of messages that stayed whole, from their sum and the noise that was drawn."""
    return 0.5 + (float(total) + drawn) / expected
