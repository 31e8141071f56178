"""One paper, one file. Methods are found by looking into this folder; there is no list to edit.

Other packages add methods through the entry point group `atoll.algorithms`, users by a file of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

from atoll.kernel.algorithm import Algorithm
from atoll.kernel.errors import UnknownName
from atoll.kernel.wrapper import core_of

__all__ = ["file_of", "found", "load_file", "name_of"]

FROM_FILES = "atoll_methods"  # users' files are modules in here, so none of them hides another module


def found() -> dict[str, type[Algorithm]]:
    """All methods by name."""
    modules = [importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__)]
    methods = [method for module in modules for method in _methods(module)]
    methods += [entry.load() for entry in metadata.entry_points(group="atoll.algorithms")]
    return {name_of(method): method for method in methods}


def name_of(method: Algorithm | type[Algorithm]) -> str:
    """Return what a method is called: its file's name, and what was added to it."""
    return _class_of(method).__module__.rpartition(".")[2].replace("_", "-") + method.added


def file_of(method: Algorithm | type[Algorithm]) -> Path | None:
    """Return the file of a user's own method; None for a method that is found by its name."""
    kind = _class_of(method)
    return Path(inspect.getfile(kind)) if kind.__module__.startswith(f"{FROM_FILES}.") else None


def _class_of(method: Algorithm | type[Algorithm]) -> type[Algorithm]:
    return method if isinstance(method, type) else type(core_of(method))


def __getattr__(name: str) -> type[Algorithm]:
    """Find a method by the name of its class, `from atoll.algorithms import Ditto`; only its own file is imported."""
    for entry in pkgutil.iter_modules(__path__) if name[:1].isupper() else ():  # modules look each other up here, too
        if f"class {name}(" in Path(__path__[0], f"{entry.name}.py").read_text(encoding="utf-8"):
            method: type[Algorithm] = getattr(importlib.import_module(f"{__name__}.{entry.name}"), name)
            return method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
