"""Decisions that a change should not undo by accident."""

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

SOURCE = Path(atoll.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}


@functools.cache
def modules():
    """Every module as a tree."""
    return {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(tree):
    """The atoll modules that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def calls(tree, method):
    """Where a method is called on something else: `super()` and `Base.method(self, ...)` are the method itself."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and ast.unparse(node.func.value) != "super()"
        and "self" not in map(ast.unparse, node.args[:1])
    ]


def test_only_federation_has_a_round_loop():
    """Conformance calls single hooks on purpose, a hybrid those of its methods, `fuse` that of each architecture."""
    aggregating = {name for name, tree in modules().items() if calls(tree, "aggregate")}
    around = {"kernel/algorithm.py", "testing/conformance/rehearsal.py", "compose/hybrids.py"}
    assert aggregating - around == {"federation/loop.py"}
    assert len(calls(modules()["federation/loop.py"], "aggregate")) == 1


@pytest.mark.parametrize(
    "name", sorted(name for name in FILES if name.startswith("algorithms/") and name != "algorithms/__init__.py")
)
def test_a_method_knows_nothing_of_engines_memory_and_channel(name):
    forbidden = (
        "atoll.runtime.engines",
        "atoll.runtime.memory",
        "atoll.protect",
        "atoll.federation",
        "atoll.records.runs",
        "atoll.report",
        "atoll.cli",
    )
    assert not [module for module in imported(modules()[name]) if module.startswith(forbidden)]


def test_nothing_is_unpickled():
    for name, tree in modules().items():
        assert not {"pickle", "dill", "cloudpickle", "joblib"} & set(imported(tree)), name
        assert "torch.load(" not in ast.unparse(tree).replace("safetensors.torch.load(", ""), name


def test_public_names_are_sorted_and_there():
    assert atoll.__all__ == sorted(atoll.__all__)
    for name in atoll.__all__:
        assert getattr(atoll, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'atoll' has no attribute 'fedrate'"):
        atoll.fedrate  # noqa: B018


IMPORT = """
import json, os, threading
import numpy, torch
import torch.fx.experimental.proxy_tensor, torch.func  # what torch itself does on import is not the question

def state():
    return [torch.random.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()]

before, threads = state(), threading.active_count()
import atoll
for name in atoll.__all__:
    getattr(atoll, name)
import atoll.cli
print(json.dumps({
    "files": os.listdir("."), "threads": threading.active_count() - threads, "drawn": before != state(),
    "seeded": torch.initial_seed() == 0, "handlers": len(__import__("logging").getLogger("atoll").handlers),
    "grad": torch.is_grad_enabled(), "dtype": str(torch.get_default_dtype()),
}))
"""


def test_importing_has_no_side_effects(tmp_path):
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "files": [], "threads": 0, "drawn": False, "seeded": False, "handlers": 0, "grad": True,
        "dtype": "torch.float32",
    }  # fmt: skip


def test_asking_for_help_does_not_wait_for_torch():
    program = "import sys, atoll; dir(atoll); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# -- plain words -------------------------------------------------------------------------------------------------------

PLAIN = (  # every room, and the loop
    "algorithms", "cli", "compose", "data", "deploy", "experiments", "federation", "kernel", "metrics", "models",
    "protect", "records", "report", "runtime", "testing", "toolbox",
)  # fmt: skip
# Openers of docstrings that answer a question nobody asked: "Of the objective.", "As it was."
OPENERS = (
    "A All Alone An Any As At By Each Every For From How If In Is It Its None Of On One Over So That The Their There "
    "These They This Those To What Whatever When Where Whether Which Who Whoever Whom Whose With Without"
)
PARTICIPLES = (
    "added aligned allowed applied arrived asked augmented averaged begun beside carried chosen closed concatenated "
    "concluded contrasted counted cropped damped dealt decoded descended distilled diversified divided drawn encoded "
    "enumerated existing expanded faded fetched fitted found fused gated generated given harmed heard imagined "
    "informed joined kept known learned listed locked made maximised measured mixed moved named needed normalised "
    "observed opened padded parted passed permuted queued redrawn refined reminded reordered resampled reshuffled "
    "resolved rotated said seeded seen sent settled shown shrunk shuffled spoken stacked standardised stepped "
    "summarised taken taught timed told tracked trained tuned turned undone unmoved unused used whole"
)
OF_THE_KERNEL = {"beside", "joined", "moved", "stacked"}  # names that its protocols prescribe, or that methods call
SO_THAT = 6  # most of them say how something is scaled or merged
ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))
    if path.name != "proofs.md"  # names of tests
}
SO_THAT_ON_A_PAGE = 1
# What stood for "hidden to fit", "clients deploy v_k", "cannot be distinguished from", "belongs to the task".
ODD = r"[Ff]or want of|what there is is|(?:Deployed|Evaluated) (?:is|are)|can(?:not)? be told from|the task's business"


def functions(room):
    """Yield the functions and methods of a room, without properties (a `fact` is one), and where they are."""
    for name, tree in modules().items():
        for node in ast.walk(tree) if name == room or name.startswith(f"{room}/") else ():
            if isinstance(node, ast.FunctionDef):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                if "property" not in decorators and "fact" not in decorators:
                    yield f"{name}:{node.lineno} {node.name}", node


@pytest.mark.parametrize("room", PLAIN)
def test_a_docstring_begins_with_a_verb(room):
    texts = {where: text for where, one in functions(room) if (text := ast.get_docstring(one))}
    first = {where: text.split()[0].strip(",.:;") for where, text in texts.items()}
    assert {where: word for where, word in first.items() if word in OPENERS.split() or not word.isalpha()} == {}


@pytest.mark.parametrize("room", PLAIN)
def test_no_function_is_named_by_a_bare_participle(room):
    found = {where: one.name for where, one in functions(room) if one.name.strip("_") in PARTICIPLES.split()}
    assert {where: name for where, name in found.items() if name not in OF_THE_KERNEL} == {}


def test_so_is_said_rather_than_so_that():
    assert sum(path.read_text().count("so that") for path in SOURCE.rglob("*.py")) <= SO_THAT
    counts = {name: len(re.findall(r"so\s+that\b", text)) for name, text in PAGES.items()}
    assert {name: count for name, count in counts.items() if count > SO_THAT_ON_A_PAGE} == {}


def test_pages_are_in_plain_english():
    assert {name: found for name, text in PAGES.items() if (found := re.findall(ODD, " ".join(text.split())))} == {}


def test_messages_name_flags_on_the_command_line_only():
    """Elsewhere they name arguments, `lr`, for which the command line puts its flags; a whole command may stand."""
    found = {
        f"{name}:{text.lineno}": text.value
        for name, tree in modules().items()
        if not name.startswith("cli/")
        for error in ast.walk(tree)
        if isinstance(error, ast.Raise)
        for text in ast.walk(error)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        if re.search(r"(?<!\w)--[a-z]", text.value) and "atoll " not in text.value
    }
    assert found == {}
