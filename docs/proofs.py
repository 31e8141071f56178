"""Writes concepts/proofs.md: for every method, the lines of its file and what tests show of it.

Limits are those that methods declare; the rest is read from the marks of tests, without running them.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.algorithms import list_methods
from atoll.kernel.algorithm import Algorithm, WithEverybody

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "proofs.md"
TESTS = sorted(path for folder in ("algorithms", "theory") for path in (ROOT / "tests" / folder).glob("test_*.py"))
KINDS = ("limit", "closed_form", "purpose")
HEADER = """\
# What is proved of each method

<!-- Written by docs/proofs.py; do not edit. -->

One row per method, read from sources and tests.

- **Lines**: those of its file, docstring and all.
- **Limits**: with these hyperparameters, or on such clients, a method is another one. Those between backticks are
  declared by the method, and the conformance battery compares the two bit for bit (`atoll check NAME`).
- **Closed forms**: answers that can be computed in another way, met to rounding error.
- **Purpose**: what a method is for, on data small enough to see it.
- **Theory**: the number of tests of these three kinds that are about the method. The sentences are their names: "ditto
  solved exactly ..." is `test_ditto_solved_exactly_...`; most are in [tests/theory](../../tests/theory).
- **Own**: the number of tests in its file in [tests/algorithms](../../tests/algorithms), many of which compute a round
  or two by hand.

"""


def functions(path: Path) -> list[ast.FunctionDef]:
    """The tests of a file."""
    body = ast.parse(path.read_text()).body
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def marks(test: ast.FunctionDef) -> list[tuple[str, list[str]]]:
    """What a test shows, and of which methods: [("limit", ["ditto"])]."""
    calls = [one for one in test.decorator_list if isinstance(one, ast.Call)]
    named = [(ast.unparse(call.func).removeprefix("pytest.mark."), call.args) for call in calls]
    return [(kind, [ast.literal_eval(method) for method in methods]) for kind, methods in named if kind in KINDS]


def proofs() -> dict[str, dict[str, list[str]]]:
    """The names of theory tests by method and kind."""
    shown: dict[str, dict[str, list[str]]] = defaultdict(lambda: {kind: [] for kind in KINDS})
    for path in TESTS:
        for test in functions(path):
            for kind, methods in marks(test):
                for method in methods:
                    shown[method][kind].append(test.name.removeprefix("test_").replace("_", " "))
    return shown


def declared(method: type[Algorithm]) -> list[str]:
    """The limits that a method declares: `lam=0.0` is local."""
    return [
        "`" + ", ".join(f"{name}={value}" for name, value in values.items()) + f"` is {other}" + when(values)
        for other, values in method.limits.items()
    ]


def when(values: Mapping[str, Any]) -> str:
    """The condition under which a limit holds, if there is one."""
    return ", with all clients in every round" if isinstance(values, WithEverybody) else ""


def page() -> str:
    """The whole page."""
    shown, methods = proofs(), dict(sorted(list_methods().items()))
    rows, totals = [], Counter[str]()
    for name, method in methods.items():
        mine, file = shown[name], name.replace("-", "_") + ".py"
        own = ROOT / "tests" / "algorithms" / f"test_{file}"
        numbers = {
            "lines": len((ROOT / "src" / "atoll" / "algorithms" / file).read_text().splitlines()),
            "theory": sum(map(len, mine.values())),
            "own": len(functions(own)) if own.exists() else 0,
        }
        totals.update(numbers)
        said = ([*declared(method), *mine["limit"]], mine["closed_form"], mine["purpose"])
        cells = ["<br>".join(sentences) or "–" for sentences in said]
        rows.append(
            f"| [{name}](../algorithms/{name}.md) | {' | '.join(map(str, numbers.values()))} | {' | '.join(cells)} |"
        )
    tests = [test for path in TESTS for test in functions(path) if marks(test)]
    limits = sum(len(method.limits) for method in methods.values())
    total = (
        f"{len(methods)} methods, {totals['lines']} lines; {limits} declared limits; {len(tests)} theory tests, some "
        f"of them about several methods; {totals['own']} tests of single methods."
    )
    heads = ("method", "lines", "theory", "own", "limits", "closed forms", "purpose")
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, "", total]
    return HEADER + "\n".join(table) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
