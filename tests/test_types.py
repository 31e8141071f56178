"""Types reach the user: every public name has one through the import that the README shows."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import pytest
import stubs

import atoll
from atoll import Task, advise, algorithms, compare, federate, tune
from atoll.algorithms import list_methods
from atoll.data import datasets, partition
from atoll.kernel.errors import UnknownName

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("path", "write"), stubs.STUBS.items(), ids=lambda one: getattr(one, "parent", Path()).name)
def test_a_stub_is_what_is_made_of_the_code(path: Path, write: Callable[[], str]) -> None:
    assert path.read_text(encoding="utf-8") == write(), "run `python tests/stubs.py`"


def test_a_method_is_found_by_its_class() -> None:
    for method in list_methods().values():
        assert getattr(algorithms, method.__name__) is method
    with pytest.raises(AttributeError, match=r"module 'atoll\.algorithms' has no attribute 'Dito'"):
        algorithms.Dito  # noqa: B018


WRONG = {  # what users write, and what a type checker answers
    "from atoll.algorithms import Dito": 'has no attribute "Dito"; maybe "Ditto"?',
    'Ditto(lam="x")': 'Argument "lam" to "Ditto" has incompatible type "str"; expected "float"',
    "Ditto(lamb=0.1)": 'Unexpected keyword argument "lamb" for "Ditto"; did you mean "lam"?',
    'Ditto(weighting="size")': "expected \"Literal['samples', 'batches', 'uniform']\"",
    "Ditto(0.1)": 'Too many positional arguments for "Ditto"',
    'FAFI(profile="released")': "expected \"Literal['clean', 'faithful']\"",
    "OneShotMargins(epoch=2)": 'for "OneShotMargins"; did you mean "epochs"?',
    "federate(task, Ditto(), roundz=3)": 'for "federate"; did you mean "rounds"?',
    'federate(task, Ditto(), rounds="3")': 'Argument "rounds" to "federate" has incompatible type "str"',
    "federate(task, Ditto)": 'incompatible type "type[Ditto]"; expected "Algorithm | str"',
    'compare(task, [Ditto(), "fedper"], sed=3)': 'for "compare"; did you mean "seed"?',
    'tune(task, "ditto", drop="often")': 'Argument "drop" to "tune" has incompatible type "str"; expected "float"',
    'advise(task, metrics="f1")': 'for "advise"; did you mean "metric"?',
    "Settings(round=3)": 'for "Settings"; did you mean "rounds"?',
    'Task.own({}, clients="hospital")': 'for "own" of "Task"; did you mean "client"?',
    "task.with_training(learning_rate=0.1)": 'keyword argument "learning_rate" for "with_training"',
    "report.score()": '"Report" has no attribute "score"; maybe "scored" or "scores"?',
    'report.summary()["macro"].mean()': '"float" has no attribute "mean"',
    'report.megabytes("sent")': "expected \"Literal['down', 'up']\"",
    "report.metric.nam": '"Metric" has no attribute "nam"; maybe "name"?',
    'compare(task, "ditto").winner': '"Comparison" has no attribute "winner"',
}


@pytest.mark.parametrize("function", [federate, compare, tune, advise], ids=lambda one: one.__name__)
def test_an_unknown_setting_is_an_error_when_it_runs_as_well(function: Callable[..., object]) -> None:
    task = Task.build(datasets.load("digits"), partition.parse("iid"), clients=2)
    with pytest.raises(UnknownName, match=rf"Unknown argument of {function.__name__} 'roundz'\. Did you mean: rounds"):
        function(task, "ditto", roundz=3)


def test_types_reach_the_user(tmp_path: Path) -> None:
    """One call of mypy, strict, on a file as users write it, on their mistakes, and on every public name."""
    methods = {one.__name__: [field.name for field in fields(one)] for one in list_methods().values()}
    imports = f"from atoll import {', '.join(atoll.__all__)}\nfrom atoll.algorithms import {', '.join(methods)}\n"
    shown = [f"reveal_type({name})" for name in (*atoll.__all__, *methods)]
    for name, lines in {"wrong": WRONG, "names": shown}.items():
        body = "\n".join(f"    {line}" for line in lines)
        (tmp_path / f"{name}.py").write_text(f"{imports}def f(task: Task, report: Report) -> None:\n{body}\n")
    files = [ROOT / "examples" / "typed.py", tmp_path / "wrong.py", tmp_path / "names.py"]
    command = [sys.executable, "-m", "mypy", *files]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    def answers_to(name: str, lines: Iterable[str]) -> dict[str, str]:
        found = dict(re.findall(rf"{name}\.py:(\d+): (?!note: .* defined in )(.*)", said))
        return {line: found.get(str(number), "") for number, line in enumerate(lines, start=4)}

    assert re.findall(r"typed\.py:\d+: .*", said) == []
    wrong = answers_to("wrong", WRONG)
    assert {line: answer for line, answer in wrong.items() if WRONG[line] not in answer} == {}
    types = answers_to("names", shown)
    assert {line: answer for line, answer in types.items() if not re.search(r'type is "(?!Any")', answer)} == {}
    functions = {line: answer for line, answer in types.items() if line.islower()}
    assert {line: answer for line, answer in functions.items() if re.search(r"\*\*\w+: Any", answer)} == {}
    for name, own in methods.items():
        answer = types[f"reveal_type({name})"]
        assert [one for one in own if f"{one}: " not in answer] == [], answer
