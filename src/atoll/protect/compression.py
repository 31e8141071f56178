"""Lean messages: `topk:0.01`, `randk:0.1`, `qsgd:8`, `sign`, `lowrank:2`.

Fields that hold a change of a model, or a model that is sent once, are packed as one vector of all their
floating-point numbers; states, statistics and labels travel as they are, and so do whole numbers. What travels are the
packed tensors, and the ledger counts these. Where packing loses a direction for good (topk, sign, lowrank), a client
remembers what was cut off and adds it to what it next sends of the same model (error feedback); so what was sent over
all rounds, and what is remembered, add up to all changes.

References: Stich et al., NeurIPS 2018 (top-k with memory); Alistarh et al., NeurIPS 2017 (QSGD); Karimireddy et al.,
ICML 2019 (sign with error feedback); Vogels et al., NeurIPS 2019 (PowerSGD).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.engine import Memory
from atoll.kernel.errors import HyperparameterError, unknown
from atoll.kernel.params import Params, Stack, spread
from atoll.kernel.randomness import Keys, generator
from atoll.kernel.wrapper import title_of
from atoll.protect.stages import Form, Place, Sent, Stage, form_of
from atoll.toolbox.bits import from_bits, to_bits

log = logging.getLogger("atoll.federation")

Notes = Mapping[str, Tensor]  # what clients remember of a field
Packed = tuple[dict[str, Tensor], dict[str, Tensor]]  # what travels, and what clients remember beside what was cut off
PACKED = "packed."  # before the names of tensors that were packed


@dataclass(frozen=True)
class Compression(Stage, ABC):
    """Base of all compressions."""

    name: ClassVar[str]
    feeds_back: ClassVar[bool] = True  # clients remember what was cut off
    linear: ClassVar[bool] = False  # packed messages may be added up, so secure sums can carry them

    def check(self, models: Sequence[Params]) -> None:
        """Raise where these models, one of each architecture, cannot be packed so."""

    def warn_of_nothing(self, algorithm: Algorithm) -> None:
        """Warn where a method sends no model, so nothing is packed."""
        if algorithm.sends and "model" not in algorithm.sends.values():
            log.warning(
                "%s sends no model, so `compress` packs nothing: its messages travel as they are", title_of(algorithm)
            )

    def apply(self, sent: Sent, place: Place) -> Sent:
        """Pack the fields that hold a model; see `Stage.apply`."""
        fields, forms = dict(sent.fields), dict(sent.forms)
        for name, value in sent.fields.items():
            if place.kinds.get(name, "model") != "model" or not len(value.floating):
                continue
            form = form_of(value)
            rows = form.to_rows(value)
            notebooks = self._list_notebooks(place, name, form)
            before = spread(
                Params.of(cut=rows.new_zeros(form.size), **self.first_notes(form, name)), len(place.clients)
            )
            for some, notebook in notebooks:
                found = notebook.recall(place.clients[some], before.rows(torch.from_numpy(some)), before=place.round)
                before = _put_rows(before, some, found)
            rows = rows + before["cut"].to(rows)
            packed, notes = self.pack(rows, form, place, name, before)
            forms[name] = form
            fields[name] = Stack(
                {PACKED + key: leaf for key, leaf in packed.items()} | dict(value.without(form.shapes))
            )
            if notebooks:
                left = Stack.of(cut=rows - self.unpack(packed, form, place, name).to(rows), **notes)
            for some, notebook in notebooks:
                notebook.keep(place.clients[some], left.rows(torch.from_numpy(some)), round=place.round)
        return sent._replace(fields=fields, forms=forms)

    def _list_notebooks(self, place: Place, field: str, form: Form) -> list[tuple[NDArray[np.int64], Memory]]:
        """List where clients remember what was cut off, and the positions of these clients.

        It is apart for messages of each form, and for changes of each of the server's models.
        """
        if not self.feeds_back or place.memory is None:
            return []
        title = f"compress {field} {form.mark}"
        if place.of_model is None:
            return [(np.arange(len(place.clients)), place.memory.beside(title))]
        numbers = place.of_model.cpu().numpy()
        return [
            (np.flatnonzero(numbers == number), place.memory.beside(f"{title} of {number}"))
            for number in np.unique(numbers).tolist()
        ]

    def restore(self, sent: Sent, place: Place) -> Sent:
        """Unpack what was packed; see `Stage.restore`."""
        fields = dict(sent.fields)
        for name, form in sent.forms.items():
            value = sent.fields[name]
            packed = {key.removeprefix(PACKED): leaf for key, leaf in value.items() if key.startswith(PACKED)}
            leaves = dict(value) | form.to_leaves(self.unpack(packed, form, place, name))
            there = [leaf for leaf in form.order if leaf in leaves]  # secure sums leave out whole numbers
            fields[name] = Stack({leaf: leaves[leaf] for leaf in there}, form.layout)
        return sent._replace(fields=fields, forms={})

    def first_notes(self, form: Form, field: str) -> dict[str, Tensor]:
        """Return what clients remember beside what was cut off, before they have packed anything."""
        return {}

    @abstractmethod
    def pack(self, rows: Tensor, form: Form, place: Place, field: str, notes: Notes) -> Packed:
        """Return the tensors that travel for a matrix of one row per client, and what clients remember beside."""

    @abstractmethod
    def unpack(self, packed: Mapping[str, Tensor], form: Form, place: Place, field: str) -> Tensor:
        """Return the matrix that the server reads."""


def _put_rows(value: Stack, places: NDArray[np.int64], rows: Stack) -> Stack:
    """Return a Stack with other rows at some places."""
    index = torch.from_numpy(places)
    return Stack({name: leaf.index_copy(0, index.to(leaf.device), rows[name].to(leaf)) for name, leaf in value.items()})


@dataclass(frozen=True)
class TopK(Compression):
    """The share P of all numbers that are largest, with their places."""

    share: float = 0.01
    name: ClassVar[str] = "topk"

    def pack(self, rows: Tensor, form: Form, place: Place, field: str, notes: Notes) -> Packed:
        """Return the largest numbers; of equal ones those that come first."""
        count, sizes = math.ceil(self.share * form.size), rows.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        least = sizes.topk(count, dim=1).values[:, -1:]
        above, equal = sizes > least, sizes == least
        chosen = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
        index = chosen.nonzero()[:, 1].reshape(len(rows), count)
        return {"values": rows.gather(1, index), "index": index.to(torch.int32)}, {}

    def unpack(self, packed: Mapping[str, Tensor], form: Form, place: Place, field: str) -> Tensor:
        """Return the numbers at their places, and 0 elsewhere."""
        values = packed["values"]
        return values.new_zeros(len(values), form.size).scatter_(1, packed["index"].long(), values)


@dataclass(frozen=True)
class RandomK(Compression):
    """The share P of all numbers, at places that are drawn anew in every round and known to everybody."""

    share: float = 0.1
    name: ClassVar[str] = "randk"
    feeds_back: ClassVar[bool] = False  # right on average
    linear: ClassVar[bool] = True

    def places(self, form: Form, place: Place, field: str) -> Tensor:
        """Draw the places of a round."""
        count = math.ceil(self.share * form.size)
        drawn = generator(place.seed, "randk", place.round, field).choice(form.size, count, replace=False)
        return torch.from_numpy(drawn).sort().values

    def pack(self, rows: Tensor, form: Form, place: Place, field: str, notes: Notes) -> Packed:
        """Return the numbers at the drawn places, enlarged as much as others are left out."""
        index = self.places(form, place, field).to(rows.device)
        return {"values": rows[:, index] * (form.size / len(index))}, {}

    def unpack(self, packed: Mapping[str, Tensor], form: Form, place: Place, field: str) -> Tensor:
        """Return the numbers at their places, and 0 elsewhere."""
        values = packed["values"]
        made = values.new_zeros(len(values), form.size)
        made[:, self.places(form, place, field).to(values.device)] = values
        return made


@dataclass(frozen=True)
class Quantised(Compression):
    """QSGD: each number in B bits, rounded up or down at random, so it is right on average; and the vector's norm."""

    bits: int = 8
    name: ClassVar[str] = "qsgd"
    feeds_back: ClassVar[bool] = False  # right on average

    @property
    def levels(self) -> int:
        """How many steps there are from 0 to the norm."""
        return int(2 ** (self.bits - 1) - 1)

    def pack(self, rows: Tensor, form: Form, place: Place, field: str, notes: Notes) -> Packed:
        """Return the norm, and the level of every number with its sign."""
        clients = torch.from_numpy(place.clients).to(rows.device)
        keys = Keys.of(clients, place.seed, "qsgd", place.round, field)
        columns = torch.arange(form.size, device=rows.device)
        norms = rows.double().norm(dim=1)
        scaled = self.levels * rows.abs().double() / norms.clamp(min=1e-300)[:, None]
        drawn = Keys(keys.low[:, None], keys.high[:, None]).uniform(columns, torch.float64)
        level = (scaled.floor() + (drawn < scaled - scaled.floor())) * rows.sign()
        return {"norm": norms.float()[:, None], "levels": to_bits(level.long() + self.levels, self.bits)}, {}

    def unpack(self, packed: Mapping[str, Tensor], form: Form, place: Place, field: str) -> Tensor:
        """Return the numbers that the levels stand for."""
        level = from_bits(packed["levels"], self.bits, form.size).long() - self.levels
        return packed["norm"].double() * level / self.levels


@dataclass(frozen=True)
class Signs(Compression):
    """The sign of every number, in one bit, and their mean size."""

    name: ClassVar[str] = "sign"

    def pack(self, rows: Tensor, form: Form, place: Place, field: str, notes: Notes) -> Packed:
        """Return the mean size and the signs."""
        return {"size": rows.abs().double().mean(1, keepdim=True).float(), "signs": to_bits(rows >= 0, 1)}, {}

    def unpack(self, packed: Mapping[str, Tensor], form: Form, place: Place, field: str) -> Tensor:
        """Return plus or minus the mean size."""
        return packed["size"].double() * (2 * from_bits(packed["signs"], 1, form.size).long() - 1)


@dataclass(frozen=True)
class LowRank(Compression):
    """PowerSGD: each matrix as a product of two thin ones of rank R; vectors travel as they are."""

    rank: int = 2
    name: ClassVar[str] = "lowrank"

    def check(self, models: Sequence[Params]) -> None:
        """Raise for a rank with which no matrix of any model becomes smaller."""
        shapes = [leaf.shape for model in models for leaf in model.values() if leaf.ndim > 1]
        sizes = [(shape[0], shape[1:].numel()) for shape in shapes]
        most = max((-(-m * n // (m + n)) - 1 for m, n in sizes), default=0)
        if self.rank > most:
            raise HyperparameterError(
                f"The rank of `lowrank` must be smaller than the model's matrices, so they become leaner: at most "
                f"{most}. Got {self.rank}."
            )

    def _matrices(self, form: Form) -> dict[str, tuple[int, int]]:
        """Return rows and columns of the leaves that are worth it."""
        sizes = {name: (shape[0], shape[1:].numel()) for name, shape in form.shapes.items() if len(shape) > 1}
        return {name: (m, n) for name, (m, n) in sizes.items() if self.rank * (m + n) < m * n}

    def first_notes(self, form: Form, field: str) -> dict[str, Tensor]:
        """Return the first right factors, the same for everybody."""
        return {
            f"right{number}": torch.from_numpy(
                generator(0, "lowrank", field, number).standard_normal((n, self.rank))
            ).to(form.dtype)
            for number, (_, n) in enumerate(self._matrices(form).values())
        }

    def pack(self, rows: Tensor, form: Form, place: Place, field: str, notes: Notes) -> Packed:
        """Return both factors of every matrix, P = orth(M Q) and M' P, with Q of the last time; and the vectors."""
        leaves, packed, factors = form.to_leaves(rows), dict[str, Tensor](), dict[str, Tensor]()
        for number, (name, (m, n)) in enumerate(self._matrices(form).items()):
            matrix = leaves.pop(name).reshape(len(rows), m, n)
            left = torch.linalg.qr(matrix @ notes[f"right{number}"].to(matrix)).Q
            packed[f"left{number}"], factors[f"right{number}"] = left, matrix.mT @ left
        if leaves:
            packed["vectors"] = torch.cat([leaf.reshape(len(rows), -1) for leaf in leaves.values()], dim=1)
        return packed | factors, factors

    def unpack(self, packed: Mapping[str, Tensor], form: Form, place: Place, field: str) -> Tensor:
        """Return the products of the factors, and the vectors."""
        matrices = self._matrices(form)
        count = len(next(iter(packed.values())))
        plain = [shape.numel() for name, shape in form.shapes.items() if name not in matrices]
        vectors = iter(torch.split(packed["vectors"], plain, dim=1) if plain else ())
        numbers = {name: number for number, name in enumerate(matrices)}
        parts = [
            (packed[f"left{numbers[name]}"] @ packed[f"right{numbers[name]}"].mT).reshape(count, -1)
            if name in numbers
            else next(vectors)
            for name in form.shapes
        ]
        return torch.cat(parts, dim=1)


COMPRESSIONS: dict[str, type[Compression]] = {one.name: one for one in (TopK, RandomK, Quantised, Signs, LowRank)}
_VALUES: dict[str, tuple[str, type, Any, str]] = {
    "topk": ("share", float, lambda v: 0 < v <= 1, "a share in (0, 1]"),
    "randk": ("share", float, lambda v: 0 < v <= 1, "a share in (0, 1]"),
    "qsgd": ("bits", int, lambda v: v in (2, 4, 8), "2, 4 or 8 bits (1 bit is `sign`)"),
    "lowrank": ("rank", int, lambda v: v >= 1, "a rank of at least 1"),
}


def parse_compression(words: str) -> Compression | None:
    """Parse a compression from words; None for `none`."""
    if words == "none":
        return None
    name, colon, value = words.partition(":")
    if name not in COMPRESSIONS:
        raise unknown("compression", name, [*COMPRESSIONS, "none"])
    kind = COMPRESSIONS[name]
    if not colon:
        return kind()
    if name not in _VALUES:
        raise HyperparameterError(f"The compression {name} takes no value. Got {words!r}.")
    field, read, holds, expected = _VALUES[name]
    try:
        number = read(value)
    except ValueError:
        number = None
    if number is None or not holds(number):
        raise HyperparameterError(
            f"`{name}` must be given with {expected}. Got {value!r}.", hint="for example topk:0.01."
        )
    return kind(**{field: number})
