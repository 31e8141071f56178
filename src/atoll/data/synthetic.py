"""Data with a known truth: planted groups of clients, known weights, known angles. Made by Atoll, from a seed."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.datasets import Dataset
from atoll.data.shift import turn
from atoll.kernel.errors import DataError
from atoll.kernel.objective import absolute_error, squared_error
from atoll.kernel.randomness import generator

FEDORA_SIZES = (128, 64, 277)  # images of a client for training, validation and test
BLACK = -1.0  # in normalised images
FEDORA_SHARES = (128 / 469, 64 / 469, 277 / 469)


@dataclass(frozen=True)
class _Planted:
    """Client k belongs to group k mod groups, and every client has `samples` samples."""

    clients: int = 20
    samples: int = 60
    dimensions: int = 10
    groups: int = 2
    noise: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            smallest = 0 if field.name in ("noise", "seed") else 1
            if getattr(self, field.name) < smallest:
                raise DataError(
                    f"`{field.name}` of {type(self).__name__} must be at least {smallest}. "
                    f"Got {getattr(self, field.name)!r} instead."
                )

    @property
    def name(self) -> str:
        """The data set's name."""
        return type(self).__name__.lower()

    @property
    def group(self) -> NDArray[np.int64]:
        """The group of each client."""
        return np.arange(self.clients) % self.groups

    @property
    def owner(self) -> NDArray[np.int64]:
        """The client of each sample."""
        return np.repeat(np.arange(self.clients), self.samples)

    def generator_of(self, what: str) -> np.random.Generator:
        """Return the generator of the truth or of the samples; two, so more samples leave the truth alone."""
        return generator(self.seed, "synthetic", self.name, what)


@dataclass(frozen=True)
class Gaussian(_Planted):
    """Classes are Gaussian clusters; each group of clients has clusters of its own.

    x = m[group, y] + noise * N(0, I), with `m` at distance `separation` from 0 in random directions, and labels that
    are as even as they can be. Within a group the best possible classifier takes the nearest mean.
    """

    groups: int = 4
    classes: int = 5
    separation: float = 3.0

    def means(self) -> NDArray[np.float64]:
        """Return m: the mean of every class in every group, [groups, classes, dimensions]."""
        directions = self.generator_of("means").normal(size=(self.groups, self.classes, self.dimensions))
        means: NDArray[np.float64] = self.separation * directions / np.linalg.norm(directions, axis=-1, keepdims=True)
        return means

    def dataset(self) -> Dataset:
        """Draw the samples of all clients."""
        rng = self.generator_of("samples")
        y = np.concatenate([rng.permutation(np.arange(self.samples) % self.classes) for _ in range(self.clients)])
        x = self.means()[self.group[self.owner], y] + self.noise * rng.normal(size=(len(y), self.dimensions))
        return _assemble(self, x, torch.from_numpy(y), classes=self.classes)


@dataclass(frozen=True)
class Linear(_Planted):
    """Linear regression in groups: y = w[group] . x + noise * N(0, 1), with x ~ N(0, I)."""

    noise: float = 0.1

    def weights(self) -> NDArray[np.float64]:
        """Return w: the true weights of every group, [groups, dimensions]."""
        return self.generator_of("weights").normal(size=(self.groups, self.dimensions))

    def dataset(self) -> Dataset:
        """Draw the samples of all clients."""
        rng = self.generator_of("samples")
        x = rng.normal(size=(len(self.owner), self.dimensions))
        y = (x * self.weights()[self.group[self.owner]]).sum(1) + self.noise * rng.normal(size=len(x))
        return _assemble(self, x, torch.from_numpy(y).float(), classes=None)


def _assemble(made: _Planted, x: NDArray[np.float64], y: Tensor, classes: int | None) -> Dataset:
    regression = {"model": "linear", "loss": squared_error, "metric": absolute_error} if classes is None else {}
    return Dataset(
        name=made.name,
        x=torch.from_numpy(x).float(),
        y=y,
        classes=classes,
        central=None,
        source=f"made by Atoll: {made}",
        owner=made.owner,
        owners=tuple(f"client {client}" for client in range(made.clients)),
        groups=made.group,
        **regression,  # type: ignore[arg-type]
    )


def rotate_clients(images: Dataset, *, clients: int = 36, samples: int = sum(FEDORA_SIZES), seed: int = 0) -> Dataset:
    """Give client k images of its own, all rotated by 360 k / clients degrees: FEDORA's setting (KDD 2023).

    With `shares=FEDORA_SHARES` a client trains on as many images as there. They are drawn from all images; FEDORA takes
    its test images from the official test set.
    """
    if clients < 1 or samples < 1 or clients * samples > len(images.y):
        raise DataError(f"{clients} clients with {samples} images each must fit into {len(images.y)} images.")
    chosen = generator(seed, "synthetic", "rotated").permutation(len(images.y))[: clients * samples]
    dealt = torch.from_numpy(chosen.reshape(clients, samples))
    angles = [360 * client / clients for client in range(clients)]
    return Dataset(
        name=f"rotated-{images.name}",
        x=torch.cat([turn(images.x[own], angle, background=BLACK) for own, angle in zip(dealt, angles, strict=True)]),
        y=images.y[dealt.flatten()],
        classes=images.classes,
        central=None,
        source=f"{images.source}, rotated by Atoll",
        owner=np.repeat(np.arange(clients), samples),
        owners=tuple(f"{angle:g}°" for angle in angles),
        model="mlp",
    )
