"""Statistics of how clients differ: sizes, labels, features. Computed from arrays only, for any number of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atoll.kernel.errors import DataError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

MOST_COUNTS = 1_000_000  # that are kept in JSON
BLOCK = 2**24  # entries of features in work at once


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """One value per client. A field that does not apply is None; a client without samples has NaN.

    With classes: `counts` of each label [clients, classes], how many are `present`, the `entropy` of the client's
    label distribution p in bits, its Jensen-Shannon `divergence` from the distribution q of all clients together,
    JS = H((p + q) / 2) - (H(p) + H(q)) / 2 in bits, from 0 to 1, and its total `variation`, sum |p - q| / 2.

    Without: mean and standard deviation of the targets, and the `target_shift`, (client's mean - mean) / std.

    `feature_distance` is between the client's mean feature and that of all, in standard deviations: the root of the
    mean square over dimensions that vary. Chance alone gives a client of n samples about 1 / sqrt(n).
    """

    samples: Whole
    classes: int | None = None
    counts: Whole | None = None
    present: Whole | None = None
    entropy: Floats | None = None
    divergence: Floats | None = None
    variation: Floats | None = None
    target_mean: Floats | None = None
    target_std: Floats | None = None
    target_shift: Floats | None = None
    feature_distance: Floats | None = None
    groups: Whole | None = None  # planted, where they are known
    speed: Floats | None = None  # of their devices, where it is known
    names: tuple[str, ...] | None = None  # of the clients; their numbers by default

    def __repr__(self) -> str:
        return f"<Statistics: {self.sentence}>"

    def name(self, client: int) -> str:
        """Return the name of the client."""
        return str(client) if self.names is None else self.names[client]

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.samples)

    @property
    def evenness(self) -> Floats | None:
        """The entropy as a share of what all classes alike would have, from 0 to 1."""
        return None if self.entropy is None else self.entropy / max(math.log2(self.classes or 2), 1e-300)

    @cached_property
    def summary(self) -> dict[str, float]:
        """All clients in a few figures; means are over clients that have samples."""
        found: dict[str, float] = {
            "clients": self.clients,
            "samples": int(self.samples.sum()),
            "smallest": int(self.samples.min()),
            "median": float(np.median(self.samples)),
            "largest": int(self.samples.max()),
            "gini": gini(self.samples),
        }
        if self.entropy is not None:
            found["effective_classes"] = float(np.nanmean(2**self.entropy))
        for name in ("present", "entropy", "divergence", "variation", "feature_distance"):
            values = getattr(self, name)
            if values is not None:
                found[name] = float(np.nanmean(values[self.samples > 0]))
        if self.target_shift is not None:
            found["target_shift"] = float(np.nanmean(np.abs(self.target_shift)))
        return found

    @property
    def sentence(self) -> str:
        """The summary in words."""
        of = self.summary
        sizes = f"{of['smallest']:,} to {of['largest']:,} samples each"
        words = [f"{self.clients:,} clients with {sizes} (median {of['median']:,g}, Gini {of['gini']:.2f})."]
        means = []
        if self.divergence is not None:
            means.append(f"has {of['present']:.1f} of {self.classes} classes ({of['effective_classes']:.1f} effective)")
            means.append(f"diverges in its labels from all clients by {of['divergence']:.2f} bits of at most 1")
        if self.target_shift is not None:
            means.append(f"has its mean target {of['target_shift']:.2f} standard deviations from that of all")
        if self.feature_distance is not None:
            means.append(f"has its mean sample {of['feature_distance']:.2f} standard deviations from that of all")
        if means:
            words.append(f"On average a client {', '.join(means[:-1])}{' and ' if means[:-1] else ''}{means[-1]}.")
        return " ".join(words)

    def as_json(self) -> dict[str, Any]:
        """Return values that JSON can hold: lists, with None for NaN; very many label counts are left out."""
        found = {field.name: _to_list(getattr(self, field.name)) for field in fields(self)}
        if self.counts is not None and self.counts.size > MOST_COUNTS:
            found["counts"] = None
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Statistics:
        """Rebuild statistics from what `as_json` gave; raise ValueError or TypeError if it is something else."""
        whole = {"samples", "counts", "present", "groups"}

        def array(name: str, values: Any) -> Any:
            if name == "classes":
                return values if values is None else int(values)
            if len(values) != len(found["samples"]):
                raise ValueError(f"{name} has {len(values)} entries for {len(found['samples'])} clients")
            if name == "names":
                return tuple(map(str, values))
            made = np.array(values, dtype=np.int64 if name in whole else np.float64)  # None becomes NaN
            if made.ndim != (2 if name == "counts" else 1):
                raise ValueError(f"{name} has {made.ndim} axes")
            return made

        if not found["samples"]:
            raise ValueError("there are no clients")
        return cls(**{name: array(name, values) for name, values in found.items()})


def gini(scores: ArrayLike) -> float:
    """Return Gini's coefficient, sum_ij |a_i - a_j| / (2 N^2 mean(a)): 0 if all are equal, towards 1 if one has all."""
    some = np.asarray(scores, dtype=np.float64)
    some = some[~np.isnan(some)]
    if not len(some) or (some < 0).any():
        return math.nan
    if not some.any():
        return 0.0
    # Sorted, the double sum is a single one: sum_ij |a_i - a_j| = 2 sum_i (2i - N - 1) a_i.
    n = len(some)
    return max(0.0, float((2 * np.arange(1, n + 1) - n - 1) @ np.sort(some) / (n * some.sum())))


def statistics(
    targets: ArrayLike,
    parts: Sequence[NDArray[np.int64]],
    classes: int | None,
    features: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    names: Sequence[str] | None = None,
) -> Statistics:
    """Describe samples that were dealt: `parts` are the indices of each client.

    `targets` are classes, one per sample or one per place (negative ones do not count), or numbers if `classes` is
    None. `features` are floats [samples, ...].
    """
    targets = np.asarray(targets)
    if not len(parts) or not sum(map(len, parts)):
        raise DataError(f"Statistics need at least 1 client with a sample. Got {len(parts)} clients and no samples.")
    samples = np.array([len(part) for part in parts])
    rows = np.concatenate(parts).astype(np.int64)
    dealt = targets[rows].reshape(len(rows), -1)
    of_targets = _describe_numbers(dealt, samples) if classes is None else _describe_classes(dealt, samples, classes)
    return Statistics(
        samples=samples,
        classes=classes,
        **of_targets,
        feature_distance=None if features is None else _feature_distance(np.asarray(features), rows, samples),
        groups=None if groups is None else np.asarray(groups, dtype=np.int64),
        names=None if names is None else tuple(names),
    )


def _describe_classes(labels: Whole, samples: Whole, classes: int) -> dict[str, Any]:
    owner = np.broadcast_to(_owner_of_each(samples)[:, None], labels.shape)
    counted = labels >= 0
    places = owner[counted] * classes + labels[counted]
    counts = np.bincount(places, minlength=len(samples) * classes).reshape(len(samples), classes)
    empty = counts.sum(axis=1) == 0
    p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    q = counts.sum(axis=0) / counts.sum()

    def where_counted(values: Floats) -> Floats:
        return np.where(empty, math.nan, values)

    return {
        "counts": counts,
        "present": (counts > 0).sum(axis=1),
        "entropy": where_counted(_bits(p)),
        # rounding can leave a little less than nothing
        "divergence": where_counted(np.maximum(_bits((p + q) / 2) - (_bits(p) + _bits(q)) / 2, 0)),
        "variation": where_counted(np.abs(p - q).sum(axis=1) / 2),
    }


def _describe_numbers(targets: NDArray[Any], samples: Whole) -> dict[str, Any]:
    values = targets.astype(np.float64).mean(axis=1)
    owner, clients = _owner_of_each(samples), len(samples)
    sizes = np.where(samples > 0, samples, math.nan)
    means = np.bincount(owner, values, minlength=clients) / sizes
    spread = np.sqrt(np.bincount(owner, (values - means[owner]) ** 2, minlength=clients) / sizes)
    return {
        "target_mean": means,
        "target_std": spread,
        "target_shift": (means - values.mean()) / (values.std() or 1),
    }


def _feature_distance(features: NDArray[Any], rows: Whole, samples: Whole) -> Floats:
    from scipy.sparse import csr_array

    flat = features.reshape(len(features), -1)
    clients, offsets = len(samples), np.concatenate([[0], np.cumsum(samples)])
    weights = 1 / np.repeat(np.maximum(samples, 1), samples)
    averaging = csr_array((weights, np.arange(len(rows)), offsets), shape=(clients, len(rows)))
    squares, varying = np.zeros(clients), 0
    width = max(1, BLOCK // max(len(rows), clients))
    for start in range(0, flat.shape[1], width):  # all dimensions at once might not fit
        block = flat[rows, start : start + width].astype(np.float64)
        std = block.std(axis=0)
        block = block[:, std > 0]
        squares += (((averaging @ block - block.mean(axis=0)) / std[std > 0]) ** 2).sum(axis=1)
        varying += block.shape[1]
    return np.where(samples > 0, np.sqrt(squares / max(varying, 1)), math.nan)


def _owner_of_each(samples: Whole) -> Whole:
    return np.repeat(np.arange(len(samples)), samples)


def _bits(p: Floats) -> Floats:
    """Return the entropy of distributions along the last axis."""
    return np.asarray(-(p * np.log2(np.where(p > 0, p, 1))).sum(axis=-1) + 0.0)


def _to_list(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return list(values) if isinstance(values, tuple) else values
    if values.dtype.kind != "f":
        return values.tolist()
    return [None if math.isnan(value) else round(value, 6) for value in values.tolist()]
