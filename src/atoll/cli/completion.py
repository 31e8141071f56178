"""What a shell offers when Tab is pressed. Names are read from the text of modules: nobody waits for torch."""

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[1]
LISTS = ("algorithms", "pairs", "tasks", "partitions", "models", "runs", "rules", "attacks", "compressions")
DEVICES = ("auto", "cpu", "cuda", "mps")


def list_methods() -> list[str]:
    """List the methods that have a file of their own."""
    files = (HOME / "algorithms").glob("[a-z]*.py")
    return sorted(file.stem.replace("_", "-") for file in files)


def list_keys(module: str, table: str) -> list[str]:
    """List the keys of a dictionary that a module defines."""
    found: list[str] = []
    for node in ast.parse((HOME / module).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and any(isinstance(one, ast.Name) and one.id == table for one in targets):
            found += [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return found


def offer(names: Callable[[], list[str]]) -> dict[str, Any]:
    """Return the argument of typer by which an option or argument completes one of these names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return {"autocompletion": complete}


METHODS = offer(list_methods)
TASKS = offer(partial(list_keys, "data/datasets.py", "CATALOGUE"))
PARTITIONS = offer(partial(list_keys, "data/partition.py", "WORDS"))
MODELS = offer(lambda: ["auto", *list_keys("models/__init__.py", "MODELS")])
WHAT_TO_LIST = offer(lambda: list(LISTS))
WHERE = offer(lambda: list(DEVICES))
