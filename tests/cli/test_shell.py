"""The shell: completion, short lists, and nothing at import that only Linux has."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atoll import models
from atoll.algorithms import list_methods
from atoll.cli import app, completion
from atoll.data import datasets, partition
from atoll.kernel.errors import EngineError
from atoll.kernel.params import widest
from atoll.runtime.engines import LocalEngine

# The program under the name by which shells call it, wherever it is installed.
ATOLL = f"""#!/bin/sh
exec {sys.executable} -m atoll "$@"
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which `atoll` is on the path."""
    program = tmp_path / "bin" / "atoll"
    program.parent.mkdir()
    program.write_text(ATOLL)
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}


BASH = """
eval "$(_ATOLL_COMPLETE=source_bash atoll)"
COMP_WORDS=({words}); COMP_CWORD={last}
_atoll_completion atoll
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ : }}
_arguments() {{ print -r -- "$@" }}
eval "$(_ATOLL_COMPLETE=source_zsh atoll)"
words=({words}); CURRENT={count}
_atoll_completion
"""
FISH = """
_ATOLL_COMPLETE=source_fish atoll | source
complete -C "{words}"
"""


SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
TYPED = [
    ("atoll com", "compare", "resume"),
    ("atoll run fedper --task fashion", "fashion-mnist", "digits"),
    ("atoll compare local dit", "ditto", "fedavg"),
    ("atoll run fedper --partition diri", "dirichlet", "iid"),
    ("atoll run fedper --device m", "mps", "cuda"),
    ("atoll list mod", "models", "tasks"),
]


@pytest.mark.parametrize(
    ("name", "words", "expected", "other"),
    [(name, *typed) for name in SHELLS for typed in (TYPED if name == "bash" else TYPED[:2])],
)
def test_a_shell_completes_commands_and_names(name, words, expected, other, shell):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    count = len(words.split())
    text = SHELLS[name].format(words=words, last=count - 1, count=count)
    done = subprocess.run([name, "-c", text], env=shell, capture_output=True, text=True, check=False)
    assert expected in done.stdout, done.stderr
    assert other not in done.stdout.replace(words, "")


def test_completion_can_be_shown_and_installed():
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "--install-completion" in shown
    assert "--show-completion" in shown


def test_what_is_offered_is_what_there_is():
    offered = {
        "METHODS": list_methods(), "TASKS": datasets.names(), "PARTITIONS": partition.WORDS,
        "MODELS": ["auto", *models.names()], "WHERE": ["auto", "cpu", "cuda", "mps"],
    }  # fmt: skip
    for name, names in offered.items():
        assert set(getattr(completion, name)["autocompletion"]("")) == set(names), name
    for what in completion.LISTS:
        assert CliRunner().invoke(app, ["list", what]).exit_code == 0


def test_completing_does_not_wait_for_torch():
    code = (
        "import sys; from atoll.cli import completion; "
        "assert completion.TASKS['autocompletion']('dig') == ['digits']; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- lists -------------------------------------------------------------------------------------------------------------


def test_a_list_has_one_line_for_each_method_and_details_on_demand(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short = CliRunner().invoke(app, ["list"])
    lines = short.stdout.strip().splitlines()
    assert len(lines) == 2 + len(list_methods())
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[2:]] == sorted(list_methods())
    assert "lam=1.0" not in short.stdout
    assert "atoll show NAME" in short.stderr
    long = CliRunner().invoke(app, ["list", "--long"]).stdout
    assert "lam=1.0" in " ".join(long.split())
    assert "hyperparameters" not in CliRunner().invoke(app, ["list", "pairs"]).stdout
    assert "hyperparameters" in CliRunner().invoke(app, ["list", "pairs", "-l"]).stdout


# -- where it runs -----------------------------------------------------------------------------------------------------

ELSEWHERE = """
import builtins, importlib, json, os, pkgutil, sys
import filelock, jinja2, numpy, PIL.Image, rich.progress, safetensors, scipy.stats, sklearn, typer
import torch, torch._dynamo, torch._inductor.config, torch.func  # what others need is not the question

MISSING = {"fcntl", "resource", "termios", "pwd", "grp", "tty", "pty", "syslog", "posix"}
real = builtins.__import__

def refuse(name, globals=None, *rest, **more):
    asking = (globals or {}).get("__name__", "")
    if name.partition(".")[0] in MISSING and asking.startswith("atoll"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return real(name, globals, *rest, **more)

builtins.__import__ = refuse
for name in ("sched_getaffinity", "fork", "getuid", "geteuid", "uname"):
    if hasattr(os, name):
        delattr(os, name)
import atoll
failed = {}
for module in pkgutil.walk_packages(atoll.__path__, "atoll."):
    if "templates" in module.name or module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = str(error)
    except AttributeError as error:
        failed[module.name] = str(error)
from atoll import Recipe, federate
report = federate(Recipe("digits", clients=2, samples=60).build(), "ditto", rounds=1, folder="run", memory="disk")
print(json.dumps({"failed": failed, "done": report.done, "memory": report.memory}))
"""


def test_nothing_that_only_linux_has_is_needed_to_import_and_run(tmp_path):
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"failed": {}, "done": 1, "memory": 0.0}


def test_an_apple_gpu_is_asked_for_by_name_and_missed_with_a_sentence():
    if torch.backends.mps.is_available():
        assert LocalEngine(device="mps").device.type == "mps"
        return
    with pytest.raises(EngineError, match="has no Apple GPU"):
        LocalEngine(device="mps")
    result = CliRunner().invoke(app, ["run", "fedavg", "--device", "mps"])
    assert result.exit_code == 2
    assert "hint: use --device cpu" in result.stderr


def test_an_apple_gpu_has_no_float64(monkeypatch):
    assert widest(torch.device("mps")) == torch.float32
    assert widest(torch.device("cpu")) == torch.float64
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(EngineError, match="must be float32 on Apple GPUs"):
        LocalEngine(device="mps", dtype=torch.float64)
