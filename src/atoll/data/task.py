"""A `Task` is everything that is learned from: samples dealt to clients, split inside each, and a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll import models
from atoll.data.batches import Split
from atoll.data.datasets import Dataset
from atoll.data.partition import Partition
from atoll.errors import ModelError, TaskError
from atoll.models.network import Network
from atoll.models.objective import PerSample, accuracy, cross_entropy
from atoll.randomness import default_generator, generator, moves_default_generator, number

SPLITS = ("train", "val", "test")


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
        checks: dict[str, tuple[bool, str]] = {
            "lr": (self.lr >= 0, "a float in [0, inf)"),
            "batch_size": (isinstance(self.batch_size, int) and self.batch_size >= 1, "an int of at least 1"),
            "momentum": (0 <= self.momentum < 1, "a float in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, "a float in [0, inf)"),
            "clip": (self.clip is None or self.clip > 0, "a float above 0, or None"),
            "lr_decay": (0 < self.lr_decay <= 1, "a float in (0, 1]"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise TaskError(f"`{name}` of Training must be {expected}. Got {getattr(self, name)!r} instead.")

    def lr_in(self, round: int) -> float:
        """The step size of a round."""
        return self.lr * self.lr_decay**round


@dataclass(frozen=True, eq=False)
class Task:
    """Clients with data, and the network they train. Build one with `Task.build` or `Task.of_clients`."""

    name: str
    x: Tensor
    y: Tensor
    splits: Mapping[str, Split]
    network: Network
    classes: int | None
    training: Training = field(default_factory=Training)
    names: tuple[str, ...] | None = None  # of the clients; their numbers by default
    central: tuple[Tensor, Tensor] | None = None  # a test set of the server's own
    facts: Mapping[str, Any] = field(default_factory=dict)  # how it was made, for the run's configuration

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise TaskError("A task must have at least 1 client. Got 0.")
        empty = np.flatnonzero(np.diff(self.splits["train"].offsets) == 0)
        if len(empty):
            raise TaskError(
                f"Every client must have at least 1 training sample. {len(empty)} of {self.clients} have none, "
                f"the first is client {self.client_name(int(empty[0]))}.",
                hint="leave these clients out, or raise the partition's `min_samples`.",
            )
        self._check_outputs()

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.splits["train"].offsets) - 1

    def client_name(self, client: int) -> str:
        """What the client is called in messages and reports."""
        return str(client) if self.names is None else self.names[client]

    def to(self, device: torch.device, dtype: torch.dtype) -> Task:
        """The same task with its tensors on `device`, floating point ones in `dtype`."""

        def moved(values: Tensor) -> Tensor:
            return values.to(device, dtype if values.is_floating_point() else None)

        return replace(
            self,
            x=moved(self.x),
            y=moved(self.y),
            splits={name: Split(split.order.to(device), split.offsets) for name, split in self.splits.items()},
            network=self.network.to(device, dtype),
            central=None if self.central is None else (moved(self.central[0]), moved(self.central[1])),
        )

    @classmethod
    def build(
        cls,
        dataset: Dataset,
        partition: Partition,
        *,
        clients: int,
        model: str | Callable[[], nn.Module] | None = None,
        seed: int = 0,
        partition_seed: int | None = None,
        training: Training | None = None,
        shares: tuple[float, float, float] = (0.6, 0.15, 0.25),
        facts: Mapping[str, Any] | None = None,
    ) -> Task:
        """Deal a data set to clients and split each client's samples into train, val and test.

        `partition_seed` decides who gets what; `seed` decides the model's initial values.
        """
        deal = seed if partition_seed is None else partition_seed
        parts = partition.split(dataset.y.numpy(), clients, generator(deal, "partition"))
        shuffled = [generator(deal, "split", client).permutation(part) for client, part in enumerate(parts)]
        shape = tuple(dataset.x.shape[1:])
        chosen = model or _usual_model(shape)
        with default_generator(number(seed, "model")):
            module = chosen() if callable(chosen) else models.build(chosen, shape, dataset.classes or 1)
        signature = None if callable(chosen) else (chosen, shape, dataset.classes)
        return cls(
            name=dataset.name,
            x=dataset.x,
            y=dataset.y,
            splits=_splits(shuffled, shares),
            network=Network(module, signature=signature),
            classes=dataset.classes,
            training=training or Training(),
            central=dataset.central,
            facts={**(facts or {}), "source": dataset.source},
        )

    @classmethod
    def of_clients(
        cls,
        data: Mapping[str, tuple[Any, Any]],
        model: nn.Module,
        *,
        name: str = "own",
        classes: int | None = None,
        loss: PerSample = cross_entropy,
        score: PerSample = accuracy,
        training: Training | None = None,
        shares: tuple[float, float, float] = (0.6, 0.15, 0.25),
        seed: int = 0,
    ) -> Task:
        """A task from each client's own samples and targets, tensors or arrays.

        `classes` is found from integer targets; floating point values become of the model's type.
        """
        if not data:
            raise TaskError("A task must have at least 1 client. Got 0.")
        dtype = next((leaf.dtype for leaf in model.parameters() if leaf.is_floating_point()), torch.get_default_dtype())

        def joined(part: int) -> Tensor:
            values = torch.cat([torch.as_tensor(both[part]) for both in data.values()])
            return values.to(dtype) if values.is_floating_point() else values

        sizes = [len(x) for x, _ in data.values()]
        ends = np.cumsum(sizes)
        y = joined(1)
        if classes is None and not y.is_floating_point():
            classes = int(y.max()) + 1
        parts = [
            generator(seed, "split", client).permutation(np.arange(end - size, end))
            for client, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        return cls(
            name=name,
            x=joined(0),
            y=y,
            splits=_splits(parts, shares),
            network=Network(module=model, loss=loss, score=score),
            classes=classes,
            training=training or Training(),
            names=tuple(data),
        )

    def _check_outputs(self) -> None:
        """The network must take the samples and give one output per class; whether it draws is found out as well."""
        from atoll.batch import Batch
        from atoll.models.network import Variant

        few = self.splits["train"].order[:2]

        @torch.no_grad()
        def outputs_of(*, train: bool) -> Tensor:
            batch = Batch(self.x[few], self.y[few], None, None, self.network, Variant(train=train))
            return batch.outputs(self.network.initial)

        model = type(self.network._original).__name__
        shape = tuple(self.x.shape[1:])
        try:
            outputs = outputs_of(train=False)
            self.network.draws_globally |= moves_default_generator(lambda: outputs_of(train=True))
        except Exception as error:  # a model may fail in any way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"{model} must take samples of shape {shape}. It failed: {reason}",
                hint="check the model's first layer against the data.",
            ) from error
        if self.classes is not None and (outputs.ndim < 2 or outputs.shape[1] != self.classes):
            raise ModelError(
                f"{model} must give one output per class, {self.classes}. Got outputs of shape {tuple(outputs.shape)} "
                f"for {len(few)} samples.",
                hint="set the width of its last layer to the number of classes.",
            )


def _usual_model(shape: tuple[int, ...]) -> str:
    return "cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"


def _splits(parts: list[NDArray[np.int64]], shares: tuple[float, float, float]) -> dict[str, Split]:
    """Cut each client's samples; every client keeps at least one for training."""
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6 or shares[0] == 0:
        raise TaskError(f"`shares` must be three shares (train, val, test) that sum to 1. Got {shares!r}.")
    cut: dict[str, list[NDArray[np.int64]]] = {name: [] for name in SPLITS}
    for part in parts:
        test = int(len(part) * shares[2] + 0.5) if len(part) > 1 else 0
        val = int(len(part) * shares[1] + 0.5) if len(part) > 2 else 0
        train = max(len(part) - test - val, min(len(part), 1))
        bounds = np.cumsum([train, min(val, len(part) - train)])
        for name, piece in zip(SPLITS, np.split(part, bounds), strict=True):
            cut[name].append(piece)
    return {name: _split(pieces) for name, pieces in cut.items()}


def _split(pieces: list[NDArray[np.int64]]) -> Split:
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    order = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    return Split(torch.from_numpy(order.astype(np.int64)), offsets)
