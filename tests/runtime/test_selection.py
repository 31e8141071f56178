"""Who is asked: rules by hand, their limits, and runs that go on with what they knew."""

from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import Cohort, LocalEngine, Settings, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.compose import create
from atoll.federation.report import Report
from atoll.federation.selection import Experience, Oort, Pool, PowerOfChoice, Turns, Ucb, parse_selection
from atoll.kernel.algorithm import Update
from atoll.kernel.errors import CohortError, PrivacyError, UnknownName
from atoll.kernel.params import Params
from atoll.testing.conformance.tasks import build_task

EVERYBODY = np.arange(6)
SAMPLES = np.array([10.0, 20, 30, 40, 50, 60])


def pool(known: Experience, size: int, seed: int = 0, present: np.ndarray = EVERYBODY) -> Pool:
    return Pool(present, size, known, SAMPLES, np.random.default_rng(seed))


def heard_all(losses: list[float], rounds: int = 1) -> Experience:
    known = Experience.none(6)
    for round in range(rounds):
        known.learn(round, EVERYBODY, EVERYBODY, np.array(losses))
    return known


def run(select: str, folder: Path | None = None, **settings: object) -> Report:
    given = {"rounds": 6, "cohort": 2, "evaluation": "none", "engine": LocalEngine(dtype=torch.float64), **settings}
    return federate(build_task(), create("fedavg"), select_clients=select, folder=folder, **given)


def asked(report: Report) -> np.ndarray:
    """How often each client replied."""
    replies = [message for message in report.ledger.messages() if message.field == "delta"]
    return np.bincount([message.client for message in replies], minlength=6)


# -- power of choice -------------------------------------------------------------------------------------------------


def test_with_as_many_candidates_as_are_asked_it_is_uniform() -> None:
    for round in range(5):
        drawn = [
            Settings(cohort=3, select_clients=words).choose(6, round) for words in ("uniform", "power-of-choice:3")
        ]
        assert drawn[0].tolist() == drawn[1].tolist()
    plain, limit = run("uniform"), run("power-of-choice:2")
    assert all((plain.server[name] == leaf).all() for name, leaf in limit.server.items())


def test_with_all_clients_as_candidates_the_highest_losses_are_asked() -> None:
    known = heard_all([0.1, 0.9, 0.3, 0.8, 0.2, 0.4])
    assert sorted(PowerOfChoice(6).choose(pool(known, 3))) == [1, 3, 5]


def test_who_was_never_heard_comes_first() -> None:
    known = Experience.none(6)
    known.learn(0, EVERYBODY[:5], EVERYBODY[:5], np.full(5, 99.0))
    assert 5 in PowerOfChoice(6).choose(pool(known, 1))


def test_candidates_are_drawn() -> None:
    known = heard_all([6.0, 5, 4, 3, 2, 1])
    found = {int(PowerOfChoice(2).choose(pool(known, 1, seed))[0]) for seed in range(60)}
    assert found == {0, 1, 2, 3, 4}  # the lowest loss of all never wins


def test_only_those_who_are_there_are_asked() -> None:
    known = heard_all([6.0, 5, 4, 3, 2, 1])
    for words in ("power-of-choice:4", "oort", "ucb", "turns"):
        chosen = parse_selection(words).choose(pool(known, 2, present=np.array([1, 3, 5])))
        assert set(chosen) <= {1, 3, 5}
        assert len(set(chosen)) == 2


# -- Oort --------------------------------------------------------------------------------------------------------------


def test_oort_explores_its_share() -> None:
    known = Experience.none(6)
    known.learn(0, EVERYBODY[:3], EVERYBODY[:3], np.array([1.0, 1, 1]))
    chosen = Oort(0.5).choose(pool(known, 2))
    assert (chosen > 2).sum() == 1
    assert set(Oort(1.0).choose(pool(known, 3))) == {3, 4, 5}


def test_oort_asks_for_samples_times_loss() -> None:
    known = heard_all([6.0, 0.1, 0.1, 0.1, 0.1, 3.0])  # 60, 2, 3, 4, 5, 180: the last alone is near the top
    assert {int(Oort(0.2).choose(pool(known, 1, seed))[0]) for seed in range(20)} == {5}


def test_oort_asks_again_for_old_losses() -> None:
    known = heard_all([1.0, 1, 1, 1, 1, 1])
    for round in range(1, 200):
        known.learn(round, EVERYBODY[1:], EVERYBODY[1:], np.full(5, 1.0))
    # Utility 10 / 60 + sqrt(0.1 log 201 / 1) = 0.895 against 50 / 60 + sqrt(0.1 log 201 / 200) = 0.885 and 1.05.
    assert {int(one) for seed in range(20) for one in Oort(0.2).choose(pool(known, 2, seed))} >= {0, 5}


# -- a bandit ----------------------------------------------------------------------------------------------------------


def test_bounds_by_hand() -> None:
    known = Experience.none(6)
    known.learn(0, EVERYBODY, np.array([0, 1]), np.array([2.0, 4.0]), 0.5)
    known.learn(1, EVERYBODY, np.array([0]), np.array([1.0]), 0.5)
    # L_0 = 1 + 2 / 2, N_0 = 1 + 1 / 2, L_1 = 4 / 2, N_1 = 1 / 2, T = 1 + 1 / 2; last losses 1 and 4, deviation 1.5.
    bound = Ucb(0.5).bounds(known, SAMPLES)
    assert bound[0] == pytest.approx(10 / 210 * (2 / 1.5 + np.sqrt(2 * 1.5**2 * np.log(1.5) / 1.5)))
    assert bound[1] == pytest.approx(20 / 210 * (4 + np.sqrt(2 * 1.5**2 * np.log(1.5) / 0.5)))
    assert np.isinf(bound[2:]).all()


def test_a_bandit_asks_everybody_and_then_mostly_those_who_lose_most() -> None:
    known, truth, counts = Experience.none(6), np.array([0.1, 0.1, 0.1, 0.1, 0.1, 3.0]), np.zeros(6)
    for round in range(60):
        chosen = Ucb(0.9).choose(Pool(EVERYBODY, 2, known, np.ones(6), np.random.default_rng(round)))
        known.learn(round, chosen, chosen, truth[chosen], 0.9)
        counts[chosen] += 1
    assert counts.min() >= 2
    assert counts[5] > 1.5 * counts[:5].max()


# -- turns -------------------------------------------------------------------------------------------------------------


def test_turns_leave_nobody_behind() -> None:
    assert asked(run("turns", rounds=6)).tolist() == [2, 2, 2, 2, 2, 2]
    assert np.ptp(asked(run("turns", rounds=7))) <= 1
    assert np.ptp(asked(run("uniform", rounds=6))) > 1


def test_equals_are_drawn() -> None:
    assert len({tuple(Turns().choose(pool(Experience.none(6), 3, seed))) for seed in range(20)}) > 5


# -- in a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["power-of-choice:4", "oort", "ucb", "turns"])
def test_a_resumed_run_asks_whom_it_would_have_asked(select: str, tmp_path: Path) -> None:
    """catches: what is known of clients that is not in the checkpoint."""
    whole = run(select, seed=3, rounds=8)

    def stop(line: object) -> None:
        if getattr(line, "round", 0) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(select, tmp_path / "run", seed=3, rounds=8, eval_every=1, on_round=stop)
    resumed = run(select, tmp_path / "run", seed=3, rounds=8, eval_every=1, resume=True)
    assert asked(resumed).tolist() == asked(whole).tolist()
    assert all((whole.server[name] == leaf).all() for name, leaf in resumed.server.items())


def test_losses_are_sent_and_counted() -> None:
    bytes_up = {words: run(words).ledger.bytes("up") for words in ("turns", "ucb")}
    assert bytes_up["ucb"] > bytes_up["turns"]
    sent = [one for one in run("ucb").ledger.messages() if one.field == "loss"]
    assert len(sent) == 12
    assert {one.direction for one in sent} == {"up"}


def test_losses_decide_who_is_asked() -> None:
    counts = {words: asked(run(words, rounds=12)).tolist() for words in ("uniform", "power-of-choice:6", "oort", "ucb")}
    assert len(set(map(tuple, counts.values()))) == 4


def test_late_and_lost_replies_do_not_stop_it() -> None:
    report = run("power-of-choice:4", late=0.4, delay=2, drop=0.3, rounds=8, participation="random:0.7")
    assert len(report.history) == 8


class Silent(FedAvg):
    """Trains nothing."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        return Update(send={"delta": cohort.stacked(w) - w}, weight=cohort.samples)


def test_a_method_without_losses_is_refused() -> None:
    words = {"cohort": 2, "select_clients": "ucb", "evaluation": "none"}
    with pytest.raises(CohortError, match="clients of Silent report none"):
        federate(build_task(), Silent(), rounds=2, **words)
    with pytest.raises(CohortError, match="`select_clients=ucb` learns from earlier rounds, and FedCGS has one"):
        federate(build_task(), create("fedcgs"), rounds=1, **words)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["power-of-choice", "power-of-choice:x", "turns:3", "oort:0", "ucb:1.5", "ucb:1:2"])
def test_bad_words(words: str) -> None:
    with pytest.raises(CohortError, match="must be"):
        parse_selection(words)


def test_an_unknown_rule() -> None:
    with pytest.raises(UnknownName, match="power-of-choice"):
        parse_selection("power-of-choise:3")


@pytest.mark.parametrize("select", ["power-of-choice:1", "power-of-choice:7"])
def test_too_few_and_too_many_candidates(select: str) -> None:
    with pytest.raises(CohortError, match="at least the cohort, 2, and at most all clients, 6"):
        run(select)


@pytest.mark.parametrize("cohort", [None, "poisson:0.5"])
def test_a_selection_needs_a_cohort(cohort: str | None) -> None:
    with pytest.raises(CohortError, match="`cohort` must be a number of clients"):
        run("turns", cohort=cohort)


def test_no_selection_under_privacy_about_clients() -> None:
    with pytest.raises(PrivacyError, match="fixed size"):
        run("ucb", dp="client:epsilon=4,delta=1e-5")
