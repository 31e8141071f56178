"""FedLPA: the mode of the product of the clients' posteriors, each a Gaussian per layer by Laplace's approximation.

    posterior of client k:  vec M ~ N( vec M_k, (A_k x B_k)^-1 ),    A_k = E[a a^T],   B_k = E[g g^T]
    min_M  sum_k p_k <M - M_k, B_k (M - M_k) A_k>,   that is   sum_k p_k B_k M A_k = sum_k p_k B_k M_k A_k

M is the matrix of a linear layer or a convolution with its bias, a what enters it, g the gradient of a sample's loss
at its output (the Kronecker factors of the empirical Fisher matrix), both damped: A_k + damping I, B_k + damping I.
Clients train w_k alone. The server solves by conjugate gradients. All other leaves are averaged.

Reference: Liu, Liu, Ye, Shen, Li, Jiang, Li. "FedLPA: One-shot Federated Learning with Layer-Wise Posterior
Aggregation." NeurIPS 2024. https://arxiv.org/abs/2310.00339
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.kernel.algorithm import Count, Positive, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack
from atoll.kernel.record import Each, record
from atoll.kernel.task import Facts
from atoll.toolbox.client.layers import inputs_of, linear_maps, matrix, output_gradients, squares, with_matrix
from atoll.toolbox.oneshot import uploads
from atoll.toolbox.pairs import OUTPUTS, LocalTraining, ServerAnswer, Start
from atoll.toolbox.server.mixing import require_bytes
from atoll.toolbox.server.triangles import symmetric, triangle, without_negative_variances

CLOSE = 1e-10  # the residual that is small enough, as a share of the right-hand side


@record
class Factors:
    """Sums over samples, layer by layer."""

    inputs: Each  # of a a^T
    gradients: Each  # of g g^T


@dataclass(frozen=True, kw_only=True)
class MostLikely(ServerAnswer):
    """Layers, merged as the most likely ones under all clients' posteriors."""

    damping: Positive = 1e-3  # added to the diagonals of A_k and B_k
    iterations: Count = 500  # largest number of conjugate gradient iterations

    called: ClassVar[str] = "fedlpa"
    needs: ClassVar[frozenset[str]] = frozenset({OUTPUTS})  # whose loss is that of the outputs
    solved: ClassVar[bool] = True
    sends: ClassVar[dict[str, str]] = {"model": "model", "inputs": "statistic", "gradients": "statistic"}
    cites: ClassVar[str] = "liu2024fedlpa"

    def require(self, training: LocalTraining, task: Facts) -> None:
        """Raise unless factors of all layers, of all clients, would fit in memory."""
        numbers = sum(out**2 + inputs**2 for out, inputs in linear_maps(self, task, convolutions=True).values())
        require_bytes(
            8 * numbers * task.clients,
            task.sample.device,
            f"The server must hold factors of {numbers:,} numbers for each of {task.clients} clients",
            hint="take a smaller model, or `regmean`, which adds up its factors, of linear layers only.",
        )

    def upload(self, training: LocalTraining, w: Stack, cohort: Cohort) -> Update:
        """Send the model, and the factors of each layer."""
        maps = linear_maps(self, cohort.task, convolutions=True)
        start = Factors(
            Params({layer: torch.zeros(inputs, inputs) for layer, (_, inputs) in maps.items()}),
            Params({layer: torch.zeros(out, out) for layer, (out, _) in maps.items()}),
        )
        seen = cohort.scan(partial(_look, layers=tuple(maps)), start, given=w, shuffle=False, train=False, exact=True)
        inputs, gradients = ((sums / cohort.samples).map(triangle) for sums in (seen.inputs, seen.gradients))
        return Update(send={"model": w, "inputs": inputs, "gradients": gradients}, weight=cohort.samples)

    def conclude(self, training: LocalTraining, start: Start, replies: Replies) -> Params:
        """Solve for each layer."""
        models, inputs, gradients = (uploads(replies, name) for name in ("model", "inputs", "gradients"))
        weights = replies.weights[torch.from_numpy(np.argsort(replies.clients, kind="stable"))].double()
        model = replies.mean("model")
        for layer in inputs:
            a, b = (self.damp(factor[layer]) for factor in (inputs, gradients))
            found = most_likely(matrix(models, layer).double(), a, b, weights / weights.sum(), self.iterations)
            model = with_matrix(model, layer, found)
        return model

    def damp(self, factor: Tensor) -> Tensor:
        """Return the factors of all clients as matrices [client, size, size], with damping on their diagonals."""
        whole = symmetric(factor.double())
        return without_negative_variances(whole + self.damping * torch.eye(whole.shape[-1]).to(whole))


def most_likely(models: Tensor, a: Tensor, b: Tensor, p: Tensor, iterations: int) -> Tensor:
    """Find M with sum_k p_k B_k M A_k = sum_k p_k B_k M_k A_k; matrices are [client, outputs, inputs].

    By conjugate gradients from the weighted mean, preconditioned by the means of A_k and of B_k.
    """
    share = p[:, None, None]
    left, right = (torch.linalg.cholesky((share * factor).sum(0)) for factor in (b, a))

    def apply(m: Tensor) -> Tensor:
        return (share * (b @ m @ a)).sum(0)

    def precondition(m: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.cholesky_solve(m, left).T, right).T

    m, wanted = (share * models).sum(0), apply(models)
    residual = wanted - apply(m)
    step = direction = precondition(residual)
    for _ in range(iterations):
        if residual.norm() <= CLOSE * wanted.norm():
            break
        curved, length = apply(direction), (residual * step).sum()
        size = length / (direction * curved).sum()
        m, residual = m + size * direction, residual - size * curved
        step = precondition(residual)
        direction = step + (residual * step).sum() / length * direction
    return m


def _look(seen: Factors, batch: Batch, w: Params, *, layers: Iterable[str]) -> Factors:
    """Add up a a^T over the places of each sample, and g g^T, of which the mean over places is taken."""
    a, g = inputs_of(batch, w, layers), output_gradients(batch, w, layers)
    return Factors(
        Params({name: seen.inputs[name] + squares(batch, rows) for name, rows in a.items()}),
        Params({name: seen.gradients[name] + squares(batch, rows) / rows.shape[1] for name, rows in g.items()}),
    )
