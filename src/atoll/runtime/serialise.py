"""Trees as bytes: safetensors and JSON only, so nothing from outside is ever executed."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, get_args

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from atoll.kernel.errors import PayloadError
from atoll.kernel.params import Layout, Structure, StructureKind, Tree, flatten, stacked_leaves, unflatten


def pack(tree: Tree, layouts: Sequence[Layout] = ()) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a tree by number, on the CPU, and the rest as JSON; models name one of the `layouts`."""
    leaves, structure = flatten(tree)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for number, leaf in enumerate(leaves):
        plain = leaf.detach().cpu().contiguous()
        # safetensors refuses two names for one memory, which a state has that holds a model twice, or a row of a Stack.
        memory = plain.untyped_storage().data_ptr()
        tensors[str(number)] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return tensors, json.dumps(_to_json(structure, layouts), separators=(",", ":"))


def unpack(tensors: dict[str, Tensor], structure: str, layouts: Sequence[Layout], device: torch.device) -> Tree:
    """Rebuild the tree on `device`; model parameters get their layout back."""
    leaves = [tensors[str(number)].to(device) for number in range(len(tensors))]
    made = _from_json(json.loads(structure), layouts)
    if len(stacked_leaves(made)) != len(leaves):
        raise ValueError(f"{len(leaves)} tensors for a structure of {len(stacked_leaves(made))}")
    return unflatten(made, leaves)


def to_bytes(tree: Tree) -> bytes:
    """Serialise a tree as one message."""
    tensors, structure = pack(tree)
    return safetensors.torch.save(tensors, {"structure": structure})


def from_bytes(message: bytes, layout: Layout | None = None, device: torch.device | str = "cpu") -> Tree:
    """Read the tree of a message; raise PayloadError for anything that is not one."""
    try:
        length = int.from_bytes(message[:8], "little")
        structure = json.loads(message[8 : 8 + length])["__metadata__"]["structure"]
        layouts = () if layout is None else (layout,)
        return unpack(safetensors.torch.load(message), structure, layouts, torch.device(device))
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PayloadError(f"A message must be safetensors with a structure. It is not: {error}") from error


def size_of(tree: Tree, *, each: bool = False) -> int:
    """Return the length of `to_bytes(tree)`; with `each`, of ONE client's part of it, a row of each Stack.

    The length of a safetensors message depends on names, types and shapes alone, so each form is serialised
    once and its length remembered; nothing leaves the device to be counted.
    """
    leaves, structure = flatten(tree)
    one = _drop_client_axis(structure) if each else structure
    rows = [each and row for row in stacked_leaves(structure)]
    shapes = tuple(
        (tuple(leaf.shape[1:] if row else leaf.shape), leaf.dtype) for leaf, row in zip(leaves, rows, strict=True)
    )
    return _measure(one, shapes)


@functools.lru_cache(maxsize=4096)
def _measure(structure: Structure, shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> int:
    return len(to_bytes(unflatten(structure, [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes])))


def _drop_client_axis(structure: Structure) -> Structure:
    parts = tuple(_drop_client_axis(part) for part in structure.parts)
    kind = "params" if structure.kind == "stack" else structure.kind
    return Structure(kind, structure.names, parts, structure.layout, structure.value)


def _to_json(structure: Structure, layouts: Sequence[Layout]) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": structure.kind}
    if structure.names:
        entry["names"] = structure.names
    if structure.parts:
        entry["parts"] = [_to_json(part, layouts) for part in structure.parts]
    if structure.kind == "static":
        entry["value"] = structure.value
    if structure.layout is not None:
        number = layouts.index(structure.layout) if structure.layout in layouts else 0
        entry["model"] = number or True  # a message, which has one layout, says no number
    return entry


def _choose_layout(model: bool | int, layouts: Sequence[Layout]) -> Layout | None:
    return layouts[0 if model is True else model] if model and layouts else None


def _from_json(entry: dict[str, Any], layouts: Sequence[Layout]) -> Structure:
    if entry["kind"] not in get_args(StructureKind):
        raise ValueError(f"unknown kind {entry['kind']!r}")
    return Structure(
        entry["kind"],
        tuple(entry.get("names", ())),
        tuple(_from_json(part, layouts) for part in entry.get("parts", ())),
        _choose_layout(entry.get("model", False), layouts),
        entry.get("value"),
    )
