"""Trees of tensors compared leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.kernel.params import Tree, flatten, stacked_leaves, unflatten
from atoll.kernel.record import is_record, parts_of
from atoll.testing.conformance.errors import ConformanceError

T = TypeVar("T")


def list_leaves(tree: Tree, place: str = "") -> Iterator[tuple[str, Any]]:
    """List the leaves of a tree with their places, such as `server/head.bias`."""
    if isinstance(tree, Mapping):
        for name, part in tree.items():
            yield from list_leaves(part, f"{place}/{name}" if place else str(name))
    elif isinstance(tree, list | tuple):
        for number, part in enumerate(tree):
            yield from list_leaves(part, f"{place}/{number}" if place else str(number))
    elif is_record(tree):
        yield from list_leaves(parts_of(tree), place)
    elif tree is not None:
        yield place, tree


def find_difference(left: Tree, right: Tree, tolerance: float = 0.0) -> str | None:
    """Say where two trees differ first, and by how much; None if nowhere."""
    mine, theirs = dict(list_leaves(left)), dict(list_leaves(right))
    if mine.keys() != theirs.keys():
        return f"{min(mine.keys() ^ theirs.keys())}, which only one of them has"
    for place, value in mine.items():
        other = theirs[place]
        if not isinstance(value, Tensor):
            if value != other:
                return f"{place}: {value!r} and {other!r}"
        elif value.shape != other.shape or value.dtype != other.dtype:
            return f"{place}: {tuple(value.shape)} {value.dtype} and {tuple(other.shape)} {other.dtype}"
        elif not torch.equal(value, other):
            gap = float((value.double() - other.double()).abs().max())
            if not gap <= tolerance:
                return f"{place} by {gap:.3g}"
    return None


def require_same(left: Tree, right: Tree, message: str, hint: str | None = None, tolerance: float = 0.0) -> None:
    """Raise if two trees differ, saying where."""
    where = find_difference(left, right, tolerance)
    if where is not None:
        raise ConformanceError(f"{message} They differ in {where}.", hint=hint)


def require_finite(tree: Tree, when: str) -> None:
    """Raise if a leaf is not finite."""
    for place, leaf in list_leaves(tree):
        if isinstance(leaf, Tensor) and not bool(torch.isfinite(leaf).all()):
            raise ConformanceError(f"Training must stay finite {when}. {place} is not.")


def copy_tree(tree: T) -> T:
    """Copy a tree into tensors of its own."""
    leaves, structure = flatten(tree)
    copied: T = unflatten(structure, [leaf.clone() for leaf in leaves])
    return copied


def take_row(tree: Tree, k: int) -> Tree:
    """Return one client's part of a stacked tree."""
    leaves, structure = flatten(tree)
    rows = stacked_leaves(structure)
    mine = [leaf[k] if row else leaf for leaf, row in zip(leaves, rows, strict=True)]
    return unflatten(structure, mine, one_client=True)


def is_telling(leaf: Any) -> bool:
    """Return whether a tensor tells something about its client: counters and zeros are the same for all."""
    return isinstance(leaf, Tensor) and leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())
