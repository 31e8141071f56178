"""One paper, one file. Methods are found by looking into this folder; there is no list to edit.

Those with one shot are pairs of a training and an answer, which are found in two folders of their own.

Other packages add methods through the entry point group `atoll.algorithms`, users by a file of their own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import HyperparameterError, UnknownName, unknown
from atoll.kernel.wrapper import core_of
from atoll.toolbox.pairs import AnswerPiece, LocalTraining, Pair, Part, ServerAnswer, TrainingPiece, make_pair

__all__ = ["file_of", "find_pair", "list_methods", "list_pairs", "list_parts", "load_file", "name_of"]

P = TypeVar("P", bound=Part)

HERE = Path(__file__).parent
FROM_FILES = "atoll_methods"  # users' files are modules in here, so none of them hides another module


def list_methods() -> dict[str, type[Algorithm]]:
    """Return all methods by name."""
    return dict(_load_methods())


@functools.cache  # looking through all installed packages takes longer than making a method
def _load_methods() -> dict[str, type[Algorithm]]:
    modules = [importlib.import_module(f"{__name__}.{entry.name}") for entry in _files()]
    methods = [method for module in modules for method in _methods(module)]
    methods += [entry.load() for entry in metadata.entry_points(group="atoll.algorithms")]
    return {name_of(method): method for method in methods}


def list_parts(kind: type[P]) -> dict[str, type[P]]:
    """Return what one-shot methods are made of by name: all trainings, answers or pieces of these."""
    found = {part.called: part for part in _load_parts() if issubclass(part, kind)}
    return dict(sorted(found.items()))


@functools.cache
def _load_parts() -> list[type[Part]]:
    modules = [
        importlib.import_module(f"{__name__}.{folder}.{entry.name}")
        for folder in ("trainings", "answers")
        for entry in pkgutil.iter_modules([str(HERE / folder)])
    ]
    parts = [part for module in modules for part in vars(module).values() if inspect.isclass(part)]
    return [part for part in parts if issubclass(part, Part) and vars(part).get("called")]


@functools.cache
def find_pair(name: str) -> type[Pair]:
    """Return the method of a training and an answer: `fafi/margins`, with pieces `fafi+bank/features+refined`.

    A pair that has a file of its own is that method.
    """
    clients, _, server = name.partition("/")
    (training, *more), (answer, *added) = clients.split("+"), server.split("+")
    client_parts = (
        _find_part("training", training, LocalTraining),
        *(_find_part("piece", one, TrainingPiece) for one in more),
    )
    server_parts = (
        _find_part("answer", answer, ServerAnswer),
        *(_find_part("piece", one, AnswerPiece) for one in added),
    )
    return _with_file().get((client_parts, server_parts)) or make_pair(client_parts, server_parts)


def list_pairs() -> dict[str, type[Pair]]:
    """Return all pairs without pieces that make sense, by the names of their halves."""
    pairs = {}
    for training in list_parts(LocalTraining):
        for answer in list_parts(ServerAnswer):
            with contextlib.suppress(HyperparameterError):
                pairs[f"{training}/{answer}"] = find_pair(f"{training}/{answer}")
    return pairs


def _find_part(kind: str, name: str, base: type[P]) -> type[P]:
    parts = list_parts(base)
    if name not in parts:
        raise unknown(kind, name, parts)
    return parts[name]


def _with_file() -> dict[tuple[tuple[type[Part], ...], tuple[type[Part], ...]], type[Pair]]:
    """Return the pairs that have a file, by their parts."""
    pairs = [method for method in list_methods().values() if issubclass(method, Pair) and method.is_plain]
    return {(pair.client_parts, pair.server_parts): pair for pair in pairs}


def _files() -> list[pkgutil.ModuleInfo]:
    return [entry for entry in pkgutil.iter_modules([str(HERE)]) if not entry.ispkg]


def name_of(method: Algorithm | type[Algorithm]) -> str:
    """Return what a method is called: its file's name, or those of its halves, and what was added to it."""
    kind = _class_of(method)
    file = kind.__module__.rpartition(".")[2].replace("_", "-")
    return (getattr(kind, "full_name", "") or file) + method.added


def file_of(method: Algorithm | type[Algorithm]) -> Path | None:
    """Return the file of a user's own method; None for a method that is found by its name."""
    kind = _class_of(method)
    return Path(inspect.getfile(kind)) if kind.__module__.startswith(f"{FROM_FILES}.") else None


def _class_of(method: Algorithm | type[Algorithm]) -> type[Algorithm]:
    return method if isinstance(method, type) else type(core_of(method))


def _find_class(name: str) -> type[Algorithm]:
    """Find a method by the name of its class, `from atoll.algorithms import Ditto`; only its own file is imported."""
    for entry in _files() if name[:1].isupper() else ():  # modules look each other up here, too
        if f"class {name}(" in (HERE / f"{entry.name}.py").read_text(encoding="utf-8"):
            method: type[Algorithm] = getattr(importlib.import_module(f"{__name__}.{entry.name}"), name)
            return method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    from atoll.algorithms.typed import *  # noqa: F403
else:
    __getattr__ = _find_class


def _methods(module: ModuleType) -> list[type[Algorithm]]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]


def load_file(path: Path) -> type[Algorithm]:
    """Return the one method that a user's file defines."""
    if not path.is_file():
        raise UnknownName(f"A method's file must exist. There is no {path}.", hint="`atoll new NAME` writes one.")
    name = f"{FROM_FILES}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    methods = _methods(module)
    if len(methods) != 1:
        names = ", ".join(method.__name__ for method in methods) or "none"
        raise UnknownName(f"{path} must define exactly one Algorithm. It defines {names}.")
    return methods[0]
