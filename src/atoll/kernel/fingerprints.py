"""What decides what a value does: functions by their code and all it reads, modules by all their attributes.

Two values with the same fingerprint do the same. In one process fingerprints are compared as they are, to find programs
again; `portable` writes one down as it reads in every process, to find training again, and `files_of` says in which
files its code is.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import logging
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from atoll.kernel.params import Params, Stack
from atoll.kernel.sources import is_edited

BLOCK = 1 << 24  # bytes that are hashed together; blocks are hashed side by side
OF_MODULES = frozenset({  # what `nn.Module` holds for itself: training, leaves and parts are looked at otherwise
    "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
})  # fmt: skip
PLAIN = (int, float, complex, str, bytes, tuple, list, dict, Tensor, Params, Stack)
OPEN = (type, FunctionType, functools.partial, set, frozenset, np.ndarray, np.generic, enum.Enum, nn.Module)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
OF_CLASSES = frozenset({
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__dataclass_fields__",
    "__abstractmethods__", "__dataclass_params__", "__match_args__", "__parameters__", "__orig_bases__",
    "__qualname__", "_abc_impl",
})  # fmt: skip


class Unstable(Exception):
    """Something was captured that may change from call to call, or that cannot be looked into."""


def fingerprint(value: Any) -> Hashable:
    """Return what decides what a value does: equal fingerprints, equal results. Raise Unstable if nobody can tell."""
    return _Look().at(value)


def function_of(value: Any, given: Iterable[Tensor] = ()) -> Hashable:
    """Return what a module or a function computes as it is now, whatever the values of the tensors it is given.

    Raise Unstable if nobody can tell.
    """
    return _Look(by_value=True, given=given).at(value)


class _Look:
    """One look at a value and at all that it reads, each thing once.

    What a step captures must not change from call to call, so tensors and objects that can be changed are
    refused. With `by_value` they are taken as they are now.
    """

    def __init__(self, *, by_value: bool = False, given: Iterable[Tensor] = ()) -> None:
        self.by_value = by_value
        self._met: dict[int, tuple[int, Any]] = {}  # by identity: its number, and itself to stay alive
        self._given = {id(tensor) for tensor in given}

    def at(self, value: Any) -> Hashable:
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
                return (type(value), value)
            case enum.Enum():
                return (self.at(type(value)), value.name)
            case Tensor() | Params() | Stack() | np.ndarray() | np.generic():
                return self._numbers(value)
            case FunctionType():
                return self._once(value, self._function)
            case MethodType():
                return (self.at(value.__func__), self.at(value.__self__))
            case functools.partial():
                return (self.at(value.func), self.at(value.args), self.at(value.keywords))
            case tuple() | list():
                return self._once(value, lambda some: (type(some), *map(self.at, some)), again=False)
            case dict():
                return self._once(value, self._dictionary, again=False)
            case frozenset():
                return value
            case type():
                return self._once(value, self._class)
            case nn.Module():
                return self._once(value, self._module)
        return self._object(value)

    def _once(self, value: Any, look: Callable[[Any], Hashable], *, again: bool = True) -> Hashable:
        """Look at a value; give only the number of one in progress or, with `again`, of one that was seen before."""
        if id(value) in self._met:
            return ("met", self._met[id(value)][0])
        self._met[id(value)] = (len(self._met), value)
        found = look(value)
        if not again:  # equal lists and the same list twice are one and the same
            del self._met[id(value)]
        return found

    # -- values ----------------------------------------------------------------------------------------------------
    def _numbers(self, value: Any) -> Hashable:
        if id(value) in self._given:
            return "given"
        if not self.by_value:
            raise Unstable(f"it captures a {type(value).__name__}; pass it in `given`")
        if isinstance(value, Params | Stack):
            return (type(value), *((name, content(leaf)) for name, leaf in value.items()))
        return content(value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value)))

    def _dictionary(self, value: dict[Any, Any]) -> Hashable:
        return (dict, *((self._name(name), self.at(part)) for name, part in value.items()))

    def _name(self, name: Any) -> Hashable:
        return name if isinstance(name, str) else self.at(name)

    def _object(self, value: Any) -> Hashable:
        kind = type(value)
        if hasattr(kind, "__fingerprint__"):
            known: Hashable = value.__fingerprint__()
            return known
        if is_dataclass(value) and (self.by_value or isinstance(value, Hashable)):  # frozen
            return (self.at(kind), *(self.at(getattr(value, field.name)) for field in fields(value)))
        if isinstance(value, functools._lru_cache_wrapper):
            return self.at(value.__wrapped__)
        if callable(value) and isinstance(value, Hashable) and hasattr(value, "__qualname__"):  # builtins
            return value
        if self.by_value:
            if isinstance(value, weakref.ref | logging.Logger):  # they compute nothing
                return self.at(kind)
            if isinstance(value, set):
                return (set, frozenset(map(self.at, value)))
            if hasattr(value, "__dict__"):
                return self._once(value, lambda one: (self.at(type(one)), self.at(dict(sorted(vars(one).items())))))
        raise Unstable(f"it captures a {kind.__name__}")

    # -- code ------------------------------------------------------------------------------------------------------
    def _function(self, function: FunctionType) -> Hashable:
        captured = [*map(_cell, function.__closure__ or ())]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
        return (function.__code__, *map(self.at, [*captured, *defaults]), *self._globals(function))

    def _globals(self, function: FunctionType) -> Iterator[Hashable]:
        """Yield what a function reads from its module, which somebody may have changed since.

        Of a library's function these are numbers and tensors: nobody defines its functions again.
        """
        space, edited = function.__globals__, is_edited(function.__code__.co_filename)
        names = [*dict.fromkeys(_names(function.__code__))]
        for value in (space[name] for name in names if name in space):
            if isinstance(value, int | float | Tensor | Params | Stack):
                yield self.at(value)
            elif isinstance(value, ModuleType) and edited:
                yield from self._from_module(value, names)
            elif edited:
                yield self._global(value)

    def _from_module(
        self, module: ModuleType, names: list[str], above: tuple[ModuleType, ...] = ()
    ) -> Iterator[Hashable]:
        """Yield what a function may read of a module that it knows by name."""
        if module in above or not is_edited(vars(module).get("__file__")):
            return
        for value in (vars(module)[name] for name in names if name in vars(module)):
            if isinstance(value, ModuleType):
                yield from self._from_module(value, names, (*above, module))
            else:
                yield self._global(value)

    def _global(self, value: Any) -> Hashable:
        """Look at a global value; of a library's object, such as a log, only at its class."""
        if value is None or isinstance(value, PLAIN):
            return self.at(value)
        own = is_edited(_file_of(type(value))) or isinstance(value, Namespace | SimpleNamespace)
        return self._as_it_is(value) if own or isinstance(value, OPEN) else self.at(type(value))

    def _as_it_is(self, value: Any) -> Hashable:
        """Look at a value that may change, as it is now."""
        before, self.by_value = self.by_value, True
        try:
            return self.at(value)
        finally:
            self.by_value = before

    def _class(self, kind: type) -> Hashable:
        """Look at a class; if users may edit it, also at its methods and those of its bases."""
        own = [one for one in kind.__mro__ if is_edited(_file_of(one))]
        return (kind, *(self._methods(one) for one in own)) if own else kind

    def _methods(self, kind: type) -> Hashable:
        found = list[Hashable]()
        for name, value in vars(kind).items():
            if name in OF_CLASSES:
                continue
            match value:
                case staticmethod() | classmethod():
                    found.append((name, self.at(value.__func__)))
                case property():
                    found.append((name, *(self.at(one) for one in (value.fget, value.fset) if one is not None)))
                case functools.cached_property():
                    found.append((name, self.at(value.func)))
                case Tensor() | list() | tuple() | dict():
                    found.append((name, self._as_it_is(value)))
                case _:
                    found.append((name, self._global(value)))
        return tuple(found)

    # -- networks --------------------------------------------------------------------------------------------------
    def _module(self, module: nn.Module) -> Hashable:
        """Look at a module's class, all its attributes, its parts and its leaves."""
        before, self.by_value = self.by_value, True
        leaves = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        try:
            attributes = {name: value for name, value in vars(module).items() if name not in {*OF_MODULES, *HOOKS}}
            hooks = [hook for name in HOOKS for hook in vars(module).get(name, {}).values()]
            return (
                self.at(type(module)),
                tuple((name, self.at(value)) for name, value in sorted(attributes.items())),
                tuple(map(self.at, hooks)),
                tuple((name, tuple(leaf.shape), leaf.requires_grad, self.at(leaf)) for name, leaf in leaves),
                tuple((name, None if part is None else self.at(part)) for name, part in module._modules.items()),
            )  # fmt: skip
        finally:
            self.by_value = before


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # what is still to be defined
        return None


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those inside it ask for."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _file_of(kind: type) -> str | None:
    """Return the file of a class; `<typed in>` for one that a user typed in."""
    file: str | None = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return "<typed in>" if file is None and kind.__module__ == "__main__" else file


# -- in every process --------------------------------------------------------------------------------------------------


def portable(value: Any, *, code: bool = True) -> object:
    """Write a fingerprint down as it reads in every process: without addresses, line numbers and the order of sets.

    Without `code`, functions count by their names alone.
    """
    match value:
        case CodeType() if not code:
            return value.co_name
        case CodeType():
            constants = tuple(map(portable, value.co_consts))
            return value.co_code, value.co_names, value.co_varnames, value.co_exceptiontable, constants
        case tuple():
            return tuple(portable(part, code=code) for part in value)
        case frozenset():
            return sorted(repr(portable(part, code=code)) for part in value)
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    if type(value) is object:  # only tells things apart in one process
        return "object"
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{getattr(value, '__module__', None)}.{name}"


def files_of(value: Any) -> set[Path]:
    """Return the files that hold the code of a fingerprint."""
    match value:
        case CodeType():
            return {Path(value.co_filename)} if not value.co_filename.startswith("<") else set()
        case tuple() | frozenset():
            return {file for part in value for file in files_of(part)}
        case type():
            named = (getattr(sys.modules.get(one.__module__), "__file__", None) for one in value.__mro__)
            return {Path(file) for file in named if file}
    module = inspect.getmodule(value) if callable(value) else None
    file = getattr(module, "__file__", None)
    return {Path(file)} if file else set()


# -- tensors -----------------------------------------------------------------------------------------------------------

_contents: Any = WeakIdKeyDictionary()  # by tensor: how often it had been written to, and its digest


def content(tensor: Tensor) -> str:
    """Digest the type, the shape and every number of a tensor; cached as long as nobody writes to it."""
    if tensor.is_inference():  # nobody knows whether it was written to
        return _content(tensor)
    known = _contents.get(tensor)
    if known is None or known[0] != tensor._version:
        known = _contents[tensor] = (tensor._version, _content(tensor))
    found: str = known[1]
    return found


def _content(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    whole = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    data: Any = plain.flatten().view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    if len(blocks) < 2:
        whole.update(data)
    else:
        with ThreadPoolExecutor() as pool:
            whole.update(b"".join(pool.map(lambda block: hashlib.sha256(block).digest(), blocks)))
    return whole.hexdigest()
