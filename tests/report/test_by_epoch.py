"""Tables and pages of one-shot runs: by epoch of local training, and where only the server has test samples."""

import warnings

import pytest

from atoll import LocalEngine, Recipe, Task, Training, compare
from atoll.cli.options import parse_curve
from atoll.experiments.comparison import Comparison
from atoll.kernel.errors import CohortError, RunError, UnknownName
from atoll.report.export import as_json, write_markdown
from atoll.report.html import render_page
from atoll.report.summary import write_findings, write_verdict
from atoll.report.table import comparison_cells, epochs_cells

WORDS = {
    "partition": "dirichlet:0.5", "clients": 3, "model": "mlp:8", "samples": 240, "central": "0.2",
    "training": Training(lr=0.05, batch_size=16),
}  # fmt: skip
METHODS = ["fafi:epochs=3", "ensemble:epochs=3", "afl:width=20"]


def compared(split: str, curve: tuple[int, ...] = (), methods: list[str] | None = None, **more: object) -> Comparison:
    engine = LocalEngine(device="cpu", compile=False, strategy="loop")
    recipe = Recipe("digits", split=split, **WORDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return compare(
            recipe, methods or METHODS, seeds=2, rounds=1, curve=curve, engine=engine, progress=False, **more
        )


@pytest.fixture(scope="module")
def tested_by_server() -> Comparison:
    return compared("100/0/0", (1, 3))


def test_scores_by_epoch_are_of_the_methods_that_have_epochs(tested_by_server: Comparison) -> None:
    heads, rows = epochs_cells(tested_by_server.outcomes)
    assert heads == ["after epoch", "1", "3"]
    assert [row[0] for row in rows] == ["fafi:epochs=3", "ensemble:epochs=3"]  # not Local, FedAvg and AFL
    last = {row["method"]: row["central"] for row in tested_by_server.results}
    for name, *cells in rows:
        assert cells[-1].startswith(f"{100 * last[name]:.1f} ± ")
        (first, second) = tested_by_server.outcomes[name]
        mean = 50 * (dict(first.by_epoch())[1] + dict(second.by_epoch())[1])
        assert cells[0].startswith(f"{mean:.1f} ± ")
    assert "| after epoch | 1 | 3 |" in write_markdown(tested_by_server)
    assert [*as_json(tested_by_server)["by_epoch"]["fafi:epochs=3"][0]] == ["1", "3"]
    assert "By epoch of local training" in render_page(tested_by_server)


def test_without_test_samples_of_clients_the_server_decides(tested_by_server: Comparison) -> None:
    heads, rows = comparison_cells(tested_by_server)
    assert heads == ["method", "server's test", "MB\nup", "MB\ndown"]
    assert [row[1] == "–" for row in rows] == [True, False, False, False, False]  # Local has no shared model
    head, more = write_verdict(tested_by_server)
    assert head.startswith("On the server's own test set")
    assert "nobody's gain is known" in more
    assert "nobody's gain is known" in tested_by_server.protocol
    assert not [sentence for sentence in write_findings(tested_by_server) if "–" in sentence]


def test_clients_with_test_samples_are_shown_by_epoch_too() -> None:
    found = compared("60/15/25", (2, 3), ["fafi:epochs=3"])
    assert epochs_cells(found.outcomes)[0] == ["after epoch", "2", "3"]
    assert comparison_cells(found)[0][3] == "server's\ntest"
    assert "By epoch of local training" not in render_page(compared("60/15/25", (), ["fafi:epochs=1"]))


def test_somebody_must_have_test_samples() -> None:
    recipe = Recipe("digits", split="100/0/0", **{**WORDS, "central": "none"})
    with pytest.raises(RunError, match=r"or the server a test set, as `central=0.25`"):
        compare(recipe, METHODS, seeds=1, rounds=1, progress=False)


def test_a_curve_needs_a_one_shot_method_that_reaches_it() -> None:
    task: Task = Recipe("digits", split="60/15/25", **WORDS).build()
    with pytest.raises(
        RunError, match="scores one-shot methods after some of their epochs. local, fedavg, ditto train"
    ):
        compare(task, ["ditto"], seeds=1, curve=(1, 2), progress=False)
    with pytest.raises(CohortError, match="Ensemble trains for 2. Got 3"):
        compare(task, ["ensemble:epochs=2", "fafi:epochs=3"], rounds=1, seeds=1, curve=(1, 3), progress=False)


def test_a_curve_is_written_as_numbers() -> None:
    assert parse_curve(" 1, 11,21") == (1, 11, 21)
    assert parse_curve(None) == ()
    with pytest.raises(UnknownName, match="`--curve` must be numbers of epochs, as 1,11,21. Got '1,two'"):
        parse_curve("1,two")
