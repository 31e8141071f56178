"""Write what type checkers and editors read of the methods: run `python tests/stubs.py` after adding or changing one.

Methods are imported when they are first asked for, and a pair takes over the hyperparameters of its parts when its
class is made. Nobody sees either without running it, so `algorithms/typed.pyi` says both.
"""

import subprocess
import sys
import types
import typing
from dataclasses import fields
from pathlib import Path

import atoll
from atoll.algorithms import list_methods
from atoll.kernel.algorithm import Algorithm
from atoll.toolbox.pairs import Pair

SOURCE = Path(atoll.__file__).parent
HEAD = '"""Every method by its class. `python tests/stubs.py` writes this file: do not edit it."""\n\n'


def spell(hint: typing.Any) -> str:
    """Spell a type as it is written."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " | ".join(map(spell, args))
    return "None" if hint is types.NoneType else str(hint.__name__)


def declare(pair: type[Pair]) -> str:
    """Declare a pair with the hyperparameters of its parts."""
    hints = typing.get_type_hints(pair)
    own = [f"    {one.name}: {spell(hints[one.name])} = {one.default!r}" for one in fields(pair)]
    return "\n".join(
        [
            "@dataclass(frozen=True, kw_only=True)",
            f"class {pair.__name__}(_{pair.__name__}):",
            f'    """{(pair.__doc__ or "").splitlines()[0]}"""\n',
            *own,
        ]
    )


def write_methods() -> str:
    """Return the stub of all methods of Atoll."""
    methods = [one for one in list_methods().values() if one.__module__.startswith("atoll.")]
    methods.sort(key=lambda one: one.__module__)
    pairs = [one for one in methods if issubclass(one, Pair)]
    imports = [f"from {one.__module__} import {one.__name__} as {alias(one)}" for one in methods]
    standard = ["from dataclasses import dataclass", "from typing import Literal"]
    return HEAD + tidy("\n".join([*standard, "", *imports, "", *map(declare, pairs)]))


def alias(method: type[Algorithm]) -> str:
    """Return the name of a class in the stub: a stub exports what keeps its name, and declares pairs itself."""
    return f"_{method.__name__}" if issubclass(method, Pair) else method.__name__


def tidy(text: str) -> str:
    """Return the text as the formatter leaves it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "typed.pyi", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


STUBS = {SOURCE / "algorithms" / "typed.pyi": write_methods}

if __name__ == "__main__":
    for path, write in STUBS.items():
        path.write_text(write(), encoding="utf-8")
