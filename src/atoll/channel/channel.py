"""The channel between server and clients: stages that change replies, and the ledger that counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.algorithm import Algorithm, Arrival, Update
from atoll.channel.ledger import Entry, Ledger
from atoll.errors import HyperparameterError, PayloadError
from atoll.params import Params, Stack, Tree
from atoll.serialise import size_of


class Stage(Protocol):
    """Something that replies pass through before they reach the server."""

    def apply(self, fields: Mapping[str, Stack], *, round: int, clients: NDArray[np.int64]) -> Mapping[str, Stack]:
        """The fields as they leave the stage."""
        ...


@dataclass(frozen=True)
class Clip:
    """Scale each client's delta down to a largest norm; the first step of robustness and of privacy."""

    norm: float
    field: str = "delta"

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise HyperparameterError(f"`norm` of Clip must be a float in (0, inf). Got {self.norm!r} instead.")

    def apply(self, fields: Mapping[str, Stack], *, round: int, clients: NDArray[np.int64]) -> Mapping[str, Stack]:  # noqa: ARG002
        """See `Stage.apply`."""
        if self.field not in fields:
            return fields
        value = fields[self.field]
        scale = (self.norm / value.norm().clamp(min=1e-12)).clamp(max=1.0)
        return {**fields, self.field: value * scale}


class Channel:
    """Carries messages both ways, changes replies by its stages, and counts every byte."""

    def __init__(self, stages: Sequence[Stage] = (), ledger: Ledger | None = None) -> None:
        self.stages = tuple(stages)
        self.ledger = ledger or Ledger()

    def down(self, field: str, tree: Tree, clients: NDArray[np.int64], round: int) -> None:
        """Count what the server sends to these clients."""
        if tree is not None:
            entry = Entry("down", round, field, _kind(tree), size_of(tree), tuple(map(int, clients)))
            self.ledger.record(entry)

    def up(self, algorithm: Algorithm, clients: NDArray[np.int64], update: Update, round: int) -> Arrival:
        """Pass on what these clients send, after checking that it is what the method declares."""
        for name, value in update.send.items():
            if name not in algorithm.sends:
                raise PayloadError(
                    f"{type(algorithm).__name__} sends a field {name!r} that it does not declare.",
                    hint=f'declare it: sends = {{"{name}": "model"}} (or "statistic", "labels").',
                )
            if not isinstance(value, Stack) or (len(value) and value.clients != len(clients)):
                raise PayloadError(
                    f"Field {name!r} must be a Stack with one row per client, {len(clients)}. Got {value!r}."
                )
        fields = dict(update.send)
        for stage in self.stages:
            fields = dict(stage.apply(fields, round=round, clients=clients))
        for name, value in fields.items():
            kind = algorithm.sends[name]
            self.ledger.record(Entry("up", round, name, kind, size_of(value), tuple(map(int, clients))))
        return Arrival(clients, fields, _weight(update, clients))


def _weight(update: Update, clients: NDArray[np.int64]) -> Tensor:
    if update.weight is None:
        device = next((leaf.device for value in update.send.values() for leaf in value.values()), None)
        return torch.ones(len(clients), device=device)
    if update.weight.shape != (len(clients),):
        raise PayloadError(
            f"`weight` must have one value per client, {len(clients)}. Got shape {tuple(update.weight.shape)}."
        )
    return update.weight


def _kind(tree: Tree) -> str:
    return "model" if isinstance(tree, Params | Stack) else "state"
