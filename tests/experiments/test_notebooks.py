"""What a notebook shows of tasks, reports and comparisons: short, with the protocol, and escaped."""

import re

import numpy as np
import pytest

from atoll import Comparison, LocalEngine, Recipe, Report, Task, compare, federate


@pytest.fixture(scope="module")
def task() -> Task:
    return Recipe("digits", clients=12, samples=600).build()


@pytest.fixture(scope="module")
def report(task: Task) -> Report:
    return federate(task, "ditto", rounds=1)


@pytest.fixture(scope="module")
def comparison(task: Task) -> Comparison:
    return compare(task, "fedavg-ft", seeds=1, rounds=1)


def test_a_repr_is_one_short_line(task: Task, report: Report, comparison: Comparison) -> None:
    shown = (
        task, report, comparison, comparison.table(), report.ledger, report.population, task.statistics, task.network,
        task.splits["train"], LocalEngine(),
    )  # fmt: skip
    for one in shown:
        assert len(repr(one)) < 400, type(one)
        assert "\n" not in repr(one)
        assert " at 0x" not in repr(one)
    assert repr(task) == "<Task digits: 12 clients, samples of shape 1x8x8, 10 classes, MLP (26,122 parameters)>"
    score = f"{100 * report.summary()['macro']:.1f} %"
    assert repr(report).endswith(f"12 clients, 1 of 1 rounds, seed 0, mean test accuracy {score}>")
    assert repr(comparison) == "<Comparison of local, fedavg, fedavg-ft on digits, 12 clients; seed 0>"


def test_a_round_does_not_list_its_clients(report: Report) -> None:
    assert len(repr(report.history[-1])) < 2000


def test_a_report_that_has_no_scores_yet_is_shown(task: Task) -> None:
    unscored = federate(task, "fedavg", rounds=1, evaluation="none")
    assert "mean test" not in repr(unscored)
    assert "MB up" in unscored._repr_html_()


def cells(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html, flags=re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL) for row in rows]


def test_a_task_lists_its_clients_and_of_many_the_ends(task: Task) -> None:
    table = cells(task._repr_html_())
    assert table[0] == ["client", "train samples", "val samples", "test samples"]
    assert table[6] == ["2 clients between", "…", "…", "…"]
    sizes = [int(row[1]) for place, row in enumerate(table[1:]) if place != 5]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 10
    assert sizes[0] == np.diff(task.splits["train"].offsets).max()
    assert "On average a client" in task._repr_html_()


def test_a_report_shows_its_table_and_protocol(report: Report) -> None:
    html = report._repr_html_()
    assert cells(html)[1][:3] == ["personal", "test", f"{100 * report.summary()['macro']:.1f}"]
    assert "on its own test split" in html
    assert "MB up" in html


def test_a_comparison_shows_what_was_found_its_table_and_protocol(comparison: Comparison) -> None:
    html = comparison._repr_html_()
    assert [row[0].split()[0] for row in cells(html)[1:]] == ["local", "fedavg", "fedavg-ft"]
    assert "Gains are paired by client" in html
    assert html.index("<p>") < html.index("<table>")
    assert "Gains are paired by client" in comparison.table()._repr_html_()


def test_names_are_escaped() -> None:
    arrays = {name: (np.eye(8), np.arange(8) % 2) for name in ("<script>alert(1)</script>", "Ulm & Lund")}
    html = Task.own(arrays)._repr_html_()
    assert "<script>" not in html
    assert "Ulm &amp; Lund" in html
