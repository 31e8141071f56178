"""The picture of which layers clients are sensitive to."""

import numpy as np
import pytest

from atoll import Recipe, federate
from atoll.compose import create
from atoll.experiments.comparison import Comparison
from atoll.federation.report import Report
from atoll.report.html import render_page


@pytest.fixture(scope="module")
def runs() -> list[Report]:
    task = Recipe(clients=4, model="mlp:8").build()
    return [federate(task, create(name), rounds=3, cohort=2) for name in ("local", "fedavg", "fedfsa:top_c=1")]


def test_each_client_has_what_was_measured_when_it_last_trained(runs: list[Report]) -> None:
    found = runs[-1].sensitivity
    assert found is not None
    layers, values = found
    assert values.shape == (4, len(layers)) == (4, 2)
    for client, row in enumerate(values):
        told = [
            line["observed"] for line in runs[-1].history if f"{client}" in line["observed"][f"sensitivity/{layers[0]}"]
        ]
        if told:
            assert [told[-1][f"sensitivity/{layer}"][f"{client}"] for layer in layers] == row.tolist()
        else:
            assert np.isnan(row).all()


def test_methods_that_measure_nothing_have_none(runs: list[Report]) -> None:
    assert runs[0].sensitivity is None
    assert "Which layers are sensitive" not in render_page(Comparison.of_runs(runs[:2]))


def test_the_page_draws_it(runs: list[Report]) -> None:
    text = render_page(Comparison.of_runs(runs))
    section = text.partition("Which layers are sensitive</h2>")[2].partition("<h2")[0]
    assert section.count('class="hit"') == 4
    assert "head.weight" in section
