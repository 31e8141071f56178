"""What a method may know of the task that it works on, and how clients take their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.errors import NamesChecked, TaskError
from atoll.kernel.network import Network
from atoll.kernel.params import Params


@dataclass(frozen=True)
class Training(NamesChecked):
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
        """Return the step size of a round."""
        return self.lr * self.lr_decay**round


@dataclass(frozen=True, eq=False)
class Facts:
    """What everybody may know of a task: the server, every client, and a method before it begins.

    No sample is in it.
    """

    name: str
    clients: int  # how many there are
    network: Network
    training: Training
    classes: int | None  # how many, if targets are classes
    sample: Tensor  # zeros in the shape, the type and the place of a sample
    target: Tensor  # the same for a target
    seed: int  # of all draws
    largest: Mapping[str, int]  # the most samples of any client, by split: tensors of this size fit them all
    has_public: bool  # whether there are samples that everybody may see
    networks: tuple[Network, ...] = ()  # the architectures, where clients have different ones
    architecture: NDArray[np.int64] | None = None  # which of the networks each client has
    speed: NDArray[np.float64] | None = None  # the share of its local steps that each client takes; None: all
    recommends: bool = False  # whether classes are items, of which those that a client knows are no candidates

    @property
    def one_class_each(self) -> bool:
        """Whether every sample has one class."""
        return self.classes is not None and self.target.ndim == 0

    @property
    def by_architecture(self) -> tuple[Facts, ...]:
        """The facts as clients of each architecture know them."""
        if self.architecture is None:
            return (self,)
        return tuple(replace(self, network=network, architecture=None) for network in self.networks)

    @property
    def own_architecture(self) -> int:
        """The number of `network` among the architectures."""
        return self.networks.index(self.network) if self.networks else 0

    def with_network(self, network: Network) -> Facts:
        """Return the same facts with another network."""
        return replace(self, network=network)

    def of(self, clients: int, initial: Params) -> Facts:
        """Return the facts for some of the clients, who begin at another model."""
        return replace(self, clients=clients, network=self.network.beginning_at(initial))

    def require_public(self, who: str) -> None:
        """Raise where `who` needs samples that everybody may see and there are none."""
        if not self.has_public:
            raise TaskError(
                f"{who} needs public data, samples that everybody may see. {self.name} has none.",
                hint="set a share of the samples aside with `public=0.1`, or give samples of your own: "
                "Task.with_public(x, y).",
            )
