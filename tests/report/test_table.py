import io
import math
from dataclasses import replace

import numpy as np
import pytest
from reports import change, report_of
from rich.console import Console

from atoll.experiments.comparison import Comparison
from atoll.federation.numbers import Numbers, mean_text, run_cells
from atoll.report.table import (
    LESS_IMPORTANT,
    comparison_cells,
    gain_text,
    harmed_text,
    megabytes,
    notes,
    run_table,
)

ERROR = {"name": "mean absolute error", "higher_is_better": False, "share": False}


def outcome(method, scores, *, seed=0, metric=None, samples=50, sent=2_000_000):
    values = np.array(scores, dtype=float)
    figures = {
        "clients": list(scores), "samples": [samples] * len(scores), "macro": float(values.mean()), "micro": 0.5,
        "worst": float(values.min()), "bottom10": float(values.min()), "std": float(values.std()), "loss": 0.125,
        **({} if metric is None else {"variances": [0.1] * len(scores)}),
    }  # fmt: skip
    line = {
        "round": 1, "seconds": {"round": 1.25}, "bytes": {"up": sent, "down": sent // 2},
        "evaluation": {"personal": {"val": figures, "test": figures}},
    }  # fmt: skip
    config = {
        "task": {"name": "toy", "clients": len(scores), **({} if metric is None else {"metric": metric})},
        "settings": {"rounds": 1, "seed": seed},
    }
    counted = {("up", "model"): sent, ("down", "model"): sent // 2}
    return report_of(method, config, [line], counted)


def comparison(scores, seeds=(0,), **more):
    """Methods with these scores of all clients, the same in every seed."""
    return Comparison(
        {method: [outcome(method, of, seed=seed, **more) for seed in seeds] for method, of in scores.items()}
    )


@pytest.fixture
def found():
    """Seven clients: ditto helps all of them and fedavg harms the first."""
    return comparison({
        "local": [0.8] * 7,
        "fedavg": [0.2, *[0.8] * 6],
        "ditto": [0.81, 0.82, 0.83, 0.84, 0.85, 0.86, 0.87],
    })  # fmt: skip


def shown(table, width=100):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


def cells(table, method):
    """The cells of a method's row; a mean and its interval stand together."""
    return cells_of(shown(table), method)


def cells_of(text, method):
    line = next(line for line in text.splitlines() if line.startswith(method))
    return line.removeprefix(method).replace(" ± ", "±").split()


# -- the comparison ----------------------------------------------------------------------------------------------------


def test_a_row_says_what_its_head_says(found):
    assert cells(found.table(), "fedavg") == [
        "71.4",
        "71.4",
        "20.0",
        "20.0",
        "21.0",
        "-8.6",
        "–",
        "1",
        "▼",
        "2.0",
        "1.0",
        "1.2",
    ]
    assert cells(found.table(), "local") == [*["80.0"] * 4, "0.0", "–", "+8.6", "–", "2.0", "1.0", "1.2"]
    heads = " ".join(shown(found.table()).split())
    assert "gain vs gain vs harmed MB MB" in heads
    assert "of 7" in heads


def test_the_best_is_starred_and_what_is_significant_is_marked(found):
    assert cells(found.table(), "ditto")[0] == "*"
    assert cells(found.table(), "ditto")[6] == "+4.0†"  # seven of seven clients: p = 2 / 2^7, twice that after Holm
    assert found.results[2]["p_local"] == pytest.approx(4 / 2**7)
    assert [gain_text(found, row) for row in found.results] == ["–", "-8.6", "+4.0†"]
    assert [gain_text(found, row, "fedavg") for row in found.results][1] == "–"


def test_only_clients_that_are_harmed_have_the_mark(found):
    assert [harmed_text(found, row) for row in found.results] == ["–", "1 ▼", "0"]
    alone = comparison({"ditto": [0.5, 0.5]})
    assert harmed_text(alone, alone.results[0]) == "–"
    assert "▼" not in shown(alone.table())


def test_what_is_lost_is_told_although_others_gain():
    found = comparison({"local": [0.5, 0.5], "fedavg": [0.3, 0.9], "ditto": [0.5, 0.6]})
    assert "Mean loss against Local over all clients (a gain counts as 0): fedavg 10.0, ditto 0.0." in notes(found)
    assert "Lost against" not in notes(comparison({"ditto": [0.5, 0.5]}))


def test_a_single_method_is_not_the_best_of_anything():
    assert "*" not in shown(comparison({"ditto": [0.5, 0.5]}).table())


def test_intervals_need_seeds(found):
    assert "±" not in shown(found.table())
    several = Comparison(
        {"ditto": [outcome("ditto", [score], seed=seed) for seed, score in enumerate((0.5, 0.6, 0.7))]}
    )
    # 10 points of standard deviation over 3 seeds: t(0.975, 2) = 4.3027, times 10 / sqrt(3)
    assert mean_text(Numbers("accuracy"), several.results[0]) == "60.0 ± 24.8"
    assert "mean ± 95 %" in shown(several.table())


def test_the_table_fits_a_terminal_with_long_names_in_full(found):
    long = comparison({"local": [0.5], "fedavg": [0.6], "ditto:lam=0.125,epochs=12": [0.7]}, seeds=(0, 1))
    text = shown(long.table(), width=125)
    assert "ditto:lam=0.125,epochs=12 *" in text
    assert "…" not in text
    assert "…" not in shown(found.table(), width=100)


def test_a_narrow_terminal_loses_columns_and_no_figures(found):
    text = shown(found.table(), width=70)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 70
    said = " ".join(text.split())
    assert "Hidden to fit the terminal: std, bottom 10 %, MB down, s. The files have all columns." in said
    assert cells_of(text, "fedavg") == ["71.4", "71.4", "20.0", "-8.6", "–", "1", "▼", "2.0"]
    assert "Hidden" not in shown(found.table(), width=100)
    assert {*LESS_IMPORTANT} - {"s"} < {*comparison_cells(found)[0]}


def test_the_servers_test_set_has_a_column_where_there_is_one(found):
    assert "server's" not in shown(found.table())
    assert "Server's test" not in notes(found)
    for method in ("fedavg", "ditto"):  # alone everybody has a model of its own, and there is none to be scored
        change(found.outcomes[method][0], central={"score": 0.375, "loss": 1.0})
    again = Comparison(found.outcomes)
    assert cells(again.table(), "fedavg")[:4] == ["71.4", "71.4", "37.5", "20.0"]
    assert cells(again.table(), "local")[:4] == ["80.0", "80.0", "–", "80.0"]
    assert "Server's test: the shared model or ensemble, on the server's own test set." in notes(again)


def test_an_error_is_written_as_it_is_and_gains_are_positive():
    found = comparison({"local": [2.0, 0.5], "fedavg": [1.0, 0.25]}, metric=ERROR)
    assert cells(found.table(), "fedavg *")[:7] == ["0.625", "0.625", "1", "1", "0.375", "+0.62", "–"]
    assert "percentage points" not in notes(found)
    assert "in units of mean absolute error, positive is better" in notes(found)
    assert "Mean absolute error of the model" in notes(found)


def test_names_in_brackets_are_not_markup():
    odd = comparison({"local": [0.5], "fedavg": [0.5]})
    odd = Comparison({"local": odd.outcomes["local"], "[bold]mine[/bold].py": odd.outcomes["fedavg"]})
    assert "[bold]mine[/bold].py" in shown(odd.table())


def test_the_notes_explain_every_mark(found):
    text = notes(found)
    assert found.protocol in text
    for mark in ("* best on validation samples (val)", "† significant by Wilcoxon's test", "(▼)", "percentage points"):
        assert mark in text


# -- a single run ------------------------------------------------------------------------------------------------------


def test_a_run_has_a_row_for_each_model_and_split():
    one = outcome("ditto", [0.5, 0.75])
    change(one, shared=one.select_evaluation().personal, central={"score": 0.375, "loss": 1.0})
    rows = [line.split() for line in shown(run_table(one)).splitlines()[2:] if line.strip()]
    assert [row[:2] for row in rows] == [
        ["personal", "test"], ["personal", "val"], ["shared", "test"], ["shared", "val"], ["shared", "central"]
    ]  # fmt: skip
    assert rows[0][2:] == ["62.5", "50.0", "50.0", "50.0", "12.5", "0.125"]
    assert rows[4][2:] == ["–", "37.5", "–", "–", "–", "–"]


def test_a_run_without_samples_has_no_figures():
    one = outcome("ditto", [math.nan, math.nan], samples=0)
    figures = one.select_evaluation().personal
    change(one, personal={**figures, "test": replace(figures["test"], micro=math.nan, loss=math.nan)})
    assert shown(run_table(one)).splitlines()[2].split() == ["personal", "test", *["–"] * 6]


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "score", "gain"),
    [
        (Numbers("accuracy"), "12.3", "+12.3"),
        (Numbers("mean absolute error", higher_is_better=False, share=False), "0.123", "+0.12"),
    ],
)
def test_shares_are_in_per_cent_and_others_have_few_digits(numbers, score, gain):
    assert (numbers.score(0.1234), numbers.gain(0.1234)) == (score, gain)
    assert numbers.gain(-0.1234) == gain.replace("+", "-")
    for unknown in (None, math.nan, math.inf):
        assert (numbers.score(unknown), numbers.gain(unknown)) == ("–", "–")


def test_bytes_are_never_rounded_to_nothing():
    assert [megabytes(value) for value in (0, 0.0123, 0.5, 12.34, 1234.5)] == ["0", "0.01", "0.5", "12.3", "1234"]


def test_a_transductive_method_is_marked_and_its_score_one_at_a_time_is_said():
    figures = {"clients": [0.8], "samples": [9], "macro": 0.8}
    personal = {"val": figures, "test": figures, "inductive": {**figures, "clients": [0.3], "macro": 0.3}}
    line = {"round": 1, "seconds": {"round": 1.0}, "bytes": {"up": 1, "down": 1}, "evaluation": {"personal": personal}}
    config = {"task": {"name": "toy", "clients": 1}, "settings": {"rounds": 1, "seed": 0}}
    shown, plain = report_of("fafi:profile=faithful", config, [line]), outcome("fedavg", [0.7])
    found = Comparison({"fafi": [shown], "fedavg": [plain]})
    assert [row[0].removesuffix(" *") for row in comparison_cells(found)[1]] == ["fafi ‡", "fedavg"]
    said = "‡ transductive: an answer depends on the other test samples of its batch. Mean with one sample at a time: "
    assert f"{said}fafi 30.0." in notes(found)
    assert [row["inductive"] for row in found.results] == [0.3, None]
    assert [row["transductive"] for row in found.results] == [True, False]
    assert "transductive" not in notes(Comparison({"fedavg": [plain]}))
    assert "test, one at a time" in [row[1] for row in run_cells(shown)[1]]
