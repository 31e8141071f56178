"""Small whole numbers, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def to_bits(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of numbers below 2^bits into bytes, as many to a byte as fit; bits divides 8."""
    each = 8 // bits
    short = -numbers.shape[1] % each
    wide = torch.nn.functional.pad(numbers, (0, short)).reshape(len(numbers), -1, each)
    shifts = torch.arange(each, device=numbers.device) * bits
    joined: Tensor = (wide << shifts).sum(2).to(torch.uint8)
    return joined


def from_bits(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return the numbers that `to_bits` packed."""
    shifts = torch.arange(8 // bits, device=packed.device) * bits
    wide = (packed.long()[:, :, None] >> shifts) & (2**bits - 1)
    numbers: Tensor = wide.reshape(len(packed), -1)[:, :size]
    return numbers
