"""Who is there in a round, and replies that are late."""

from pathlib import Path

import numpy as np
import pytest
import torch

from atoll import LocalEngine, Recipe, Settings, federate
from atoll.algorithms.fedrep import FedRep
from atoll.compose import create
from atoll.federation.participation import Moment, parse
from atoll.federation.report import Report
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import CohortError, DataError, RunError, UnknownName
from atoll.kernel.params import Stack, Tree
from atoll.testing.conformance import personal_models, play, quadratics
from atoll.testing.conformance.tasks import build_task

ROUNDS = 40


def days(words: str, clients: int = 30, seed: int = 3) -> np.ndarray:
    """Who is there, [round, client]."""
    schedule = parse(words)
    return np.stack([schedule(Moment(round, clients, seed, ROUNDS)) for round in range(ROUNDS)])


def test_constant_is_as_if_there_were_no_schedule() -> None:
    assert days("constant").all()
    always = Settings(cohort=3, participation="random:1")
    assert Settings(cohort=3).choose(10, 4).tolist() == always.choose(10, 4).tolist()


def test_random_is_there_as_often_as_asked() -> None:
    there = days("random:0.7", clients=200)
    assert abs(there.mean() - 0.7) < 0.02
    assert not (there == there[0]).all()
    assert (there == days("random:0.7", clients=200)).all()


def test_diurnal_is_there_for_half_of_every_period() -> None:
    there = days("diurnal:8")
    assert (there[8:] == there[:-8]).all()
    assert (there[:8].sum(0) == 4).all()
    assert len({tuple(column) for column in there.T}) > 3


def test_turnover_some_leave_for_good_and_others_join() -> None:
    there = days("turnover:0.3")
    changes = np.abs(np.diff(there.astype(int), axis=0)).sum(0)
    assert (changes <= 1).all()
    left, joined = there[0] & ~there[-1], ~there[0] & there[-1]
    assert (left.sum(), joined.sum()) == (9, 9)
    assert (there[0] & there[-1]).sum() == 12


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("client,from,to\n0,1,3\n0,6,40\n2,2,2\n")
    there = days(f"file:{path}", clients=3)
    assert np.flatnonzero(there[:, 0] == 0).tolist() == [3, 4]
    assert np.flatnonzero(there[:, 2]).tolist() == [1]
    assert not there[:, 1].any()


@pytest.mark.parametrize("words", ["random", "random:0", "random:1.5", "diurnal:1", "turnover:0.6", "constant:1"])
def test_bad_words(words: str) -> None:
    with pytest.raises(CohortError, match="number|no value"):
        parse(words)


def test_an_unknown_schedule() -> None:
    with pytest.raises(UnknownName, match="diurnal"):
        parse("diurna:3")


@pytest.mark.parametrize("text", ["", "client,from\n0,1\n", "client,from,to\n0,x,3\n"])
def test_a_bad_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text or "nothing")
    with pytest.raises(DataError, match="client, from, to"):
        parse(f"file:{path}")


def test_a_file_that_names_a_client_there_is_not(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("client,from,to\n7,1,3\n")
    with pytest.raises(DataError, match="from 0 to 2"):
        days(f"file:{path}", clients=3)


def test_a_file_is_read_anew_for_every_run_and_must_not_change_during_one(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("client,from,to\n0,1,2\n1,1,2\n")
    settings = Settings(rounds=2, participation=f"file:{path}", evaluation="none")

    def asked(**more: object) -> list[int]:
        report = federate(RECIPE.build(), create("fedavg"), settings=settings, **more)  # type: ignore[arg-type]
        return [line["asked"] for line in report.history]

    assert asked(folder=tmp_path / "run") == [2, 2]
    path.write_text("client,from,to\n0,1,2\n")
    assert asked() == [1, 1]
    with pytest.raises(RunError, match="The schedule differs in file."):
        asked(folder=tmp_path / "run", resume=True)


# -- a federation whose clients come and go ----------------------------------------------------------------------------

RECIPE = Recipe(clients=10, partition="dirichlet:0.5", samples=600)


def test_nobody_loses_what_they_kept() -> None:
    """A client that leaves has the model of its last round; one that comes back goes on from it."""
    task, settings = RECIPE.build(), Settings(rounds=12, participation="turnover:0.3", evaluation="none")
    report = federate(task, create("local"), settings=settings)
    asked = [settings.choose(10, round) for round in range(12)]
    rounds = np.array([sum(client in some for some in asked) for client in range(10)])
    assert rounds.min() < rounds.max() == 12
    assert [line["asked"] for line in report.history] == [len(some) for some in asked]

    def model(of: Report, client: int) -> Stack:
        initial = of.population.task.network.initial.map(lambda leaf: leaf[None])
        return of.population.memory.recall(np.array([client]), Stack(initial, initial.layout), before=99)

    for client in range(0, 10, 3):
        # Alone, and there in the same rounds, a client trains to the same model.
        alone = federate(task, create("local"), settings=settings, faults=lambda _, who, me=client: who != me)
        mine, theirs = model(alone, client), model(report, client)
        assert all(torch.allclose(mine[name], theirs[name]) for name in mine), client


@pytest.mark.parametrize(
    "name", ["fedavg", "ditto", "ifca:clusters=2", "flhc", "cfl", "fedamp", "apfl", "scaffold", "pfedhn:server_lr=0.1"]
)
def test_methods_cope_with_turnover_and_late_replies(name: str) -> None:
    report = federate(RECIPE.build(), create(name), rounds=12, participation="turnover:0.3", late=0.3, delay=3)
    assert np.isfinite(report.scores()).all()
    assert report.summary()["macro"] > 0.3


# -- late replies ------------------------------------------------------------------------------------------------------


def test_whose_reply_is_on_its_way_is_not_asked() -> None:
    report = federate(RECIPE.build(), create("fedavg"), rounds=10, late=0.5, delay=3, evaluation="none")
    asked = [line["asked"] for line in report.history]
    assert asked[0] == 10
    assert min(asked) < 10
    assert len({entry.round for entry in report.ledger.entries}) == 10


def test_all_replies_late_by_one_round_count_less_but_count() -> None:
    """Replies that are all equally late have the mean that they would have had in time."""
    task = RECIPE.build()
    plain = federate(task, create("fedavg"), rounds=1, evaluation="none").server
    late = federate(task, create("fedavg"), rounds=2, late=0.999999, delay=1, evaluation="none").server
    assert all(torch.allclose(plain[name], late[name], atol=1e-6) for name in plain)


def test_a_resumed_run_has_the_replies_that_were_on_their_way(tmp_path: Path) -> None:
    task, options = RECIPE.build(), {"late": 0.5, "delay": 3, "participation": "random:0.8", "eval_every": 1}
    whole = federate(task, create("fedavg"), rounds=8, **options)

    class Stop(Exception):
        pass

    def stop(line: dict) -> None:
        if line["round"] == 4:
            raise Stop

    with pytest.raises(Stop):
        federate(task, create("fedavg"), rounds=8, folder=tmp_path / "run", on_round=stop, **options)
    resumed = federate(task, create("fedavg"), rounds=8, folder=tmp_path / "run", resume=True, **options)
    assert all(torch.equal(whole.server[name], resumed.server[name]) for name in whole.server)
    assert [line["asked"] for line in whole.history] == [line["asked"] for line in resumed.history]


@pytest.mark.parametrize("bad", [{"late": 1.0}, {"late": -0.1}, {"delay": 0}, {"participation": "never"}])
def test_bad_settings(bad: dict) -> None:
    with pytest.raises((CohortError, UnknownName)):
        federate(RECIPE.build(), create("fedavg"), rounds=1, **bad)


def test_a_late_reply_counts_less_by_its_age() -> None:
    """f_k(w) = (w - c_k)^2 / 2 and one step of size 1/2 per round, so client k sends (c_k - w) / 2.

    With this seed the first client is late by one round and the second never: round 0 has the reply of the second
    alone, round 1 the old reply of the first, for 1 / sqrt(2), and another one of the second.
    """
    task = quadratics(torch.tensor([[8.0], [2.0]], dtype=torch.float64), lr=0.5)
    report = federate(
        task, create("fedavg"), rounds=2, late=0.5, delay=1, seed=12, evaluation="none",
        engine=LocalEngine(dtype=torch.float64),
    )  # fmt: skip
    assert [line["asked"] for line in report.history] == [2, 1]  # who is late is not asked
    old, new = 4.0, (2.0 - 1.0) / 2  # sent from w = 0, and from w = 1, where round 0 ended
    weight = 2**-0.5
    assert float(report.server["w"]) == pytest.approx(1.0 + (weight * old + new) / (weight + 1), abs=1e-12)


# -- who is there before the first round and after the last ------------------------------------------------------------


def three_of_six(tmp_path: Path, late: int = 1) -> Settings:
    """Clients 1 and 4 are there from the beginning, client 2 from round `late`; the others never are."""
    path = tmp_path / "schedule.csv"
    path.write_text(f"client,from,to\n1,1,9\n4,1,9\n2,{late},9\n")
    return Settings(rounds=4, participation=f"file:{path}", evaluation="none")


EXCHANGING = ["fedora", "fedora:similarity=loss", "ifca:clusters=2,starts=kmeans++", "ifca:clusters=2,restarts=3"]


@pytest.mark.parametrize("name", [*EXCHANGING, "fedrep", "fedcr", "ditto@ifca:clusters=2,cluster_rounds=1,restarts=2"])
def test_who_never_appears_sends_and_keeps_nothing(name: str, tmp_path: Path) -> None:
    settings = three_of_six(tmp_path)
    report = play(build_task(), create(name), settings.rounds, participation=settings.participation)
    assert {client for entry in report.ledger.entries for client in entry.clients} == {1, 2, 4}
    saved = report.population.memory.save(round=4)
    assert saved is None or set(saved["clients"].tolist()) <= {1, 2, 4}


@pytest.mark.parametrize("name", EXCHANGING)
def test_who_drops_out_does_not_exchange(name: str) -> None:
    report = play(build_task(), create(name), 3, faults=lambda _, clients: np.isin(clients, (0, 5)))
    assert {client for entry in report.ledger.entries for client in entry.clients} == {1, 2, 3, 4}


@pytest.mark.parametrize("name", ["fedora", "fedora:similarity=loss"])
def test_who_arrives_later_exchanges_on_arrival(name: str, tmp_path: Path) -> None:
    settings = three_of_six(tmp_path, late=3)
    report = play(build_task(), create(name), settings.rounds, participation=settings.participation)
    told = [(one.round, one.client) for one in report.ledger.messages() if one.field == "bases"]
    first = -create(name).exchanges
    assert sorted(told) == [(first, 1), (first, 4), (2, 2)]
    assert report.server.known.tolist() == [False, True, True, False, True, False]
    mixing = report.algorithm.mixing(report.server)
    assert (mixing[2, [1, 4]] > 0).any()  # it learns from those who were there
    assert (mixing[[1, 4], 2] > 0).any()  # and they from it


def test_similarities_are_those_of_everybody_whenever_they_arrived(tmp_path: Path) -> None:
    settings = three_of_six(tmp_path, late=3)
    at_once = play(build_task(), create("fedora"), 4, faults=lambda _, clients: ~np.isin(clients, (1, 2, 4))).server
    later = play(build_task(), create("fedora"), 4, participation=settings.participation).server
    torch.testing.assert_close(later.P, at_once.P)


def test_starts_are_chosen_once(tmp_path: Path) -> None:
    settings = three_of_six(tmp_path, late=3)
    report = play(build_task(), create("ifca:clusters=2,starts=kmeans++"), 4, participation=settings.participation)
    early = [one for one in report.ledger.messages() if one.round < 0 and one.field == "delta"]
    assert [(one.round, one.client) for one in early] == [(-1, 4), (-1, 1)]  # client 2 says nothing on its arrival
    assert not [one for one in report.ledger.messages() if one.field == "delta" and (one.round, one.client) == (1, 2)]
    assert report.server.models.clients == 2


def test_fewer_clients_than_clusters_start_from_drawn_models() -> None:
    report = play(build_task(), create("ifca:clusters=4,starts=kmeans++"), 2, cohort=2)
    models = report.server.models
    assert models.clients == 4
    assert len({tuple(leaf.flatten().tolist()) for leaf in models["head.weight"]}) == 4


def test_exchanges_are_resumed(tmp_path: Path) -> None:
    """A client that arrives after a stop exchanges, one that was there before does not do so again."""
    settings = three_of_six(tmp_path, late=4)
    asked = {"participation": settings.participation, "eval_every": 1, "evaluation": "all"}

    def stop(line: dict) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(build_task(), create("fedora"), 4, folder=tmp_path / "run", on_round=stop, **asked)
    resumed = play(build_task(), create("fedora"), 4, folder=tmp_path / "run", resume=True, **asked)
    straight = play(build_task(), create("fedora"), 4, **asked)
    assert resumed.ledger.entries == straight.ledger.entries
    assert torch.equal(resumed.server.P, straight.server.P)


def test_what_a_newcomer_says_of_others_models_stands_for_both(tmp_path: Path) -> None:
    """Clients 1 and 4 never tried the model of client 2, which comes later and tries theirs."""
    settings = three_of_six(tmp_path, late=3)
    scores = play(build_task(), create("fedora:similarity=loss"), 4, participation=settings.participation).server.scores
    assert (scores[2, [1, 4]] > 0).all()
    assert torch.equal(scores[[1, 4], 2], scores[2, [1, 4]])
    assert scores[1, 4] != scores[4, 1]


def test_a_last_step_that_is_not_finite_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(FedRep):
        def finish(self, server: Tree, cohort: Cohort) -> Tree:
            bad = torch.where(cohort.ids == 1, torch.nan, 1.0).to(cohort.lr)
            return super().finish(server, cohort) * bad

    report = federate(build_task(), Fails(), rounds=2, evaluation="none")
    assert all(torch.isfinite(leaf).all() for model in personal_models(report) for leaf in model.values())
    assert report.history[-1]["lost"] == {"not finite": 1}
    assert "client client 1 is lost: its training did not stay finite" in caplog.text
