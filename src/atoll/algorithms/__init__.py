"""One paper, one file. Methods are found by looking into this folder; there is no list to edit.

Other packages add methods through the entry point group `atoll.algorithms`, users by a file of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.algorithm import Algorithm, hyperparameters
from atoll.errors import UnknownName, unknown

__all__ = ["create", "file_of", "find", "found", "from_record", "name_of", "to_record", "upgrade_record"]

FROM_FILES = "atoll_methods"  # users' files are modules in here, so that none of them hides another module


def found() -> dict[str, type[Algorithm]]:
    """All methods by name."""
    modules = [importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__)]
    methods = [method for module in modules for method in _methods(module)]
    methods += [entry.load() for entry in metadata.entry_points(group="atoll.algorithms")]
    return {name_of(method): method for method in methods}


def find(name: str) -> type[Algorithm]:
    """A method by its name or file (`./mine.py`), with pieces (`fedper+prox`), inside clusters (`ditto@ifca`)."""
    name, at, clusterer = name.partition("@")
    if at:
        from atoll.hybrids import within_clusters

        return within_clusters(find(name), find(clusterer))
    name, *pieces = re.split(r"\+(?=[a-z]+(?:\+|$))", name)
    if name.endswith(".py"):
        method = _from_file(Path(name))
    else:
        methods = found()
        if name not in methods:
            raise unknown("algorithm", name, methods)
        method = methods[name]
    for piece in pieces:
        from atoll.pieces import composed

        method = composed(method, piece)
    return method


def create(text: str, /, **more: str) -> Algorithm:
    """A method with hyperparameters, as written on the command line: `ditto` or `ditto:lam=0.1,epochs=2`."""
    name, _, rest = text.partition(":")
    method = find(name)
    known = {hyperparameter.name: hyperparameter for hyperparameter in hyperparameters(method)}
    values = {}
    for pair in [*filter(None, rest.split(",")), *(f"{key}={value}" for key, value in more.items())]:
        key, given, value = pair.partition("=")
        if key not in known:
            raise unknown(f"hyperparameter of {name_of(method)}", key, known)
        if not given:
            raise UnknownName(f"Hyperparameters must be written name=value. Got {pair!r}.")
        values[key] = known[key].parse(method.__name__, value)
    return method(**values)


def name_of(method: type[Algorithm]) -> str:
    """What a method is called: its file's name, and what was added to it."""
    return method.__module__.rpartition(".")[2].replace("_", "-") + method.added


def file_of(method: type[Algorithm]) -> Path | None:
    """The file of a user's own method; None for a method that is found by its name."""
    return Path(inspect.getfile(method)) if method.__module__.startswith(f"{FROM_FILES}.") else None


def to_record(algorithm: Algorithm) -> dict[str, Any]:
    """Write a method down: its name, the file of a user's own, and the values of its hyperparameters."""
    file = file_of(type(algorithm))
    return {"name": name_of(type(algorithm)), "file": file and str(file), "values": asdict(algorithm)}


def from_record(record: Mapping[str, Any]) -> Algorithm:
    """Make the method that was written down."""
    name, file, values = (upgrade_record(record)[part] for part in ("name", "file", "values"))
    added = re.search(r"[+@].*$", name)  # what a user's own method was put together with
    return find(f"{file}{added[0] if added else ''}" if file else name)(**values)


def upgrade_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Give an older record, whose values stand beside the name, the form that `to_record` writes."""
    if isinstance(record.get("values"), Mapping):
        return dict(record)
    values = {name: value for name, value in record.items() if name not in ("name", "file")}
    return {"name": record["name"], "file": record.get("file"), "values": values}


def _methods(module: ModuleType) -> list[type[Algorithm]]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]


def _from_file(path: Path) -> type[Algorithm]:
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
