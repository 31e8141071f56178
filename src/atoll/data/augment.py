"""Augmentation: training images are seen a little different each time, on the device, without a loop over samples.

How a sample looks is decided by (seed, client, round, stream, step, place in the batch), so that it is the same for a
client alone, in a chunk or in a cohort, and in a run that was resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.errors import TaskError, unknown
from atoll.randomness import Keys


class Augment(Protocol):
    """A rule that changes the samples of a batch; a frozen dataclass, so that equal rules share programs."""

    def __call__(self, x: Tensor, keys: Keys) -> Tensor:
        """The samples, changed."""
        ...

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise unless samples of this shape can be changed so."""
        ...


@dataclass(frozen=True)
class CropAndFlip:
    """Images moved by up to `padding` pixels each way, the edges mirrored, and half of them flipped left to right.

    What padding by reflection, a random crop of the old size and a random flip give: the rule of NIID-Bench and many
    others for CIFAR.
    """

    padding: int = 4
    flip: bool = True

    def __call__(self, x: Tensor, keys: Keys) -> Tensor:
        """One draw per sample for each of: down, right, flip."""
        samples, _, height, width = x.shape
        place = torch.arange(samples, device=x.device)
        down, right = (keys.fold(part).bits(place) % (2 * self.padding + 1) - self.padding for part in (1, 2))
        rows = _mirrored(torch.arange(height, device=x.device) + down[:, None], height)
        columns = _mirrored(torch.arange(width, device=x.device) + right[:, None], width)
        if self.flip:
            turned = (keys.fold(3).bits(place) & 1).bool()
            columns = torch.where(turned[:, None], columns.flip(1), columns)
        moved = x[place[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [sample, height, width, channel]
        return moved.permute(0, 3, 1, 2)

    def check(self, shape: tuple[int, ...]) -> None:
        """Images larger than the padding."""
        if len(shape) != 3 or min(shape[1:]) <= self.padding:
            raise TaskError(
                f"Augmentation needs images (channels, height, width) with sides above {self.padding}. Got {shape}.",
                hint="leave it out for other data.",
            )


def _mirrored(index: Tensor, size: int) -> Tensor:
    """Places outside 0 .. size - 1 as in a mirror at the edge."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


RULES: dict[str, Augment] = {"crop-flip": CropAndFlip(), "crop": CropAndFlip(flip=False)}


def parse(text: str) -> Augment | None:
    """The rule of this name; None for `none`."""
    if text == "none":
        return None
    if text not in RULES:
        raise unknown("augmentation", text, ["none", *RULES])
    return RULES[text]
