import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from reports import change, report_of
from scipy.spatial.distance import jensenshannon
from scipy.stats import spearmanr
from typer.testing import CliRunner, Result

from atoll import Recipe, algorithms, federate
from atoll.cli import app
from atoll.data.statistics import Statistics, statistics
from atoll.experiments.comparison import Comparison
from atoll.experiments.explain import Case, Study, explain, overview
from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm
from atoll.kernel.clusters import Clusters
from atoll.kernel.errors import RunError, UnknownName
from atoll.protect.ledger import Entry, Ledger
from atoll.runtime.engines.measuring import one_thread_each

METHODS = ("local", "fedavg", "ditto")
SIZES = [4, 8, 20, 20, 40, 60]
LABELS = [  # of each client's samples, by class
    [2, 1, 1], [4, 2, 2], [0, 16, 4], [10, 5, 5], [20, 10, 10], [30, 15, 15],
]  # fmt: skip
TESTED = 20


def data(labels=LABELS, **more) -> Statistics:
    """Clients with these labels; features are none unless given."""
    targets = np.concatenate([np.repeat(np.arange(len(row)), row) for row in labels])
    ends = np.cumsum([sum(row) for row in labels])
    return statistics(targets, np.split(np.arange(len(targets)), ends[:-1]), len(labels[0]), **more)


def figures(scores, samples, losses=None, variances=None, share=True) -> dict:
    values = np.asarray(scores, dtype=float)
    spread = values * (1 - values) if share else np.ones(len(values))
    return {
        "clients": values.tolist(), "samples": list(samples), "macro": float(np.nanmean(values)),
        "micro": float(np.nanmean(values)), "losses": [1.0] * len(values) if losses is None else losses,
        "variances": (spread if variances is None else np.asarray(variances)).tolist(),
    }  # fmt: skip


def outcome(
    method, scores, *, seed=0, tested=None, val=None, losses=None, each=None, facts=None, metric=None, shared=None,
    mixing=None, rounds=4, fingerprint=None, missing=False,
) -> Report:  # fmt: skip
    """A run that ended with these scores, and had the losses on validation that each entry of `losses` gives."""
    tested = [TESTED] * len(scores) if tested is None else tested
    share = metric is None
    test = figures(scores, tested, share=share)
    of_rounds = losses or [None, None]
    history = [
        {
            "round": 2 * number + 2, "bytes": {"down": 0, "up": 0}, "seconds": {"round": 1.0},
            "evaluation": {"personal": {"test": test, "val": figures(val or scores, tested, loss, share=share)}},
        }
        for number, loss in enumerate(of_rounds)
    ]  # fmt: skip
    if shared is not None:
        history[-1]["evaluation"]["shared"] = {"test": figures(shared, tested, share=share)}
    if mixing is not None:
        history[-1]["evaluation"]["mixing"] = mixing
    task = {"name": "invented", "clients": len(scores), "data": fingerprint}
    config = {
        "task": task | ({} if metric is None else {"metric": metric}),
        "settings": {"rounds": rounds, "seed": seed},
    }
    known = None if missing else data() if facts is None else facts
    return report_of(method, config, history, {}, known, each)


def study(*scores, methods=METHODS, method=None, **more) -> Study:
    """Runs of the methods with these scores; options go to all of them."""
    outcomes = {name: [outcome(name, row, **more)] for name, row in zip(methods, scores, strict=True)}
    return Study(Comparison(outcomes), method or methods[-1])


def words(of: Study, client: int, heading: str) -> str:
    return " ".join(explain(of, client).get(heading, []))


SAME = [0.5] * 6


# -- how the data differ -----------------------------------------------------------------------------------------------


def test_data_are_set_among_those_of_the_others():
    text = words(study(SAME, SAME, SAME), 2, "data")
    assert "It trains on 20 samples, 1.00 times the median of 20, rank 3 of 6 by size." in text
    # 16 of class 1 and 4 of class 2: H = -0.8 log2 0.8 - 0.2 log2 0.2 = 0.72, log2 3 = 1.58
    assert "It has 2 of 3 classes, the most frequent 1 (80 %) and 2 (20 %)" in text
    assert "label entropy is 0.7 bits of at most 1.6" in text
    everybody = np.sum(LABELS, axis=0) / np.sum(LABELS)
    far = jensenshannon([0, 0.8, 0.2], everybody, base=2) ** 2
    assert f"diverge from those of all by {far:.2g} bits of at most 1 (by chance" in text
    assert "rank 1 of 6; total variation 0.48" in text  # of class 1, 16 of 20 against 49 of 152


def test_chance_of_labels_is_what_theory_says():
    # for many samples the divergence of n draws from C classes is (C - 1) / (8 n ln 2) on average
    of = Case(study(*[[0.5] * 2] * 3, facts=data([[400, 300, 300], [400, 300, 300]])), 0)
    assert of.chance["label divergence"] == pytest.approx(2 / (8 * 1000 * math.log(2)), rel=0.15)
    assert of.chance["feature distance"] == 1 / math.sqrt(1000)


def test_features_are_compared_with_chance():
    features = np.concatenate([np.full(sum(row), float(number == 5)) for number, row in enumerate(LABELS)])
    known = data(features=features[:, None])
    text = words(study(SAME, SAME, SAME, facts=known), 4, "data")
    assert f"Its mean sample is {known.feature_distance[4]:.2f} standard deviations" in text
    assert "(by chance alone about 0.16), rank 2 of 6" in text  # 1 / sqrt(40); the last is farther away


def test_planted_groups_and_equal_sizes_are_said():
    facts = data([[3, 3]] * 4, groups=[0, 1, 1, 1])
    text = words(study(*[[0.5] * 4] * 3, facts=facts), 2, "data")
    assert "It trains on 6 samples, as all clients do; it belongs to planted group 1, as 2 others do." in text
    assert "the same for all 4 clients" in text


def regression(tested=4, **more) -> Study:
    """Five clients with mean targets 0, 0, 0, 0 and 10; the method is better than Local where its error is lower."""
    parts = np.split(np.arange(50), 5)
    targets = np.concatenate([np.tile([-1.0, 1.0], 20), np.tile([9.0, 11.0], 5)])
    metric = {"name": "mean absolute error", "higher_is_better": False, "share": False}
    scores = ([2.0, 2.0, 2.0, 2.0, 2.0], [3.0, 2.0, 2.0, 2.0, 9.0], [1.0, 2.0, 2.0, 2.0, 4.0])
    return study(*scores, facts=statistics(targets, parts, None), metric=metric, tested=[tested] * 5, **more)


def test_targets_of_a_regression_are_compared():
    # all: mean 2, variance 1 + 16, so the last is 8 / sqrt(17) = 1.94 away, the others 0.49
    text = words(regression(), 4, "data")
    assert "Its mean target, 10, is 1.94 standard deviations above that of all (by chance alone about 0.32)" in text
    assert "rank 1 of 5" in text
    assert "classes" not in text
    assert "0.49 standard deviations below" in words(regression(), 0, "data")


def test_without_statistics_it_says_so_and_explains_the_rest():
    of = study(SAME, SAME, [0.1, *SAME[1:]], missing=True)
    assert "no statistics of its clients' data" in words(of, 0, "data")
    assert "-40.0 points" in words(of, 0, "result")
    assert words(of, 0, "plausible") == "None of the rules accounts for it."


def test_a_client_without_samples_is_bare():
    facts = data([[0, 0], [3, 1], [1, 3]])
    text = words(study(*[[math.nan, 0.5, 0.5]] * 3, facts=facts, tested=[0, 4, 4]), 0, "data")
    assert text == "It trains on 0 samples, 0.00 times the median of 4, rank 3 of 3 by size."
    assert "no test samples" in words(study(*[[math.nan, 0.5, 0.5]] * 3, facts=facts, tested=[0, 4, 4]), 0, "result")


# -- whom it learned from ----------------------------------------------------------------------------------------------


def test_nobody_learns_from_others_with_local():
    assert words(study(SAME, SAME, SAME, method="local"), 0, "learned from").startswith("It learned from nobody")


def test_the_weight_in_an_average_is_by_samples_or_the_same():
    text = words(study(SAME, SAME, SAME), 4, "learned from")
    assert "weighted by samples: it has 26 % of all weight" in text  # 40 of 152
    # clients 0, 1, 3, 4 and 5 have the same labels, so the first three of the others are the most similar: 32 of 152
    assert "the most similar labels (0, 1 and 3) together 21 %" in text
    text = words(study(SAME, SAME, SAME, methods=("local", "fedavg", "ditto:weighting=uniform")), 4, "learned from")
    assert "each the same: it has 17 % of all weight" in text


def test_mixing_weights_are_read():
    row = [0.0, 0.0, 0.5, 0.25, 0.25, 0.0]
    text = words(study(SAME, SAME, SAME, mixing=[row] * 6), 2, "learned from")
    assert "50 % is its own, most of the rest that of 3 (25 %) and 4 (25 %)" in text
    assert "over 2.8 equal clients" in text  # exp(entropy) = 2^1.5
    # the other five have the same labels: the first two of them are the most similar ones
    assert "0 of these 2 are among the 2 with the most similar labels" in text
    text = words(study(SAME, SAME, SAME, mixing=[row] * 6, facts=data(groups=[0, 0, 1, 1, 0, 0])), 2, "learned from")
    assert "Its planted group has 75 % of the weight." in text
    text = words(study(SAME, SAME, SAME, mixing=[[-0.5, 0.0, 0.0, 1.5, 0.0, 0.0]] * 6), 2, "learned from")
    assert "0 % is its own, most of the rest that of 3 (75 %) and 0 (-25 %)" in text
    assert "no client any weight" in words(study(SAME, SAME, SAME, mixing=[[0.0] * 6] * 6), 2, "learned from")


def test_companions_in_a_cluster_are_named():
    of = study(SAME, SAME, SAME)
    found = Clusters(np.array([0, 1, 1, -1, 1, 2]))
    change(of.outcome, clusters=found.as_json())
    assert "It is in cluster 1, one of 3, with 2 and 4." in words(of, 1, "learned from")
    assert "It is in cluster 2, one of 3, alone." in words(of, 5, "learned from")
    assert "It is in none of the 3 clusters." in words(of, 3, "learned from")
    assert "cluster" not in words(study(SAME, SAME, SAME), 1, "learned from")


def test_what_a_method_does_not_say_is_not_known():
    @dataclass(frozen=True, kw_only=True)
    class Silent(Algorithm):
        """Neither a mean with weights nor a matrix."""

    of = study(SAME, SAME, SAME)
    silent = Study(
        Comparison({**of.comparison.outcomes, "silent": [replace(of.outcome, algorithm=Silent())]}), "silent"
    )
    assert words(silent, 0, "learned from") == "Which clients it learned from is not known."


# -- what it gained ----------------------------------------------------------------------------------------------------


def right(*counts: int) -> np.ndarray:
    """Test samples of all clients: the first so many of each are right."""
    return np.concatenate([np.arange(TESTED) < count for count in counts]).astype(float)


def test_gains_have_errors_and_a_test_sample_by_sample():
    # client 0: the method has samples 9 .. 11 right only, Local 0 .. 8 only
    ours, theirs = right(12, 10, 10, 10, 10, 10), right(9, 10, 10, 10, 10, 10)
    ours[:9] = 0
    scores = {"local": [0.45, *SAME[1:]], "fedavg": SAME, "ditto": [0.15, *SAME[1:]]}
    each = {"local": theirs, "fedavg": right(*[10] * 6), "ditto": ours}
    outcomes = {name: [outcome(name, row, each=each[name])] for name, row in scores.items()}
    text = words(Study(Comparison(outcomes), "ditto"), 0, "result")
    assert "With ditto its accuracy is 15.0 % on 20 test samples." in text
    error = 100 * math.sqrt((0.15 * 0.85 + 0.45 * 0.55) / 20)
    p = 2 * (1 + 12 + 66 + 220) / 2**12
    assert (
        f"Against local (45.0 %) that is -30.0 points, beyond one standard error ({error:.1f}); right only with "
        f"ditto: 3, only with local: 9 (McNemar's p = {p:.2g})."
    ) in text
    assert "Against fedavg (50.0 %) that is -35.0 points" in text


def test_a_lower_error_is_a_gain():
    text = words(regression(), 0, "result")
    assert "Against local (2) that is +1, beyond one standard error (0.707)." in text  # sqrt((1 + 1) / 4)
    assert "Against fedavg (3) that is +2" in text
    assert "McNemar" not in text
    assert "lower is better" in overview(regression())[0]


def test_other_seeds_count_where_the_data_are_the_same():
    def both(fingerprints):
        return Comparison(
            {
                name: [
                    outcome(name, row, seed=seed, fingerprint=fingerprints[seed])
                    for seed, row in enumerate(([score, *SAME[1:]], [score + 0.1 * (name == "ditto"), *SAME[1:]]))
                ]
                for name, score in {"local": 0.5, "fedavg": 0.5, "ditto": 0.6}.items()
            }
        )

    same = words(Study(both(["a", "a"]), "ditto"), 0, "result")
    assert "With other seeds, on the same data, it is +20.0 points against local." in same
    assert "+10.0 points against local." in words(Study(both(["a", "a"]), "ditto", 1), 0, "result")
    assert "other seeds" not in words(Study(both(["a", "b"]), "ditto"), 0, "result")
    assert "other seeds" not in words(Study(both([None, None]), "ditto"), 0, "result")


def test_without_references_gains_are_unknown():
    of = study([0.9, 0.2, 0.4, 0.9, 0.9, 0.9], methods=("ditto",))
    assert "`atoll compare ditto`" in " ".join(overview(of))
    assert of.most_affected(2) == [1, 2]
    assert [*explain(of, 1)] == ["data", "learned from", "result"]
    assert "Against" not in words(of, 1, "result")


# -- why that is plausible, and what may help --------------------------------------------------------------------------


def test_a_small_difference_is_called_chance():
    of = study(SAME, SAME, [0.55, *SAME[1:]])
    assert words(of, 0, "plausible") == "On 20 test samples a difference of +5.0 points may be chance (p = 0.75)."
    assert words(of, 0, "may help") == (
        "More test samples, from more data, a larger test share or more seeds: 20 show no difference beyond chance, so "
        "nothing else is advised."
    )
    losing = study(SAME, SAME, [0.45, *SAME[1:]])
    assert words(losing, 0, "plausible") == "On 20 test samples a difference of -5.0 points may be chance (p = 0.75)."
    assert "stay with local" not in words(losing, 0, "may help")
    assert "it makes no difference" in words(of, 1, "plausible")


def test_a_gain_that_one_test_doubts_is_doubted():
    each = {"local": right(10, *[10] * 5), "fedavg": right(*[10] * 6), "ditto": right(15, *[10] * 5)}
    scores = {"local": SAME, "fedavg": SAME, "ditto": [0.75, *SAME[1:]]}
    outcomes = {name: [outcome(name, row, each=each[name])] for name, row in scores.items()}
    of = Study(Comparison(outcomes), "ditto")
    assert "McNemar's p = 0.062" in words(of, 0, "result")  # 2 / 2^5
    assert "a difference of +25.0 points may be chance (McNemar's p = 0.062)." in words(of, 0, "plausible")


def test_nothing_is_advised_from_three_test_samples():
    """catches: `ditto:lam=10` and another method for a client whose three test samples say p = 1."""
    each = {"local": np.array([1.0, 1.0, 0.0]), "ditto": np.array([0.0, 1.0, 0.0]), "fedavg": np.ones(3)}
    outcomes = {
        name: [outcome(name, [score, 0.5], each=np.tile(each[name], 2), tested=[3, 3], val=[val, 0.5],
                       shared=[1.0, 0.5], facts=data([[0, 8], [3, 3]]))]
        for name, score, val in (("local", 2 / 3, 1.0), ("fedavg", 1.0, 1.0), ("ditto", 1 / 3, 0.0))
    }  # fmt: skip
    of = Study(Comparison(outcomes), "ditto")
    assert "(McNemar's p = 1)" in words(of, 0, "plausible")
    assert "costs it" not in words(of, 0, "plausible")
    assert words(of, 0, "may help") == (
        "More test samples, from more data or a larger test share: fewer than 6 never show a difference, so nothing "
        "else is advised."
    )


def test_a_single_test_sample_has_no_standard_error():
    text = words(study([1.0], [1.0], [0.0], facts=data([[0, 8]]), tested=[1]), 0, "result")
    assert "that is -100.0 points, on a single sample, which has no standard error" in text


def test_few_samples_explain_a_gain_and_say_whether_that_holds():
    gaining = [0.9, 0.8, 0.6, 0.7, 0.65, 0.55]  # the smaller, the more
    text = words(study(SAME, SAME, gaining), 0, "plausible")
    assert "It has few samples (4, median 20)" in text
    assert "and its data are ordinary" in text
    rho, p = spearmanr(gaining, SIZES)
    assert f"; over all clients the gain falls with size (ρ = {rho:+.2f}, p = {p:.2g})" in text
    unclear = [0.9, 0.5, 0.6, 0.65, 0.7, 0.75]
    text = words(study(SAME, SAME, unclear), 0, "plausible")
    assert "over all clients the gain is not significantly correlated with size" in text
    assert "few samples" not in words(study(SAME, SAME, gaining), 5, "plausible")


def test_a_rule_that_the_run_contradicts_is_said_to_be():
    gaining = [0.65, 0.7, 0.75, 0.8, 0.85, 0.9]  # the larger, the more
    of = study(SAME, SAME, gaining)
    assert of.relations["size"].rho == pytest.approx(spearmanr(gaining, SIZES)[0])
    assert "yet over all clients the gain rises with size (ρ = +0.99, p < 0.001)" in words(of, 1, "plausible")


def test_far_labels_explain_a_loss():
    losing = [0.5, 0.5, 0.1, 0.5, 0.5, 0.5]
    text = words(study(SAME, SAME, losing), 2, "plausible")
    assert "Its labels (rank 1 of 6) are far from those of all, and its own part may be too weak" in text
    assert "with label divergence (ρ = " in text
    assert "ditto:lam=0.1" in words(study(SAME, SAME, losing), 2, "may help")
    shared = study(SAME, losing, methods=("local", "fedavg"))
    assert "one model serves all" in words(shared, 2, "plausible")
    assert words(shared, 2, "may help") == (
        "It can stay with local, which has 50.0 % here. It may need more of its own: fedper keeps a head for each "
        "client, which suits other labels, fedavg-ft tunes the shared model on each client's data."
    )
    assert "far" not in words(study(SAME, SAME, [0.1, *SAME[1:]]), 0, "plausible")


def test_far_targets_explain_a_loss():
    assert "Its targets (rank 1 of 5) are far from those of all" in words(regression(), 4, "plausible")


def test_only_methods_that_exist_are_proposed(monkeypatch):
    known = algorithms.list_methods()
    monkeypatch.setattr(
        algorithms, "list_methods", lambda: {name: one for name, one in known.items() if name != "fedper"}
    )
    losing = study(SAME, [0.5, 0.5, 0.1, 0.5, 0.5, 0.5], methods=("local", "fedavg"))
    assert "fedper" not in words(losing, 2, "may help")
    assert "fedavg-ft" in words(losing, 2, "may help")


def test_other_groups_explain_a_loss():
    facts = data([[3, 3]] * 4, groups=[0, 1, 1, 1])
    of = study([0.9] * 4, [0.1] * 4, methods=("local", "fedavg"), facts=facts)
    assert "75 % of the weight in what it gets is that of other planted groups" in words(of, 0, "plausible")
    assert "25 % of the weight" in words(of, 1, "plausible")
    apart = [[0.5, 0.25, 0.25, 0], *[[0, 0.5, 0.25, 0.25]] * 3]
    of = study([0.9] * 4, [0.1] * 4, methods=("local", "fedavg"), facts=facts, mixing=apart)
    assert "50 % of the weight" in words(of, 0, "plausible")
    assert "other planted groups" not in words(of, 1, "plausible")
    alone = study([0.9] * 4, [0.1] * 4, methods=("local", "fedavg"), facts=data([[3, 3]] * 4, groups=[1] * 4))
    assert "planted" not in words(alone, 0, "plausible")


def test_a_large_client_has_little_to_gain():
    text = words(study(SAME, SAME, SAME), 5, "plausible")
    assert "It has many samples (60, median 20) and ordinary data, so others add little" in text
    assert "many samples" not in words(study(SAME, SAME, SAME), 0, "plausible")


def test_a_client_that_is_good_alone_has_no_room():
    alone = [0.5, 0.98, *SAME[2:]]
    assert "at most 2.0 points are left to gain" in words(study(alone, SAME, alone), 1, "plausible")


def test_the_shared_model_is_compared_on_the_same_samples():
    shared = [0.1, 0.9, *SAME[2:]]
    of = study(SAME, SAME, SAME, shared=shared)
    error = 100 * math.sqrt((0.25 + 0.09) / 20)
    assert (
        f"Its own model has 50.0 %, the shared one 10.0 % (standard error {error:.1f}): personalization helps it."
        in words(of, 0, "plausible")
    )
    assert "costs it" in words(of, 1, "plausible")
    assert "A stronger pull towards the shared model (ditto:lam=10)" in words(of, 1, "may help")
    assert "shared" not in words(study(SAME, SAME, SAME, shared=[0.6] * 6), 2, "plausible")  # within the error


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([0.5, 0.4, 0.8, 1.2], "lowest after round 4 (0.4) and is 1.2 now"),
        ([0.5, 0.4, 0.4, 1.2], "jumped from 0.4 to 1.2"),
    ],
)
def test_a_validation_loss_that_rose_is_noticed(losses, said):
    of = study(SAME, SAME, [0.9, *SAME[1:]], losses=[[loss] * 6 for loss in losses], rounds=8)
    assert said in words(of, 0, "plausible")
    steady = study(SAME, SAME, [0.9, *SAME[1:]], losses=[[0.5] * 6, [0.4] * 6, [0.45] * 6], rounds=6)
    assert "validation loss" not in words(steady, 0, "plausible")
    few = study(*[SAME] * 3, losses=[[loss] * 6 for loss in losses], rounds=8, tested=[9] * 6)
    assert "validation loss" not in words(few, 0, "plausible")


def test_validation_may_prefer_another_method():
    def prefer(score):
        outcomes = {
            name: [outcome(name, SAME, val=[val, *SAME[1:]])]
            for name, val in {"local": 0.6, "fedavg": score, "ditto": 0.5}.items()
        }
        return Study(Comparison(outcomes), "ditto")

    text = words(prefer(0.9), 0, "may help")
    assert text == "On its 20 validation samples fedavg is the best method here, 90.0 % against 50.0 %."
    assert "validation samples" not in words(prefer(0.9), 1, "may help")
    assert "validation samples" not in words(prefer(0.7), 0, "may help")  # within chance
    errors = regression(method="fedavg", tested=20)  # the lowest is best
    assert "ditto is the best method here, 1 against 3." in words(errors, 0, "may help")


def test_no_client_gets_more_than_a_dozen_sentences_or_so():
    losing = [0.5, 0.5, 0.1, 0.5, 0.5, 0.5]
    features = np.arange(152.0)[:, None]
    of = study(SAME, SAME, losing, shared=SAME, losses=[[0.1] * 6, [1.0] * 6], facts=data(features=features))
    paragraphs = explain(of, 2)
    assert [*paragraphs] == ["data", "learned from", "result", "plausible", "may help"]
    assert sum(map(len, paragraphs.values())) <= 13
    assert all(text.endswith(".") and text[0].isupper() for part in paragraphs.values() for text in part)


# -- all clients -------------------------------------------------------------------------------------------------------


def test_the_most_affected_are_harmed_and_helped():
    of = study([0.5] * 8, [0.5] * 8, [0.1, 0.2, 0.25, 0.3, 0.9, 0.8, 0.55, 0.45], facts=data([[3, 3]] * 8))
    assert of.most_affected(3) == [0, 1, 4]  # beyond one standard error: 0 to 3 are harmed, 4 and 5 helped
    assert of.most_affected(5) == [0, 1, 2, 4, 5]
    assert of.most_affected(10) == [0, 1, 2, 3, 4, 5]
    assert of.most_affected(1) == [0]


def test_overview_counts_and_correlates():
    gaining = [0.1, 0.8, 0.8, 0.9, 0.95, 1.0]
    text = " ".join(overview(study(SAME, SAME, gaining)))
    assert "ditto on invented, seed 0: accuracy 75.8 % on average over 6 clients after round 4." in text
    assert "the mean gain is +25.8 points; of 6 clients, 5 gain and 1 loses (0) more than one standard error" in text
    rho, p = spearmanr(gaining, SIZES)
    assert f"size ρ = {rho:+.2f}" in text
    assert p < 0.05
    assert "Significant (p < 0.05): size." in text
    assert "Rank correlation" not in " ".join(overview(study(SAME, SAME, SAME)))  # nothing varies


def test_a_curve_that_still_rises_asks_for_more_rounds():
    one = outcome("ditto", SAME)
    change_validation(one, {"macro": 0.4})
    of = Study(Comparison({"ditto": [one]}), "ditto")
    assert "from 40.0 % after round 2 to 50.0 % after round 4: more rounds" in " ".join(overview(of))
    assert "more rounds" not in " ".join(overview(study(SAME, methods=("ditto",))))


def change_validation(of, *found):
    for place, changed in enumerate(found):
        figures = of.history[place].personal
        change(of, place, personal={**figures, "val": replace(figures["val"], **changed)})


def test_an_error_that_still_falls_asks_for_more_rounds():
    of = regression(tested=10)
    last, first = {"macro": 100.0}, {"macro": 102.0}
    change_validation(of.outcome, first, last)
    assert "from 102 after round 2 to 100 after round 4" in " ".join(overview(of))
    change_validation(of.outcome, {"macro": 100.5}, last)
    assert "more rounds" not in " ".join(overview(of))
    few = regression(tested=9)
    change_validation(few.outcome, first, last)
    said = "from 102 after round 2 to 100 after round 4; on 45 samples in all that may be chance."
    assert said in " ".join(overview(few))


def test_a_client_that_was_hardly_there_is_noticed():
    of = study(SAME, SAME, [0.9, 0.9, *SAME[2:]])
    sent = [Entry("up", round, "delta", "model", 1, (1, 2, 3, 4, 5)) for round in range(4)]
    prepared = Entry("up", -1, "delta", "model", 1, (0,))  # before the first round does not count
    outcomes = {**of.comparison.outcomes, "ditto": [replace(of.outcome, ledger=Ledger([prepared, *sent]))]}
    of = Study(Comparison(outcomes), "ditto")
    assert "It took part in 0 of the 4 rounds, the mean client in 3.3." in words(of, 0, "learned from")
    assert "It took part in 0 rounds, the mean client in 3.3, so what it gets" in words(of, 0, "plausible")
    assert "larger cohort" in words(of, 0, "may help")
    assert "took part" not in words(of, 1, "plausible")


def test_runs_of_different_length_are_not_passed_over():
    short = outcome("ditto", SAME, losses=[[1.0] * 6], rounds=4)
    runs = [outcome("local", SAME), outcome("fedavg", SAME), short]
    text = " ".join(overview(Study(Comparison.of_runs(runs), "ditto")))
    assert "ditto with seed 0 is incomplete: 2 of 4 rounds." in text
    assert "ditto after round 2, local after round 4 and fedavg after round 4" in text


def test_gains_of_local_itself_are_over_fedavg():
    of = study([0.2, *SAME[1:]], SAME, SAME, method="local")
    assert "Against fedavg the mean gain is -5.0 points" in " ".join(overview(of))
    assert of.most_affected(3) == [0]
    assert "plausible" not in explain(of, 0)


def test_clients_without_test_samples_are_not_counted():
    text = " ".join(overview(study(*[[math.nan, 0.5]] * 3, facts=data([[2, 2]] * 2), tested=[0, 4])))
    assert "of 1 client, 0 gain and 0 lose more than" in text


# -- names -------------------------------------------------------------------------------------------------------------


def test_clients_are_found_by_name_and_number():
    of = study(SAME, SAME, SAME, facts=data(names=["oslo", "rome", "5", "bern", "lima", "kyiv"]))
    assert [of.find(text) for text in ("rome", "0", "5", "4")] == [1, 0, 2, 4]
    assert [of.title(client) for client in (1, 2)] == ["rome (client 1)", "5 (client 2)"]
    with pytest.raises(UnknownName, match="from 0 to 5. Got 'rom'.\nhint: did you mean: rome"):
        of.find("rom")
    with pytest.raises(UnknownName, match="they are called oslo, rome, 5, bern, lima and kyiv"):
        of.find("77")
    plain = study(SAME, SAME, SAME)
    assert plain.title(3) == "Client 3"
    with pytest.raises(UnknownName):
        plain.find("-1")


# -- folders and the command line --------------------------------------------------------------------------------------

TINY = ["--rounds", "2", "--clients", "4", "--cohort", "3"]
MIXED = '''"""Mixed: a mean, of which everybody is said to take half from itself and half from the next client."""
from dataclasses import dataclass

import torch

from atoll.kernel.algorithm import Algorithm, Update
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Mixed(Algorithm):
    """For tests."""

    def local(self, w, cohort):
        """Train."""
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.weights("samples"))

    def mixing(self, server):
        """Half, half."""
        return (torch.eye(4) + torch.eye(4).roll(1, 1)) / 2
'''


def atoll(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def said(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A comparison of two methods and a method with a matrix, two seeds; and a lone run."""
    place = tmp_path_factory.mktemp("explained")
    (place / "mixed.py").write_text(MIXED)
    methods = ["local", "fedavg", "ditto", str(place / "mixed.py")]
    with one_thread_each():  # models this small only wait for a second one
        said(atoll("compare", *methods, *TINY, "--seeds", "2", "--out", str(place / "c")))
        said(atoll("run", "ditto", *TINY, "--out", str(place / "alone")))
    return place


def test_explain_a_comparison(folder):
    text = said(atoll("explain", str(folder / "c"), "--method", "ditto", "--client", "2", "--seed", "1"))
    one = Study.read(folder / "c", "ditto", 1)
    assert text.startswith("ditto on digits (dirichlet:0.3), seed 1: accuracy")
    for part in (*overview(one), *(sentence for some in explain(one, 2).values() for sentence in some)):
        assert part in text
    score = json.loads((folder / "c/ditto-seed1/metrics.jsonl").read_text().splitlines()[-1])
    assert f"{100 * score['evaluation']['personal']['test']['clients'][2]:.1f} %" in words(one, 2, "result")
    samples = json.loads((folder / "c/ditto-seed1/clients.json").read_text())["samples"]
    assert f"It trains on {samples[2]} samples" in text


def test_explain_opens_models_to_say_which_parts_are_whose(folder):
    one = Study.read(folder / "c", "ditto", 1)
    names, apart = one.parts
    text = said(atoll("explain", str(folder / "c"), "--method", "ditto", "--client", "2", "--seed", "1", "--parts"))
    sentence = " ".join(explain(one, 2, parts=True)["parts"])
    assert sentence in text
    farthest = names[int(np.argmax(apart[2]))]
    assert sentence.startswith(f"Its model differs from the average of all clients' models most in {farthest} by ")
    shared = " ".join(explain(Study.read(folder / "c", "fedavg", 0), 2, parts=True)["parts"])
    assert shared == "All clients deploy the same model."


def test_parts_that_all_clients_share_are_named():
    report = federate(Recipe(clients=3, samples=90).build(), "fedper", rounds=1, progress=False)
    study = Study(Comparison.of_runs([report]), report.label)
    text = " ".join(explain(study, 0, parts=True)["parts"])
    assert "most in head." in text
    assert text.endswith("All clients share body.1.weight, body.1.bias, body.3.weight and body.3.bias.")


def test_explain_reads_who_took_part(folder):
    one = Study.read(folder / "c", "ditto")
    entries = [json.loads(line) for line in (folder / "c/ditto-seed0/ledger.jsonl").read_text().splitlines()]
    delta = [entry["clients"] for entry in entries if entry["field"] == "delta"]
    assert len(delta) == 2
    for client in range(4):
        rounds = sum(client in clients for clients in delta)
        assert one.replies[client] == rounds
        expected = "all 2 rounds" if rounds == 2 else f"{rounds} of the 2 rounds, the mean client in 1.5"
        assert f"It took part in {expected}." in words(one, client, "learned from")
    assert Study.read(folder / "c", "local").replies is None


def test_explain_a_method_with_a_matrix(folder):
    text = said(atoll("explain", str(folder / "c"), "--method", str(folder / "mixed.py"), "--client", "1"))
    assert "Of what it gets, 50 % is its own, most of the rest that of 2 (50 %)" in text
    assert "over 2.0 equal clients" in text


def test_explain_the_most_affected(folder):
    one = Study.read(folder / "c", "fedavg")
    shown = atoll("explain", str(folder / "c"), "--method", "fedavg", "--most", "2").stdout
    titles = [line for line in shown.splitlines() if line.startswith("Client ")]
    assert titles == [one.title(client) for client in one.most_affected(2)]
    assert Study.read(folder / "c").method not in ("local", "fedavg")


def test_a_run_of_a_comparison_finds_its_references(folder):
    one = Study.read(folder / "c/ditto-seed1")
    assert (one.method, one.outcome.seed) == ("ditto", 1)
    assert words(one, 0, "result") == words(Study.read(folder / "c", "ditto", 1), 0, "result")
    assert "Against local" in words(one, 0, "result")


def test_a_lone_run_says_how_to_get_gains(folder):
    assert "`atoll compare ditto`" in said(atoll("explain", str(folder / "alone")))


def test_an_incomplete_run_says_so(folder, tmp_path):
    copied = tmp_path / "cut"
    shutil.copytree(folder / "c", copied)
    path = copied / "ditto-seed0/metrics.jsonl"
    shutil.rmtree(copied / "ditto-seed0/checkpoints")  # killed before the first one
    path.write_text(path.read_text().splitlines()[0] + "\n")
    text = said(atoll("explain", str(copied), "--method", "ditto"))
    assert "ditto with seed 0 is incomplete: 1 of 2 rounds." in text
    assert "Gains compare scores of different rounds" in text
    path.write_text("")
    with pytest.raises(RunError, match="needs the scores of clients"):
        Study.read(copied / "ditto-seed0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--client", "9"], "by a number from 0 to 3. Got '9'."),
        (["--method", "dito"], "Unknown method 'dito'. Did you mean: ditto?"),
        (["--seed", "5"], "Unknown seed '5'. Available: 0, 1"),
        (["--most", "0"], "--most"),
    ],
)
def test_wrong_options_are_explained(folder, options, message):
    result = atoll("explain", str(folder / "c"), *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert "must hold config.json" in atoll("explain", str(tmp_path)).stderr


# -- a gate ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pulls", "said"),
    [
        ([0.0, 0.0], "The gate stayed shut in all 2 rounds"),
        ([0.0, 1.5], "open in 1 of 2 rounds, first in round 4, with a pull of 1.5 on average."),
        ([2.0, 0.0], "first in round 2, with a pull of 2 on average and has been shut since round 3."),
    ],
)  # fmt: skip
def test_when_a_gate_was_open(pulls, said):
    of = study(SAME, SAME, SAME)
    for place, pull in enumerate(pulls):
        of.outcome.history[place] = replace(of.outcome.history[place], observed={"lam": {"1": pull}})
    assert said in words(of, 1, "learned from")
    assert "gate" not in words(of, 2, "learned from")


@pytest.mark.parametrize(
    ("alone", "lead", "said"),
    [
        (
            1.0,
            3.14,
            "the model that it trained alone: on its validation data its own model is 3.1 standard errors better.",
        ),
        (0.0, -0.5, "what the method offers: on its validation data its own model is 0.5 standard errors worse."),
    ],
)
def test_whether_a_client_fell_back(alone, lead, said):
    of = study(SAME, SAME, SAME)
    change(of.outcome, observed={"alone": {"1": alone}, "lead": {"1": lead}})
    assert f"It deploys {said}" in words(of, 1, "learned from")
    assert "deploys" not in words(of, 2, "learned from")
