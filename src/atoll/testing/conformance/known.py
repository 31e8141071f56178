"""Tasks with known answers, for tests that are about one method only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from atoll.data.task import Task, Training


class Quadratic(nn.Module):
    """f(w) = 1/2 (w - c)^T H (w - c): the output is the loss, and a sample carries c and H."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss per sample."""
        size = len(self.w)
        apart, curvature = self.w - x[:, :size], x[:, size:].reshape(-1, size, size)
        return 0.5 * (apart[:, :, None] * curvature * apart[:, None]).sum((1, 2))


def quadratics(
    optima: Tensor,
    curvatures: Tensor | None = None,
    *,
    samples: Iterable[int] | None = None,
    start: Tensor | None = None,
    lr: float = 0.1,
) -> Task:
    """Make a task in which client k has f_k(w) = 1/2 (w - c_k)^T H_k (w - c_k).

    Clients take one full-batch step per epoch. `optima` holds c_k in its rows, `curvatures` the H_k (the identity by
    default), `samples` how much each client counts. The parameters begin at `start`, or at 0, and are called `w`.
    """
    clients, size = optima.shape
    curvatures = torch.eye(size, dtype=optima.dtype).expand(clients, size, size) if curvatures is None else curvatures
    sizes = [1] * clients if samples is None else list(samples)
    data = {}
    for client, number in enumerate(sizes):
        x = torch.cat([optima[client], curvatures[client].flatten()])
        data[str(client)] = (x.repeat(number, 1), torch.zeros(number, dtype=optima.dtype))
    return Task.of_clients(
        data,
        Quadratic(torch.zeros(size, dtype=optima.dtype) if start is None else start),
        name="quadratics",
        loss=_output,
        score=_output,
        training=Training(lr=lr, batch_size=max(sizes)),
        shares=(1.0, 0.0, 0.0),
    )


def _output(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs
