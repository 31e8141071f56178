"""The public names with their types as text: what `atoll` and `atoll.algorithms` offer to import."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

import atoll
from atoll import algorithms

API = Path(__file__).with_name("api.txt")


def describe_api() -> str:
    """Return a line for each public name, class member and hyperparameter."""
    lines: list[str] = []
    for name in sorted(atoll.__all__):
        lines += describe(f"atoll.{name}", getattr(atoll, name), members=True)
    for name in sorted({*algorithms.__all__, *map(_class_name, algorithms.list_methods().values())}):
        lines += describe(f"atoll.algorithms.{name}", getattr(algorithms, name), members=False)
    return "\n".join(lines) + "\n"


def _class_name(kind: type) -> str:
    return kind.__name__


def describe(name: str, value: Any, *, members: bool) -> Iterator[str]:
    """Yield the lines of one public name: of a class, its signature and members."""
    if not inspect.isclass(value):
        yield f"{name}{show_signature(value)}" if callable(value) else f"{name}: {type(value).__name__}"
        return
    yield f"class {name}{show_signature(value)}"
    declared = {one.name for one in fields(value)} if is_dataclass(value) else set()
    for member in sorted({one for one in dir(value) if not one.startswith("_")} | declared) if members else ():
        found = inspect.getattr_static(value, member, None)
        if getattr(found, "__objclass__", None) not in (None, value) and member not in declared:
            continue  # of a built-in type
        yield f"    .{member}{show_member(value, member, found)}"


def show_member(kind: type, name: str, found: Any) -> str:
    """Show what type a member has, or its signature."""
    match found:
        case property():
            return f": {show_type(_annotations(found.fget).get('return', Any))}  (property)"
        case _ if hasattr(found, "func") and hasattr(found, "attrname"):  # a cached property
            return f": {show_type(_annotations(found.func).get('return', Any))}  (property)"
        case classmethod():
            return f"{show_signature(found.__func__, drop=1)}  (class method)"
        case staticmethod():
            return f"{show_signature(found.__func__)}  (static method)"
        case _ if inspect.isfunction(found):
            return show_signature(found, drop=1)
    hints = [vars(one).get("__annotations__", {}).get(name) for one in kind.__mro__]
    return f": {show_type(next((hint for hint in hints if hint is not None), type(found)))}"


def show_signature(value: Any, drop: int = 0) -> str:
    """Show a signature as it is written, without the modules of types."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parts, star = [], False
    known = typing.get_type_hints(value) if inspect.isclass(value) and issubclass(value, atoll.Algorithm) else {}
    for one in [*found.parameters.values()][drop:]:
        if one.kind is one.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        mark = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        hint = "" if one.annotation is one.empty else f": {show_type(known.get(one.name, one.annotation))}"
        default = "" if one.default is one.empty else f" = {show_default(one.default)}"
        parts.append(f"{mark}{one.name}{hint}{default}")
    back = "" if found.return_annotation in (found.empty, None, "None") else show_type(found.return_annotation)
    return f"({', '.join(parts)})" + (f" -> {back}" if back else "")


def show_type(hint: Any) -> str:
    """Show a type by its own name, without the range of a hyperparameter."""
    if typing.get_origin(hint) is typing.Annotated:
        return show_type(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return " | ".join(map(show_type, typing.get_args(hint))).replace("NoneType", "None")
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def show_default(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value) or isinstance(value, ModuleType):
        return str(value.__name__)
    text = repr(value)
    return "..." if " at 0x" in text or "<factory>" in text else re.sub(r"\s+", " ", text)


def _annotations(function: Any) -> dict[str, Any]:
    return typing.cast(dict[str, Any], getattr(function, "__annotations__", {}))
