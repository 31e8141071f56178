"""Clients so simple that a round can be computed by hand."""

import pytest
import torch
from torch import Tensor, nn

from atoll import Task, Training
from atoll.testing.conformance import quadratics


@pytest.fixture
def two_clients() -> Task:
    """F_k(w) = (w - c_k)^2 / 2 with c = 1, 3; the second client has 3 samples; w begins at 0, steps are 0.5."""
    return quadratics(torch.tensor([[1.0], [3.0]], dtype=torch.float64), samples=[1, 3], lr=0.5)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, dtype=torch.float64))


class Sum(nn.Module):
    head_modules = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Scalar(), Scalar()

    def forward(self, c: Tensor) -> Tensor:
        return 0.5 * (self.body.value + self.head.value - c[:, 0]) ** 2


@pytest.fixture
def body_and_head() -> Task:
    """F_k(u, h) = (u + h - c_k)^2 / 2 with a body u and a head h; otherwise as `two_clients`."""
    data = {
        str(c): (torch.full((n, 1), c, dtype=torch.float64), torch.zeros(n, dtype=torch.float64))
        for c, n in ((1.0, 1), (3.0, 3))
    }
    return Task.of_clients(
        data,
        Sum(),
        loss=lambda outputs, _: outputs,
        score=lambda outputs, _: outputs,
        training=Training(lr=0.5, batch_size=3),
        shares=(1.0, 0.0, 0.0),
    )
