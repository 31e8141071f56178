"""Augmentation: training images look a little different each time, on the device, without a loop over samples.

How a sample looks is decided by (seed, client, round, stream, step, place in the batch), so it is the same for a client
alone, in a chunk or in a cohort, and in a run that was resumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from atoll.kernel.batch import Augment
from atoll.kernel.errors import TaskError, unknown
from atoll.kernel.randomness import Keys


@dataclass(frozen=True)
class CropAndFlip:
    """Images moved by up to `padding` pixels each way, the edges mirrored, and half of them flipped left to right.

    The same as padding by reflection, a random crop of the old size and a random flip: the rule of NIID-Bench and
    many others for CIFAR.
    """

    padding: int = 4
    flip: bool = True

    def __call__(self, x: Tensor, keys: Keys) -> Tensor:
        """Move and flip each sample by draws of its own: down, right, flip."""
        samples, _, height, width = x.shape
        place = torch.arange(samples, device=x.device)
        down, right = (keys.fold(part).bits(place) % (2 * self.padding + 1) - self.padding for part in (1, 2))
        rows = _mirror(torch.arange(height, device=x.device) + down[:, None], height)
        columns = _mirror(torch.arange(width, device=x.device) + right[:, None], width)
        if self.flip:
            turned = (keys.fold(3).bits(place) & 1).bool()
            columns = torch.where(turned[:, None], columns.flip(1), columns)
        moved = x[place[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [sample, height, width, channel]
        return moved.permute(0, 3, 1, 2)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise unless samples are images larger than the padding."""
        if len(shape) != 3 or min(shape[1:]) <= self.padding:
            raise TaskError(
                f"Augmentation needs images (channels, height, width) with sides above {self.padding}. Got {shape}.",
                hint="leave it out for other data.",
            )


def _mirror(index: Tensor, size: int) -> Tensor:
    """Reflect places outside 0 .. size - 1 at the edge."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


TRIES = 10  # of a crop that fits, after which the largest of an allowed shape is taken
OF_A_CROP = (TRIES, TRIES, 1, 1, 1)  # draws: area, shape, down, right, flip
OF_COLOURS = 6  # draws: jitter, brightness, contrast, saturation, hue, gray
LUMA = (0.299, 0.587, 0.114)  # of red, green, blue: ITU-R BT.601; they sum to 1


@dataclass(frozen=True)
class RandomView:
    """SimCLR's view of an image: a random part of it at the old size, flipped or not, its colours changed.

    The same as torchvision's RandomResizedCrop (bilinear, no antialiasing), RandomHorizontalFlip, ColorJitter in a
    fixed order (brightness, contrast, saturation, hue) and RandomGrayscale. Images with one channel have no
    saturation, hue or gray. With per="batch" all samples of a batch share one draw, as in the released code
    of FAFI. Colours are changed on values v in 0 .. 1; the images are (v - mean) / std, as those of
    `atoll.data.datasets` by default.
    """

    per: Literal["sample", "batch"] = "sample"
    scale: tuple[float, float] = (0.2, 1.0)  # share of the image's area that is seen
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of that part
    flip: float = 0.5  # probability
    jitter: float = 0.8  # probability that the next four happen
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1  # share of a whole turn, each way
    gray: float = 0.2  # probability
    mean: float = 0.5
    std: float = 0.5

    def __post_init__(self) -> None:
        shares = ("flip", "jitter", "brightness", "contrast", "saturation", "gray")
        checks = {name: (0 <= getattr(self, name) <= 1, "a float in [0, 1]") for name in shares} | {
            "per": (self.per in ("sample", "batch"), "sample or batch"),
            "scale": (0 < self.scale[0] <= self.scale[1] <= 1, "two shares in (0, 1], ascending"),
            "ratio": (0 < self.ratio[0] <= self.ratio[1], "two positive numbers, ascending"),
            "hue": (0 <= self.hue <= 0.5, "a float in [0, 0.5]"),
            "std": (self.std > 0, "a float above 0"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise TaskError(f"`{name}` of RandomView must be {expected}. Got {getattr(self, name)!r} instead.")

    def __call__(self, x: Tensor, keys: Keys) -> Tensor:
        """Return a view of each sample, from draws that are made at once: many small operations would cost more."""
        count = sum(OF_A_CROP) + OF_COLOURS
        place = torch.arange(len(x), device=x.device)[:, None] * (self.per == "sample")
        draws = keys.uniform(place * count + torch.arange(count, device=x.device), x.dtype)
        crop, colours = draws[:, : sum(OF_A_CROP)], draws[:, sum(OF_A_CROP) :, None, None]
        seen = self._crop(x, *torch.split(crop, list(OF_A_CROP), 1))
        return self._change_colours(seen, *torch.split(colours, 1, 1))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise unless samples are images, gray or in colours."""
        if len(shape) != 3 or shape[0] not in (1, 3):
            raise TaskError(
                f"Augmentation needs images (channels, height, width) of 1 or 3 channels. Got {shape}.",
                hint="leave it out for other data.",
            )

    def _crop(self, x: Tensor, area: Tensor, shape: Tensor, down: Tensor, right: Tensor, flip: Tensor) -> Tensor:
        height, width = x.shape[2:]
        high, wide = self._box(height, width, area, shape)
        rows, columns = _source_places(height, high, down), _source_places(width, wide, right)
        low, up, part = (torch.where(flip < self.flip, each.flip(1), each) for each in columns)
        return _interpolate(_interpolate(x, 2, *rows), 3, low, up, part)

    def _box(self, height: int, width: int, area: Tensor, shape: Tensor) -> tuple[Tensor, Tensor]:
        """Return the height and width of the part that is seen, each [samples, 1]: of ten draws the first that fits."""
        (smallest, largest), (narrowest, widest) = self.scale, map(math.log, self.ratio)
        pixels = height * width * (smallest + (largest - smallest) * area)
        ratio = torch.exp(narrowest + (widest - narrowest) * shape)
        high, wide = torch.sqrt(pixels / ratio).round(), torch.sqrt(pixels * ratio).round()
        fits = (high >= 1) & (high <= height) & (wide >= 1) & (wide <= width)
        first = (fits * torch.arange(TRIES, 0, -1, device=area.device)).argmax(1, keepdim=True)
        none = ~fits.any(1, keepdim=True)
        tallest, broadest = min(height, round(width / self.ratio[0])), min(width, round(height * self.ratio[1]))
        return high.gather(1, first).masked_fill(none, tallest), wide.gather(1, first).masked_fill(none, broadest)

    def _change_colours(
        self, x: Tensor, jitter: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor, hue: Tensor,
        gray: Tensor,
    ) -> Tensor:  # fmt: skip
        in_colours = x.shape[1] == 3
        v = x * self.std + self.mean
        if self.brightness:
            v = _stretch(v, torch.zeros_like(brightness), self.brightness, brightness)
        if self.contrast:
            v = _stretch(v, _luma(v).mean((1, 2, 3), keepdim=True), self.contrast, contrast)
        if self.saturation and in_colours:
            v = _stretch(v, _luma(v), self.saturation, saturation)
        if self.hue and in_colours:
            v = _turn_hue(v, self.hue * (2 * hue - 1))
        x = torch.where(jitter < self.jitter, (v - self.mean) / self.std, x)
        return torch.where(gray < self.gray, _luma(x), x) if in_colours else x


def _stretch(v: Tensor, base: Tensor, strength: float, draw: Tensor) -> Tensor:
    """Multiply distances from `base` by a factor drawn from 1 - strength to 1 + strength."""
    return (base + (v - base) * (1 + strength * (2 * draw - 1))).clamp(0, 1)


def _source_places(size: int, seen: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the `size` pixels of a side are taken from: between which two of its places, and how far along.

    `seen` of its places are seen, the first of which is drawn by `start` in [0, 1); both [samples, 1].
    """
    first = (start * (size - seen + 1)).floor().clamp(max=size - seen)  # rounding may reach the end
    middle = (torch.arange(size, device=seen.device) + 0.5) * (seen / size) - 0.5
    at = first + middle.clamp(min=0)
    low = at.floor()
    up = torch.minimum(low + 1, first + seen - 1)
    return low.long(), up.long(), at - low


def _interpolate(x: Tensor, side: int, low: Tensor, up: Tensor, part: Tensor) -> Tensor:
    """Interpolate rows (side 2) or columns (side 3) of images, for each sample at its own places."""
    low, up, part = (each[:, None, :, None] if side == 2 else each[:, None, None, :] for each in (low, up, part))
    below, above = (x.gather(side, index.expand(x.shape)) for index in (low, up))
    return below + (above - below) * part


def _luma(x: Tensor) -> Tensor:
    """Return how bright each pixel is; an image with one channel is its own brightness."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def _turn_hue(v: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by a share of a whole turn; saturation and value in HSV stay."""
    red, green, blue = v.unbind(1)
    top, low = v.amax(1), v.amin(1)
    chroma = top - low
    divisor = chroma.masked_fill(chroma == 0, 1)
    hue = torch.where(top == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    hue = torch.where(top == red, (green - blue) / divisor, hue) + 6 * turn[:, 0]

    def channel(place: int) -> Tensor:
        sector = (place + hue) % 6
        return top - chroma * torch.minimum(sector, 4 - sector).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1)


RULES: dict[str, Augment] = {
    "crop-flip": CropAndFlip(),
    "crop": CropAndFlip(flip=False),
    "simclr": RandomView(),
    "simclr-batch": RandomView(per="batch"),
}


def parse(text: str) -> Augment | None:
    """Return the rule with this name; None for `none`."""
    if text == "none":
        return None
    if text not in RULES:
        raise unknown("augmentation", text, ["none", *RULES])
    return RULES[text]
