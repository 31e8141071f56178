"""A plan: how clients are grouped, how their steps run, and in which arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from atoll.kernel.errors import AtollError, first_line
from atoll.kernel.network import Precision

Mode = Literal["eager", "traced", "compiled"]
VARIANTS = ("graph", "columns", "channels_last", "one_core")  # of a plan


@dataclass(frozen=True)
class Plan:
    """A plan: how clients are grouped and how their steps run."""

    strategy: Literal["loop", "threads", "chunk", "whole"] = "whole"
    chunk: int | None = None
    mode: Mode = "eager"
    graph: bool = False  # capture as a CUDA graph
    own_data: bool = False  # which reads a copy of the samples, because others come in the next round, as to a server
    columns: bool = False  # convolutions as matrix products
    channels_last: bool = False
    one_core: bool = False  # small steps gain little from several cores, and suffer when others use them
    plain: bool = False  # the step cannot be vectorised, not even for one client
    precision: Precision = "fp32"

    @property
    def vectorised(self) -> bool:
        """Whether several clients share one call of `Algorithm.local`."""
        return self.strategy in ("chunk", "whole") or (self.strategy == "threads" and (self.chunk or 1) > 1)

    def size(self, clients: int) -> int:
        """Return how many clients one call of `Algorithm.local` gets."""
        return min(clients, self.chunk or clients) if self.vectorised else 1

    def __str__(self) -> str:
        grouping = self.strategy if self.chunk is None else f"{self.strategy}:{self.chunk}"
        extras = [name for name in (*VARIANTS, "plain") if getattr(self, name)]
        return " ".join([grouping, self.mode, *extras, self.precision])


class NotVectorisable(Exception):
    """The step or the model uses an operation that cannot run for many clients at once."""


@contextmanager
def vectorising() -> Iterator[None]:
    """Turn whatever fails under `vmap` into NotVectorisable: it may succeed for one client at a time."""
    try:
        yield
    except AtollError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise NotVectorisable(first_line(error)) from error


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Use the GPU's TF32 units only where asked to."""
    with keep_arithmetic():
        for place in _arithmetic():
            place.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        yield


@contextmanager
def keep_arithmetic() -> Iterator[None]:
    """Have the same arithmetic afterwards as before, whatever others need in between."""
    before = [(place, place.fp32_precision) for place in _arithmetic()]
    try:
        yield
    finally:
        for place, value in before:
            place.fp32_precision = value


def _arithmetic() -> tuple[Any, ...]:
    """Return torch's settings for products of fp32 numbers, where there is a GPU."""
    if not torch.cuda.is_available():
        return ()
    return torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
