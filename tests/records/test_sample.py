"""A sample of clients is scored: which, what it says about all of them, and what is kept of very many."""

import csv
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll import LocalEngine, Settings, federate
from atoll.compose import create
from atoll.experiments.comparison import Comparison, compare
from atoll.experiments.explain import Study, explain, overview
from atoll.experiments.explain.client import Case
from atoll.federation.report import Report
from atoll.kernel.errors import CohortError, RunError, UnknownName
from atoll.metrics.evaluation import collect_observations
from atoll.metrics.fairness import PERCENTILES
from atoll.metrics.significance import interval
from atoll.records.rounds import Evaluation
from atoll.report.html import render_page
from atoll.report.table import comparison_cells, notes

SIZES = (20, 8, 30, 16, 24, 12, 28, 9, 18)
SHARES = (0.5, 0.2, 0.3)


@pytest.fixture
def task(make_task):
    return make_task(sizes=SIZES, shares=SHARES, dtype=torch.float64)


@pytest.fixture
def few_are_many(monkeypatch):
    """Five clients are already very many, of which three are scored by default."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("atoll.") and hasattr(module, "MANY_CLIENTS"):
            monkeypatch.setattr(module, "MANY_CLIENTS", 5)
    monkeypatch.setattr("atoll.federation.settings.SAMPLE_SIZE", 3)


def run(task, method="ditto", **more):
    more = {"rounds": 3, "eval_every": 1, **more}
    return federate(task, create(method), engine=LocalEngine(dtype=torch.float64), **more)


# -- who is scored -----------------------------------------------------------------------------------------------------


def test_all_clients_are_scored_unless_they_are_very_many():
    assert Settings().resolve(10_000).evaluation == "all"
    assert Settings().resolve(10_001).evaluation == "sample:1000"
    assert Settings(evaluation="all").resolve(10_001).evaluation == "all"
    assert len(Settings().draw_scored(1_000_000)) == 1_000
    assert Settings(evaluation="all").draw_scored(20_000).tolist() == [*range(20_000)]


def test_a_sample_is_drawn_by_the_seed_alone():
    settings = Settings(evaluation="sample:4", seed=3)
    drawn = settings.draw_scored(50)
    assert sorted({*drawn.tolist()}) == drawn.tolist()
    assert len(drawn) == 4
    others = replace(settings, rounds=7, cohort=2, drop=0.5, memory="disk")
    assert others.draw_scored(50).tolist() == drawn.tolist()
    assert replace(settings, seed=4).draw_scored(50).tolist() != drawn.tolist()


def test_every_client_is_as_likely_as_another():
    counts = np.zeros(10)
    for seed in range(600):
        counts[Settings(evaluation="sample:3", seed=seed).draw_scored(10)] += 1
    assert counts.sum() == 1800
    assert np.abs(counts - 180).max() < 4.5 * np.sqrt(600 * 0.3 * 0.7)


@pytest.mark.parametrize("given", ["sample", "sample:", "sample:x", "sample:-3", "sample:0.1", "some", "everybody"])
def test_words_that_are_no_evaluation_are_refused(task, given):
    with pytest.raises(CohortError, match="`evaluation` must be 'auto', 'all', 'sample:N', 'central' or 'none'"):
        run(task, evaluation=given)


@pytest.mark.parametrize("size", [0, 1, 10])
def test_a_sample_has_at_least_two_clients_and_not_more_than_there_are(task, size):
    with pytest.raises(CohortError, match="must have 2 to 9 clients, all that there are. Got 'sample:"):
        run(task, evaluation=f"sample:{size}")


# -- its scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("ditto", {"cohort": 3, "late": 0.5, "drop": 0.2}),
        ("fedavg-ft+sam", {}),
        ("ditto@ifca:cluster_rounds=1", {"cohort": 6}),
        ("fedbn", {}),
    ],
)
def test_scores_of_a_sample_are_those_that_its_clients_have_among_all(make_task, method, more):
    layers = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3)]
    model = (lambda: torch.nn.Sequential(*layers)) if method == "fedbn" else None
    task = make_task(model, sizes=SIZES, shares=SHARES, dtype=torch.float64)
    everybody = run(task, method, evaluation="all", **more)
    some = run(task, method, evaluation="sample:4", **more)
    assert everybody.scored.tolist() == [*range(9)]
    assert some.scored.tolist() == Settings(evaluation="sample:4").draw_scored(9).tolist() != [0, 1, 2, 3]
    for mine, theirs in zip(some.evaluations, everybody.evaluations, strict=True):
        assert mine.evaluation.sample == some.scored.tolist()
        for split in ("val", "test"):
            for name in ("clients", "samples", "losses", "variances"):
                listed = np.array(theirs.personal[split][name])[some.scored]
                np.testing.assert_array_equal(mine.personal[split][name], listed)
    for place, client in enumerate(some.scored.tolist()):
        np.testing.assert_array_equal(some.each_of(place), everybody.each_of(client))
    assert some.ledger.entries == everybody.ledger.entries


def test_a_sample_is_the_same_from_memory_from_its_folder_and_after_a_stop(task, tmp_path):
    def stop(line):
        if line.round == 2:
            raise KeyboardInterrupt

    more = {"evaluation": "sample:4", "cohort": 5, "memory": "disk"}
    whole = run(task, folder=tmp_path / "whole", **more)
    with pytest.raises(KeyboardInterrupt):
        run(task, folder=tmp_path / "run", on_round=stop, **more)
    resumed = run(task, folder=tmp_path / "run", resume=True, **more)
    for one in (resumed, Report.read(tmp_path / "run"), Report.read(tmp_path / "whole")):
        np.testing.assert_array_equal(one.scored, whole.scored)
        np.testing.assert_array_equal(one.scores(), whole.scores())
        np.testing.assert_array_equal(one.outcomes["test"], whole.outcomes["test"])
    with pytest.raises(RunError, match="The settings differs in evaluation"):
        run(task, folder=tmp_path / "run", resume=True, **{**more, "evaluation": "sample:5"})


def test_runs_from_before_there_were_samples_are_continued_with_all_clients(task, tmp_path):
    run(task, evaluation="all", folder=tmp_path)
    assert run(task, folder=tmp_path, resume=True).config.settings.evaluation == "all"


# -- what it says about all --------------------------------------------------------------------------------------------


def test_the_mean_of_a_sample_has_an_interval_for_all_clients(task):
    report = run(task, evaluation="sample:4")
    figures = report.figures()
    scores = report.scores()
    assert figures.macro == scores.mean()
    error = scores.std(ddof=1) / 2 * np.sqrt(1 - 4 / 9)
    assert figures.interval == pytest.approx(3.182446 * error, rel=1e-6)  # t with 3 degrees of freedom
    assert figures.micro == pytest.approx(scores @ report.samples() / report.samples().sum())
    assert run(task, evaluation="sample:9").figures().interval is None  # all of them
    assert run(task).figures().interval is None


def test_an_interval_of_a_finite_population_covers_its_mean_as_often_as_it_says():
    population = np.random.default_rng(0).beta(4, 2, size=400)
    means, covered = [], 0
    for seed in range(400):
        values = population[Settings(evaluation="sample:80", seed=seed).draw_scored(400)]
        means.append(values.mean())
        covered += abs(values.mean() - population.mean()) <= interval(values, 80 / 400)
    assert np.mean(means) == pytest.approx(population.mean(), abs=4 * np.std(means) / 20)  # without bias
    assert 0.92 < covered / 400 < 0.98  # without the correction it is 0.97 and more
    assert interval(population, 1.0) == 0


@pytest.fixture
def compared(task, tmp_path):
    engine = LocalEngine(dtype=torch.float64)
    return compare(
        task, ["ditto"], seeds=1, rounds=3, engine=engine, evaluation="sample:4", folder=tmp_path / "comparison"
    )


def test_gains_of_a_sample_are_paired(task, compared):
    everybody = {method: run(task, method, evaluation="all", eval_every=None) for method in ("local", "ditto")}
    some = compared.example.scored
    gains = everybody["ditto"].scores() - everybody["local"].scores()
    np.testing.assert_array_equal(compared.gains("ditto"), gains[None, some])
    row = next(row for row in compared.results if row["method"] == "ditto")
    assert (row["clients"], row["scored"]) == (9, 4)
    assert row["gain_local"] == pytest.approx(gains[some].mean())
    assert row["gain_local_interval"] == pytest.approx(interval(gains[some], 4 / 9))
    assert (
        row["interval"] == row["interval_of_sample"] == pytest.approx(compared.outcomes["ditto"][0].figures().interval)
    )


def test_every_seed_has_a_sample_of_its_own_and_the_interval_is_over_seeds(task):
    found = compare(task, ["fedavg"], seeds=2, rounds=1, evaluation="sample:4")
    first, second = (outcome.scored.tolist() for outcome in found.first)
    assert first != second
    row = found.results[0]
    means = [outcome.scores().mean() for outcome in found.outcomes["local"]]
    halves = [interval(outcome.scores(), 4 / 9) for outcome in found.outcomes["local"]]
    assert row["interval"] == pytest.approx(interval(means))
    assert row["interval_of_sample"] == pytest.approx(np.hypot(*halves) / 2)
    assert "Seed 0 only: every seed has another sample of clients." in render_page(found)


def test_runs_with_different_samples_are_not_compared(task):
    runs = [run(task, method, evaluation=f"sample:{size}") for method, size in (("local", 4), ("ditto", 5))]
    with pytest.raises(RunError, match="must have scored the same clients. With seed 0, local has 4 and ditto 5"):
        Comparison.of_runs(runs)


@pytest.mark.parametrize("evaluation", ["central", "none"])
def test_a_comparison_needs_scores(task, evaluation):
    with pytest.raises(RunError, match="evaluation='all' or 'sample:N'. Got"):
        compare(task, ["fedavg"], evaluation=evaluation)


def test_tables_files_and_page_say_how_many_were_scored(compared, tmp_path):
    heads, _ = comparison_cells(compared)
    assert {"mean ± 95 %", "harmed\nof 4"} <= {*heads}
    assert "a sample of 4 of 9 clients, drawn by the seed, each counted the same; ± is the 95 % interval" in notes(
        compared
    )
    paths = compared.save(tmp_path / "files")
    with paths["clients"].open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "ditto"]
    some = compared.example.scored.tolist()
    assert [(int(row["client"]), row["name"]) for row in rows] == [(client, f"client {client}") for client in some]
    assert [float(row["score"]) for row in rows] == compared.scores("ditto")[0].tolist()
    page = paths["report"].read_text()
    assert "a sample of 4 of 9 clients" in page
    assert "Only 4 of 9 clients were scored" in page
    for client, score in zip(some, compared.scores("ditto")[0], strict=True):
        described = json.loads(page.split('id="data">')[1].split("</script>")[0])["clients"][str(client)]
        assert described[0] == f"client {client}"
        assert described[2][2][0] == f"{100 * score:.1f}"


def test_clients_that_were_not_scored_are_drawn_in_their_clusters_by_name(task):
    report = run(task, "ifca", evaluation="sample:3")
    page = render_page(Comparison.of_runs([report]))
    described = json.loads(page.split('id="data">')[1].split("</script>")[0])["clients"]
    unscored = {*range(9)} - {*report.scored.tolist()}
    assert all(described[str(client)] == [f"client {client}", None, []] for client in unscored)


def test_groups_are_made_of_all_clients(compared):
    thirds = np.argsort(np.argsort(SIZES)) // 3
    some, scores = compared.example.scored, compared.scores("ditto")[0]
    expected = {
        name: scores[thirds[some] == third].mean()
        for third, name in enumerate(("small", "medium", "large"))
        if third in thirds[some]
    }
    groups = compared.groups("ditto")["size"]
    assert {name: group.mean for name, group in groups.items()} == pytest.approx(expected)
    assert sum(group.clients for group in groups.values()) == 4


def test_an_explanation_is_of_clients_of_the_sample(compared, tmp_path):
    study = Study.read(tmp_path / "comparison")
    some = compared.example.scored.tolist()
    assert "over 4 of 9 clients" in overview(study)[0]
    assert {*study.most_affected(9)} <= {*some}
    assert study.find(str(some[1])) == some[1]
    other = next(client for client in range(9) if client not in some)
    with pytest.raises(UnknownName, match=f"Client {other} is not in the sample of 4 of 9 clients"):
        study.find(f"client {other}")
    sizes = [Case(study, client).test_samples for client in some]
    assert sizes == compared.example.samples().tolist()
    assert all(explain(study, client) for client in some)
    gains, _ = study.gains("local")
    np.testing.assert_array_equal(gains[some], compared.gains("ditto")[0])
    assert np.isnan(np.delete(gains, some)).all()


# -- very many clients -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_are_many")
def test_of_very_many_clients_a_sample_is_scored_and_messages_are_counted(task, tmp_path):
    report = run(task, folder=tmp_path, cohort=4, late=0.3)
    assert report.config.settings.evaluation == "sample:3"
    assert len(report.scores()) == 3
    entries = report.ledger.entries
    assert all(entry.clients is None for entry in entries)
    keys = [(entry.direction, entry.round, entry.field, entry.bytes) for entry in entries]
    assert len({*keys}) == len(keys)
    assert Report.read(tmp_path).ledger.entries == entries


@pytest.mark.parametrize("strategy", ["whole", "loop"])
def test_counted_bytes_are_those_of_listed_messages(task, few_are_many, monkeypatch, strategy):
    def bytes_of():
        engine = LocalEngine(strategy=strategy, dtype=torch.float64)
        report = federate(
            task, create("ditto@ifca:cluster_rounds=1"), engine=engine, rounds=3, cohort=6, late=0.3, drop=0.1
        )
        rounds = [line.bytes for line in report.history]
        return report.bytes, rounds, [report.ledger.bytes(way) for way in ("up", "down")], report.spent[-1]

    counted = bytes_of()
    monkeypatch.setattr("atoll.federation.session.MANY_CLIENTS", 100)
    assert bytes_of() == counted


@pytest.mark.usefixtures("few_are_many")
def test_all_of_very_many_clients_are_in_arrays_and_not_in_lines(task, tmp_path, monkeypatch):
    report = run(task, "ifca", evaluation="all", folder=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = json.loads(lines[-1])["evaluation"]["personal"]["test"]
    assert found["scored"] == 9
    assert "clients" not in found
    assert found["percentiles"] == np.percentile(report.scores(), PERCENTILES).tolist()
    assert "clusters" not in json.loads(lines[-1])["evaluation"]
    read = Report.read(tmp_path / "run")
    for name in sys.modules:
        if name.startswith("atoll.") and hasattr(sys.modules[name], "MANY_CLIENTS"):
            monkeypatch.setattr(f"{name}.MANY_CLIENTS", 100)
    few = run(task, "ifca", evaluation="all")
    for one in (report, read):
        np.testing.assert_array_equal(one.scored, few.scored)
        np.testing.assert_array_equal(one.scores(), few.scores())
        np.testing.assert_array_equal(one.samples(), few.samples())
        np.testing.assert_array_equal(one.variances(), few.variances())
        np.testing.assert_array_equal(one.each_of(3), few.each_of(3))
        np.testing.assert_array_equal(one.clusters.of_client, few.clusters.of_client)
        with pytest.raises(RunError, match="only the test scores of the models that they deploy after the last round"):
            one.scores("val")
        with pytest.raises(RunError, match="`evaluation=sample:1000`"):
            replace(one, history=one.history[:-1]).scores()


@pytest.mark.usefixtures("few_are_many")
def test_what_is_kept_of_very_many_clients_is_the_same_after_a_stop(task, tmp_path):
    def stop(line):
        if line.round == 2:
            raise KeyboardInterrupt

    whole = run(task, evaluation="sample:7", folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(task, evaluation="sample:7", folder=tmp_path / "run", on_round=stop)
    resumed = run(task, evaluation="sample:7", folder=tmp_path / "run", resume=True)
    assert len(resumed.scored) == 7
    for name, array in whole.outcomes.items():
        np.testing.assert_array_equal(resumed.outcomes[name], array)
    assert resumed.ledger.entries == whole.ledger.entries


@pytest.mark.usefixtures("few_are_many")
def test_reports_of_very_many_clients_are_in_percentiles_and_bins(task, tmp_path):
    found = compare(task, ["ifca"], seeds=1, rounds=2, evaluation="all", folder=tmp_path)
    paths = found.save(tmp_path)
    with paths["clients"].open() as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "ifca"]
    assert [int(row["percentile"]) for row in rows] == [*PERCENTILES]
    assert {(row["clients"], row["scored"]) for row in rows} == {("9", "9")}
    assert [float(row["score"]) for row in rows] == np.percentile(found.scores("ifca")[0], PERCENTILES).tolist()
    gains = np.percentile(found.gains("ifca")[0], PERCENTILES)
    assert [float(row["gain_local"]) for row in rows] == pytest.approx(gains.tolist())
    page = paths["report"].read_text()
    assert "data-client" not in page.split("<main>")[1].split("<script")[0]
    assert "Percentiles over all clients" in page
    assert "How many clients gain how much" in page
    with pytest.raises(RunError, match="kept of at most 5 clients. Here 9 were scored"):
        Study.read(tmp_path)
    with pytest.raises(RunError, match="the best round must score at most 5 clients"):
        compare(task, ["ifca"], evaluation="all", select="best")


@pytest.mark.usefixtures("few_are_many")
def test_observations_of_very_many_clients_are_those_of_the_sample(task):
    report = run(task, "ditto+gate", evaluation="sample:3")
    assert {name: {*map(int, values)} for name, values in report.deployment.items()} == {
        "alone": {*report.scored.tolist()}, "lead": {*report.scored.tolist()}
    }  # fmt: skip
    clients, values = np.arange(9), {"lam": np.arange(9.0), "loss/main": np.ones(9)}
    assert collect_observations([(clients, values)], np.array([2, 7])) == {"lam": {"2": 2.0, "7": 7.0}}
    assert collect_observations([(clients[:5], {"lam": np.arange(5.0)})]) == {
        "lam": {str(k): float(k) for k in range(5)}
    }
    assert collect_observations([(clients, values)]) == collect_observations([(clients, values)], np.arange(9)) == {}


# -- what may stand in the files ---------------------------------------------------------------------------------------

FIGURES = {
    "macro": 0.5,
    "micro": 0.5,
    "worst": 0,
    "bottom10": 0,
    "std": 0,
    "loss": 1,
    "clients": [0.0, 1.0],
    "samples": [1, 1],
}


@pytest.mark.parametrize("sample", [[1], [1, 1], [3, 1], [-1, 2], []])
def test_a_sample_that_does_not_fit_is_refused(sample):
    Evaluation.of_json({"sample": [1, 4], "personal": {"test": FIGURES}})
    with pytest.raises(ValueError, match="sample"):
        Evaluation.of_json({"sample": sample, "personal": {"test": FIGURES}})


def test_a_sample_of_other_clients_than_there_are_is_refused(task, tmp_path):
    report = run(task, evaluation="sample:2")
    evaluation = Evaluation.of_json({"sample": [1, 9], "personal": {"test": FIGURES}})
    changed = replace(report, history=[replace(report.history[0], evaluation=evaluation)], outcomes=None)
    with pytest.raises(RunError, match="has 9 in config.json and 10 in round 1 of metrics.jsonl"):
        changed.require_clients()
