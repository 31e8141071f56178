"""Find copies of private samples in what a client sends: as they are, or changed in ways that are easily undone.

    copy_in(message, samples)      any number of a sample, also negated, doubled or halved, wherever it stands
    likeness_in(message, samples)  a whole sample, scaled and shifted, with a little noise on it, strided, transposed,
                                   permuted, as the differences or the running sums of its numbers

    signs_in(message, samples)     where the signs of a window are those of a sample's numbers, around its mean or 0

The second is for clients with several samples. A client with one sample sends a scaled copy with every step of a
linear layer, and honestly so: a gradient is the sample times a number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LONGEST_STRIDE = 32
ALIKE = 0.99  # correlation of a copy with its sample: a little noise does not hide it
EXACTLY = 1 - 1e-9  # the same without noise
SAME = 1 - 1e-9  # the same for sorted numbers: any two sorted lists are alike
AT_ONCE = 65_536  # windows


def copy_in(message: Mapping[str, Tensor], samples: Tensor) -> str | None:
    """Name the leaf of a message in which a number of a sample stands; 0 and 1 tell nothing.

    Leaves must have the type of the samples: of fewer digits, different numbers become the same.
    """
    private = samples[torch.isfinite(samples)]
    private = torch.cat([private * factor for factor in (1, -1, 2, -2, 0.5, -0.5)])
    private = private[(private != 0) & (private.abs() != 1)]
    for name, leaf in message.items():
        if leaf.dtype == private.dtype and bool(torch.isin(leaf.flatten(), private).any()):
            return name
    return None


def likeness_in(
    message: Mapping[str, Tensor], samples: Tensor, alike: float = ALIKE, strides: int = LONGEST_STRIDE
) -> str | None:
    """Name the leaf of a message in which a window of numbers is like a sample: correlated by at least so much."""
    leaves = {name: leaf.flatten().to(samples) for name, leaf in message.items() if leaf.is_floating_point()}
    if not leaves:
        return None
    samples, values = samples.flatten(1), torch.cat([*leaves.values()])
    size, ends = samples.shape[1], torch.tensor([len(leaf) for leaf in leaves.values()]).cumsum(0)
    asked = [
        *((values, samples, stride, alike) for stride in range(1, strides + 1)),
        (values, samples.diff(), 1, alike),
        (values.diff(), samples[:, 1:], 1, alike),
    ]
    for line, wanted, stride, least in asked:
        place = _find_window(line, wanted, stride, least)
        if place is not None:
            return [*leaves][int(torch.searchsorted(ends, place, right=True))]
    if len(values) >= size:
        ordered = values.unfold(0, size, 1).sort(1).values
        for line in (ordered, ordered.flip(1)):  # flipped, where the scale is negative
            found = (_normalise(line) @ _normalise(samples.sort(1).values).T).abs().amax(1) > SAME
            if bool(found.any()):
                return [*leaves][int(torch.searchsorted(ends, found.int().argmax(), right=True))]
    return None


def _find_window(values: Tensor, samples: Tensor, stride: int, least: float) -> Tensor | None:
    """Find where a window of every `stride`-th value is a sample, scaled and shifted; None if nowhere."""
    size, reach = samples.shape[1], (samples.shape[1] - 1) * stride + 1
    if len(values) < reach:
        return None
    wanted = _normalise(samples).T
    for first in range(0, len(values) - reach + 1, AT_ONCE):
        windows = values[first : first + AT_ONCE + reach - 1].unfold(0, reach, 1)[:, ::stride]
        assert windows.shape[1] == size
        found = (_normalise(windows) @ wanted).abs().amax(1) > least
        if bool(found.any()):
            return first + found.int().argmax()
    return None


def signs_in(message: Mapping[str, Tensor], samples: Tensor) -> Tensor:
    """Return for each window of a message whether its signs, or their opposite, are those of a sample.

    Numbers of a sample are above or below its mean, or 0. Samples of which nearly all are on one side tell nothing. A
    few windows are alike by chance; the same ones of many clients are not.
    """
    leaves = [leaf.flatten().to(samples) for leaf in message.values() if leaf.is_floating_point()]
    samples = samples.flatten(1)
    size = samples.shape[1]
    values = torch.cat([*leaves, samples.new_zeros(size)])
    signs = torch.cat([torch.where(one > 0, 1.0, -1.0) for one in (samples - samples.mean(1, keepdim=True), samples)])
    signs = signs.to(samples)
    signs = signs[signs.sum(1).abs() <= size - 4]
    return ((values.sign().unfold(0, size, 1) @ signs.T).abs() == size).any(1)


def _normalise(rows: Tensor) -> Tensor:
    """Center rows and scale them to length 1; rows of one number only become 0."""
    centered = rows - rows.mean(1, keepdim=True)
    norm = centered.norm(dim=1, keepdim=True)
    flat = norm <= 1e-9 * rows.norm(dim=1, keepdim=True)
    return torch.where(flat, 0.0, centered / norm.clamp(min=1e-300))
