"""The house: a room imports only from rooms above it, whether at once, lazily or for types."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "atoll"
ROOMS = (
    "kernel", "models", "data", "toolbox", "algorithms", "compose", "runtime", "protect", "metrics",
    "export", "records", "federation", "report", "experiments", "deploy", "testing", "cli",
)  # fmt: skip
MODULES = {
    ".".join(("atoll", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
    if "templates" not in file.parts  # which users' files begin as
}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def imported(module: str) -> set[str]:
    """The modules of Atoll that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "atoll":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "atoll"}
    return found


@functools.cache
def edges() -> Counter[tuple[str, str]]:
    """How often the modules of a room import those of another."""
    return Counter((room(module), room(other)) for module in MODULES if room(module) for other in imported(module))


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_from_rooms_above_it(name: str) -> None:
    below = ROOMS[ROOMS.index(name) + 1 :]
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if room(module) == name
        for other in sorted(imported(module))
        if room(other) in below or (room(other) == "" and name not in ("testing", "cli"))
    ]
    assert not wrong, "\n".join(wrong)


def test_opening_the_package_shows_the_architecture() -> None:
    there = {file.stem for file in PACKAGE.iterdir() if not file.name.startswith("_") and file.suffix != ".typed"}
    assert there == set(ROOMS)


def test_every_room_is_needed_by_one_below() -> None:
    """An edge that nobody uses would be a room that could be left out."""
    used = {other for (mine, other), count in edges().items() if mine != other and count}
    assert used >= set(ROOMS) - {"testing", "cli"}


def table() -> str:
    """How often the modules of a room (rows) import those of another (columns)."""
    rows = [["", *ROOMS], *([mine, *(str(edges()[mine, other] or "") for other in ROOMS)] for mine in ROOMS)]
    return "\n".join(" | ".join(cell.rjust(11) for cell in row) for row in rows)


if __name__ == "__main__":
    print(table())
