"""Attacks on the replies of protect.md 5.2, on samples, and in whole runs."""

import numpy as np
import pytest
import torch

from atoll import Recipe, federate
from atoll.algorithms import Ditto, FedAvg, Local
from atoll.federation.results import Results
from atoll.kernel.algorithm import Arrival
from atoll.kernel.errors import HyperparameterError, UnknownName
from atoll.kernel.params import Stack
from atoll.protect.attacks import ATTACKS, Scene, hidden_deviations, parse_attack
from atoll.protect.vectors import gram, squared_distances
from atoll.report.summary import write_findings

X = torch.tensor([[0, 0], [1, 0], [0, 2], [3, 1], [50, -40]], dtype=torch.float64)
SIZES = (8, 9, 12, 7, 10)


def reply(words, **more):
    own = Arrival(np.arange(4, 5), {"delta": Stack.of(w=X[4:])}, torch.ones(1))
    scene = Scene({"delta": Stack.of(w=X[:4])}, own, **{"replies": 5, "hostile": 1, "seed": 0, "round": 0, **more})
    return parse_attack(words).replies(scene)["delta"]["w"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sign-flip", [-1, -0.75]),
        ("ipm:factor=2", [-2, -1.5]),
        ("alie:factor=-1.5", [3.1213203436, 2.1861406616]),
        ("scaling", [250, -200]),
        ("scaling:factor=2", [100, -80]),
        ("mimic", [3, 1]),
        ("free-rider", [0, 0]),
    ],
)
def test_attackers_send_what_they_send_by_hand(words, expected):
    assert reply(words)[0].tolist() == pytest.approx(expected)


def test_alie_goes_as_far_as_a_majority_hides_it():
    assert hidden_deviations(50, 12) == pytest.approx(0.336, abs=1e-3)
    assert hidden_deviations(50, 24) == pytest.approx(1.43, abs=5e-3)
    assert hidden_deviations(10, 2) == 0


def test_min_max_stays_within_the_widest_distance_of_honest_replies():
    made = reply("min-max")
    distances = squared_distances(gram([torch.cat([X[:4], made])]))
    assert distances[4, :4].max() == pytest.approx(distances[:4, :4].max().item(), rel=1e-6)


def test_noise_is_as_large_as_the_own_reply_and_the_same_every_time():
    assert torch.equal(reply("gaussian"), reply("gaussian"))
    assert not torch.equal(reply("gaussian"), reply("gaussian", round=1))
    own = Arrival(np.arange(1), {"delta": Stack.of(w=torch.linspace(-9, 9, 20_000)[None].double())}, torch.ones(1))
    scene = Scene({"delta": own.fields["delta"]}, own, 2, 1, 0, 0)
    made = parse_attack("gaussian").replies(scene)["delta"]["w"]
    assert made.std() == pytest.approx(own.fields["delta"]["w"].std().item(), rel=0.03)


def test_noise_of_an_attacker_does_not_depend_on_who_arrives_with_it():
    leaves = {"w": X.clone(), "b": X[:, 0].clone()}
    whole = [Arrival(np.arange(5), {"delta": Stack(leaves)}, torch.ones(5))]
    halves = [one.only(part) for one in whole for part in (np.arange(5) < 2, np.arange(5) >= 2)]
    made = [parse_attack("gaussian").forge(some, np.array([1, 3, 4]), seed=0, round=0) for some in (whole, halves)]
    for name in leaves:
        first, second = (torch.cat([one.fields["delta"][name] for one in some]) for some in made)
        assert torch.equal(first, second)
    assert not torch.equal(made[0][0].fields["delta"]["w"][3], made[0][0].fields["delta"]["w"][4])


def test_only_attackers_replace_their_replies():
    arrivals = [Arrival(np.arange(5), {"delta": Stack.of(w=X.clone())}, torch.ones(5))]
    (made,) = parse_attack("sign-flip").forge(arrivals, np.array([1, 3]), seed=0, round=0)
    honest = X[[0, 2, 4]].mean(0)
    assert torch.equal(made.fields["delta"]["w"][[0, 2, 4]], X[[0, 2, 4]])
    assert torch.allclose(made.fields["delta"]["w"][[1, 3]], -honest.expand(2, 2))
    assert torch.equal(arrivals[0].fields["delta"]["w"], X)


def test_attackers_are_drawn_once_and_nobody_scores_them(make_task):
    task = make_task(sizes=SIZES, shares=(0.6, 0.0, 0.4))
    report = federate(task, FedAvg(), rounds=2, attack="sign-flip:0.4")
    assert len(report.scored) == 3
    again = federate(task, Ditto(), rounds=1, attack="free-rider:0.4")
    assert again.scored.tolist() == report.scored.tolist()


def test_honest_clients_are_everybody_and_no_sample(make_task):
    """Figures of all honest clients have no interval of a sample, and words say whose they are."""
    task = make_task(sizes=(8,) * 10, shares=(0.6, 0.0, 0.4))
    report = federate(task, FedAvg(), rounds=1, attack="sign-flip:0.2")
    assert report.select_evaluation().personal["test"].interval is None
    results = Results({"fedavg": [report]})
    assert not results.sampled
    assert "the 8 honest clients of 10, each counted the same" in results.protocol
    assert "sample" not in results.protocol.partition(";")[2]
    assert "over all honest clients" in write_findings(results)[0]


def test_a_sample_of_honest_clients_is_called_that(make_task):
    task = make_task(sizes=(8,) * 10, shares=(0.6, 0.0, 0.4))
    report = federate(task, FedAvg(), rounds=1, attack="sign-flip:0.2", evaluation="sample:6")
    assert report.select_evaluation().personal["test"].interval is not None
    results = Results({"fedavg": [report]})
    assert f"a sample of {len(report.scored)} of the 8 honest clients of 10" in results.protocol
    assert "interval of the mean over all 8 honest clients" in results.protocol


@pytest.mark.parametrize("words", [name for name, kind in ATTACKS.items() if not kind.on_data])
def test_every_attack_of_the_wire_changes_what_honest_clients_get(make_task, words):
    task = make_task(sizes=SIZES)
    plain = federate(task, FedAvg(), rounds=2, evaluation="none").server
    attacked = federate(task, FedAvg(), rounds=2, evaluation="none", attack=f"{words}:0.4").server
    assert (plain - attacked).norm() > 1e-6


@pytest.mark.parametrize("words", ATTACKS)
def test_a_method_that_sends_nothing_leaves_nothing_to_attack(make_task, words):
    task = make_task(sizes=SIZES, shares=(0.6, 0.2, 0.2))
    report = federate(task, Local(), rounds=2, evaluation="none", attack=f"{words}:0.4")
    assert [line.replied for line in report.history] == [5, 5]


def test_a_reply_that_is_not_finite_loses_its_own_client_and_changes_nothing_else(make_task):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    report = federate(task, FedAvg(), rounds=1, evaluation="none", attack="not-finite:0.4")
    honest = np.setdiff1d(np.arange(5), parse_attack("not-finite:0.4").draw_attackers(5, 0))
    alone = federate(task, FedAvg(), rounds=1, evaluation="none", faults=lambda _, c: ~np.isin(c, honest))
    assert (report.server - alone.server).norm() == 0
    assert report.history[0].lost == {"not finite": 2}


@pytest.mark.parametrize("words", ["label-flip:0.4", "label-flip:share=0.4,random=true", "backdoor:0.4",
                                   "scaling:share=0.4,random=true"])  # fmt: skip
def test_attackers_of_the_data_change_their_own_samples_alone(make_task, words):
    task = make_task(sizes=SIZES, shares=(0.6, 0.2, 0.2), classes=4)  # no class is its own opposite
    attack = parse_attack(words)
    bad = attack.draw_attackers(task.clients, 0)
    poisoned = attack.poison(task, bad, 0)
    for split in ("train", "val", "test"):
        for client in range(task.clients):
            before, after = (
                (one.x[rows], one.y[rows])
                for one in (task, poisoned)
                for rows in [one.splits[split].of(np.array([client])).order]
            )
            same = torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
            assert same == (client not in bad or split == "test") or len(before[1]) == 0 or "random" in words
    assert torch.equal(poisoned.x[: len(task.x)], task.x)


def test_a_backdoor_is_measured_on_honest_clients_and_works():
    """The shared model answers the target to the trigger; clients that train alone never learn it."""
    task = Recipe("digits", partition="iid", clients=8, samples=800, model="mlp:32").build()
    more = {"rounds": 8, "attack": "backdoor:share=0.4,size=4"}
    fooled, alone = (federate(task, method, **more).select_evaluation().attack for method in ("fedavg", "local"))
    assert fooled > 0.6
    assert alone < 0.4
    assert federate(task, "fedavg", rounds=1).select_evaluation().attack is None


def test_test_samples_of_the_target_do_not_count_as_success(make_task):
    task = make_task(sizes=SIZES, shares=(0.5, 0.0, 0.5))
    shown = parse_attack("backdoor").show_trigger(task)
    order = task.splits["test"].order
    assert len(shown.splits["test"].order) == int((task.y[order] != 0).sum())
    assert (shown.y[shown.splits["test"].order] == 0).all()
    assert (shown.x[shown.splits["test"].order][:, -3:] == task.x.max()).all()


def test_personal_models_of_honest_clients_do_not_feel_an_attack_on_the_wire(make_task):
    task = make_task(sizes=SIZES, shares=(0.6, 0.0, 0.4), dtype=torch.float64)
    plain, attacked = (
        federate(task, Local(), rounds=2, attack=words).select_evaluation().personal["test"].clients
        for words in ("none", "sign-flip:0.4")
    )
    honest = federate(task, Local(), rounds=2, attack="sign-flip:0.4").scored
    assert [plain[k] for k in honest] == attacked


def test_a_run_under_attack_with_a_rule_is_resumed_bit_for_bit(make_task, tmp_path):
    import threading

    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 4, "evaluation": "none", "attack": "alie:share=0.4,factor=2", "aggregate": "nnm:1+median",
            "compress": "topk:0.3", "late": 0.3, "cohort": 4}  # fmt: skip
    whole = federate(task, Ditto(), **more).server
    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        federate(task, Ditto(), folder=tmp_path / "run", stop=stop, on_round=lambda _: stop.set(), **more)
    resumed = federate(task, Ditto(), folder=tmp_path / "run", resume=True, **more).server
    assert (whole - resumed).norm() == 0


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ("sign-filp", UnknownName, "sign-flip"),
        ("sign-flip:2", HyperparameterError, "share of attackers"),
        ("sign-flip:x", HyperparameterError, "must be a float"),
        ("alie:facto=1", UnknownName, "factor"),
        ("backdoor:target=9", HyperparameterError, "0 to 2"),
        ("backdoor:amount=0", HyperparameterError, "amount"),
        ("alie:0.2,7", HyperparameterError, "name=value"),
    ],
)
def test_attacks_that_cannot_be_are_refused(make_task, words, error, text):
    with pytest.raises(error, match=text):
        federate(make_task(), FedAvg(), rounds=1, evaluation="none", attack=words)
