"""What a run left, as digests: of all bits, and of a few sums for machines that round otherwise."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll import Report
from atoll.testing.conformance.playing import answer_tests

TOLERANCE = 1e-6  # relative, of sums: far above rounding, far below any other number
OF_THE_MACHINE = ("seconds", "memory")

Digest = dict[str, Any]


def digest_run(report: Report) -> dict[str, Digest]:
    """Digest what a run left: the server's state, what clients answer, the ledger, and the history."""
    answers = answer_tests(report) if report.task.classes is not None else []
    return {
        "server": digest(report.server),
        "answers": digest(answers),
        "ledger": digest(sorted(map(list, report.ledger.messages()))),
        "history": digest([describe_round(line.as_json()) for line in report.history]),
    }


def describe_round(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a round that do not depend on the machine; of clients that were lost, how many."""
    kept = {name: value for name, value in line.items() if name not in OF_THE_MACHINE}
    return {**kept, "lost": sum(line.get("lost", {}).values())}


def digest(tree: Any) -> Digest:
    """Digest all numbers and words of a tree: bits for this kind of machine, sums for others.

    Types and the names of fields in a state do not count, nor does their order: code may move.
    """
    leaves = [*list_leaves(tree)]
    bits = hashlib.sha256(b"".join(sorted(map(digest_leaf, leaves)))).hexdigest()[:16]
    arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    counts = norm_of([leaf for leaf in arrays if leaf.dtype.kind != "f"])  # large ones would hide small numbers
    numbers = [np.where(np.isfinite(leaf), leaf, 0.0) for leaf in arrays if leaf.dtype.kind == "f"]
    # Beside the norm, a sum that notices numbers that changed places.
    mixed = sum(abs(float(one.ravel() @ np.cos(np.arange(one.size)))) for one in numbers)
    return {"bits": bits, "sums": [len(leaves), *(float(f"{one:.9g}") for one in (counts, norm_of(numbers), mixed))]}


def norm_of(arrays: list[np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(one, dtype=np.float64).sum()) for one in arrays))


def list_leaves(tree: Any) -> Iterator[np.ndarray | str]:
    """Yield the numbers of a tree as arrays, and its words."""
    match tree:
        case None:
            return
        case Tensor():
            yield tree.detach().cpu().numpy()
        case np.ndarray():
            yield tree
        case str():
            yield tree
        case bool() | int() | float() | np.generic():
            yield np.asarray(tree)
        case Mapping():
            for value in tree.values():
                yield from list_leaves(value)
        case list() | tuple() | set() | frozenset():
            for value in tree:
                yield from list_leaves(value)
        case _ if is_dataclass(tree):
            for one in fields(tree):
                yield from list_leaves(getattr(tree, one.name))
        case _:
            raise TypeError(f"A golden run must leave numbers and words. It left {type(tree).__name__}.")


def digest_leaf(leaf: np.ndarray | str) -> bytes:
    """Digest the type, the shape and all bits of an array, or a word."""
    if isinstance(leaf, str):
        return hashlib.sha256(b"word " + leaf.encode()).digest()
    if leaf.dtype.kind == "f":
        leaf = np.where(np.isnan(leaf), np.asarray(np.nan, leaf.dtype), leaf) + 0.0  # one NaN, and no -0
    return hashlib.sha256(f"{leaf.dtype.str} {leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()).digest()


def digest_machine() -> str:
    """Digest how this machine rounds: products, convolutions and functions, of these versions of the libraries."""
    draw = np.random.Generator(np.random.PCG64(7))
    found: list[Tensor] = []
    for rows, inner, columns in ((4, 12, 8), (4, 8, 3), (12, 4, 8), (37, 53, 29)):
        a, b = (torch.from_numpy(draw.normal(size=shape)) for shape in ((rows, inner), (inner, columns)))
        found += [a @ b, torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)), torch.log_softmax(a @ b, 1)]
        found += [a.exp(), a.tanh(), a.abs().log(), a.sin(), a.erf(), a.square().sum(), a.mean(0), a.std(1)]
    x, w = (torch.from_numpy(draw.normal(size=shape)) for shape in ((5, 2, 6, 6), (4, 2, 3, 3)))
    found += [torch.nn.functional.conv2d(x, w, padding=1), torch.linalg.svdvals(x[0, 0]), torch.linalg.inv(x[0, 0])]
    found += [torch.from_numpy(np.asarray(draw.normal(size=(9, 9)) @ draw.normal(size=(9, 9))))]
    bits = [one.contiguous().numpy().tobytes() for one in found]
    words = json.dumps([torch.__version__.partition("+")[0], np.__version__])
    return hashlib.sha256(b"".join([words.encode(), *bits])).hexdigest()[:16]


def find_differences(golden: Mapping[str, Digest], now: Mapping[str, Digest], *, exact: bool) -> list[str]:
    """Name the parts of a run that differ: in any bit or, between machines, by more than rounding."""
    return [part for part in {**golden, **now} if differs(part, golden.get(part), now.get(part), exact=exact)]


def differs(part: str, golden: Digest | None, now: Digest | None, *, exact: bool) -> bool:
    if golden is None or now is None:
        return True
    if exact or part == "ledger":  # bytes do not depend on rounding
        return bool(golden["bits"] != now["bits"])
    pairs = zip(golden["sums"], now["sums"], strict=True)
    return not all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in pairs)
