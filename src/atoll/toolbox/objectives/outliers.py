"""Outliers from a client's own samples: each is destroyed in one of several ways, so it is of no class any more.

    images   crop      a tenth to a third of the image, enlarged to the whole
             blur      the mean over a window, longer one way than the other
             erase     a third to a half of the image takes its darkest value
             copy      a band of half the image covers another one
             swap      the two halves of the image change places
             rotate    two blocks of half a side each are turned by quarters
    others   shuffle   values change places within the sample
             erase     half of the values become 0, the mean of a standardised column
             noise     Gaussian noise as large as the sample's own values

What becomes of a sample depends on its own values and draws only, never on the samples beside it.

Reference: Diao, Li, He. "Towards Addressing Label Skews in One-Shot Federated Learning." ICLR 2023, for destroyed
images; what is done to other samples is ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.kernel.batch import Batch

IMAGE_KINDS = ("crop", "blur", "erase", "copy", "swap", "rotate")
OTHER_KINDS = ("shuffle", "erase", "noise")
SMALLEST = 4  # side of an image: what is smaller has no parts to exchange
CROPPED, ERASED = (0.1, 0.33), (0.33, 0.5)  # shares of an image's area
RATIO = 4 / 3  # of the longer side of these parts to the shorter one, at most
WINDOW = 4  # the most pixels on either side that a blur averages, and half of that the other way
DRAWS = 6  # of one image: kind, direction, and four that its kind reads


def destroy(batch: Batch) -> Tensor:
    """Return an outlier for each sample of a batch, made from the sample as it is in the data."""
    x = batch.x if batch.raw is None else batch.raw
    if x.ndim == 4 and min(x.shape[2:]) >= SMALLEST:
        return destroy_images(x, batch.uniform("outliers", len(x), DRAWS))
    flat = x.flatten(1)
    draws = batch.uniform("outliers", len(flat), 1 + 3 * flat.shape[1])
    return destroy_values(flat, draws).reshape(x.shape)


def destroy_images(x: Tensor, draws: Tensor) -> Tensor:
    """Destroy images [sample, channel, row, column] by draws from [0, 1), `DRAWS` for each."""
    height, width = x.shape[2:]
    kind = (draws[:, 0] * len(IMAGE_KINDS)).long()[:, None, None]
    upright = draws[:, 1, None, None] < 0.5  # bands of rows, or of columns
    each = draws[:, 2:, None, None].unbind(1)
    rows = torch.arange(height, device=x.device)[:, None].expand(height, width)
    columns = torch.arange(width, device=x.device).expand(height, width)
    for number, name in enumerate(IMAGE_KINDS):
        if name in PLACES:
            new_rows, new_columns = PLACES[name](rows, columns, upright, *each)
            rows, columns = (
                torch.where(kind == number, new_rows, rows),
                torch.where(kind == number, new_columns, columns),
            )
    moved = take(x, rows.expand(len(x), -1, -1), columns.expand(len(x), -1, -1))
    moved = torch.where((kind == IMAGE_KINDS.index("blur"))[:, None], blur(x, upright, *each), moved)
    erased = (kind == IMAGE_KINDS.index("erase")) & box_mask(height, width, ERASED, *each)
    return torch.where(erased[:, None], x.amin((1, 2, 3), keepdim=True), moved)


def take(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return images whose pixels come from these places, [sample, row, column]."""
    places = (rows * x.shape[3] + columns).flatten(1)[:, None]
    return x.flatten(2).gather(2, places.expand(-1, x.shape[1], -1)).reshape(x.shape)


# -- where pixels come from: functions of the places and of draws, [sample, 1, 1] each --------------------------------


def crop(rows: Tensor, columns: Tensor, upright: Tensor, *draws: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Enlarge a part of the image."""
    height, width = rows.shape[-2:]
    top, left, high, wide = box(height, width, CROPPED, *draws)
    return (
        (top + ((rows + 0.5) * high / height).floor()).long().clamp(max=height - 1),
        (left + ((columns + 0.5) * wide / width).floor()).long().clamp(max=width - 1),
    )


def copy(rows: Tensor, columns: Tensor, upright: Tensor, *draws: Tensor) -> tuple[Tensor, Tensor]:
    """Cover a band of half the image with another one, which begins at least a quarter of the side away."""

    def covered(places: Tensor, side: int) -> Tensor:
        band = side // 2
        free = side - band  # the last place where a band can begin
        least = max(1, free // 2)
        low = (draws[0] * (free - least + 1)).floor()
        high = low + least + (draws[1] * (free - least - low + 1)).floor()
        to, source = torch.where(draws[2] < 0.5, low, high).long(), torch.where(draws[2] < 0.5, high, low).long()
        return torch.where((places >= to) & (places < to + band), places - to + source, places)

    height, width = rows.shape[-2:]
    return torch.where(upright, covered(rows, height), rows), torch.where(upright, columns, covered(columns, width))


def swap(rows: Tensor, columns: Tensor, upright: Tensor, *draws: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Exchange the two halves of the image; of an odd side, the halves differ by one."""
    height, width = rows.shape[-2:]
    return (
        torch.where(upright, (rows + height // 2) % height, rows),
        torch.where(upright, columns, (columns + width // 2) % width),
    )


def rotate(rows: Tensor, columns: Tensor, upright: Tensor, *draws: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Turn two square blocks, side by side, by one to three quarters."""
    height, width = rows.shape[-2:]
    side = min(height, width) // 2
    top = (draws[0] * (height - side + 1)).floor().long()
    turns = 1 + (draws[1] * 3).long()
    i, j = rows - top, columns % side
    inside = (i >= 0) & (i < side) & (columns < 2 * side)
    last = side - 1
    new_i = torch.where(turns == 1, j, torch.where(turns == 2, last - i, last - j))
    new_j = torch.where(turns == 1, last - i, torch.where(turns == 2, last - j, i))
    return torch.where(inside, top + new_i, rows), torch.where(inside, columns - j + new_j, columns)


PLACES = {"crop": crop, "copy": copy, "swap": swap, "rotate": rotate}


def box(height: int, width: int, areas: tuple[float, float], *draws: Tensor) -> tuple[Tensor, ...]:
    """Return top, left, height and width of a part of an image, whole numbers, for each sample."""
    area = areas[0] + (areas[1] - areas[0]) * draws[0]
    ratio = torch.exp(math.log(RATIO) * (2 * draws[1] - 1))
    high, wide = ((side * share.sqrt()).round() for side, share in ((height, area * ratio), (width, area / ratio)))
    high, wide = high.clamp(1, height), wide.clamp(1, width)
    top, left = (draws[2] * (height - high + 1)).floor(), (draws[3] * (width - wide + 1)).floor()
    return top, left, high, wide


def box_mask(height: int, width: int, areas: tuple[float, float], *draws: Tensor) -> Tensor:
    """Return which pixels are in such a part, [sample, row, column]."""
    top, left, high, wide = box(height, width, areas, *draws)
    rows = torch.arange(height, device=top.device)[:, None]
    columns = torch.arange(width, device=top.device)
    return (rows >= top) & (rows < top + high) & (columns >= left) & (columns < left + wide)


# -- means over windows ------------------------------------------------------------------------------------------------


def blur(x: Tensor, upright: Tensor, *draws: Tensor) -> Tensor:
    """Average every pixel over a window of up to 9 x 5 or 5 x 9 pixels; edges are mirrored."""
    far, near = (1 + draws[0] * WINDOW).long().clamp(max=WINDOW), (draws[1] * (WINDOW // 2 + 1)).long()
    tall, broad = torch.where(upright, far, near), torch.where(upright, near, far)
    down, across = (windows(side, x)[reach.flatten()] for side, reach in ((x.shape[2], tall), (x.shape[3], broad)))
    return torch.einsum("nra,ncab,nsb->ncrs", down, x, across)


def windows(side: int, like: Tensor) -> Tensor:
    """Return the matrices that average over 0 to `WINDOW` neighbours on either side, [reach, place, place]."""
    place = torch.arange(side, device=like.device)
    offset = torch.arange(-WINDOW, WINDOW + 1, device=like.device)
    source = (place[:, None] + offset).abs()
    source = torch.where(source >= side, 2 * (side - 1) - source, source).clamp(min=0)
    hit = (source[..., None] == place).to(like.dtype)  # [place, offset, source]
    reach = torch.arange(WINDOW + 1, device=like.device)[:, None]
    share = (offset.abs() <= reach).to(like.dtype) / (2 * reach + 1)
    return torch.einsum("ko,pos->kps", share, hit)


# -- samples that are no images ----------------------------------------------------------------------------------------


def destroy_values(x: Tensor, draws: Tensor) -> Tensor:
    """Destroy rows of values [sample, value] by draws from [0, 1): one for the kind, and three for every value."""
    kind = (draws[:, :1] * len(OTHER_KINDS)).long()
    first, second, third = draws[:, 1:].reshape(len(x), 3, x.shape[1]).unbind(1)
    shuffled = x.gather(1, first.argsort(1))
    erased = torch.where(second < 0.5, 0, x)
    size = x.square().mean(1, keepdim=True).sqrt()
    noisy = x + size * torch.sqrt(-2 * torch.log1p(-second)) * torch.cos(2 * math.pi * third)  # Box and Muller
    return torch.where(kind == 0, shuffled, torch.where(kind == 1, erased, noisy))
