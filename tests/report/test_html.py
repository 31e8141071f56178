import io
import re

import numpy as np
import pytest
from rich.console import Console

from atoll.algorithms import create
from atoll.comparison import Comparison, Outcome
from atoll.report.figures import apart, gains, styles, ticks_between
from atoll.report.html import page
from atoll.report.table import comparison_table, megabytes, run_table


def outcome(method: str, scores: list[float], seed: int = 0) -> Outcome:
    figures = {
        "clients": scores, "samples": [50] * len(scores), "macro": float(np.mean(scores)), "micro": 0.5,
        "worst": min(scores), "bottom10": min(scores), "std": float(np.std(scores)), "loss": 0.1,
    }  # fmt: skip
    lines = [
        {"round": done, "seconds": {"round": 1.0}, "evaluation": {"personal": {"val": figures, "test": figures}}}
        for done in (1, 2)
    ]
    config = {
        "task": {"name": "<digits>", "clients": len(scores)},
        "settings": {"rounds": 2, "seed": seed},
        "training": {"lr": 0.1},
    }
    return Outcome(create(method), config, lines, {("up", "model"): 2_000_000, ("down", "model"): 1_000_000})


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(
        {
            "local": [outcome("local", [0.8, 0.9], seed) for seed in (0, 1)],
            "fedavg": [outcome("fedavg", [0.9, 0.5], seed) for seed in (0, 1)],
            "ditto": [outcome("ditto", [0.9, 0.92], seed) for seed in (0, 1)],
        }
    )


def test_the_page_needs_nothing_from_elsewhere(comparison):
    text = page(comparison)
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", text)
    assert len(text) < 100_000


def test_the_page_shows_every_part_and_escapes_names(comparison):
    text = page(comparison)
    for title in ("Results", "Learning curves", "What each client gains", "Client by client", "What it costs"):
        assert f"<h2>{title}</h2>" in text
    assert "&lt;digits&gt;" in text
    assert "<digits>" not in text
    assert "ditto ★" in text
    assert "Ditto: Fair and Robust" in text  # the citation
    assert "▼ 50.0" in text  # the second client is harmed by fedavg


def test_harmed_clients_have_another_shape():
    values = {"fedavg": np.array([[0.1, -0.4]])}
    svg = gains(values, {"fedavg": np.array([[False, True]])}, [0])
    assert svg.count("<circle") == 1
    assert svg.count("<polygon") == 1
    assert "client 1, seed 0: -40.0 (harmed)" in svg


def test_a_single_run_has_a_page_without_gains():
    text = page(Comparison({"ditto": [outcome("ditto", [0.9, 0.8])]}))
    assert "What each client gains" not in text
    assert "Gain vs Local" not in text
    assert "Learning curves" in text


def test_tables_fit_a_terminal(comparison):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison_table(comparison), run_table(comparison.example))
    text = console.export_text()
    assert "ditto *" in text
    assert "…" not in text
    assert "91.0 ±  0.0" in text
    assert "+6.0" in text


def test_ticks_are_round_and_cover():
    assert ticks_between(43, 97) == [40, 50, 60, 70, 80, 90, 100]
    assert ticks_between(-0.4, 0.3) == pytest.approx([-0.4, -0.2, 0.0, 0.2, 0.4])
    assert len(ticks_between(5, 5)) == 2


def test_labels_keep_their_distance_and_order():
    moved = apart({"a": 10.0, "b": 11.0, "c": 50.0}, 15)
    assert moved["b"] - moved["a"] == pytest.approx(15)
    assert moved["a"] < moved["b"] < moved["c"]


def test_methods_differ_in_more_than_colour():
    looks = styles(["local", "fedavg", "a", "b", "c"])
    assert len(set(looks.values())) == 5
    assert len({looks[name].dash for name in "abc"}) == 3


def test_bytes_are_never_rounded_to_nothing():
    assert [megabytes(value) for value in (0, 0.0123, 0.5, 12.34, 1234.5)] == ["0", "0.01", "0.5", "12.3", "1234"]
