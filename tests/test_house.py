"""The figures of the house count what they say."""

import ast

from house import count_callers, declares, show

SOURCE = """
def helper(): ...
def shared(): ...
def called_by_nobody(): ...
def run(metric, *, other=shared):
    helper()
    shared()
class Box:
    metric: str = "auto"
    def run(self): ...
    def use(self, metric): return run
"""


def test_a_function_with_one_caller_is_read_once_and_has_a_name_of_its_own() -> None:
    assert count_callers([ast.parse(SOURCE)]) == (4, 1)  # helper; shared is read twice, run is a method as well


def test_parameters_and_fields_are_declarations() -> None:
    assert sum(declares(node, "metric") for node in ast.walk(ast.parse(SOURCE))) == 3


def test_the_table_shows_before_now_and_aim() -> None:
    now = {"figures": {"lines": 71_000, "functions": 5}, "rooms": {"kernel": (4_000, 20)}}
    rows = show(now, {"figures": {"lines": 68_000}}).splitlines()
    assert "| lines | 68,000 | 71,000 | 47,000 |" in rows
    assert "| functions | – | 5 | – |" in rows
    assert "| kernel | 4,000 | 20 |" in rows
