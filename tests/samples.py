"""What tests read of a client's samples, and what they ask models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll import Algorithm, Batch, Cohort, Task, Training
from atoll.kernel.job import AtTheEnd
from atoll.kernel.network import Variant
from atoll.kernel.predictor import Deployed, predictor_of
from atoll.kernel.randomness import Keys, generator


def own(task: Task, client: int, split: str = "train") -> tuple[Tensor, Tensor]:
    """The samples of one client, and their targets."""
    dealt = task.splits[split]
    rows = dealt.order[dealt.offsets[client] : dealt.offsets[client + 1]]
    return task.x[rows], task.y[rows]


def with_public(task: Task, samples: int = 12) -> Task:
    """The same task with public samples, normal ones with random classes."""
    assert task.classes is not None
    draw = generator(1, "public")
    x, y = draw.normal(size=(samples, *task.x.shape[1:])), draw.integers(task.classes, size=samples)
    return replace(task, public=(torch.from_numpy(x).to(task.x.dtype), torch.from_numpy(y)))


def answers(task: Task, deployed: Deployed, x: Tensor) -> Tensor:
    """What is deployed answers to samples: a model, or one with a rule of its own."""
    asked, batch = predictor_of(deployed), Batch(x, x[:, :0], None, None, task.network, Variant(train=False))
    return asked.answer(asked.model, asked.beside, batch)  # type: ignore[arg-type]


class Sloped(nn.Linear):
    """A linear layer with a slope that it does not show."""

    def __init__(self, slope: float) -> None:
        super().__init__(4, 3)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """The layer's answer, times the slope."""
        answer: Tensor = self.slope * super().forward(x)
        return answer


class Bias(nn.Module):
    """Logits that are parameters, whatever the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b + 0 * x


def biased(*clients: tuple[int, int], public: int = 0, lr: float = 4.0) -> Task:
    """Clients with (samples, class), whose model is a bias; a step of size 4 gives them logits of 2 and -2.

    Public samples are of the class `public`.
    """
    rows = {
        str(k): (torch.zeros(size, 2, dtype=torch.float64), torch.full((size,), label))
        for k, (size, label) in enumerate(clients)
    }
    training = Training(lr=lr, batch_size=max(size for size, _ in clients))
    task = Task.of_clients(rows, Bias(), classes=2, training=training, shares=(1.0, 0.0, 0.0))
    return replace(task, public=(torch.zeros(4, 2, dtype=torch.float64), torch.full((4,), public)))


class Shaken:
    """Samples with a little noise, another for each view."""

    def __call__(self, x: Tensor, keys: Keys) -> Tensor:
        counter = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        return x + (keys.bits(counter) >> 8).to(x.dtype) / 2**24

    def check(self, shape: tuple[int, ...]) -> None:
        pass


@dataclass(frozen=True)
class Work(AtTheEnd):
    """A phase in which clients do something that no method does."""

    work: Callable[[Cohort], Any]
    name: str = "local"

    @property
    def replies(self) -> bool:  # type: ignore[override]
        """Whether the server waits for it."""
        return self.name == "local"

    def run(self, method: Algorithm, received: Any, cohort: Cohort) -> Any:
        return self.work(cohort)
