"""Named tensors that behave like vectors: `Params` of one model, and a `Stack` of one per client.

    w_k - w        the delta of every client of a cohort (Stack minus Params)
    w + delta      a step; leaves that `delta` does not name stay as they are
    0.5 * w        integer buffers ride along unchanged

A leaf is trained, frozen or a buffer, which the model's `Layout` says. Norms and inner products run over trained
leaves only, so a proximal term never pulls at BatchNorm statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, overload

import torch
from torch import Tensor

from atoll.kernel.errors import CohortError, ModelError
from atoll.kernel.hyperparameters import Words
from atoll.kernel.record import is_record, parts_of

Kind = Literal["trained", "frozen", "buffer"]
# A part of a model: what it declares, or the layers on one side of a boundary, by count or by name.
Part = Annotated[
    str,
    Words(("all", "none", "head", "body", "norm", "batchnorm", "first:N", "last:N", "before:LAYER", "from:LAYER")),
]
Scalar = float | int | Tensor


@dataclass(frozen=True)
class Layout:
    """What a model's leaves are: their kind, their layer, and which of them form the head and the norm layers."""

    kinds: Mapping[str, Kind]
    head: frozenset[str] = frozenset()
    norm: frozenset[str] = frozenset()
    batchnorm: frozenset[str] = frozenset()
    layers: tuple[str, ...] = ()  # the modules that hold leaves themselves, in the order of their declaration
    _hash: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        content = (tuple(self.kinds.items()), self.head, self.norm, self.batchnorm, self.layers)
        object.__setattr__(self, "_hash", hash(content))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[Any, ...]]:
        """Rebuild it in another process, where names have other hashes."""
        return Layout, (self.kinds, self.head, self.norm, self.batchnorm, self.layers)

    def names(self, kind: Kind) -> frozenset[str]:
        """Return the names of the leaves of one kind."""
        return frozenset(name for name, found in self.kinds.items() if found == kind)

    def part(self, part: Part) -> frozenset[str]:
        """Return the names of a part's leaves: declared, or on one side of a boundary between layers."""
        everything = frozenset(self.kinds)
        if ":" in part:
            below = self.layers[: self._boundary(part)]
            lower = frozenset(name for name in everything if name.rpartition(".")[0] in below)
            return lower if part.startswith(("first:", "before:")) else everything - lower
        parts = {
            "all": everything,
            "none": frozenset[str](),
            "head": self.head,
            "body": everything - self.head,
            "norm": self.norm,
            "batchnorm": self.batchnorm,
        }
        return parts[part]

    def _boundary(self, part: Part) -> int:
        """Count the layers below the boundary that a part names."""
        side, _, where = part.partition(":")
        hint = f"its layers are: {', '.join(self.layers)}."
        if side in ("first", "last"):
            count, layers = int(where), len(self.layers)
            if count > layers:
                raise ModelError(f"{part!r} must count at most all layers of the model, {layers}.", hint=hint)
            return count if side == "first" else layers - count
        for position, layer in enumerate(self.layers):
            if layer == where or layer.startswith(f"{where}."):
                return position
        raise ModelError(f"{part!r} must name a layer of the model. It has none called {where!r}.", hint=hint)


class _Leaves(Mapping[str, Tensor]):
    """What Params and Stack have in common: a read-only mapping from names to tensors, with arithmetic."""

    __slots__ = ("_leaves", "layout")

    def __init__(self, leaves: Mapping[str, Tensor], layout: Layout | None = None) -> None:
        self._leaves = dict(leaves)
        self.layout = layout

    # -- a mapping -----------------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> Tensor:
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        leaves = ", ".join(f"{name}: {tuple(leaf.shape)}" for name, leaf in self._leaves.items())
        return f"{type(self).__name__}({leaves})"

    def _union(self, other: _Leaves) -> Any:
        """Join both; on a shared name the right one wins. Leaves stand in the layout's order, however they met."""
        mine, theirs = self._spread_both(other)
        joined, layout = {**mine, **theirs}, self.layout or other.layout
        known = () if layout is None else [name for name in layout.kinds if name in joined]
        return self._result(other)({**{name: joined[name] for name in known}, **joined}, layout)

    def only(self, names: Iterable[str]) -> Self:
        """Return the leaves with these names; names that do not occur are ignored."""
        wanted = frozenset(names)
        return self._like({name: leaf for name, leaf in self._leaves.items() if name in wanted})

    def without(self, names: Iterable[str]) -> Self:
        """Return all leaves but those with these names."""
        unwanted = frozenset(names)
        return self._like({name: leaf for name, leaf in self._leaves.items() if name not in unwanted})

    @property
    def value(self) -> Tensor:
        """The only leaf, for what has no more than one: `replies.stack("loss").value`."""
        (only,) = self._leaves.values()
        return only

    def part(self, part: Part) -> Self:
        """Return the leaves of a part of the model."""
        return self.only(self.layout.part(part) if self.layout else ())

    def without_part(self, part: Part) -> Self:
        """Return all leaves outside a part of the model."""
        return self.without(self.layout.part(part) if self.layout else ())

    @property
    def trained(self) -> Self:
        """The leaves that gradients reach."""
        return self if self.layout is None else self.only(self.layout.names("trained"))

    @property
    def buffers(self) -> Self:
        """The leaves that a forward pass writes, such as BatchNorm's statistics."""
        return self.only(self.layout.names("buffer") if self.layout else ())

    @property
    def floating(self) -> Self:
        """The leaves that are not integers or flags."""
        return self.only(name for name, leaf in self._leaves.items() if leaf.is_floating_point())

    # -- a vector ------------------------------------------------------------------------------------------------
    def __mul__(self, scale: Scalar) -> Self:
        return self._scale(scale, torch.mul)

    def __truediv__(self, scale: Scalar) -> Self:
        return self._scale(scale, torch.div)

    __rmul__ = __mul__

    def __neg__(self) -> Self:
        return self * -1.0

    def moved(self, direction: _Leaves, size: Scalar) -> Self:
        """Return self + size * direction in one pass over memory; leaves that `direction` lacks stay as they are."""
        new = dict(self._leaves)
        for name, step in direction.items():
            leaf = self._require(name)
            scale = self._align(size, leaf)
            # addcmul takes a tensor as the step size, so a compiled step does not bake it in.
            new[name] = (
                torch.addcmul(leaf, step, scale) if isinstance(scale, Tensor) else torch.add(leaf, step, alpha=scale)
            )
        return self._like(new)

    def step(self, delta: Self, size: Scalar) -> Self:
        """Return self + size * delta where leaves are trained, self + delta elsewhere: a size scales no statistics."""
        return self._combine(delta._union(delta.trained * size), torch.add)  # type: ignore[no-any-return]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every leaf."""
        return self._like({name: function(leaf) for name, leaf in self._leaves.items()})

    def zeros(self) -> Self:
        """Return zeros of the same shapes, for the trained leaves."""
        return self.trained.map(torch.zeros_like)

    # -- helpers -------------------------------------------------------------------------------------------------
    def _like(self, leaves: Mapping[str, Tensor]) -> Self:
        return type(self)(leaves, self.layout)

    def _require(self, name: str) -> Tensor:
        try:
            return self._leaves[name]
        except KeyError:
            raise CohortError(
                f"The left operand must have every leaf of the right one. Got none called {name!r} in {self!r}.",
                hint="cut the right operand with `.only(...)`, or swap the two.",
            ) from None

    def _result(self, other: _Leaves) -> type[Any]:
        return Stack if isinstance(self, Stack) or isinstance(other, Stack) else type(self)

    def _spread_both(self, other: _Leaves) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the leaves of both, with a client axis on both if one has it."""
        if isinstance(self, Stack) and not isinstance(other, Stack):
            return self._leaves, spread(other, self.clients)._leaves
        if isinstance(other, Stack) and not isinstance(self, Stack):
            return spread(self, other.clients)._leaves, other._leaves
        return self._leaves, other._leaves

    def _combine(self, other: _Leaves, operation: Callable[[Tensor, Tensor], Tensor]) -> Any:
        if not isinstance(other, _Leaves):
            return NotImplemented
        new = {name: _unless_flags(operation)(self._require(name), leaf) for name, leaf in other.items()}
        rest = self._leaves if len(new) == len(self) else self._spread_both(other)[0]
        return self._result(other)({name: new.get(name, leaf) for name, leaf in rest.items()}, self.layout)

    def _scale(self, scale: Scalar, operation: Callable[[Tensor, Any], Tensor]) -> Self:
        return self.map(lambda leaf: operation(leaf, self._align(scale, leaf)) if leaf.is_floating_point() else leaf)

    def _align(self, scale: Scalar, leaf: Tensor) -> Scalar:
        return scale


class Params(_Leaves):
    """The named tensors of one model, or of anything else that belongs together."""

    @classmethod
    def of(cls, **values: Tensor | float) -> Params:
        """Make Params from keywords: `Params.of(loss=0.0, count=0.0)`."""
        return cls({name: torch.as_tensor(value) for name, value in values.items()})

    @overload
    def __add__(self, other: Params) -> Params: ...
    @overload
    def __add__(self, other: Stack) -> Stack: ...
    def __add__(self, other: _Leaves) -> _Leaves:
        return self._combine(other, torch.add)  # type: ignore[no-any-return]

    @overload
    def __sub__(self, other: Params) -> Params: ...
    @overload
    def __sub__(self, other: Stack) -> Stack: ...
    def __sub__(self, other: _Leaves) -> _Leaves:
        return self._combine(other, torch.sub)  # type: ignore[no-any-return]

    @overload
    def __or__(self, other: Params) -> Params: ...
    @overload
    def __or__(self, other: Stack) -> Stack: ...
    def __or__(self, other: _Leaves) -> _Leaves:
        return self._union(other)  # type: ignore[no-any-return]

    def lerp(self, other: Params, share: Scalar) -> Params:
        """Return (1 - share) * self + share * other, for the floating point leaves of `other`; the rest stays."""
        return self | (self.only(there := other.floating) * (1 - share) + there * share)

    def dot(self, other: Params) -> Tensor:
        """Return the inner product over the trained leaves."""
        return _total([(a * other[name]).sum() for name, a in self.trained.floating.items()])

    def norm(self) -> Tensor:
        """Return the Euclidean norm over the trained leaves."""
        return self.dot(self).sqrt()


class Stack(_Leaves):
    """One Params per client of a cohort: every leaf has a leading client axis."""

    @classmethod
    def of(cls, **values: Tensor) -> Stack:
        """Make a Stack from keywords; each tensor has the clients on its first axis."""
        return cls(values)

    def __add__(self, other: _Leaves) -> Stack:
        return self._combine(other, torch.add)  # type: ignore[no-any-return]

    def __sub__(self, other: _Leaves) -> Stack:
        return self._combine(other, torch.sub)  # type: ignore[no-any-return]

    def __or__(self, other: _Leaves) -> Stack:
        return self._union(other)  # type: ignore[no-any-return]

    def lerp(self, other: _Leaves, share: Scalar) -> Stack:
        """Interpolate as `Params.lerp`; `share` may differ from client to client."""
        there = (other if isinstance(other, Stack) else spread(other, self.clients)).floating
        return self | (self.only(there) * (1 - share) + there * share)

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return next((len(leaf) for leaf in self._leaves.values()), 0)

    def dot(self, other: _Leaves) -> Tensor:
        """Return the inner product over the trained leaves, one value per client."""
        products = (a * other[name] for name, a in self.trained.floating.items())
        return _total([product.reshape(len(product), -1).sum(1) for product in products])

    def norm(self) -> Tensor:
        """Return the Euclidean norm over the trained leaves, one value per client."""
        return self.dot(self).sqrt()

    def rows(self, index: slice | Tensor) -> Stack:
        """Return the clients at these positions."""
        return self.map(lambda leaf: leaf[index])

    def where(self, chosen: Tensor, other: _Leaves) -> Stack:
        """Take the own leaves for the clients that are `chosen`, those of `other` for the rest."""
        mine, theirs = self._spread_both(other)
        axes = {name: chosen.reshape(-1, *[1] * (leaf.ndim - 1)) for name, leaf in mine.items()}
        return self._like({name: torch.where(axes[name], leaf, theirs[name]) for name, leaf in mine.items()})

    def client(self, position: int) -> Params:
        """Return one client's Params."""
        return Params({name: leaf[position] for name, leaf in self.items()}, self.layout)

    def _align(self, scale: Scalar, leaf: Tensor) -> Scalar:
        """Lay a scale per client along the client axis."""
        if isinstance(scale, Tensor) and scale.ndim == 1:
            return scale.reshape(-1, *[1] * (leaf.ndim - 1))
        return scale


def spread(params: Params | _Leaves, clients: int) -> Stack:
    """Give every client the same values, without copying them."""
    return Stack({name: leaf.expand(clients, *leaf.shape) for name, leaf in params.items()}, params.layout)


def stack(many: Iterable[Params]) -> Stack:
    """Make one Stack from the Params of several clients."""
    each = list(many)
    return Stack({name: torch.stack([one[name] for one in each]) for name in each[0]}, each[0].layout)


def _unless_flags(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Leave flags alone, such as a mask in a buffer: they have no sum, and the left ones stay."""
    return lambda mine, other: mine if mine.dtype == torch.bool else operation(mine, other)


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0) if parts else torch.zeros(())


# -- trees: what may be passed around, kept, sent and saved -------------------------------------------------------
# A tree is None, a number, a string, a tensor, a Params, a Stack, or a record, dict, list or tuple of trees.

Tree = Any
StructureKind = Literal["static", "tensor", "rows", "params", "stack", "record", "dict", "list", "tuple"]


@dataclass(frozen=True)
class Structure:
    """A tree without its tensors; hashable, so compiled programs can be found again by it."""

    kind: StructureKind
    names: tuple[str, ...] = ()
    parts: tuple[Structure, ...] = ()
    layout: Layout | None = None
    value: Any = None  # of what is static; the class of a record


def flatten(tree: Tree) -> tuple[list[Tensor], Structure]:
    """Return the tensors of a tree, in order, and what is left of it without them."""
    leaves: list[Tensor] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Tree, leaves: list[Tensor]) -> Structure:
    match tree:
        case Tensor():
            leaves.append(tree)
            return Structure("tensor")
        case Params() | Stack():
            leaves.extend(tree.values())
            return Structure("stack" if isinstance(tree, Stack) else "params", tuple(tree), layout=tree.layout)
        case dict():
            return Structure("dict", tuple(map(str, tree)), tuple(_flatten(part, leaves) for part in tree.values()))
        case list() | tuple():
            parts = tuple(_flatten(part, leaves) for part in tree)
            return Structure("list" if isinstance(tree, list) else "tuple", parts=parts)
        case None | bool() | int() | float() | str():
            return Structure("static", value=tree)
        case _ if is_record(tree):
            named = parts_of(tree)
            parts = tuple(_flatten_part(tree, name, part, leaves) for name, part in named.items())
            return Structure("record", tuple(named), parts, value=type(tree))
    raise CohortError(
        "A value must be made of numbers, tensors, Params, Stack, records, dict, list or tuple. Got "
        f"{type(tree).__name__}.",
        hint="put tensors that belong together into Params.of(name=tensor), or make the class a @record.",
    )


def _flatten_part(whole: Any, name: str, part: Tree, leaves: list[Tensor]) -> Structure:
    """Flatten a field of a record; a bare tensor in a field that is `Each` has one row per client."""
    structure = _flatten(part, leaves)
    return Structure("rows") if structure.kind == "tensor" and name in whole.__rows__ else structure


def named_leaves(tree: Tree) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a tree, in order, each with the name of its leaf; outside Params and Stack it is empty."""
    leaves, structure = flatten(tree)
    return zip(_names(structure), leaves, strict=True)


def _names(structure: Structure) -> Iterator[str]:
    match structure.kind:
        case "params" | "stack":
            yield from structure.names
        case "tensor" | "rows":
            yield ""
        case _:
            for part in structure.parts:
                yield from _names(part)


def unflatten(structure: Structure, leaves: Iterable[Tensor], *, one_client: bool = False) -> Tree:
    """Rebuild a tree; with `one_client`, leaves have lost their client axis and a Stack becomes Params."""
    return _unflatten(structure, iter(leaves), one_client)


def _unflatten(structure: Structure, leaves: Iterator[Tensor], one_client: bool) -> Tree:
    match structure.kind:
        case "static":
            return structure.value
        case "tensor" | "rows":
            return next(leaves)
        case "params" | "stack":
            made = Params if structure.kind == "params" or one_client else Stack
            return made({name: next(leaves) for name in structure.names}, structure.layout)
        case "dict" | "record":
            parts = (_unflatten(part, leaves, one_client) for part in structure.parts)
            named = dict(zip(structure.names, parts, strict=True))
            return named if structure.kind == "dict" else structure.value(**named)
        case "list" | "tuple":
            made_of = [_unflatten(part, leaves, one_client) for part in structure.parts]
            return made_of if structure.kind == "list" else tuple(made_of)


def stacked_leaves(structure: Structure) -> list[bool]:
    """Return whether each tensor of a flattened tree has a client axis: in a Stack, or bare in an `Each` field."""
    if structure.kind in ("params", "stack"):
        return [structure.kind == "stack"] * len(structure.names)
    if structure.kind in ("tensor", "rows"):
        return [structure.kind == "rows"]
    return [flag for part in structure.parts for flag in stacked_leaves(part)]


def rows_of(tree: Tree, index: Tensor | slice) -> Tree:
    """Return the clients at these positions of a stacked tree; what is not stacked stays as it is."""
    leaves, structure = flatten(tree)
    rows = stacked_leaves(structure)
    return unflatten(structure, [leaf[index] if row else leaf for leaf, row in zip(leaves, rows, strict=True)])


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device: Apple GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
