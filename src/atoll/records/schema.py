"""Records: frozen dataclasses that are written as JSON, and read again with every type checked.

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Round(Record):
        round: int
        lost: dict[str, int]
        evaluation: Evaluation | None = None

In code a record has attributes; as a mapping it is what stands in the file, `line["lost"]`. A field that is None by
default is written only if it is something else.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal, Self

SCHEMA = 4  # the form of a run's files; raised when an older Atoll could not read them. Without one: older than 1.
MORE = "more"  # the field of a record that takes all other names


class SchemaError(ValueError):
    """What was read is not what a record must be; says where and why."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Record(Mapping[str, Any]):
    """A part of what a run writes down."""

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Make a record of what `as_json` returned; raise SchemaError where names or types differ."""
        made: Self = parse(cls, value)
        return made

    @classmethod
    def upgrade(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give what an older Atoll wrote the form of today."""
        return value

    def as_json(self) -> dict[str, Any]:
        """Return what is written: dictionaries, lists, strings and numbers."""
        return dict(self._written)

    def check(self) -> None:
        """Raise SchemaError if fields do not fit each other."""

    @cached_property
    def _written(self) -> dict[str, Any]:
        found = {
            one.name: to_json(value)
            for one in fields(self)
            if (value := getattr(self, one.name)) is not None or one.default is not None
        }
        return {**found, **found.pop(MORE, {})}

    def __getitem__(self, name: str) -> Any:
        return self._written[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._written)

    def __len__(self) -> int:
        return len(self._written)


def to_json(value: Any) -> Any:
    """Return a value as JSON holds it; lists of numbers stay as they are."""
    if isinstance(value, Record):
        return value.as_json()
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {name: to_json(one) for name, one in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return [to_json(one) for one in value]
    return value


def parse(hint: Any, value: Any, where: str = "") -> Any:
    """Return a JSON value as the type that is asked for; raise SchemaError, naming the place, if it is another."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _parse_union(inner, value, where)
    if origin is Literal:
        return _require(value in inner, f"one of {', '.join(map(repr, inner))}", value, where)
    if is_dataclass(hint):
        return _parse_dataclass(hint, value, where)
    if origin in (dict, Mapping):
        _require(isinstance(value, Mapping), "a dictionary", value, where)
        return {name: parse(inner[1], one, f"{where}.{name}") for name, one in value.items()}
    if origin in (list, tuple, Sequence):
        _require(isinstance(value, list | tuple), "a list", value, where)
        if not _all_plain(inner[0], value):
            value = [parse(inner[0], one, f"{where}[{place}]") for place, one in enumerate(value)]
        return tuple(value) if origin is tuple else value
    if hint in (int, float):
        fits = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
        return _require(fits, "a whole number" if hint is int else "a number", value, where)
    kinds = {bool: "true or false", str: "a text", types.NoneType: "nothing"}
    return _require(isinstance(value, hint), kinds[hint], value, where)


def _parse_union(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in hints:
        return None
    *others, last = [hint for hint in hints if hint is not types.NoneType]
    for hint in others:
        try:
            return parse(hint, value, where)
        except SchemaError:
            continue
    return parse(last, value, where)


def _parse_dataclass(cls: Any, value: Any, where: str) -> Any:
    if isinstance(value, cls):
        return value
    _require(isinstance(value, Mapping), "a dictionary", value, where)
    value = cls.upgrade(value) if issubclass(cls, Record) else value
    hints, known = _hints(cls), {one.name: one for one in fields(cls) if one.init}
    given = {name: parse(hints[name], one, f"{where}.{name}") for name, one in value.items() if name in known}
    others = {name: one for name, one in value.items() if name not in known}
    if MORE in known:
        given[MORE] = others
    elif others:
        raise SchemaError(f"{_called(where)} must not have {min(map(str, others))!r}")
    for name, one in known.items():
        if name not in given and one.default is MISSING and one.default_factory is MISSING:
            if types.NoneType not in typing.get_args(hints[name]):
                raise SchemaError(f"{_called(where)} must have {name!r}")
            given[name] = None
    made = cls(**given)
    if isinstance(made, Record):
        try:
            made.check()
        except SchemaError as error:
            raise SchemaError(f"{_called(where)}: {error}") from None
    return made


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _all_plain(hint: Any, values: Sequence[Any]) -> bool:
    """Return whether all values are plain numbers or texts of a type, which need no closer look one by one."""
    allowed: dict[Any, set[type]] = {int: {int}, float: {int, float}, str: {str}, bool: {bool}}
    return hint is Any or {*map(type, values)} <= allowed.get(hint, set())


def _require(holds: bool, expected: str, value: Any, where: str) -> Any:
    if not holds:
        text = repr(value)
        raise SchemaError(
            f"{_called(where)} must be {expected}. It is {text if len(text) <= 40 else text[:37] + '...'}"
        )
    return value


def _called(where: str) -> str:
    return where.removeprefix(".") or "it"
