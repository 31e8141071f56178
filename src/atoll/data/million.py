"""A million clients, each with samples of its own that nobody stores: `--task million`.

    y  one of `classes`; half of a client's labels are one of three neighbours, which are its favourites
    x  separation * (m[y] / 2 + a u[y] + b v[y]) + noise, with m, u, v random directions of every class

The client's own numbers a and b, in [-1, 1], move the classes about: clients that have alike ones agree, others call
the same point by another name. So one model for all is blurred, one client's samples are few, and personalisation pays.
Sizes follow a power law: most clients have little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.building import Model, build_network, deal_networks
from atoll.data.datasets import Dataset
from atoll.data.generated import generate_splits
from atoll.data.splits import SHARES, Shares
from atoll.data.task import Task, Training
from atoll.kernel.errors import DataError
from atoll.kernel.randomness import Keys, generator

CLIENTS = 1_000_000
LARGEST = 2**31  # clients: keys are made of 32 bits
FAVOURITES = 3  # classes that half of a client's labels are among
BYTES_STD = (4 * (256**2 - 1) / 12) ** 0.5  # of a sum of four random bytes


@dataclass(frozen=True)
class Million:
    """The law by which clients, their sizes and their samples are drawn."""

    clients: int = CLIENTS
    seed: int = 0
    dimensions: int = 20
    classes: int = 10
    separation: float = 4.0
    least: int = 12  # samples of a client
    most: int = 240

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= LARGEST:
            raise DataError(f"`clients` of million must be between 1 and {LARGEST:,}. Got {self.clients!r}.")

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many samples each client has: P(size > n) = (least / n) ^ 1.5, up to `most`."""
        keys = Keys.of(torch.arange(self.clients), self.seed, "million", "size")
        share = keys.uniform(torch.zeros(1, dtype=torch.int64), torch.float64).numpy()
        sizes = self.least * (1 - share) ** (-1 / 1.5)
        return np.minimum(sizes, self.most).astype(np.int64)

    @cached_property
    def directions(self) -> Tensor:
        """m, u and v: [3, classes, dimensions], each of length 1."""
        drawn = generator(self.seed, "million", "directions").normal(size=(3, self.classes, self.dimensions))
        return torch.from_numpy(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)).float()

    def draw(self, clients: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a sample and its label for each pair of a client and a place; see `Source.draw`."""
        of_client = Keys.of(clients, self.seed, "million", "client")
        a, b, favourite = (of_client.bits(torch.full_like(clients, number)) for number in range(3))
        of_sample = Keys.of(clients, self.seed, "million", "sample").fold(places)
        word, kind = (of_sample.bits(torch.full_like(clients, number)) for number in range(2))
        near = (self._class_of(favourite) + kind % FAVOURITES) % self.classes
        y = torch.where(kind < 2**31, near, self._class_of(word))
        m, u, v = (one[y] for one in self.directions.to(clients.device))
        x = m / 2 + _between(a)[:, None] * u
        x = (x + _between(b)[:, None] * v) * self.separation
        columns = torch.arange(2, 2 + self.dimensions, device=clients.device)
        noise = Keys(of_sample.low[:, None], of_sample.high[:, None]).bits(columns)
        total = (noise & 255) + (noise >> 8 & 255) + (noise >> 16 & 255) + (noise >> 24)  # nearly normal
        return x + (total - 510).to(x.dtype) / BYTES_STD, y

    def _class_of(self, bits: Tensor) -> Tensor:
        return (bits >> 8) * self.classes >> 24

    def task(
        self,
        *,
        model: Model | Sequence[Model] = "mlp:32",
        seed: int = 0,
        training: Training | None = None,
        shares: Shares = SHARES,
        facts: Mapping[str, Any] | None = None,
    ) -> Task:
        """Build the task; `seed` decides the model's initial values."""
        splits = generate_splits(self, self.sizes, shares)
        x, y = self.draw(torch.zeros(2, dtype=torch.int64), torch.arange(2))  # two samples, to show their form
        shown = Dataset("million", x, y, self.classes, None, source=f"made by Atoll: {self}")
        several = [model] if isinstance(model, str) or not isinstance(model, Sequence) else model
        return Task(
            name=shown.name,
            x=x,
            y=y,
            splits=splits,
            **deal_networks([build_network(one, shown, seed) for one in several], self.clients),
            classes=self.classes,
            training=training or Training(),
            facts={**(facts or {}), "source": shown.source},
        )


def _between(bits: Tensor) -> Tensor:
    """Map 32 bits to a number in [-1, 1)."""
    return (bits >> 8).float() / 2**23 - 1
