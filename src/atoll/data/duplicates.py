"""Finding samples that are there twice, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import Tensor

SAMPLES_AT_ONCE = 4096


def digests(x: Tensor) -> Iterator[bytes]:
    """Yield one digest per sample: equal samples have equal digests, and in practice no others do."""
    for some in torch.split(x, SAMPLES_AT_ONCE):
        rows = (some + 0).cpu().contiguous().numpy()  # -0 equals 0, and must have its bits
        yield from (blake2b(row.tobytes(), digest_size=16).digest() for row in rows)


def duplicates(x: Tensor, others: Tensor) -> list[int]:
    """Return which samples of `x` are also among `others`, which have the same type."""
    known = set(digests(others))
    return [place for place, digest in enumerate(digests(x)) if digest in known]
