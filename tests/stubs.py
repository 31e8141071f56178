"""Write what type checkers and editors read: run `python tests/stubs.py` after changing a method or a setting.

Methods are imported when they are first asked for, and a pair takes over the hyperparameters of its parts when its
class is made. Functions that take settings as keywords take the fields of `Settings`. Nobody sees any of this without
running it, so the files `typed.pyi` say it.
"""

import builtins
import inspect
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from atoll import Settings, Training, algorithms
from atoll.algorithms import list_methods
from atoll.data import own
from atoll.kernel.algorithm import Algorithm
from atoll.toolbox.pairs import Pair

ROOT = Path(__file__).parents[1]
HEAD = "Written by `python tests/stubs.py`; do not edit."


class Spelling:
    """How types are written, and what must be imported for that."""

    def __init__(self) -> None:
        self.imports: set[tuple[str, str]] = set()

    def name(self, kind: typing.Any) -> str:
        """Return the name of a class."""
        if kind.__module__ != builtins.__name__:
            self.imports.add((kind.__module__, kind.__name__))
        return str(kind.__name__)

    def spell(self, hint: typing.Any) -> str:
        """Return how a type is written, without the ranges in it."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is types.NoneType or hint is ...:
            return "None" if hint is types.NoneType else "..."
        if origin is None:
            return self.name(hint)
        if origin is typing.Literal:
            self.imports.add(("typing", "Literal"))
            return f"Literal[{', '.join(map(repr, args))}]"
        if origin in (types.UnionType, typing.Union):
            return " | ".join(map(self.spell, args))
        if origin is Callable:
            *taken, made = args
            return f"{self.name(origin)}[[{', '.join(map(self.spell, taken[0]))}], {self.spell(made)}]"
        return f"{self.name(origin)}[{', '.join(map(self.spell, args))}]"

    def write(self, title: str, exports: Iterable[str], classes: Iterable[str]) -> str:
        """Return a whole stub, as the formatter leaves it."""
        imports = [f"from {module} import {name}" for module, name in sorted(self.imports)]
        text = "\n".join([f'"""{title}\n\n{HEAD}\n"""\n', *imports, "", *exports, "", *classes])
        for command in (["check", "--select=I", "--fix"], ["format"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename=src/typed.pyi", "-"]
            text = subprocess.run(ruff, input=text, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return text


def write_methods() -> str:
    """Return the stub of all methods of Atoll."""
    methods = [one for one in list_methods().values() if one.__module__.startswith("atoll.")]
    methods.sort(key=lambda one: one.__module__)
    spelling = Spelling()
    imports = [f"from {one.__module__} import {one.__name__} as {alias(one)}" for one in methods]
    classes = [declare_pair(one, spelling) for one in methods if issubclass(one, Pair)]
    spelling.imports.add(("dataclasses", "dataclass"))
    return spelling.write("Every method by its class.", imports, classes)


def alias(method: type[Algorithm]) -> str:
    """Return the name of a class in the stub: a stub exports what keeps its name, and declares pairs itself."""
    return f"_{method.__name__}" if issubclass(method, Pair) else method.__name__


def declare_pair(pair: type[Pair], spelling: Spelling) -> str:
    """Declare a pair with the hyperparameters of its parts."""
    hints = typing.get_type_hints(pair)
    own = [f"    {one.name}: {spelling.spell(hints[one.name])} = {one.default!r}" for one in fields(pair)]
    doc = (pair.__doc__ or "").splitlines()[0]
    head = f'@dataclass(frozen=True, kw_only=True)\nclass {pair.__name__}({alias(pair)}):\n    """{doc}"""\n'
    return "\n".join([head, *own])


def write_keywords(title: str, **keywords: Mapping[str, typing.Any]) -> str:
    """Return the stub of dictionaries of keywords."""
    spelling = Spelling()
    spelling.imports.add(("typing", "TypedDict"))
    classes = []
    for name, hints in keywords.items():
        own = [f"    {key}: {spelling.spell(hint)}" for key, hint in hints.items()]
        classes.append("\n".join([f"class {name}(TypedDict, total=False):", *own]))
    return spelling.write(title, [], classes)


def fields_of(kind: type[typing.Any]) -> dict[str, typing.Any]:
    """Return the fields of a dataclass with their types."""
    hints = typing.get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def write_settings() -> str:
    """Return the stub of settings that are given as keywords."""
    return write_keywords("Settings as keywords, such as `rounds=50`.", GivenSettings=fields_of(Settings))


def write_reading() -> str:
    """Return the stub of the arguments of `Task.own` that say how data are read, and of those of a training."""
    hints = typing.get_type_hints(own.read)
    keywords = [one.name for one in inspect.signature(own.read).parameters.values() if one.kind is one.KEYWORD_ONLY]
    given = {name: hints[name] for name in keywords if name != "min_samples"}  # which `Task.own` takes itself
    title = "How own data are read, such as `target='readmitted'`, and clients train, such as `lr=0.1`."
    return write_keywords(title, GivenReading=given, GivenTraining=fields_of(Training))


STUBS: dict[Path, Callable[[], str]] = {
    Path(inspect.getfile(place)).with_name("typed.pyi"): write
    for place, write in ((algorithms, write_methods), (Settings, write_settings), (own, write_reading))
}

if __name__ == "__main__":
    for path, write in STUBS.items():
        path.write_text(write(), encoding="utf-8")
