"""From a raw row, window or picture to the network's input, and from its output to a class name.

scaling = task.scaling                    of all clients: mean and spread of every number or channel
mine = scaling.of_client(3)               of one: a small value that is written as JSON
mine.encode("new.csv")                    what the network takes
mine.decode(outputs)                      class names, or numbers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.rows import Rows
from atoll.data.schema import Feature, Schema
from atoll.data.tables import Values, table_of
from atoll.kernel.errors import DataError

LEAST_SPREAD = 1e-12  # relative to the mean; below it a column is constant but for rounding

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Preprocessing:
    """What one client does with raw samples: its columns, its mean and spread, and the names of the classes."""

    schema: Schema
    mean: tuple[float, ...]  # of every number of a table, or of every channel
    std: tuple[float, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the network's outputs."""
        return self.schema.classes

    def encode(self, raw: Any) -> Tensor:
        """Return what the network takes for raw samples.

        They are anything that a table may be (a file, a frame, a dict of columns), one row as a dict of values or,
        where samples are arrays, an array of them. A target among them is not read.
        """
        return self.scale(self.schema.encode(self._rows_of(raw)))

    def number(self, raw: Any) -> Values:
        """Return raw samples as numbers that are not scaled: categories as 0/1 columns, arrays as they are."""
        rows, array = self._rows_of(raw), self.schema.array
        if array is None:
            return self.schema.encode(rows)
        array.encode(rows)  # raises where it does not fit
        return rows.column(array.name)

    def scales(self, shape: tuple[int, ...]) -> tuple[Floats, Floats] | None:
        """Return what is subtracted from, and then divides, numbers of a shape as `number` gives them; None: nothing.

        Both have the axes of a sample. Pixels count from 0 to 255.
        """
        array, mean, std = self.schema.array, np.array(self.mean), np.array(self.std)
        if array is not None and array.holds == "tokens":
            return None
        if array is None:
            both = np.zeros(shape), np.ones(shape)
            both[0][self.schema.scaled], both[1][self.schema.scaled] = mean, std
        else:
            axes = [1] * len(shape)
            if array.channel_axis is not None:
                axes[array.channel_axis] = -1
            both = mean.reshape(axes), std.reshape(axes)
            if array.holds == "pixels":
                both = (both[0] * 0.5 + 0.5) * 255, both[1] * 0.5 * 255
        return both if both[0].any() or (both[1] != 1).any() else None

    def _rows_of(self, raw: Any) -> Rows:
        array = self.schema.array
        if array is not None and isinstance(raw, np.ndarray | Tensor):
            values = raw.detach().cpu().numpy() if isinstance(raw, Tensor) else raw
            raw = {array.name: values if values.ndim > len(array.shape) else values[None]}
        elif isinstance(raw, Mapping) and all(np.ndim(value) == 0 for value in raw.values()):
            raw = {name: [value] for name, value in raw.items()}
        return Rows([table_of(raw, "the samples")])

    def scale(self, values: Values) -> Tensor:
        """Return encoded numbers as the network takes them: standardised, in single precision; tokens stay whole."""
        if values.dtype.kind in "iu" and self.schema.array is not None and self.schema.array.holds == "tokens":
            return torch.from_numpy(np.ascontiguousarray(values, np.int64))
        return _apply(self.schema, values, np.array(self.mean), np.array(self.std))

    def decode(self, outputs: Tensor) -> list[str] | Tensor:
        """Return the name of the likeliest class for each sample; of a regression, the numbers themselves."""
        if not self.schema.classes:
            return outputs.argmax(dim=1) if self.schema.kind == "tokens" else outputs
        return [self.schema.classes[index] for index in outputs.argmax(dim=1).tolist()]

    def as_json(self) -> dict[str, Any]:
        """Return the value as JSON holds it."""
        return {"inputs": self.schema.as_json(), "mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Preprocessing:
        """Rebuild the value from what `as_json` gave."""
        try:
            return cls(
                Schema.of_json(found["inputs"]), tuple(map(float, found["mean"])), tuple(map(float, found["std"]))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"A preprocessing must have a schema, means and spreads. {error}.") from error

    @classmethod
    def fit(cls, schema: Schema, raw: Any, rows: NDArray[np.int64] | None = None) -> Preprocessing:
        """Find mean and spread from raw samples of a client that has none yet, or from some rows of them."""
        value = cls(schema, (), ())
        x = schema.encode(value._rows_of(raw))
        mean, std = measure(schema, x if rows is None else x[rows])
        return cls(schema, tuple(mean.tolist()), tuple(std.tolist()))


@dataclass(frozen=True, eq=False)
class Scaling:
    """The mean and spread of all clients: a row for each, or one row where all share them."""

    schema: Schema
    mean: Floats  # [clients or 1, numbers or channels]
    std: Floats

    @classmethod
    def fit(cls, schema: Schema, x: Values, training: Sequence[NDArray[np.int64]]) -> Scaling:
        """Find mean and spread of encoded samples from the training rows of each client, or of all together."""
        if schema.standardise == "global":
            training = [np.concatenate([*training])]
        if schema.standardise == "none":
            width = _width(schema, x.shape[1:])
            return cls(schema, np.zeros((1, width)), np.ones((1, width)))
        both = [measure(schema, x[rows]) for rows in training]
        return cls(schema, np.stack([mean for mean, _ in both]), np.stack([std for _, std in both]))

    def of_client(self, client: int) -> Preprocessing:
        """Return what one client does with raw samples."""
        row = client if len(self.mean) > 1 else 0
        return Preprocessing(self.schema, tuple(self.mean[row].tolist()), tuple(self.std[row].tolist()))

    def of(self, clients: NDArray[np.int64]) -> Scaling:
        """Return the scaling of some clients only."""
        return Scaling(self.schema, self.mean[clients], self.std[clients]) if len(self.mean) > 1 else self

    def welcome(self, raw: Any, rows: NDArray[np.int64] | None = None) -> Preprocessing:
        """Return the preprocessing of a client that was never there, from its raw samples; no target is read.

        It finds its own mean and spread, as the others did, from all `rows` or some; unless all clients share one.
        """
        return Preprocessing.fit(self.schema, raw, rows) if self.schema.standardise == "client" else self.of_client(0)

    def apply(self, x: Values, owner: NDArray[np.int64]) -> Tensor:
        """Return samples as the network takes them, each scaled as its owner does."""
        if len(self.mean) == 1:
            return _apply(self.schema, x, self.mean[0], self.std[0])
        scaled = torch.empty(x.shape, dtype=torch.float32)
        order = np.argsort(owner, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(owner[order])) + 1):
            if len(rows):
                client = owner[rows[0]]
                scaled[rows] = _apply(self.schema, x[rows], self.mean[client], self.std[client])
        return scaled

    def as_json(self) -> dict[str, Any]:
        """Return the value as JSON holds it."""
        return {"inputs": self.schema.as_json(), "mean": self.mean.tolist(), "std": self.std.tolist()}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Scaling:
        """Rebuild the value from what `as_json` gave; raise ValueError or DataError if it is something else."""
        mean, std = (np.array(found[name], dtype=np.float64) for name in ("mean", "std"))
        if mean.ndim != 2 or mean.shape != std.shape:
            raise ValueError(f"means have the shape {mean.shape}, spreads {std.shape}")
        return cls(Schema.of_json(found["inputs"]), mean, std)


def plain_scaling(shape: tuple[int, ...], *, whole: bool, classes: int | None) -> Scaling:
    """Return what samples need that are numbers already: nothing; classes are called by their numbers."""
    feature = Feature("x", "array", shape=shape, holds="tokens" if whole else "amounts")
    names = tuple(map(str, range(classes or 0)))
    schema = Schema((feature,), "y", "regression" if classes is None else "classification", names, standardise="none")
    return Scaling.fit(schema, np.zeros((0, *shape)), [])


def measure(schema: Schema, x: Values) -> tuple[Floats, Floats]:
    """Return the mean and spread of each number of a table, or of each channel; 1 for what does not vary."""
    columns = _columns_of(schema, x).astype(np.float64)
    if not len(columns):
        return np.zeros(columns.shape[1]), np.ones(columns.shape[1])
    mean, std = columns.mean(axis=0), columns.std(axis=0)
    std[std <= LEAST_SPREAD * np.abs(mean)] = 1.0
    return mean, std


def _columns_of(schema: Schema, x: Values) -> Values:
    """Return what is scaled as columns: the numbers of a table, or all values of each channel."""
    if schema.array is None:
        return x[:, schema.scaled]
    axis = schema.array.channel_axis
    return x.reshape(-1, 1) if axis is None else np.moveaxis(x, axis + 1, -1).reshape(-1, x.shape[axis + 1])


def _width(schema: Schema, shape: tuple[int, ...]) -> int:
    if schema.array is None:
        return len(schema.scaled)
    axis = schema.array.channel_axis
    return 1 if axis is None else shape[axis]


def _apply(schema: Schema, x: Values, mean: Floats, std: Floats) -> Tensor:
    if schema.array is None:
        scaled = x.astype(np.float64)
        scaled[:, schema.scaled] = (scaled[:, schema.scaled] - mean) / std
        return torch.from_numpy(scaled.astype(np.float32))
    axis = schema.array.channel_axis
    shape = [1] * x.ndim
    if axis is not None:
        shape[axis + 1] = -1
    return torch.from_numpy(((x - mean.reshape(shape)) / std.reshape(shape)).astype(np.float32))
