"""What a method may know of the task that it works on, and how clients take their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.batch import Augment
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Network
from atoll.kernel.params import Layout, Params


@dataclass(frozen=True)
class Training:
    """How a client takes its steps; the same for every method of a comparison."""

    lr: float = 0.1
    batch_size: int = 10
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  # largest norm of a gradient
    lr_decay: float = 1.0  # factor per round

    def __post_init__(self) -> None:
        checks: dict[str, tuple[Callable[[Any], bool], str]] = {
            "lr": (lambda lr: 0 <= lr < math.inf, "a float in [0, inf)"),
            "batch_size": (lambda size: isinstance(size, int) and size >= 1, "an int of at least 1"),
            "momentum": (lambda momentum: 0 <= momentum < 1, "a float in [0, 1)"),
            "weight_decay": (lambda decay: 0 <= decay < math.inf, "a float in [0, inf)"),
            "clip": (lambda clip: 0 < clip < math.inf, "a float in (0, inf), or None"),
            "lr_decay": (lambda decay: 0 < decay <= 1, "a float in (0, 1]"),
        }
        for name, (holds, expected) in checks.items():
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (holds(value) if number else value is None and name == "clip"):
                raise TaskError(f"`{name}` of Training must be {expected}. Got {value!r} instead.")

    def lr_in(self, round: int) -> float:
        """The step size of a round."""
        return self.lr * self.lr_decay**round


class Split(Protocol):
    """The samples of every client in one split: client k owns `order[offsets[k] : offsets[k + 1]]`."""

    @property
    def order(self) -> Tensor:
        """The numbers of all samples, client after client."""
        ...

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each client's samples begin, and the end."""
        ...

    def sizes(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many samples these clients have."""
        ...

    def uneven(self, batch_size: int) -> bool:
        """Return whether any client's last batch is short."""
        ...


class Task(Protocol):
    """Clients with data, and the network they train; `atoll.data.task.Task` is one."""

    @property
    def name(self) -> str:
        """What the task is called in messages."""
        ...

    @property
    def x(self) -> Tensor:
        """All samples."""
        ...

    @property
    def y(self) -> Tensor:
        """Their targets."""
        ...

    @property
    def splits(self) -> Mapping[str, Split]:
        """Who owns which samples: `train`, `val` and `test`."""
        ...

    @property
    def network(self) -> Network:
        """The network of all clients; where they have different ones, the first."""
        ...

    @property
    def networks(self) -> tuple[Network, ...]:
        """The architectures, where clients have different ones."""
        ...

    @property
    def architecture(self) -> NDArray[np.int64] | None:
        """Which of the networks each client has."""
        ...

    @property
    def classes(self) -> int | None:
        """How many classes there are, if targets are classes."""
        ...

    @property
    def training(self) -> Training:
        """How clients take their steps."""
        ...

    @property
    def augment(self) -> Augment | None:
        """How training samples are changed each time they are seen."""
        ...

    @property
    def public(self) -> tuple[Tensor, Tensor] | None:
        """Samples that everybody may see."""
        ...

    @property
    def samples(self) -> str:
        """A fingerprint of all samples and of who owns them."""
        ...

    @property
    def clients(self) -> int:
        """How many clients there are."""
        ...

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """What the leaves of the models are, by architecture."""
        ...

    @property
    def by_architecture(self) -> Sequence[Task]:
        """The task as the clients of each architecture see it."""
        ...

    @property
    def own_architecture(self) -> int:
        """The number of `network` among the architectures."""
        ...

    def client_name(self, client: int) -> str:
        """Return what a client is called in messages and reports."""
        ...

    def public_for(self, who: str) -> tuple[Tensor, Tensor]:
        """Return the public samples; raise where `who` needs them and there are none."""
        ...

    def of(self, clients: NDArray[np.int64], initial: Params) -> Task:
        """Return the task of some clients only, from another initial model."""
        ...
