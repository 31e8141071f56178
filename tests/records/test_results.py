import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reports import change, report_of
from scipy import stats

from atoll import Recipe, Task, federate
from atoll.compose import create, from_record, to_record
from atoll.data.statistics import Statistics, statistics
from atoll.experiments.comparison import Comparison, compare, runs_in
from atoll.federation.config import describe
from atoll.federation.labels import label
from atoll.federation.report import Report
from atoll.federation.results import SELECTIONS
from atoll.federation.settings import Settings
from atoll.kernel.clusters import Clusters
from atoll.kernel.errors import RunError, UnknownName
from atoll.kernel.randomness import generator

NAN = float("nan")
ERROR = {"name": "mean absolute error", "higher_is_better": False, "share": False}


def figures(scores, samples, variances=None):
    """What an evaluation writes about one split."""
    values, sizes = np.array(scores, dtype=float), np.array(samples)
    known = ~np.isnan(values)
    found = {
        "macro": float(values[known].mean()) if known.any() else NAN,
        "micro": float(values[known] @ sizes[known] / sizes.sum()) if known.any() else NAN,
        "worst": 0.0, "bottom10": 0.0, "std": 0.0, "loss": 0.25, "clients": list(scores), "samples": list(samples),
    }  # fmt: skip
    return found if variances is None else {**found, "variances": list(variances)}


def outcome(
    method,
    tests,
    *,
    vals=None,
    samples=None,
    variances=None,
    every=1,
    rounds=None,
    seed=0,
    metric=None,
    sent=0,
    each=None,
    shared=None,
    central=None,
    before=0,
    statistics=None,
    **task,
):
    """A run that was evaluated with these scores, `every` so many rounds; `sent` bytes go up in a round."""
    samples = [10] * len(tests[0]) if samples is None else samples
    done = every * len(tests)
    history = [
        {"round": number, "seconds": {"round": 2.0, "evaluation": 9.0}, "gradients": 7, "memory": number * 10**6,
         "bytes": {"up": sent, "down": 0}}
        for number in range(1, done + 1)
    ]  # fmt: skip
    for index, (test, val) in enumerate(zip(tests, tests if vals is None else vals, strict=True)):
        found = {"personal": {"test": figures(test, samples, variances), "val": figures(val, samples)}}
        history[every * (index + 1) - 1]["evaluation"] = found
    if shared is not None:
        history[-1]["evaluation"]["shared"] = {"test": figures(shared, samples)}
    if central is not None:
        history[-1]["evaluation"]["central"] = {"score": central, "loss": 1.0}
    config = {
        "task": {"name": "toy", "clients": len(tests[0]), **({} if metric is None else {"metric": metric}), **task},
        "settings": {"rounds": rounds or done, "seed": seed},
        "model": {"parameters": 5},
    }
    counted = {("up", "model"): sent * done + before, ("down", "model"): 0}
    return report_of(method, config, history, counted, statistics, None if each is None else np.array(each))


def comparison(*outcomes, **more):
    """Each method with one seed."""
    return Comparison({label(one.algorithm): [one] for one in outcomes}, **more)


# -- which round counts ------------------------------------------------------------------------------------------------


def test_the_last_the_best_on_validation_and_the_oracles_round():
    tests, vals = [[0.2, 0.4], [0.9, 0.7], [0.5, 0.5], [0.6, 0.4]], [[0.1, 0.1], [0.2, 0.2], [0.9, 0.7], [0.7, 0.9]]
    run = outcome("ditto", tests, vals=vals, every=2)
    assert [run.select_round(select)["round"] for select in SELECTIONS] == [8, 6, 4]  # of equals the first: 6, not 8
    assert [run.scores(select=select).tolist() for select in SELECTIONS] == [[0.6, 0.4], [0.5, 0.5], [0.9, 0.7]]
    assert run.scores("val", select="best").tolist() == [0.9, 0.7]
    rows = {select: comparison(run, select=select).results[0] for select in SELECTIONS}
    assert [rows[select]["mean"] for select in SELECTIONS] == pytest.approx([0.5, 0.5, 0.8])
    assert [rows[select]["round"] for select in SELECTIONS] == [8, 6, 4]
    assert comparison(run).with_selection("oracle").results == comparison(run, select="oracle").results


def test_the_best_round_of_an_error_is_the_lowest():
    run = outcome("ditto", [[3.0], [1.0], [2.0]], vals=[[2.0], [3.0], [1.5]], metric=ERROR)
    assert [run.select_round(select)["round"] for select in SELECTIONS] == [3, 3, 2]


def test_a_selection_needs_samples_to_select_by():
    run = outcome("ditto", [[0.5]])
    change(run, personal={**run.history[-1].personal, "val": figures([NAN], [0])})
    assert run.select_round("last")["round"] == 1
    with pytest.raises(RunError, match="Selection by the val split needs samples in it. There are none."):
        run.select_round("best")


def test_a_run_without_scores_says_what_to_do():
    with pytest.raises(RunError) as error:
        replace(outcome("ditto", [[0.5]]), history=[]).select_round()
    assert str(error.value) == (
        "A comparison needs the scores of clients. This run of ditto has none.\n"
        "hint: finish it with `atoll resume`, and run it with evaluation='all' or 'sample:N'."
    )


def test_an_unknown_selection_or_model_is_refused():
    with pytest.raises(UnknownName, match="Unknown selection 'bets'"):
        comparison(outcome("ditto", [[0.5]]), select="bets")
    with pytest.raises(UnknownName, match="Unknown model 'shared'"):
        outcome("ditto", [[0.5]]).figures(model="shared")


# -- gains and harm ----------------------------------------------------------------------------------------------------


def test_gains_are_paired_client_by_client():
    found = comparison(outcome("local", [[0.5, 0.9]]), outcome("fedavg", [[0.7, 0.6]]), outcome("ditto", [[0.8, 0.9]]))
    assert found.gains("ditto").tolist() == [pytest.approx([0.3, 0.0])]
    assert found.gains("ditto", over="fedavg").tolist() == [pytest.approx([0.1, 0.3])]
    assert found.best == "ditto"
    assert [row["gain_local"] for row in found.results] == pytest.approx([0.0, -0.05, 0.15])
    assert [row["gain_fedavg"] for row in found.results] == pytest.approx([0.05, 0.0, 0.2])
    assert [row["helped"] for row in found.results] == [0, 1, 1]
    assert [row["harm_mass"] for row in found.results] == pytest.approx([0.0, 0.15, 0.0])


def test_the_best_is_best_on_validation_and_never_on_test():
    """catches: a star that rests on test scores, or on validation samples that the method has read itself."""
    runs = [
        outcome("local", [[0.5, 0.5]], vals=[[0.6, 0.6]]),
        outcome("ditto", [[0.9, 0.9]], vals=[[0.5, 0.5]]),
        outcome("knn-per", [[0.9, 0.9]], vals=[[0.7, 0.7]]),
    ]
    found = comparison(*runs)
    assert found.best == "local"
    assert [row["validation"] for row in found.results] == pytest.approx([0.6, 0.5, 0.7])
    assert [row["reads_validation"] for row in found.results] == [False, False, True]
    for run in runs:
        change(run, personal={**run.history[-1].personal, "val": figures([NAN, NAN], [0, 0])})
    assert comparison(*runs).best is None


def test_a_lower_error_is_a_gain():
    variances = [0.1, 0.1]
    found = comparison(
        outcome("local", [[2.0, 1.0]], metric=ERROR, variances=variances),
        outcome("fedavg", [[1.5, 3.0]], metric=ERROR, variances=variances),
    )
    assert found.gains("fedavg").tolist() == [[0.5, -2.0]]
    assert found.find_harmed("fedavg").tolist() == [[False, True]]  # se^2 = 0.2 / 10, so 0.14
    assert found.best == "local"
    assert found.results[1]["worst"] == 3.0
    assert found.results[1]["jain_error"] is None  # there is no rate of errors


def test_a_client_is_harmed_beyond_one_standard_error():
    # r = 0.9, a = 0.7: se^2 = (0.09 + 0.21) / n, so se = 0.173 with 10 samples, 0.245 with 5; the loss is 0.2
    found = comparison(
        outcome("local", [[0.9, 0.9, 1.0]], samples=[10, 5, 10]),
        outcome("fedavg", [[0.7, 0.7, 1.0]], samples=[10, 5, 10]),
    )
    assert found.errors("fedavg").tolist() == [pytest.approx([math.sqrt(0.03), math.sqrt(0.06), 0.0])]
    assert found.find_harmed("fedavg").tolist() == [[True, False, False]]
    assert found.results[1]["harmed"] == 1.0
    assert found.results[0]["harmed_fedavg"] == 0.0


def test_variances_that_were_measured_are_used():
    # the same with variances of 0.3 instead: se^2 = 0.6 / 10 is more than the loss
    found = comparison(outcome("local", [[0.9]], variances=[0.3]), outcome("fedavg", [[0.7]], variances=[0.3]))
    assert found.errors("fedavg").tolist() == [[pytest.approx(math.sqrt(0.06))]]
    assert found.find_harmed("fedavg").tolist() == [[False]]


def test_harm_is_judged_in_the_round_that_counts():
    local = outcome("local", [[0.9], [0.1]], vals=[[0.9], [0.1]])
    fedavg = outcome("fedavg", [[0.7], [0.5]], vals=[[0.9], [0.1]])
    last, best = comparison(local, fedavg), comparison(local, fedavg, select="best")
    assert last.find_harmed("fedavg").tolist() == [[False]]
    assert best.find_harmed("fedavg").tolist() == [[True]]
    assert last.errors("fedavg").tolist() == [[pytest.approx(math.sqrt((0.09 + 0.25) / 10))]]
    assert best.errors("fedavg").tolist() == [[pytest.approx(math.sqrt((0.09 + 0.21) / 10))]]


def test_clients_without_test_samples_do_not_count():
    found = comparison(outcome("local", [[0.5, NAN]], samples=[4, 0]), outcome("fedavg", [[0.75, NAN]], samples=[4, 0]))
    assert found.results[1]["gain_local"] == found.results[1]["gain_local_median"] == pytest.approx(0.25)
    assert found.find_harmed("fedavg").tolist() == [[False, False]]


def test_without_any_test_samples_nothing_is_claimed():
    found = Comparison({
        method: [outcome(method, [[NAN, NAN]], samples=[0, 0], seed=seed) for seed in (0, 1)]
        for method in ("local", "fedavg")
    })  # fmt: skip
    row = found.results[1]
    names = ("gain_local", "gain_fedavg", "gain_local_median", "gain_local_interval", "harm_mass", "worst")
    assert [row[name] for name in names] == [None] * 6
    assert row["harmed"] == 0


def test_without_references_there_are_no_gains():
    found = comparison(outcome("ditto", [[0.5, 0.6]]))
    assert found.gains("ditto") is found.find_harmed("ditto") is found.mcnemar("ditto") is found.errors("ditto") is None
    assert found.significant == {}
    assert [found.results[0][name] for name in ("gain_local", "p_local", "harmed", "helped")] == [None] * 4
    assert next(found.rows())["gain_local"] is None


# -- more than chance --------------------------------------------------------------------------------------------------


def test_mcnemar_for_each_client_by_hand():
    # client 0: 5 samples only ditto has right and none only local, p = 2 / 2^5; client 1: 1 and 1, p = 1
    local = [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0]
    ditto = [1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0]
    runs = [
        outcome(method, [[np.mean(each[:6]), np.mean(each[6:])]], samples=[6, 8], each=each)
        for method, each in (("local", local), ("ditto", ditto))
    ]
    found = comparison(*runs)
    assert runs[1].each_of(0).tolist() == ditto[:6]
    assert runs[1].each_of(1).tolist() == ditto[6:]
    assert found.mcnemar("ditto").tolist() == [[pytest.approx(2 / 32), 1.0]]
    assert [row["mcnemar_local"] for row in found.rows()] == [1.0, 1.0, pytest.approx(2 / 32), 1.0]


def test_mcnemar_needs_single_samples_that_are_right_or_wrong_after_the_last_round():
    def pair(each, **more):
        local, ditto = (outcome(method, [[0.5, 0.5]], samples=[1, 1], each=each) for method in ("local", "ditto"))
        return comparison(local, ditto, **more).mcnemar("ditto")

    assert pair([0, 1]) is not None
    assert pair(None) is None
    assert pair([0.5, 1]) is None  # tokens: a sample can be half right
    assert pair([0, 1, 1]) is None  # of another task
    assert pair([0, 1], select="best") is None


def test_significance_is_wilcoxons_over_all_clients_and_seeds_after_holm():
    local, fedavg, ditto = generator(0, "scores").uniform(0, 0.5, size=(3, 2, 9))
    ditto = ditto + 0.2
    found = Comparison({
        method: [outcome(method, [values.tolist()], seed=seed) for seed, values in enumerate(of_seeds)]
        for method, of_seeds in (("local", local), ("fedavg", fedavg), ("ditto", ditto))
    })  # fmt: skip
    raw = [stats.wilcoxon(one.ravel(), local.ravel()).pvalue for one in (fedavg, ditto)]
    assert raw[1] < raw[0]
    assert found.significant["local"] == pytest.approx({"ditto": 2 * raw[1], "fedavg": max(raw[0], 2 * raw[1])})
    assert set(found.significant["fedavg"]) == {"local", "ditto"}
    assert [row["p_local"] for row in found.results] == [None, *map(pytest.approx, found.significant["local"].values())]
    assert found.results[2]["gain_local"] == pytest.approx((ditto - local).mean())
    seeds = (ditto - local).mean(axis=1)
    width = stats.t.ppf(0.975, 1) * np.std(seeds, ddof=1) / math.sqrt(2)
    assert found.results[2]["gain_local_interval"] == pytest.approx(width)
    assert found.results[2]["interval"] == pytest.approx(
        stats.t.ppf(0.975, 1) * np.std(ditto.mean(axis=1), ddof=1) / math.sqrt(2)
    )


# -- groups of clients -------------------------------------------------------------------------------------------------


def test_clients_that_are_alike_have_means_of_their_own():
    sizes = [2, 3, 4, 10, 20, 30]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    has = statistics(np.arange(sum(sizes)) % 2, parts, 2, groups=[0, 1, 0, 1, 0, 1], names=tuple("abcdef"))
    runs = [
        outcome("ditto", [scores], seed=seed, statistics=has)
        for seed, scores in enumerate([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]])
    ]
    found = Comparison({"ditto": runs})
    groups = found.groups("ditto")
    assert [(name, *map(pytest.approx, score)) for name, score in groups["size"].items()] == [
        ("small", 0.25, 0.2, 2), ("medium", 0.45, 0.4, 2), ("large", 0.65, 0.6, 2)
    ]  # fmt: skip
    assert groups["planted"]["group 1"] == pytest.approx((0.5, 0.3, 3))
    assert set(groups) == {"size", "label entropy", "label divergence", "planted"}
    assert found.client(3) == "d"
    assert [row["name"] for row in found.rows()] == [*"abcdef"] * 2
    assert comparison(outcome("ditto", [[0.5]])).groups("ditto") == {}


def test_the_worst_of_a_group_by_an_error_is_the_largest():
    has = statistics(np.arange(6.0), np.split(np.arange(6), 2), None, groups=[0, 0])
    found = comparison(outcome("ditto", [[1.0, 3.0]], metric=ERROR, statistics=has))
    assert found.groups("ditto")["planted"]["group 0"] == (2.0, 3.0, 2)


# -- cost --------------------------------------------------------------------------------------------------------------


def curve(method, values, **more):
    """A run whose only client has these scores on validation."""
    return outcome(method, [[0.0]] * len(values), vals=[[value] for value in values], **more)


def test_rounds_and_megabytes_until_a_target_by_hand():
    run = curve("ditto", [0.2, 0.6, 0.7, 0.8, 0.9], every=2, sent=10**6, before=5 * 10**5)
    # means of three: 0.5, 0.7, 0.8 after rounds 6, 8, 10; one MB per round, half a MB before the first
    for target, expected in ((0.45, (6, 6.5)), (0.7, (8, 8.5)), (0.75, (10, 10.5)), (0.81, (None, None))):
        row = comparison(run, target=target).results[0]
        assert (row["rounds_to_target"], row["megabytes_to_target"]) == expected
    assert run.spent == pytest.approx([2.5, 4.5, 6.5, 8.5, 10.5])


def test_an_error_must_fall_to_its_target():
    run = curve("ditto", [9.0, 5.0, 4.0, 3.0], metric=ERROR)
    assert [comparison(run, target=target).to_target("ditto")[0] for target in (6.0, 4.0, 3.9)] == [3, 4, None]


def test_without_a_target_it_is_most_of_what_fedavg_reached():
    fedavg, ditto = curve("fedavg", [0.5, 0.8, 0.8, 0.4]), curve("ditto", [0.76, 0.76, 0.76, 0.9])
    found = comparison(fedavg, ditto)
    assert found.target_of(0) == pytest.approx(0.95 * 0.8)
    assert found.to_target("ditto")[0] == 3
    assert found.to_target("fedavg") == (None, None)
    assert comparison(ditto).target_of(0) is None
    errors = comparison(curve("fedavg", [4.0, 1.9], metric=ERROR))
    assert errors.target_of(0) == pytest.approx(1.9 / 0.95)


def test_a_target_counts_only_if_every_seed_reached_it():
    runs = [curve("ditto", values, seed=seed) for seed, values in enumerate(([0.9] * 4, [0.1, 0.9, 0.9, 0.9]))]
    found = Comparison({"ditto": runs}, target=0.9)
    assert found.to_target("ditto") == (3.5, 0.0)  # after rounds 3 and 4, without a byte
    assert replace(found, target=0.95).to_target("ditto") == (None, None)


def test_a_curve_without_validation_samples_has_no_target():
    assert comparison(curve("fedavg", [NAN, NAN])).to_target("fedavg") == (None, None)


def test_costs_are_sums_over_rounds_and_means_over_seeds():
    runs = [outcome("ditto", [[0.5]] * rounds, seed=seed, sent=10**6) for seed, rounds in enumerate((2, 4))]
    row = Comparison({"ditto": runs}).results[0]
    assert (row["seconds"], row["gradients"], row["megabytes_up"], row["megabytes_down"]) == (6.0, 21, 3.0, 0.0)
    assert row["memory_megabytes"] == 4.0
    assert row["megabytes_deployed"] is None  # of runs that did not count it
    assert row["seeds"] == 2


def test_training_that_was_found_counts_as_long_as_it_took():
    run = outcome("ensemble", [[0.5]])
    assert run.seconds == 2.0
    run.history[-1] = replace(run.history[-1], seconds={**run.history[-1].seconds, "found": 5.0})
    assert run.seconds == 7.0


def test_what_clients_deploy_is_a_mean_over_seeds():
    runs = [outcome("ditto", [[0.5]], seed=seed) for seed in range(2)]
    for run, size in zip(runs, (2e6, 4e6), strict=True):
        change(run, deployed=size)
    assert Comparison({"ditto": runs}).results[0]["megabytes_deployed"] == 3.0


# -- the shared model --------------------------------------------------------------------------------------------------


def test_the_shared_model_on_all_test_samples_together():
    fedavg = outcome("fedavg", [[0.5, 1.0]], samples=[10, 30])
    assert fedavg.union == pytest.approx(0.875)  # its clients use the shared model
    assert outcome("ditto", [[0.5, 1.0]], samples=[10, 30], shared=[1.0, 0.0]).union == pytest.approx(0.25)
    assert outcome("ditto", [[0.5, 1.0]]).union is None
    assert outcome("local", [[0.5, 1.0]]).union is None


def test_the_servers_own_test_set():
    assert outcome("fedavg", [[0.5]], central=0.75).central == 0.75
    assert outcome("fedavg", [[0.5]]).central is None
    found = Comparison({"fedavg": [outcome("fedavg", [[0.5]], seed=seed, central=seed / 2) for seed in (0, 1)]})
    assert found.results[0]["central"] == 0.25


# -- runs that go together, and those that do not ----------------------------------------------------------------------


def test_runs_are_collected_by_method_and_seed():
    runs = [outcome(method, [[0.5]], seed=seed) for seed in (1, 0) for method in ("local", "ditto")]
    found = Comparison.of_runs(runs, select="best")
    assert list(found.outcomes) == ["local", "ditto"]
    assert found.seeds == [0, 1]
    assert found.missing == ()
    assert found.select == "best"


def test_what_is_incomplete_is_shown_and_said():
    runs = [outcome("local", [[0.5]] * 4), outcome("ditto", [[0.5]] * 2, rounds=4)]
    found = Comparison.of_runs(runs)
    assert found.missing == ("ditto with seed 0 is incomplete: 2 of 4 rounds.",)
    assert [row["round"] for row in found.results] == [4, 2]
    assert "after the last round (2 or 4)" in found.protocol


def test_seeds_that_a_method_lacks_are_left_out_and_said():
    begun = replace(outcome("ditto", [[0.5]], seed=2, rounds=3), history=[])
    runs = [outcome("local", [[0.5]], seed=seed) for seed in range(3)] + [outcome("ditto", [[0.6]], seed=1), begun]
    found = Comparison.of_runs(runs)
    assert found.seeds == [1]
    assert found.missing == (
        "ditto with seed 2 is incomplete: 0 of 3 rounds.",
        "Left out, because not every method has them: seeds 0, 2.",
    )


def test_runs_without_a_common_seed_or_score_are_no_comparison():
    with pytest.raises(RunError, match=r"must have a seed in common. They have none \(local: \[0\]; ditto: \[1\]\)."):
        Comparison.of_runs([outcome("local", [[0.5]]), outcome("ditto", [[0.5]], seed=1)])
    with pytest.raises(RunError, match="A report needs at least one run that was evaluated once. There is none."):
        Comparison.of_runs([replace(outcome("local", [[0.5]]), history=[])])


def test_a_run_that_is_there_twice_is_refused(tmp_path):
    runs = [replace(outcome("ditto", [[0.5]]), folder=tmp_path / name) for name in ("a", "b")]
    with pytest.raises(RunError) as error:
        Comparison.of_runs(runs)
    assert str(error.value) == (
        f"A comparison must have one run of each method and seed. ditto with seed 0 is there twice: {tmp_path / 'a'} "
        f"and {tmp_path / 'b'}.\nhint: give the folder of one of them only."
    )


def test_methods_of_a_comparison_share_their_seeds():
    with pytest.raises(RunError, match="same seeds"):
        Comparison({"local": [outcome("local", [[1.0]])], "fedavg": [outcome("fedavg", [[1.0]], seed=1)]})
    with pytest.raises(RunError, match="same seeds"):
        Comparison({"local": []})


def test_different_tasks_are_refused_with_the_difference():
    words = {"partition": "iid", "clients": 2, "data": "/here"}
    runs = [
        outcome("local", [[0.5, 0.5]], data="aa", recipe=words),
        outcome("ditto", [[0.5, 0.5]], data="bb", recipe={**words, "partition": "dirichlet:0.1"}),
    ]
    with pytest.raises(RunError) as error:
        Comparison.of_runs(runs)
    assert str(error.value) == (
        "The runs of a comparison must have their task in common. local and ditto with seed 0 differ in data: 'aa' and "
        "'bb'; recipe: partition 'iid' and 'dirichlet:0.1'.\n"
        "hint: compare runs of the same task, or run them again with one `atoll compare`."
    )
    other = outcome("ditto", [[0.5, 0.5]], data="aa", recipe=words)
    other.config["model"]["parameters"] = 6
    with pytest.raises(RunError, match="must have their model in common. .* differ in parameters: 5 and 6."):
        Comparison.of_runs([runs[0], other])


def test_the_same_data_may_lie_elsewhere():
    words = {"partition": "iid", "data": "/here"}
    runs = [
        outcome("local", [[0.5]], data="aa", recipe=words),
        outcome("ditto", [[0.5]], data="aa", recipe={**words, "data": None}),
    ]
    assert list(Comparison.of_runs(runs).outcomes) == ["local", "ditto"]


# -- rows and words ----------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_every_method_seed_and_client():
    runs = {
        method: [outcome(method, [[0.9, score]], seed=seed, samples=[10, 20]) for seed in (3, 4)]
        for method, score in (("local", 0.9), ("fedavg", 0.1))
    }
    rows = [*Comparison(runs).rows()]
    assert [(row["method"], row["seed"], row["client"]) for row in rows] == [
        (method, seed, client) for method in ("local", "fedavg") for seed in (3, 4) for client in (0, 1)
    ]
    assert rows[-1] == {
        "method": "fedavg", "seed": 4, "client": 1, "name": "1", "test_samples": 20, "score": 0.1,
        "gain_local": pytest.approx(-0.8), "gain_fedavg": 0.0, "harmed": True, "mcnemar_local": None,
        "cluster": None,
    }  # fmt: skip


def test_clusters_are_counted_and_compared_with_planted_groups():
    known = Statistics(np.full(4, 9), groups=np.array([0, 0, 1, 1]))
    runs = [outcome("ifca", [[0.5] * 4], seed=seed, statistics=known) for seed in (0, 1)]
    for run, numbers in zip(runs, ([1, 1, 0, 0], [0, 0, 1, 2]), strict=True):
        change(run, clusters=Clusters(np.array(numbers)).as_json())
    (row,) = Comparison({"ifca": runs}).results
    assert row["clusters"] == 2.5
    assert row["adjusted_rand"] == pytest.approx((1 + 4 / 7) / 2)
    assert [line["cluster"] for line in Comparison({"ifca": runs}).rows()] == [1, 1, 0, 0, 0, 0, 1, 2]
    unknown = outcome("ifca", [[0.5] * 4])
    assert (unknown.clusters, unknown.agreement) == (None, None)
    (row,) = comparison(unknown).results
    assert (row["clusters"], row["adjusted_rand"]) == (None, None)


def test_the_protocol_says_what_the_figures_are():
    recipe = {"partition": "dirichlet:0.1", "split": "60/15/25"}
    runs = [outcome("ditto", [[0.5, 0.5]] * 3, seed=seed, recipe=recipe) for seed in (0, 1)]
    found = Comparison({"ditto": runs})
    assert found.protocol == (
        "Accuracy in % of the model each client would deploy, on its own test split (train/val/test 60/15/25 %, "
        "2 cuts), after the last round (3); all 2 clients, each counted the same; ± is the 95 % t-interval over 2 "
        "seeds. toy, dirichlet:0.1, seeds 0, 1."
    )
    assert "after the round that is best on validation; all" in found.with_selection("best").protocol
    assert "an oracle" in found.with_selection("oracle").protocol
    alone = comparison(outcome("ditto", [[0.5]], metric=ERROR, recipe={"partition": "fafi:0.1"}))
    assert alone.protocol == (
        "Mean absolute error of the model each client would deploy, on its own test split (one cut), after the last "
        "round (1); all 1 clients, each counted the same. toy, fafi:0.1, seed 0. Clients share samples in this "
        "partition."
    )


def test_the_protocol_of_recommenders_has_no_shares(tmp_path):
    rows = [f"{user},{(user + 2 * step) % 9},{step}" for user in range(6) for step in range(6)]
    (tmp_path / "sales.csv").write_text("\n".join(["user,item,time", *rows]) + "\n")
    task = Task.ratings(tmp_path / "sales.csv", fewest=(3, 1))
    found = comparison(federate(task, "fedmf", rounds=1))
    assert "on its own test split (by time: a user's last item is for testing), after" in found.protocol


def test_citations_come_once():
    found = comparison(outcome("ditto", [[0.5]]), outcome("ditto:lam=0.1", [[0.5]]), outcome("local", [[0.5]]))
    assert found.citations.count("@") == 1
    assert "Ditto: Fair and Robust" in found.citations


@pytest.mark.parametrize("text", ["ditto", "ditto:lam=0.1", "fedavg:epochs=2,weighting=uniform"])
def test_labels_are_what_the_command_line_takes(text):
    assert label(create(text)) == text
    assert label(create(label(create(text)))) == text


def test_configuration_gives_the_algorithm_back():
    ditto = create("ditto:lam=0.1")
    config = json.loads(json.dumps(describe(Recipe(clients=4).build(), ditto, Settings()).as_json()))
    assert from_record(config["algorithm"]) == ditto


AWKWARD = """
from dataclasses import dataclass
from typing import Literal

from atoll import Algorithm, Update
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Awkward(Algorithm):
    name: Literal["sgd", "ditto"] = "sgd"
    file: Literal["none", "some"] = "none"
    values: Literal["few", "many"] = "few"
    text: Literal["short", "long"] = "short"

    def local(self, w, cohort):
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)
"""


@pytest.mark.parametrize("values", ["", ":name=ditto", ":file=some,values=many", ":text=long"])
def test_hyperparameters_may_be_called_as_the_parts_of_a_record(make_task, tmp_path, monkeypatch, values):
    """catches: values beside the name, where `name` and `file` of the method take the place of the record's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "awkward.py").write_text(AWKWARD)
    assert create("./awkward.py", text="long").text == "long"
    method, task = create(f"./awkward.py{values}"), make_task(shares=(0.6, 0.2, 0.2))
    federate(task, method, rounds=1, folder="run")
    read = Report.read(Path("run")).algorithm
    assert [getattr(read, one) for one in ("name", "file", "values", "text")] == [
        getattr(method, one) for one in ("name", "file", "values", "text")
    ]
    found = compare(task, [method], seeds=1, rounds=1, folder=tmp_path / "both")
    assert f"awkward.py{values}" in found.outcomes
    assert [Report.read(folder).label for folder in runs_in(tmp_path / "both")] == [*found.outcomes]


@pytest.mark.parametrize("made", ["fedper+prox:mu=0.5", "ditto@ifca:clusters=3"])
def test_older_records_have_their_values_beside_the_name(made):
    method = create(made)
    record = to_record(method)
    older = {"name": record["name"], "file": None, **record["values"]}
    assert from_record(older) == from_record(record) == method


@pytest.mark.parametrize(
    ("name", "values", "now"),
    [
        ("apfl", {"form": "published", "alpha": 0.3}, "apfl:alpha=0.3"),
        ("apfl+tune", {"form": "survey", "alpha": 0.3}, "apfl-survey+tune:alpha=0.3"),
        ("pfedme", {"form": "survey", "lam": 2.0, "eta": 0.1, "beta": 1.0, "inner_steps": 3}, "pfedme-survey:lam=2"),
        ("interp+gate", {"share": None, "epochs": 1}, "interp+gate:adapt=grid,begin=own"),
        ("pfedme", {"form": "published", "lam": 2.0, "eta": 0.1}, "pfedme:lam=2,eta=0.1"),
    ],
)
def test_older_records_are_read_as_what_they_were(name, values, now):
    older = [{"name": name, "file": None, "values": values}, {"name": name, **values}]
    assert [from_record(one) for one in older] == [create(now)] * 2
    assert from_record(to_record(create(now))) == create(now)


@pytest.mark.parametrize("made", ["ditto", "fedper+prox", "ditto@ifca"])
def test_a_record_with_a_hyperparameter_that_nothing_has_is_refused(made):
    """catches: a value that is left out in silence, so a run is read as one of another method."""
    record = to_record(create(made))
    with pytest.raises(UnknownName, match=rf"Unknown hyperparameter of {re.escape(made)} 'nu'"):
        from_record({**record, "values": {**record["values"], "nu": 1.0}})


def unsealed(content):
    """A JSON file as it was before files had versions and seals."""
    return {name: value for name, value in content.items() if name not in ("schema", "seal")}


def test_an_older_run_is_resumed(make_task, tmp_path):
    task, folder = make_task(shares=(0.6, 0.2, 0.2)), tmp_path / "run"
    federate(task, create("ditto:lam=0.5"), rounds=1, folder=folder)
    config = json.loads((folder / "config.json").read_text())
    record = config["algorithm"]
    config["algorithm"] = {"name": record["name"], "file": record["file"], **record["values"]}
    (folder / "config.json").write_text(json.dumps(unsealed(config)))
    (folder / "clients.json").write_text(json.dumps(unsealed(json.loads((folder / "clients.json").read_text()))))
    for file in (folder / "checkpoints").glob("*.json"):  # nor had checkpoints seals
        facts = json.loads(file.read_text())
        file.write_text(json.dumps({name: facts[name] for name in ("round", "bytes", "sha256")}))
    assert federate(task, create("ditto:lam=0.5"), rounds=1, folder=folder, resume=True)
    with pytest.raises(RunError, match=r"The algorithm differs in lam\."):
        federate(task, create("ditto:lam=0.7"), rounds=1, folder=folder, resume=True)


# -- from real runs ----------------------------------------------------------------------------------------------------


def test_an_outcome_reads_the_same_from_memory_and_folder(make_task, tmp_path):
    task = make_task(sizes=(12, 9, 20), shares=(0.6, 0.15, 0.25))
    report = federate(task, create("ditto"), rounds=3, folder=tmp_path)
    memory, folder = federate(task, create("ditto"), rounds=3), Report.read(tmp_path)
    assert folder.scores().tolist() == memory.scores().tolist() == report.scores().tolist()
    assert folder.bytes == memory.bytes
    assert folder.spent == memory.spent
    assert folder.spent[-1] == pytest.approx(folder.megabytes("up") + folder.megabytes("down"))
    assert folder.gradients == memory.gradients > 0
    assert (folder.seed, folder.rounds, folder.done, folder.finished, folder.label) == (0, 3, 3, True, "ditto")
    assert folder.union == memory.union is not None
    assert folder.statistics.samples.tolist() == memory.statistics.samples.tolist()
    for client in range(3):
        assert folder.each_of(client).tolist() == memory.each_of(client).tolist()
        assert folder.each_of(client).mean() == pytest.approx(report.scores()[client])
    assert memory.variances() == pytest.approx(report.scores() * (1 - report.scores()), abs=1e-6)
