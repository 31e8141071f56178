"""Gradients with sample-level differential privacy (DP-SGD).

    g = (sum_i g_i min(1, C / ||g_i||) + N(0, z^2 C^2 I)) / B

g_i is the gradient of sample i's own loss, B the batch size of the task, also for a last batch that is smaller.
Momentum, weight decay, proximal terms and clipping of g come after the noise and cost nothing.

Reference: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. "Deep Learning with Differential Privacy." CCS 2016.
https://arxiv.org/abs/1607.00133
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.kernel.batch import Batch
from atoll.kernel.errors import PrivacyError
from atoll.kernel.params import Params
from atoll.kernel.task import Facts


@dataclass(frozen=True)
class Private:
    """How far a sample's gradient may reach, and the noise on their sum."""

    clip: float  # C; 0: none is cut
    noise: float  # z: standard deviation over C

    def require(self, task: Facts, *, gradient: Any, radius: Any) -> None:
        """Raise where single samples have no gradient of their own."""
        if task.network.layout.batchnorm:
            raise PrivacyError(
                "Under sample-level privacy a network must answer each sample by itself. This one has BatchNorm, which "
                "mixes the samples of a batch.",
                hint="take a network with GroupNorm, such as resnet18-gn.",
            )
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
        found = {}
        for name, rows in each.items():
            total = torch.tensordot(share.to(rows), rows, dims=1)
            if self.noise:
                total = total + self.noise * self.clip * batch.normal(f"private {name}", *total.shape)
            found[name] = total / size
        return Params(found, each.layout), w, loss
