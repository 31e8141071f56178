"""The house in numbers, with the aim beside each: `python tests/house.py [ROOT] [--types] [--json FILE]`.

ROOT is another checkout; `--before FILE` shows figures that `--json` kept. `--types` also asks mypy, which takes a
minute. Numbers are a compass, not a limit.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
AIMS = {
    "lines": 47_000, "files": 330, "lines of the kernel": 2_300, "names of Algorithm": 20,
    "frames from federate to a step": 22, "files of a FedAvg round": 45, "functions of a FedAvg round": None,
    "places that declare metric": 6, "class names that occur twice": 15, "public members of Report": 35,
    "functions": None, "functions with one caller": 350, "methods without a type": 0, "words of docs": 105_000,
}  # fmt: skip


def measure(root: Path, *, types: bool) -> dict[str, Any]:
    """Return all figures of a checkout, and lines and files by room."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in list_sources(root)]
    rooms = count_rooms(root)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    functions, lonely = count_callers(trees)
    found = {
        "lines": sum(lines for lines, _ in rooms.values()),
        "files": sum(files for _, files in rooms.values()),
        "lines of the kernel": rooms["kernel"][0],
        "places that declare metric": sum(declares(node, "metric") for node in nodes),
        "class names that occur twice": sum(count > 1 for count in classes.values()),
        "functions": functions,
        "functions with one caller": lonely,
        "words of docs": sum(len(file.read_text(encoding="utf-8").split()) for file in (root / "docs").rglob("*.md")),
        **call(root, "--inside"),
    }
    if types:
        found["methods without a type"] = count_untyped(root)
    return {"figures": {name: found[name] for name in AIMS if name in found}, "rooms": rooms}


# -- by reading --------------------------------------------------------------------------------------------------------


def list_sources(root: Path) -> list[Path]:
    return sorted((root / "src" / "atoll").rglob("*.py"))


def count_rooms(root: Path) -> dict[str, tuple[int, int]]:
    """Count lines and files of each room; files that stand in none are the door."""
    lines, files = Counter[str](), Counter[str]()
    for file in list_sources(root):
        parts = file.relative_to(root / "src" / "atoll").parts
        room = parts[0] if len(parts) > 1 else "the door"
        lines[room] += len(file.read_text(encoding="utf-8").splitlines())
        files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(lines)}


def declares(node: ast.AST, name: str) -> int:
    """Count the parameters and fields of this name that a node declares."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        given = node.args
        return sum(one.arg == name for one in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    if isinstance(node, ast.ClassDef):
        return sum(isinstance(one, ast.AnnAssign) and getattr(one.target, "id", "") == name for one in node.body)
    return 0


def count_callers(trees: list[ast.Module]) -> tuple[int, int]:
    """Count the functions of modules, and those that one place alone reads, to call them or to pass them on.

    By names alone: a function whose name another function or method has is left out, since nobody knows who is meant.
    Imports do not count as reading; commands and entry points, which nobody reads, have no caller.
    """
    defined, methods, read = Counter[str](), Counter[str](), Counter[str]()
    for tree in trees:
        of_module = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    (defined if id(node) in of_module else methods)[node.name] += 1
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                    read[name] += 1
    lonely = [name for name, count in defined.items() if count == 1 and not methods[name] and read[name] == 1]
    return sum(defined.values()), len(lonely)


# -- by running --------------------------------------------------------------------------------------------------------


def call(root: Path, *words: str) -> dict[str, Any]:
    """Run this file on a checkout in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        own = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "ATOLL_CACHE": place, "ATOLL_STATE": place}
        command = [sys.executable, __file__, str(root), *words]
        run = subprocess.run(command, env={**os.environ, **own}, check=True, stdout=subprocess.PIPE, cwd=place)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def look_inside(root: Path) -> dict[str, int]:
    """Count what only running code shows: names of classes, and what a round of FedAvg passes."""
    import atoll  # of the checkout: `call` says where it is

    assert Path(atoll.__file__).is_relative_to(root)
    frames = watch_a_step(root)
    places = watch_a_round(root)
    return {
        "names of Algorithm": len(public_names(atoll.Algorithm)),
        "public members of Report": len(public_names(atoll.Report)),
        "frames from federate to a step": frames,
        "files of a FedAvg round": len({file for file, _ in places}),
        "functions of a FedAvg round": len(places),
    }


def public_names(kind: type) -> list[str]:
    """List the public attributes of a class, and its fields without a default."""
    return sorted(name for name in {*dir(kind), *getattr(kind, "__dataclass_fields__", {})} if not name.startswith("_"))


def play(on_forward: Callable[[], None] = lambda: None) -> None:
    """Play one round of FedAvg on four clients, without compilation, one client after another."""
    import torch
    from torch import Tensor, nn

    from atoll import LocalEngine, Task, create, federate

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            on_forward()
            return super().forward(x)

    x, y = torch.linspace(-1, 1, 40).reshape(20, 2), torch.arange(20) % 2
    task = Task.of_clients({f"client {k}": (x[k::4], y[k::4]) for k in range(4)}, Watched(2, 2))
    engine = LocalEngine(device="cpu", strategy="loop", compile=False, remember=False)
    federate(task, create("fedavg"), rounds=1, engine=engine, progress=False)


def watch_a_step(root: Path) -> int:
    """Count the package's frames from `federate` to the network's answer in a step, on the shortest way."""
    depths: list[int] = []

    def look() -> None:
        stack = [*list_stack()]
        names = [frame.f_code.co_name for frame in stack]
        if "local" in names and "federate" in names:
            ours = [frame for frame in stack[: names.index("federate") + 1] if is_ours(frame.f_code.co_filename, root)]
            depths.append(len(ours))

    play(look)
    return min(depths)


def list_stack() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def watch_a_round(root: Path) -> set[tuple[str, str]]:
    """List the functions of the package that a round calls, by file and name; modules are loaded before."""
    seen: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and is_ours(code.co_filename, root) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    play()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        play()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def is_ours(file: str, root: Path) -> bool:
    return file.startswith(str(root / "src" / "atoll"))


def count_untyped(root: Path) -> int:
    """Count the methods that mypy does not know by their own class when a user imports them from `atoll.algorithms`."""
    names = call(root, "--names")["names"]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "written_by_a_user.py")
        lines = [f"from atoll.algorithms import {name}\nreveal_type({name})" for name in names]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        own = {**os.environ, "MYPYPATH": str(root / "src")}
        command = [sys.executable, "-m", "mypy", "--no-error-summary", f"--cache-dir={place}/cache", str(file)]
        shown = subprocess.run(command, env=own, check=False, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    return sum(f'.{name}"' not in shown for name in names)


def list_names() -> dict[str, list[str]]:
    from atoll.algorithms import list_methods

    return {"names": sorted(kind.__name__ for kind in list_methods().values())}


# -- the table ---------------------------------------------------------------------------------------------------------


def show(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Return the figures as two Markdown tables."""

    def row(*cells: Any) -> str:
        shown = ("–" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in cells)
        return f"| {' | '.join(shown)} |"

    earlier = ([], []) if before is None else (["before"], ["---:"])
    figures = [row("figure", *earlier[0], "now", "aim"), row("---", *earlier[1], "---:", "---:")]
    for name, value in now["figures"].items():
        figures.append(row(name, *([] if before is None else [before["figures"].get(name)]), value, AIMS[name]))
    rooms = [row("room", "lines", "files"), row("---", "---:", "---:")]
    rooms += [row(room, *map(int, counts)) for room, counts in now["rooms"].items()]
    return "\n".join([*figures, "", *rooms])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python tests/house.py", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=HERE, help="another checkout")
    parser.add_argument("--types", action="store_true", help="also ask mypy which methods have a type")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    parser.add_argument("--before", type=Path, metavar="FILE", help="kept figures to show beside")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--names", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    root = asked.root.resolve()
    if asked.inside or asked.names:
        print(json.dumps(look_inside(root) if asked.inside else list_names()))
        return
    now = measure(root, types=asked.types)
    if asked.json:
        asked.json.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    print(show(now, None if asked.before is None else json.loads(asked.before.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
