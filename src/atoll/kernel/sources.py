"""Which code something depends on: files and all that they import, found by reading them.

A change of a page's style must not throw away hours of training, and a change of a helper in a user's own file must. So
what is digested is what can be reached: from some files, along their imports, within Atoll and within what users write
themselves. Installed packages are libraries: they count by the files that are asked for, not by what these import.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# What shows runs, and compares and checks them: it changes no number of a run.
AROUND_RUNS = ("cli", "data/statistics", "experiments", "report", "testing", "toolbox/references")
# What calls training and is never called by it.
AROUND_TRAINING = (*AROUND_RUNS, "federation", "metrics", "records")
TRAINING = (
    "data/augment", "kernel/batch", "kernel/cohort", "kernel/network", "kernel/params",
    "runtime/engines/local", "runtime/engines/scan", "runtime/engines/trainings",
)  # fmt: skip


@functools.cache
def code_digest() -> str:
    """Digest the code that decides the numbers of a run: all but pages, tables and the command line."""
    return digest(file for file in _snapshot() if not _is_within(file, AROUND_RUNS))[:8]


def training_digest(files: Iterable[Path]) -> str:
    """Digest the code that decides a training whose functions are in these files."""
    roots = [PACKAGE / f"{name}.py" for name in TRAINING]
    return digest(reach([*roots, *sorted(files)], AROUND_TRAINING))


def file_digest(file: Path) -> str:
    """Digest a user's file and all that it imports from among the user's files, in eight letters."""
    return own_digest(file)[:8]


def own_digest(file: Path) -> str:
    """Digest a user's file as `file_digest` does, in full length."""
    return digest(file for file in reach([file], AROUND_TRAINING) if PACKAGE not in file.parents)


def digest(files: Iterable[Path]) -> str:
    """Digest the names and texts of files; the folder of a package, or of a file by itself, does not count."""
    each = [(file.relative_to(_top(file)).as_posix(), hashlib.sha256(_text(file)).hexdigest()) for file in files]
    return hashlib.sha256(repr(sorted(each)).encode()).hexdigest()


def _top(file: Path) -> Path:
    """Return the folder of a file, or of the outermost package around it."""
    if PACKAGE in file.parents:
        return PACKAGE.parent
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def reach(roots: Iterable[Path], around: tuple[str, ...] = ()) -> set[Path]:
    """Find these files and all that they import, without the parts of Atoll in `around` and missing files."""
    found, waiting = set[Path](), [file.resolve() for file in roots]
    while waiting:
        file = waiting.pop()
        if file in found or _is_within(file, around) or not file.is_file():
            continue
        found.add(file)
        if PACKAGE in file.parents or is_edited(str(file)):
            waiting += _imported_files(file, _text(file))
    return found


@functools.lru_cache(maxsize=4096)
def _is_within(file: Path, parts: tuple[str, ...]) -> bool:
    """Return whether a file is one of these parts of Atoll, or inside one."""
    return any(part in file.parents or part == file.with_suffix("") for part in (PACKAGE / name for name in parts))


@functools.cache
def _libraries() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    places = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(Path(place).resolve() for place in (*places, site.getusersitepackages()))


@functools.cache
def is_edited(file: str | None) -> bool:
    """Return whether code is a user's own, also if typed in: neither Atoll's, nor an installed package's."""
    if file is None or file.startswith("<frozen"):
        return False
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    return not any(place in path.parents for place in (PACKAGE, *_libraries()))


# -- reading -----------------------------------------------------------------------------------------------------------


def _text(file: Path) -> bytes:
    """Return the text of a file; of Atoll's own, as the snapshot has it."""
    return _snapshot().get(file) or file.read_bytes()


@functools.cache
def _snapshot() -> dict[Path, bytes]:
    """Read all of Atoll's code once: a process runs the code it began with, not what was edited since."""
    return {file: file.read_bytes() for file in PACKAGE.rglob("*.py")}


@functools.lru_cache(maxsize=4096)
def _imported_files(file: Path, text: bytes) -> tuple[Path, ...]:
    """Return the files that a file of this text imports; of users' packages also each `__init__.py` that then runs."""
    found = [target for node in _imports(text) for target in _targets(node, file)]
    if PACKAGE not in file.parents:
        found += [folder / "__init__.py" for folder in file.parents if _top(file) in folder.parents]
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=4096)
def _imports(text: bytes, *, typing: bool = False) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Find all imports of a text, also those inside functions; those for type checkers only with `typing`."""
    try:
        waiting: list[ast.AST] = [ast.parse(text)]
    except (SyntaxError, ValueError):  # not Python: an extension module
        return ()
    found = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and _asks_for_types(node.test) and not typing:
            waiting += node.orelse
        elif not isinstance(node, ast.expr):
            waiting += ast.iter_child_nodes(node)
    return tuple(found)


def _asks_for_types(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", None), getattr(test, "attr", None))


def _targets(node: ast.Import | ast.ImportFrom, file: Path) -> Iterator[Path]:
    """Yield the files that an import in `file` leads to."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            found = [_module(alias.name, _places(alias.name, file))]
        elif node.level:
            found = _imported_from(node.module or "", alias.name, [file.parents[node.level - 1]])
        else:
            found = _imported_from(node.module or "", alias.name, _places(node.module or "", file))
        yield from (one for one in found if one is not None)


def _imported_from(module: str, name: str, places: list[Path]) -> list[Path | None]:
    """Return the files of `from module import name`: of the module, and of one of that name inside it.

    A package of Atoll that only re-exports a name does not count; the module that defines it does. So a page does
    not count because a loop does.
    """
    whole = _module(module, places) if module else None
    inner = _module(f"{module}.{name}" if module else name, places)
    if whole is None or PACKAGE not in whole.parents:
        return [whole, inner]
    return [inner or _find_home(whole, name) or whole]


def _find_home(package: Path, name: str) -> Path | None:
    """Return the file from which a package of Atoll re-exports a name, if it does."""
    if package.name != "__init__.py":
        return None
    for node in _imports(_text(package), typing=True):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _imported_from(node.module, alias.name, [PACKAGE.parent])[0]
    return None


def _places(name: str, file: Path) -> list[Path]:
    """Return the folders in which a module may be: Atoll's own; beside a file, and beside the package that it is in."""
    root = name.partition(".")[0]
    if root == PACKAGE.name:
        return [PACKAGE.parent]
    loaded = getattr(sys.modules.get(root), "__file__", None)
    places = [file.parent, _top(file)]
    if loaded and is_edited(loaded):
        above = Path(loaded).resolve().parent
        places.append(above.parent if Path(loaded).name == "__init__.py" else above)
    return places


def _module(name: str, places: Iterable[Path]) -> Path | None:
    """Return the file of a module in one of these folders."""
    for place in places:
        path = place.joinpath(*name.split("."))
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file.resolve()
    return None
