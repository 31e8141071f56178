"""RegMean: linear layers are merged so that on the clients' own inputs they answer as the clients' layers do.

    min_M  sum_k sum_{a enters the layer at client k} |M a - M_k a|^2
    M = (sum_k M_k G_k) (sum_k G_k)^-1,        G_k = sum a a^T,  its off-diagonal entries times `damping`

Clients train w_k alone. A client sends G_k, and M_k G_k in place of M_k, so sums suffice. All other leaves are
averaged.

Reference: Jin, Ren, Preotiuc-Pietro, Cheng. "Dataless Knowledge Fusion by Merging Weights of Language Models."
ICLR 2023. https://arxiv.org/abs/2212.09849
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from atoll.kernel.algorithm import Replies, Share, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.task import Facts
from atoll.toolbox.client.layers import inputs_of, linear_maps, matrix, squares, with_matrix
from atoll.toolbox.pairs import LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.triangles import symmetric, triangle

RIDGE = 1e-6  # of the mean of the diagonal: an input that is always 0 says nothing about its weights


@dataclass(frozen=True, kw_only=True)
class Regression(ServerAnswer):
    """Linear layers, merged by least squares on their inputs."""

    damping: Share = 0.9  # factor on the off-diagonal entries of G_k

    called: ClassVar[str] = "regmean"
    sums_suffice: ClassVar[bool] = True
    solved: ClassVar[bool] = True
    sends: ClassVar[dict[str, str]] = {"rest": "model", "products": "statistic", "grams": "statistic"}
    cites: ClassVar[str] = "jin2023dataless"

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless there are linear layers to merge."""
        linear_maps(self, task)

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Find out what enters each linear layer, and send that with the products."""
        maps = linear_maps(self, cohort.task)
        start = Params({layer: torch.zeros(inputs, inputs) for layer, (_, inputs) in maps.items()})
        seen = cohort.scan(partial(_look, layers=tuple(maps)), start, given=w, shuffle=False, train=False, exact=True)
        grams = (seen / cohort.samples).map(partial(damp, damping=self.damping))
        products = Stack({layer: matrix(w, layer) @ gram for layer, gram in grams.items()})
        rest = w.without(f"{layer}.{leaf}" for layer in maps for leaf in ("weight", "bias"))
        send = {"rest": rest, "products": products, "grams": grams.map(triangle)}
        return Update(send=send, weight=cohort.samples)

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Solve for each linear layer; weights by samples make sums of what are means over samples."""
        model = start.model | replies.mean("rest")
        products, grams = (replies.mean(name).map(Tensor.double) for name in ("products", "grams"))
        for layer, product in products.items():
            model = with_matrix(model, layer, torch.linalg.solve(symmetric(grams[layer]), product, left=False))
        return model


def damp(gram: Tensor, damping: float) -> Tensor:
    """Shrink the off-diagonal entries of Gram matrices [..., inputs, inputs], and add a ridge."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, keepdim=True)
    return damping * gram + torch.diag_embed((1 - damping) * diagonal + ridge)


def _look(seen: Params, batch: Batch, w: Params, *, layers: Iterable[str]) -> Params:
    return Params({name: seen[name] + squares(batch, rows) for name, rows in inputs_of(batch, w, layers).items()})
