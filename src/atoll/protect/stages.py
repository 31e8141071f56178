"""Stages of the channel: what clients do to a message before it leaves them, and what the server does to read it.

The order is fixed: compress, clip, noise, encode. Every stage is a small frozen value. What it needs to remember of a
client stays in that client's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.engine import Memory
from atoll.kernel.errors import HyperparameterError
from atoll.kernel.params import Layout, Stack
from atoll.kernel.randomness import number


class Form(NamedTuple):
    """What a packed field was: names, shapes and types of its leaves; all of it is public."""

    shapes: dict[str, torch.Size]  # of the floating-point leaves, without the client axis
    dtype: torch.dtype
    layout: Layout | None
    order: tuple[str, ...]  # of all leaves

    @property
    def size(self) -> int:
        """How many numbers the vector has."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def mark(self) -> str:
        """What tells this form from others: a client may send the same field in another one later in a run."""
        return f"{number(0, 'form', *(f'{name} {tuple(shape)}' for name, shape in self.shapes.items())):x}"

    def to_rows(self, value: Stack) -> Tensor:
        """Return the field as a matrix, a row per client."""
        return torch.cat([value[name].reshape(value.clients, -1) for name in self.shapes], dim=1)

    def to_leaves(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the floating-point leaves that a matrix holds."""
        parts = torch.split(rows.to(self.dtype), [shape.numel() for shape in self.shapes.values()], dim=1)
        return {
            name: part.reshape(len(rows), *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def form_of(value: Stack) -> Form:
    """Return the form of a field."""
    floating = value.floating
    dtype = next((leaf.dtype for leaf in floating.values()), torch.float32)
    shapes = {name: leaf.shape[1:] for name, leaf in floating.items()}
    return Form(shapes, dtype, value.layout, tuple(value))


class Sent(NamedTuple):
    """What some clients send, a row per client, and what is publicly known of its form."""

    fields: Mapping[str, Stack]
    weight: Tensor | None  # None where every reply counts the same, and nothing is told
    forms: Mapping[str, Form] = {}  # of packed fields: what they were, without a number of theirs
    summed: bool = False  # whether there is one row: the sum over these clients


@dataclass(frozen=True)
class Place:
    """Where a message is sent: in which round, by whom, and where these clients remember things."""

    round: int
    clients: NDArray[np.int64]
    kinds: Mapping[str, str] = field(default_factory=dict)  # of the fields: model, statistic, labels, ...
    memory: Memory | None = None
    seed: int = 0
    of_model: Tensor | None = None  # which of the server's models each client's changes are of; None: there is one
    secret: bytes | None = field(default=None, repr=False)  # of who sends, for noise; None: it follows from the seed

    @property
    def source(self) -> int | bytes:
        """What noise is drawn from; what everybody must draw alike is drawn from the seed."""
        return self.seed if self.secret is None else self.secret


class Stage:
    """Base of all stages."""

    hides_weight: ClassVar[bool] = False  # whether the server does not learn how many samples a client has

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Return what leaves the clients."""
        return sent

    def restore(self, sent: Sent, place: Place) -> Sent:
        """Return what the server reads in what arrived."""
        return sent


def joint_norms(fields: Mapping[str, Stack]) -> Tensor:
    """Return the norm of each client's message: all floating-point numbers of all its fields together."""
    parts = [
        leaf.double().flatten(1).square().sum(1) if leaf.ndim > 1 else leaf.double().square()
        for value in fields.values()
        for leaf in value.values()
        if leaf.is_floating_point()
    ]
    return torch.stack(parts).sum(0).sqrt() if parts else torch.zeros(())


@dataclass(frozen=True)
class Clip(Stage):
    """Scale each client's message down to a largest norm: all numbers of all fields, BatchNorm's statistics as well."""

    norm: float

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise HyperparameterError(f"`norm` of Clip must be a float in (0, inf). Got {self.norm!r} instead.")

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Scale the message down; see `Stage.apply`."""
        norms = joint_norms(sent.fields)
        return sent._replace(fields=cut_to(self.norm, sent.fields, norms)) if norms.ndim else sent


def cut_to(norm: float, fields: Mapping[str, Stack], norms: Tensor) -> dict[str, Stack]:
    """Return messages of these norms scaled down to a largest one; those within it keep their bits."""
    scale = torch.where(norms > norm, norm / norms.clamp(min=1e-300), 1.0)
    return {name: _scale(value, scale) for name, value in fields.items()}


def _scale(value: Stack, scale: Tensor) -> Stack:
    """Return each client's floating-point leaves times its scale; what is not scaled keeps its bits."""
    cut = scale < 1
    return value.map(
        lambda leaf: (
            torch.where(_align(cut, leaf), leaf * _align(scale.to(leaf.dtype), leaf), leaf)
            if leaf.is_floating_point()
            else leaf
        )
    )


def _align(values: Tensor, leaf: Tensor) -> Tensor:
    return values.to(leaf.device).reshape(-1, *[1] * (leaf.ndim - 1))


def send_through(stages: Sequence[Stage], sent: Sent, place: Place) -> Sent:
    """Return what leaves clients after all stages, in their order."""
    for stage in stages:
        sent = stage.apply(sent, place)
    return sent


def read_through(stages: Sequence[Stage], sent: Sent, place: Place) -> Sent:
    """Return what the server reads in a message that has passed all stages."""
    for stage in reversed(stages):
        sent = stage.restore(sent, place)
    return sent
