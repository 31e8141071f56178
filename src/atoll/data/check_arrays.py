"""The same check for files of arrays: windows, pictures, lists of numbers, one npz file per client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.data.check import FAR, FEW, TINY, group_spellings
from atoll.data.clean import Change, make_folder, write_changes
from atoll.data.leaks import find_overlaps_within, nearest, spread_points
from atoll.data.own import MOST_CATEGORIES
from atoll.data.schema import Feature, Schema
from atoll.data.sheets import MOST_SHOWN, Problem, plural
from atoll.data.tables import READERS, Values
from atoll.kernel.errors import AtollError


@dataclass(frozen=True, eq=False)
class ArrayCheck:
    """The arrays of every file, and everything that is wrong with them."""

    source: Path
    files: Mapping[str, Mapping[str, Values]]
    samples: str  # the column of arrays
    target: str
    unreadable: tuple[Problem, ...] = ()

    @property
    def summary(self) -> str:
        """How much was looked at."""
        total = sum(len(columns[self.samples]) for columns in self.files.values())
        shape = next(iter(self.files.values()))[self.samples].shape[1:]
        return f"{plural(len(self.files), 'file')}, {total} samples of shape {'x'.join(map(str, shape))}"

    @cached_property
    def problems(self) -> list[Problem]:
        """Everything that is wrong."""
        return [
            *self.unreadable,
            *self._look_at_values(),
            *self._look_at_labels(),
            *self._look_at_rows(),
            *self._look_at_sizes(),
        ]

    @property
    def _x(self) -> Values:
        return np.concatenate([columns[self.samples] for columns in self.files.values()])

    @cached_property
    def _schema(self) -> Schema:
        x = next(iter(self.files.values()))[self.samples]
        holds: Any = "pixels" if x.dtype == np.uint8 and x.ndim > 2 else "amounts"
        return Schema((Feature(self.samples, "array", shape=x.shape[1:], holds=holds),), self.target, "classification")

    @cached_property
    def _owner(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.files)), [len(one[self.samples]) for one in self.files.values()])

    @cached_property
    def _place(self) -> NDArray[np.int64]:
        return np.concatenate([np.arange(len(one[self.samples])) for one in self.files.values()])

    def _report(self, kind: str, wrong: NDArray[np.bool_], column: str, what: str, fix: str) -> Iterator[Problem]:
        """Yield a problem for every file that has some of these rows."""
        names = list(self.files)
        for index in np.unique(self._owner[wrong]):
            rows = self._place[wrong & (self._owner == index)].tolist()
            shown = ", ".join(map(str, rows[:MOST_SHOWN])) + (", ..." if len(rows) > MOST_SHOWN else "")
            text = what.format(count=plural(len(rows), "sample"))
            yield Problem(kind, names[index], column, text, fix, tuple((names[index], row) for row in rows), shown)

    def _look_at_values(self) -> Iterator[Problem]:
        """Find values that are not finite, spikes, and channels that say nothing."""
        x = self._x
        if x.dtype.kind != "f":
            return
        flat = x.reshape(len(x), -1)
        broken = np.asarray(~np.isfinite(flat).all(axis=1))
        yield from self._report("missing", broken, self.samples, "{count} with NaN or infinite values", "left out")
        axis = self._schema.features[0].channel_axis
        channels = x[..., None] if axis is None else np.moveaxis(x, axis + 1, -1)
        for channel in range(channels.shape[-1]):
            values = channels[~broken][..., channel]
            named = f"{self.samples}[{channel}]" if channels.shape[-1] > 1 else self.samples
            low, middle, high = np.percentile(values, [25, 50, 75])
            if values.min() == values.max():
                yield Problem("constant", "all files", named, f"constant: all values are {middle:g}")
                continue
            reach = FAR * (high - low) if high > low else 1e6 * (1 + abs(middle))
            far = np.zeros(len(x), dtype=bool)
            far[~broken] = (np.abs(values - middle) > reach).reshape(len(values), -1).any(axis=1)
            if 0 < far.mean() <= FEW:
                worst = float(channels[far][..., channel].flat[np.argmax(np.abs(channels[far][..., channel]))])
                what = f"{{count}} with spikes, as {worst:g} where {middle:g} is usual"
                yield from self._report("spike", far, named, what, "left out")

    def _look_at_labels(self) -> Iterator[Problem]:
        """Find labels that occur once, or are written in several ways."""
        if any(self.target not in columns for columns in self.files.values()):
            what = "there is no such array to predict in every file; labels are not checked"
            yield Problem("absent", "all files", self.target, what)
            return
        labels = np.concatenate([columns[self.target] for columns in self.files.values()])
        if labels.ndim > 1 or labels.dtype.kind == "f":
            return
        counts = Counter(map(str, labels))
        if len(counts) > MOST_CATEGORIES:
            return
        for usual, others in group_spellings(counts).items():
            for other in others:
                what = f"{other!r} is elsewhere written {usual!r}"
                yield from self._report("spelling", labels.astype(str) == other, self.target, what, "")
        for label, count in counts.items():
            if count == 1:
                what = f"the label {label!r} occurs once"
                yield from self._report("lone", labels.astype(str) == label, self.target, what, "left out")

    def _look_at_rows(self) -> Iterator[Problem]:
        """Find samples that nearly repeat another, and windows that overlap."""
        x = self._x
        whole = np.isfinite(x.reshape(len(x), -1)).all(axis=1)
        points = spread_points(self._schema, x[whole])
        if points is not None:
            near, _ = nearest(points, points, apart=True)
            later = np.zeros(len(x), dtype=bool)
            later[np.flatnonzero(whole)[(near >= 0) & (near < np.arange(len(near)))]] = True
            what = "{count} nearly repeating an earlier one"
            yield from self._report("repeat", later, self.samples, what, "later ones left out")
        overlapping = find_overlaps_within(self._schema, x[whole])
        if overlapping.any():
            what = (
                f"{int(overlapping.sum())} of {len(overlapping)} windows share raw values with another: split them by "
                "group, or by order with a gap"
            )
            yield Problem("overlap", "all files", self.samples, what)

    def _look_at_sizes(self) -> Iterator[Problem]:
        """Find clients with too few samples to test."""
        for index, (name, columns) in enumerate(self.files.items()):
            size = len(columns[self.samples])
            if size < TINY:
                tested = max(1, round(size / 4))
                what = f"{plural(size, 'sample')}, about {tested} to test with; it counts as much as a large client"
                rows = tuple((name, row) for row in range(int((self._owner == index).sum())))
                yield Problem("tiny", name, "", what, "client left out", rows)

    def clean(self) -> tuple[ArrayCheck, list[Change]]:
        """Leave out what is wrong; return the check of what is left, and what was done."""
        changes, gone = [], {name: np.zeros(len(one[self.samples]), dtype=bool) for name, one in self.files.items()}
        for problem in self.problems:
            if problem.fix:
                changes.append(Change(problem.file, problem.column, problem.lines, problem.what, problem.fix))
            if problem.fix and problem.rows:
                gone[problem.file][[row for _, row in problem.rows]] = True
        kept = {
            name: {column: values[~gone[name]] for column, values in columns.items()}
            for name, columns in self.files.items()
            if not gone[name].all()
        }
        return replace(self, files=kept, unreadable=()), changes

    def save(self, changes: Sequence[Change], folder: Path) -> dict[str, Path]:
        """Write the cleaned files to a new folder, and beside it the list of what was done."""
        make_folder(folder)
        for name, columns in self.files.items():
            arrays: dict[str, Any] = dict(columns)
            np.savez_compressed(folder / name, **arrays)
        return {"cleaned": folder, "changes": write_changes(changes, folder)}


def check_arrays(source: Path, target: str | None) -> ArrayCheck | None:
    """Check a folder of npz files that hold arrays; return None where it holds tables."""
    paths = sorted(path for path in source.iterdir() if not path.name.startswith(".")) if source.is_dir() else [source]
    if not any(path.suffix.lower() == ".npz" for path in paths):
        return None
    files: dict[str, Mapping[str, Values]] = {}
    problems = []
    for path in paths:
        if path.suffix.lower() != ".npz":
            problems.append(Problem("stray", path.name, "", "is no .npz file, as the others are", "left out"))
            continue
        try:
            files[path.name] = READERS[".npz"](path).columns
        except (AtollError, OSError, ValueError, KeyError, EOFError) as error:
            what = f"cannot be read: {error}".splitlines()[0]
            problems.append(Problem("unreadable", path.name, "", what, "left out"))
    arrays = Counter(name for columns in files.values() for name, values in columns.items() if values.ndim > 1)
    if not arrays:
        return None
    samples = max(arrays, key=lambda name: arrays[name])
    shapes = Counter(columns[samples].shape[1:] for columns in files.values() if samples in columns)
    usual = shapes.most_common(1)[0][0]
    for name in list(files):
        mine = files[name].get(samples)
        if mine is None or mine.shape[1:] != usual or not len(mine):
            given = "has none" if mine is None else f"has samples of shape {mine.shape[1:]}, not {usual}"
            problems.append(Problem("shape", name, samples, given, "left out"))
            del files[name]
    return ArrayCheck(source, files, samples, target or "y", tuple(problems))
