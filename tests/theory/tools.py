"""What theory tests build on: clients whose losses are quadratics, and what methods make of them."""

from typing import Any

import torch
from torch import Tensor, nn

from atoll import Algorithm, Task, Training
from atoll.federation.report import Report
from atoll.kernel.randomness import default_generator
from atoll.testing.conformance import personal_models, play

CLIENTS, SIZE = 4, 3
EYE = torch.eye(SIZE, dtype=torch.float64)
SAMPLES = [1, 2, 3, 4]
P = torch.tensor(SAMPLES, dtype=torch.float64) / sum(SAMPLES)
ALIKE = torch.full((CLIENTS,), 1 / CLIENTS, dtype=torch.float64)


def optima_and_curvatures(seed: int) -> tuple[Tensor, Tensor]:
    """c_k and H_k of four clients: eigenvalues 1, 1.5 and 2 in random directions, so that no two of the H_k commute."""
    with default_generator(seed):
        optima = torch.randn(CLIENTS, SIZE, dtype=torch.float64)
        bases, _ = torch.linalg.qr(torch.randn(CLIENTS, SIZE, SIZE, dtype=torch.float64))
    return optima, bases @ torch.diag(torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)) @ bases.mT


def each(matrices: Tensor, points: Tensor) -> Tensor:
    """M_k x_k for every client."""
    return torch.einsum("kij,kj->ki", matrices, points)


def balance(matrices: Tensor, points: Tensor, weights: Tensor) -> Tensor:
    """(sum_k p_k M_k)^-1 sum_k p_k M_k c_k: the point where the pulls M_k towards c_k are in balance."""
    total = torch.einsum("k,kij->ij", weights, matrices)
    return torch.linalg.solve(total, torch.einsum("k,kij,kj->i", weights, matrices, points))


def deployed(report: Report) -> Tensor:
    """The personal models of all clients, one in each row."""
    return torch.stack([model["w"] for model in personal_models(report)])


def personal(task: Task, algorithm: Algorithm, rounds: int = 1) -> Tensor:
    """The personal models after some rounds."""
    return deployed(play(task, algorithm, rounds))


def kept(report: Report) -> Any:
    """What all clients keep at the end of a run."""
    saved = report.population.memory.save(round=report.settings.rounds)
    assert saved is not None
    return saved["kept"]  # type: ignore[no-any-return]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, dtype=torch.float64))


class BodyAndHeadQuadratic(nn.Module):
    """f(u, h) = 1/2 (u - a)^2 + 1/2 (h - b - u)^2: the head has to make up for the body; a sample is (a, b)."""

    head_modules = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Scalar(), Scalar()

    def forward(self, x: Tensor) -> Tensor:
        u, h = self.body.value, self.head.value
        return 0.5 * (u - x[:, 0]) ** 2 + 0.5 * (h - x[:, 1] - u) ** 2


def body_and_head(a: Tensor, b: Tensor, lr: float) -> Task:
    """Clients with a_k and b_k and full-batch steps; they count as `SAMPLES`."""
    data = {
        str(k): (torch.stack([a[k], b[k]]).repeat(n, 1), torch.zeros(n, dtype=torch.float64))
        for k, n in enumerate(SAMPLES)
    }
    return losses_as_outputs(data, BodyAndHeadQuadratic(), lr)


def losses_as_outputs(data: dict[str, tuple[Tensor, Tensor]], model: nn.Module, lr: float) -> Task:
    """Clients whose model computes its own loss; all samples are for training, four at most in a batch."""
    return Task.of_clients(
        data,
        model,
        loss=lambda outputs, _: outputs,
        score=lambda outputs, _: outputs,
        training=Training(lr=lr, batch_size=4),
        shares=(1.0, 0.0, 0.0),
    )


def bodies_and_heads(report: Report) -> tuple[Tensor, Tensor]:
    """Body u and head h of every client's model."""
    models = personal_models(report)
    return torch.cat([one["body.value"] for one in models]), torch.cat([one["head.value"] for one in models])
