"""Small whole numbers, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def to_bits(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of numbers below 2^bits into bytes, as many to a byte as fit; bits divides 8."""
    each = 8 // bits
    short = -numbers.shape[1] % each
    places = torch.nn.functional.pad(numbers.to(torch.uint8), (0, short)).reshape(len(numbers), -1, each).unbind(2)
    joined = places[0].clone()
    for number, place in enumerate(places[1:], 1):
        joined |= place << (number * bits)
    return joined


def from_bits(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return the numbers that `to_bits` packed, as bytes."""
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    wide = (packed[:, :, None] >> shifts) & (2**bits - 1)
    numbers: Tensor = wide.reshape(len(packed), -1)[:, :size]
    return numbers
