"""Records: small frozen dataclasses with the paper's letters for a server's state, a carry, or what clients keep.

    @record
    class Kept:
        v: Stack
        alpha: Each

`replace(kept, alpha=...)` makes the next one. A record is a tree as a dict is: it is stacked, kept, sent and saved by
its fields. A field that is `Each` may hold a bare tensor with one row per client, of which a step sees its client's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

from atoll.kernel.errors import RunError

T = TypeVar("T")
ROWS = "one row per client"
Each = Annotated[Any, ROWS]  # each client has its own: Params or a tensor in a step, a Stack or rows around it

_KNOWN: dict[str, type[Any]] = {}  # all records that loaded code defines, by name: a reader finds their classes here


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a class a record: a frozen dataclass that `flatten` knows."""
    made: Any = dataclass(frozen=True, eq=False)(cls)
    hints = get_type_hints(made, include_extras=True)
    made.__names__ = tuple(one.name for one in fields(made))
    made.__rows__ = frozenset(name for name in made.__names__ if ROWS in getattr(hints[name], "__metadata__", ()))
    _KNOWN[name_of_record(made)] = made
    return made  # type: ignore[no-any-return]


def is_record(value: object) -> bool:
    """Return whether a value is a record."""
    return hasattr(type(value), "__rows__")


def parts_of(value: Any) -> dict[str, Any]:
    """Return the fields of a record by name."""
    return {name: getattr(value, name) for name in value.__names__}


def name_of_record(kind: type[Any]) -> str:
    """Return the name under which a checkpoint writes a record."""
    return f"{kind.__module__}.{kind.__qualname__}"


def record_named(name: str, names: tuple[str, ...]) -> type[Any]:
    """Return the record of this name among those that loaded code defines; it must have these fields."""
    kind = _KNOWN.get(name)
    if kind is None:
        raise RunError(
            f"A record must be one that the method's code defines. None is called {name}.",
            hint="another version of the method wrote it: begin a new run in another folder.",
        )
    if names != kind.__names__:
        raise RunError(
            f"{name} must have the fields {', '.join(kind.__names__)}. Got {', '.join(names)}.",
            hint="another version of the method wrote it: begin a new run in another folder.",
        )
    return kind
