"""Advice rests on validation samples, is tested with fresh seeds, and says when federating does not pay."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll import Recipe, Task, advise, create
from atoll.algorithms import name_of
from atoll.experiments import advice as module
from atoll.experiments.candidates import ALWAYS, CLUSTERS, Constraints, Look, normalise_lead, propose
from atoll.kernel.errors import RunError
from atoll.metrics.gains import Gain, estimate_gain, pool_seeds
from atoll.report.table import count_range

SMALL = Recipe("digits", partition="dirichlet:0.3", clients=8, samples=400, model="mlp:4")
QUICK = {"trials": 3, "chosen_by": 1, "seeds": 2, "rounds": 5}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    return advise(SMALL, ["fedavg-ft", "knn-per", "fedper"], **QUICK, folder=folder), folder


# -- gains and how sure they are ---------------------------------------------------------------------------------------


def test_an_interval_has_two_parts_by_hand():
    gains = np.array([[1.0, 3.0, 1.0, 3.0, 1.0, 3.0], [2.0, 4.0, 2.0, 4.0, 2.0, 4.0], [0.0, 2.0, 0.0, 2.0, 0.0, 2.0]])
    gain = estimate_gain(gains)
    assert gain.mean == pytest.approx(2.0)
    of_clients = math.sqrt(1.2) / math.sqrt(6)  # clients gain 1 and 3
    of_seeds = 1 / math.sqrt(3)  # seeds gain 2, 3 and 1
    assert gain.of_clients == pytest.approx(of_clients)
    assert gain.of_seeds == pytest.approx(of_seeds)
    both = of_clients**2 + of_seeds**2
    freedom = both**2 / (of_clients**4 / 5 + of_seeds**4 / 2)
    from scipy import stats

    assert gain.half == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(both))


def test_words_need_an_interval_and_seeds():
    clear = np.full((3, 8), 0.1) + np.linspace(0, 0.01, 8)
    assert estimate_gain(clear).words == "sure"
    assert estimate_gain(clear[:2]).words == "likely"  # two seeds are never sure
    assert estimate_gain(clear[:, :5]).words == "too few clients to say how sure"
    assert estimate_gain(clear[:, :5]).half is None
    noise = np.random.default_rng(0).normal(size=(3, 8))
    mixed = noise - noise.mean(axis=1, keepdims=True) + np.array([[1.0], [-1.0], [0.1]])
    assert estimate_gain(mixed).words == "no evidence"


def test_clients_without_a_score_do_not_count():
    gains = np.array([[0.1] * 7 + [np.nan], [0.2] * 7 + [np.nan]])
    assert estimate_gain(gains).mean == pytest.approx(0.15)
    assert estimate_gain(gains).of_clients == pytest.approx(0.0)


def test_seeds_are_pooled_over_methods():
    several = [np.array([[0.0, 0.0], [2.0, 2.0]]), np.array([[1.0, 1.0], [1.0, 1.0]])]
    spread, freedom = pool_seeds(several)
    assert (spread, freedom) == (pytest.approx(1.0), 2)  # squares 2 and 0, one degree of freedom each


def test_an_interval_covers_a_truth_that_was_not_chosen_by():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        truth = rng.normal(0.02, 0.06, size=12) + rng.normal(0, 0.01, size=(3, 1))
        gain = estimate_gain(truth)
        covered += abs(gain.mean - 0.02) <= gain.half
    assert covered >= 186  # of 200, for 95 %


# -- which methods are raced -------------------------------------------------------------------------------------------

LOOK = Look(clients=20, samples=200, divergence=0.05, shift=1.0)


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (replace(LOOK, lead=0.1), {"fedprox", "perfedavg", "fedrod"}),
        (replace(LOOK, lead=-0.1, divergence=0.5), {"fedrep", "fedper", "pfedme"}),
        (replace(LOOK, samples=30), {"fedrod", "knn-per", "apfl"}),
        (replace(LOOK, shift=3.0), {"fedora", CLUSTERS, "fedbn"}),
        (replace(LOOK, lead=-0.3), {"fedper", "fedora:similarity=loss", CLUSTERS, "cfl"}),
        (replace(LOOK, public=True), {"feddf"}),
        (LOOK, {"fedper", "fedrod", "apfl"}),
    ],
)
def test_what_is_seen_cuts_the_list(look, expected):
    names = {*propose(look, Constraints())}
    assert expected <= names
    assert {*ALWAYS[2:]} <= names
    assert all(create(name) for name in names)


def test_one_upload_and_sums_are_constraints():
    assert all(create(name).one_shot for name in propose(LOOK, Constraints(one_shot=True)))
    assert (
        Constraints(individual_updates=False).forbids(create("fedora")) == "its server needs what single clients send"
    )
    assert Constraints(individual_updates=False).forbids(create("ditto")) is None


def test_a_lead_of_errors_is_a_share_of_them():
    assert normalise_lead(0.9, 0.8, higher_is_better=True, share=True) == pytest.approx(0.1)
    assert normalise_lead(1.0, 2.0, higher_is_better=False, share=False) == pytest.approx(0.5)
    assert normalise_lead(-math.inf, 2.0, higher_is_better=False, share=False) is None


# -- advice ------------------------------------------------------------------------------------------------------------


def test_the_sentence_says_what_the_comparison_found(found):
    advice, _ = found
    rows = {row["method"]: row for row in advice.comparison.results}
    best = rows[advice.best.label]
    assert advice.gains["local"].mean == pytest.approx(best["gain_local"])
    assert f"{100 * best['gain_local']:+.1f}" in advice.sentence
    counts = advice.comparison.find_harmed(advice.best.label).sum(axis=1)
    assert f"{count_range(counts)} of 8 clients worse off (up to 1 by chance)" in advice.sentence
    assert best["harmed"] == pytest.approx(counts.mean())
    assert advice.sentence.startswith("Use " if advice.federate else "Federating does not pay here: ")
    assert advice.comparison.seeds == [1, 2]
    assert advice.sentences[0].startswith("The second choice is ")
    assert advice.sentences[-1].startswith("The federation: 8 clients")


def test_local_and_fedavg_are_raced_to_the_end_with_the_same_budget(found):
    advice, _ = found
    for name in ("local", "fedavg"):
        arms = [arm for arm in advice.race.arms if name_of(arm.method) == name]
        assert len(arms) == 3
        assert any(5 in arm.rungs for arm in arms)
    assert [*advice.reasons] == ["local", "fedavg", "fedavg-ft", "knn-per", "fedper"]


def test_methods_that_read_validation_samples_are_judged_by_the_other_half(found):
    advice, _ = found
    task = advice.race.tasks[0]
    assert not {*task.splits["val"].order.tolist()} & {*task.splits["test"].order.tolist()}


def test_it_is_written_for_programs(found):
    advice, folder = found
    read = json.loads(advice.save(folder)["advice"].read_text())
    keys = {
        "sentence", "task", "constraints", "arms", "choice", "claim", "cost", "shared_statistics", "warnings", "second",
        "raced_because",
    }  # fmt: skip
    assert read.keys() == keys
    assert read["claim"]["seeds"] == [1, 2]
    assert read["claim"]["gain_local"] == pytest.approx(advice.gains["local"].mean)
    assert read["cost"]["rounds"] == sum(run.done for run in advice.race.reports.values())


class FakeRace:
    """A race that has ended with these validation scores."""

    rounds, sign = 9, 1

    def __init__(self, scores, harmed=None, sent=None):
        self.table, self.harmed, self.sent = scores, harmed or {}, sent or {}

    def rank(self, arms, rounds):
        return sorted(arms, key=lambda arm: -np.mean(self.table[arm]))

    def lead(self, arm, other, rounds):
        lead = np.array(self.table[arm]) - np.array(self.table[other])
        return float(lead.mean()), float(lead.std(ddof=1) / math.sqrt(len(lead))), lead

    def count_harmed(self, arm, local):
        return self.harmed.get(arm, 0)

    def megabytes(self, arm):
        return self.sent.get(arm, 0.0)

    def gradients(self, arm):
        return 1.0


def test_where_training_alone_is_as_near_it_is_the_choice():
    local, ditto = [0.80, 0.70, 0.90, 0.80], [0.90, 0.62, 0.90, 0.80]
    assert np.mean(ditto) > np.mean(local)  # by less than a standard error
    race = FakeRace({"local": local, "ditto": ditto}, {"ditto": 1}, {"ditto": 3.0})
    assert module.choose(race, ["local", "ditto"], "local") == "local"
    better = FakeRace({"local": local, "ditto": [one + 0.05 for one in local]}, {}, {"ditto": 3.0})
    assert module.choose(better, ["local", "ditto"], "local") == "ditto"


def test_of_near_equals_the_gentler_then_the_cheaper_is_chosen():
    scores = {"a": [0.90, 0.80, 0.90], "b": [0.80, 0.90, 0.89], "local": [0.5, 0.5, 0.5]}
    assert module.choose(FakeRace(scores, {"a": 2, "b": 1}), ["local", "a", "b"], "local") == "b"
    assert module.choose(FakeRace(scores, {}, {"a": 1.0, "b": 2.0}), ["local", "a", "b"], "local") == "a"


def test_where_clients_have_nothing_in_common_federating_does_not_pay():
    """Every client has its own linear rule, which it can learn alone; averaging them says nothing."""
    draw = torch.Generator().manual_seed(0)
    data = {}
    for k in range(8):
        x = torch.randn(80, 3, generator=draw)
        data[f"c{k}"] = (x, ((-1) ** k * x[:, k % 3] > 0).long())
    task = Task.own(data, kind="classification", model="linear")
    found = advise(task, ["fedavg-ft"], trials=3, chosen_by=1, seeds=2, rounds=9)
    assert not found.federate
    assert name_of(found.method) == "local"
    assert found.sentence.startswith("Federating does not pay here: the best method, ")


def test_no_individual_updates_leaves_methods_out_aloud():
    found = advise(SMALL, ["fedora", "fedavg-ft"], individual_updates=False, **QUICK)
    assert "fedora is left out: its server needs what single clients send." in found.warnings
    assert not any(arm.entry == "fedora" for arm in found.race.arms)


def test_megabytes_exclude_methods_and_say_how_many_they_need():
    with pytest.raises(
        RunError, match=r"No method but training alone fits these constraints: the cheapest .* Got max_mb"
    ):
        advise(SMALL, ["fedavg-ft"], max_mb=0.0001, **QUICK)


def test_new_runs_decide_what_validation_samples_leave_open(found):
    """catches: "does not pay" said of a gain that new runs make likely, or a choice that they contradict."""
    advice, _ = found
    local = next(arm for arm in advice.race.arms if name_of(arm.method) == "local")
    clear, unclear = (Gain(0.05, half, 0.01, 0.01, 3, agree=agree) for half, agree in ((0.02, True), (0.2, False)))
    near = replace(advice, choice=local, gains={"local": clear})
    assert near.federate
    assert not replace(near, gains={"local": unclear}).federate
    assert not replace(near, gains={"local": replace(clear, mean=-0.05)}).federate
    assert replace(near, choice=advice.best, gains={"local": unclear}).federate
    assert not replace(near, choice=advice.best, gains={"local": replace(unclear, mean=-0.05)}).federate


@pytest.mark.slow
def test_one_upload(tmp_path):
    found = advise(SMALL, one_shot=True, trials=3, chosen_by=1, seeds=2, folder=tmp_path)
    assert found.race.rounds == 1
    assert all(arm.method.one_shot or name_of(arm.method) in ("local", "fedavg") for arm in found.race.arms)
    assert "in 1 round;" in found.sentence or not found.federate


@pytest.mark.slow
def test_what_may_fit_is_raced_without_being_named(tmp_path):
    found = advise(SMALL, **QUICK, folder=tmp_path)
    assert {"local", "fedavg", "fedavg-ft", "ditto", "knn-per"} <= {*found.reasons}
    again = advise(SMALL, **QUICK, folder=tmp_path)
    assert again.sentence == found.sentence


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_two_clients_get_their_gains_one_by_one():
    found = advise(Recipe("digits", partition="iid", clients=2, samples=120, model="mlp:4"), ["fedavg-ft"], **QUICK)
    assert found.gains["local"].half is None
    assert "too few clients to say how sure" in found.sentence
    assert any(sentence.startswith("Client by client, ") for sentence in found.sentences)
    assert "2 clients are few: what holds for them may not hold for others." in found.warnings


def test_one_client_has_nothing_to_federate():
    with pytest.raises(RunError, match="There is nothing to federate: advice needs at least 2 clients. Got 1."):
        advise(Recipe("digits", partition="iid", clients=1, samples=120, model="mlp:4"), **QUICK)


def test_megabytes_must_be_above_nothing():
    with pytest.raises(RunError, match="`max_mb` must be above 0. Got 0."):
        advise(SMALL, "fedavg-ft", max_mb=0, **QUICK)


def test_one_upload_has_one_round():
    with pytest.raises(RunError, match="With one upload there is one round. Got rounds=5."):
        advise(SMALL, one_shot=True, **QUICK)


def test_without_test_samples_it_chooses_and_claims_nothing():
    found = advise(replace(SMALL, split="70/30/0"), ["fedavg-ft"], **QUICK)
    assert found.comparison is None
    assert not found.gains
    assert "nothing is claimed" in found.sentence or "does not pay" in found.sentence
    json.dumps(found.as_json())
