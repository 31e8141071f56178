"""Trees as bytes: safetensors and JSON only, so nothing that came from outside is ever executed.

A record is written by the names of its fields. A message has those that hold something: who receives it knows what it
is. A checkpoint and an assignment have all, and name the class, which is found among the records that the loaded code
defines.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, get_args

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from atoll.kernel.errors import PayloadError, RunError
from atoll.kernel.params import Layout, Structure, StructureKind, Tree, flatten, stacked_leaves, unflatten
from atoll.kernel.record import name_of_record, record_named

NOTHING = Structure("static")


def pack(tree: Tree, layouts: Sequence[Layout] = (), *, classes: bool = True) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a tree by number, on the CPU, and the rest as JSON; models name one of the `layouts`.

    Without `classes`, a record is a dict of the fields that hold something.
    """
    leaves, structure = flatten(tree)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for number, leaf in enumerate(leaves):
        plain = leaf.detach().cpu().contiguous()
        # safetensors refuses two names for one memory, which a state has that holds a model twice, or a row of a Stack.
        memory = plain.untyped_storage().data_ptr()
        tensors[str(number)] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return tensors, json.dumps(_to_json(structure, layouts, classes), separators=(",", ":"))


def unpack(tensors: dict[str, Tensor], structure: str, layouts: Sequence[Layout], device: torch.device) -> Tree:
    """Rebuild the tree on `device`; model parameters get their layout back."""
    leaves = [tensors[str(number)].to(device) for number in range(len(tensors))]
    made = _from_json(json.loads(structure), layouts)
    if len(stacked_leaves(made)) != len(leaves):
        raise ValueError(f"{len(leaves)} tensors for a structure of {len(stacked_leaves(made))}")
    return unflatten(made, leaves)


def to_bytes(tree: Tree, about: str | None = None) -> bytes:
    """Write a tree as one message.

    With words `about` it, which are read before it, the message names the classes of records, too.
    """
    tensors, structure = pack(tree, classes=about is not None)
    return safetensors.torch.save(tensors, {"structure": structure} | ({} if about is None else {"about": about}))


def read_about(message: bytes) -> str:
    """Return the words about the tree of a message; raise PayloadError if there are none."""
    try:
        about: str = _metadata(message)["about"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PayloadError(f"A message must be safetensors with words about it. It is not: {error}") from error
    return about


def from_bytes(message: bytes, layout: Layout | None = None, device: torch.device | str = "cpu") -> Tree:
    """Read the tree of a message; raise PayloadError for anything that is not one."""
    try:
        layouts = () if layout is None else (layout,)
        return unpack(safetensors.torch.load(message), _metadata(message)["structure"], layouts, torch.device(device))
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError, RunError) as error:
        raise PayloadError(f"A message must be safetensors with a structure. It is not: {error}") from error


def _metadata(message: bytes) -> dict[str, Any]:
    length = int.from_bytes(message[:8], "little")
    found: dict[str, Any] = json.loads(message[8 : 8 + length])["__metadata__"]
    return found


def size_of(tree: Tree, *, each: bool = False) -> int:
    """Return the length of `to_bytes(tree)`; with `each`, of ONE client's part of it, a row of each Stack.

    The length of a safetensors message depends on names, types and shapes alone, so each form is
    serialised once and its length remembered; nothing leaves the device to be counted.
    """
    leaves, structure = flatten(tree)
    one = _one_client(structure) if each else structure
    rows = [each and row for row in stacked_leaves(structure)]
    shapes = tuple(
        (tuple(leaf.shape[1:] if row else leaf.shape), leaf.dtype) for leaf, row in zip(leaves, rows, strict=True)
    )
    return _size(one, shapes)


@functools.lru_cache(maxsize=4096)
def _size(structure: Structure, shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> int:
    return len(to_bytes(unflatten(structure, [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes])))


def _one_client(structure: Structure) -> Structure:
    parts = tuple(_one_client(part) for part in structure.parts)
    kind = "params" if structure.kind == "stack" else structure.kind
    return Structure(kind, structure.names, parts, structure.layout, structure.value)


def _to_json(structure: Structure, layouts: Sequence[Layout], classes: bool) -> dict[str, Any]:
    structure = structure if classes else _without_class(structure)
    entry: dict[str, Any] = {"kind": structure.kind}
    if structure.kind == "record":
        entry["class"] = name_of_record(structure.value)
    if structure.names:
        entry["names"] = structure.names
    if structure.parts:
        entry["parts"] = [_to_json(part, layouts, classes) for part in structure.parts]
    if structure.kind == "static":
        entry["value"] = structure.value
    if structure.layout is not None:
        number = layouts.index(structure.layout) if structure.layout in layouts else 0
        entry["model"] = number or True  # a message, which has one layout, says no number
    return entry


def _without_class(structure: Structure) -> Structure:
    """Return a record as the dict of the fields that hold something, rows as a tensor, and all else as it is."""
    if structure.kind == "rows":
        return Structure("tensor")
    if structure.kind != "record":
        return structure
    there = {name: part for name, part in zip(structure.names, structure.parts, strict=True) if part != NOTHING}
    return Structure("dict", tuple(there), tuple(there.values()))


def _layout(model: bool | int, layouts: Sequence[Layout]) -> Layout | None:
    return layouts[0 if model is True else model] if model and layouts else None


def _from_json(entry: dict[str, Any], layouts: Sequence[Layout]) -> Structure:
    if entry["kind"] not in get_args(StructureKind):
        raise ValueError(f"unknown kind {entry['kind']!r}")
    names = tuple(entry.get("names", ()))
    return Structure(
        entry["kind"],
        names,
        tuple(_from_json(part, layouts) for part in entry.get("parts", ())),
        _layout(entry.get("model", False), layouts),
        record_named(entry["class"], names) if entry["kind"] == "record" else entry.get("value"),
    )
