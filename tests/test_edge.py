"""Ray and Flower stand at the edge: they are found by entry points, and nothing inside imports or names them."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll import LocalEngine, compare, federate
from atoll.cli.options import build_engine
from atoll.data import datasets, partition
from atoll.data.task import Task
from atoll.kernel.errors import AtollError
from atoll.runtime import installed

PACKAGE = Path(atoll.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
EDGE = re.compile(r"(atoll\.)?(runtime\.engines\.cluster\.rays|deploy\.flower)\b|(ray|flwr)(\.|$)")
NAMED = {
    "__init__.py",  # where users find `RayEngine`
    "runtime/installed.py",  # the table of our own entry points
}


def is_at_the_edge(file: Path) -> bool:
    return file.name == "rays.py" or file.parent.name == "flower"


INSIDE = {
    file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text())
    for file in sorted(PACKAGE.rglob("*.py"))
    if not is_at_the_edge(file)
}


def names_in(tree: ast.AST) -> set[str]:
    """The modules that a file imports, anywhere in it, and all of its strings that are no documentation."""
    texts = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found.add(node.value)
    return found


def test_nothing_inside_imports_or_names_what_is_at_the_edge() -> None:
    wrong = {name: found for name, tree in INSIDE.items() if (found := {*filter(EDGE.match, names_in(tree))})}
    assert wrong.keys() == NAMED, wrong


@pytest.mark.parametrize(
    "line",
    [
        "import ray",
        "from flwr.app import Message",
        "def f():\n    from atoll.deploy.flower import link",
        "if TYPE_CHECKING:\n    from atoll.runtime.engines.cluster.rays import RayEngine",
        'import_module("flwr.app")',
        'homes = {"RayEngine": "runtime.engines.cluster.rays"}',
        'name == "ray"',
    ],
)
def test_every_way_to_name_it_is_found(line: str) -> None:
    assert [*filter(EDGE.match, names_in(ast.parse(line)))]


ALONE = """
import importlib, sys
for name in ("ray", "flwr"):
    sys.modules[name] = None  # as if it were not installed
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_everything_inside_can_be_imported_without_them() -> None:
    files = [name for name in INSIDE if "templates/" not in name and not name.endswith("__main__.py")]
    modules = [f"atoll.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__") for name in files]
    done = subprocess.run([sys.executable, "-c", ALONE, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_our_own_are_declared_as_those_of_others_are() -> None:
    declared = {
        EntryPoint(name, value, group) for group, own in PROJECT["entry-points"].items() for name, value in own.items()
    }
    assert {*installed.OURS} == declared
    assert all(one.load() for one in declared)


class Elsewhere:
    """An engine of another package: not one of ours, and none of their classes; it has what the protocol asks for."""

    def __init__(self, address: str | None = None, *, workers: int | None = None, **options: Any) -> None:
        self._local = LocalEngine(**options)
        self.options = {"cluster": "elsewhere", "address": address, "workers": workers, **self._local.options}

    def __getattr__(self, name: str) -> Any:
        if name == "run_together":
            raise AttributeError(name)
        return getattr(self._local, name)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = EntryPoint("elsewhere", f"{__name__}:Elsewhere", installed.ENGINES)
    broken = EntryPoint("broken", "atoll_is_not_here:Engine", installed.ENGINES)
    monkeypatch.setattr(installed, "entry_points", lambda group: [mine, broken])
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module() -> Any:
    module = type(sys)(__name__)
    module.__dict__.update(globals())
    return module


@pytest.fixture
def task() -> Task:
    return Task.build(datasets.load("digits"), partition.parse("iid"), clients=2)


@pytest.mark.usefixtures("elsewhere")
def test_an_engine_of_another_package_is_found_by_its_name(task: Task) -> None:
    engine = build_engine("elsewhere:far:1", False, "fp32", "cpu", None, workers=3)
    assert (engine.options["address"], engine.options["workers"]) == ("far:1", 3)
    there = federate(task, "fedavg", rounds=1, engine=engine)
    assert np.array_equal(there.scores(), federate(task, "fedavg", rounds=1).scores())
    table = compare(task, "fedavg", rounds=1, seeds=1, engine=engine)
    assert np.array_equal(table.scores("fedavg")[0], there.scores())
    with pytest.raises(AtollError, match="Runs go on side by side on a LocalEngine or on workers. Got a Elsewhere"):
        compare(task, "fedavg", rounds=1, seeds=2, engine=engine, together=True)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("elsewher", "Unknown engine 'elsewher'. Did you mean: elsewhere?"),
        ("broken", "What is installed as broken must be importable. It is not: No module named 'atoll_is_not_here'"),
    ],
)
def test_an_engine_that_is_not_there_is_an_error(name: str, said: str) -> None:
    with pytest.raises(AtollError) as raised:
        installed.load_installed(installed.ENGINES, name)
    assert said in str(raised.value)
