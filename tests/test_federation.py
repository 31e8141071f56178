import logging
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from atoll import LocalEngine, Recipe, Settings, Training, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedavg_ft import FedAvgFT
from atoll.algorithms.feddyn import FedDyn
from atoll.algorithms.fedper import FedPer
from atoll.algorithms.fedprox import FedProx
from atoll.algorithms.local import Local
from atoll.algorithms.pfedme import PFedMe
from atoll.algorithms.pfedme_survey import PFedMeSurvey
from atoll.data.task import Task
from atoll.federation.guards import warn_of_overshooting
from atoll.kernel.algorithm import Algorithm, Update
from atoll.kernel.errors import AtollError, CohortError, DivergedError, OneShotError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import generator
from atoll.records.runs import Run
from atoll.runtime.engines.measuring import FORCED
from atoll.runtime.engines.plan import Plan
from atoll.toolbox.client import sgd


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


# -- a round -------------------------------------------------------------------------------------------------------


def test_a_round_is_the_weighted_mean_of_what_clients_send(make_task, make_cohort):
    task = make_task(dtype=torch.float64)
    w = task.network.initial
    v = sgd(make_cohort(task), start=w, epochs=1)
    expected = w["head.bias"] + sum(n * (v["head.bias"][k] - w["head.bias"]) for k, n in enumerate((5, 1, 12, 7))) / 25
    engine = LocalEngine(dtype=torch.float64)
    found = federate(task, FedAvg(), rounds=1, engine=engine, evaluation="none").server
    assert torch.allclose(found["head.bias"], expected, atol=1e-14)


@pytest.mark.parametrize("inside", [False, True])
def test_a_negative_variance_in_the_servers_state_ends_the_run_and_is_named(make_task, inside):
    @dataclass(frozen=True, kw_only=True)
    class Careless(FedAvg):
        def start(self, task):
            return {"models": [task.network.initial]} if inside else task.network.initial

        def broadcast(self, server):
            return server["models"][0] if inside else server

        def aggregate(self, server, replies):
            w = self.broadcast(server) + replies.mean("delta") * 30.0  # also what is not trained
            return {"models": [w]} if inside else w

    layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    with pytest.raises(DivergedError, match=r"negative.*round 0.*'1\.running_var' is -\d.*\nhint: ") as raised:
        federate(make_task(lambda: layers), Careless(), rounds=1, evaluation="none")
    assert raised.value.round == 0


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FedProx(), Ditto(), FedPer(), Local(), FedAvgFT(tune_epochs=1)],
    ids=lambda a: type(a).__name__,
)
def test_the_same_seed_gives_the_same_bits_and_another_does_not(make_task, algorithm):
    task = make_task(sizes=(12, 9, 20), shares=(0.6, 0.2, 0.2))

    def losses(seed):
        return federate(task, algorithm, rounds=2, seed=seed).history[-1]["evaluation"]["personal"]["test"]["losses"]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


@pytest.mark.parametrize("strategy", ["loop", "threads", "chunk:2"])
@pytest.mark.parametrize("algorithm", [Ditto(), FedPer()], ids=lambda a: type(a).__name__)
def test_a_federation_gives_the_same_bits_in_every_strategy(make_task, algorithm, strategy):
    task = make_task(sizes=(12, 9, 20, 2), shares=(0.6, 0.2, 0.2))

    def run(how):
        report = federate(task, algorithm, rounds=3, cohort=3, engine=LocalEngine(strategy=how, dtype=torch.float64))
        return report.server, report.scores(), [line["loss"] for line in report.history]

    (server, scores, losses), (server_2, scores_2, losses_2) = run("whole"), run(strategy)
    assert equal(server, server_2)
    np.testing.assert_array_equal(scores, scores_2)
    assert losses == losses_2


def test_the_task_is_not_changed(make_task):
    task = make_task()
    before = {name: leaf.clone() for name, leaf in task.network.initial.items()}
    federate(task, Ditto(), rounds=2)
    assert equal(before, task.network.initial)


def test_a_federation_leaves_global_generators_alone(make_task):
    task = make_task()
    torchs, numpys = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    federate(task, Ditto(), rounds=1)
    assert torch.equal(torch.random.get_rng_state(), torchs)
    assert (np.random.get_state()[1] == numpys).all()  # noqa: NPY002


# -- who takes part ------------------------------------------------------------------------------------------------


def test_a_cohort_is_drawn_without_repetition_and_anew_every_round():
    settings = Settings(cohort=10, seed=3)
    drawn = [settings.choose(100, round).tolist() for round in range(20)]
    assert all(len(set(cohort)) == 10 and cohort == sorted(cohort) for cohort in drawn)
    assert len({tuple(cohort) for cohort in drawn}) == 20
    assert drawn[7] == settings.choose(100, 7).tolist()
    assert Settings().choose(5, 0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("cohort", "size"), [(None, 20), (7, 7), (0.5, 10), (0.01, 1), (1.0, 20)])
def test_a_cohort_is_a_number_or_a_share(cohort, size):
    assert Settings(cohort=cohort).cohort_size(20) == size


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cohort": 5}, "`cohort` must be between 1 and the number of clients, 4. Got 5.\nhint: lower `cohort`"),
        ({"cohort": 0}, "`cohort` must be between 1 and the number of clients, 4. Got 0."),
        ({"cohort": 1.5}, r"`cohort` as a share must be in \(0, 1\]. Got 1.5."),
        ({"rounds": 0}, "`rounds` must be at least 1. Got 0."),
        ({"drop": 1.0}, r"`drop` must be a float in \[0, 1\). Got 1.0."),
        ({"evaluation": "best"}, "`evaluation` must be 'auto', 'all', 'sample:N', 'central' or 'none'. Got 'best'."),
        ({"evaluation": "central"}, "needs a task with a central test set"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_a_folder_is_made(make_task, tmp_path, settings, text):
    with pytest.raises(CohortError, match=text):
        federate(make_task(), FedAvg(), folder=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_keywords_change_given_settings(make_task):
    report = federate(make_task(), FedAvg(), settings=Settings(rounds=5, seed=7), rounds=1, evaluation="none")
    assert (report.settings.rounds, report.settings.seed) == (1, 7)


def test_drop_outs_are_counted_in_the_metrics_and_in_the_log(make_task, tmp_path):
    task = make_task(sizes=(4,) * 20)
    report = federate(task, FedAvg(), rounds=4, drop=0.3, folder=tmp_path / "run", evaluation="none")
    for line in report.history:
        lost = line["lost"].get("dropped out", 0)
        assert line["replied"] == 20 - lost
    total = sum(line["lost"].get("dropped out", 0) for line in report.history)
    assert 80 * 0.3 - 3 * (80 * 0.3 * 0.7) ** 0.5 < total < 80 * 0.3 + 3 * (80 * 0.3 * 0.7) ** 0.5
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"round 0: lost {report.history[0]['lost']['dropped out']} of 20 clients" in log


def test_clients_that_drop_out_send_and_receive_nothing(make_task):
    report = federate(make_task(), Ditto(), rounds=2, evaluation="none", faults=lambda round, clients: clients == 2)
    assert {message.client for message in report.ledger.messages()} == {0, 1, 3}
    memory = report.population.memory
    assert memory.recall(np.array([2]), Stack.of(default=torch.zeros(1)), before=9)["default"].tolist() == [0.0]


def test_a_round_without_replies_leaves_the_server_as_it_is(make_task, caplog):
    task = make_task()
    with caplog.at_level(logging.WARNING, "atoll"):
        report = federate(task, FedAvg(), rounds=1, faults=lambda _, clients: clients >= 0, evaluation="none")
    assert equal(report.server, task.network.initial)
    assert "round 0: no client replied" in caplog.text


# -- methods -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OneShot(FedAvg):
    one_shot: ClassVar[bool] = True


def test_a_one_shot_method_has_one_round_and_the_ledger_proves_it(make_task):
    with pytest.raises(OneShotError) as error:
        federate(make_task(), OneShot(), rounds=2)
    assert str(error.value) == (
        "OneShot uploads once, so `rounds` must be 1. Got rounds=2.\n"
        "hint: to train longer on each client, raise its `epochs`."
    )
    report = federate(make_task(), OneShot(), rounds=1, evaluation="none")
    assert sorted(message.client for message in report.ledger.messages() if message.field == "delta") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (Ditto(lam=0.0), "Ditto with lam=0.0 and all clients in every round does the same as local"),
        (FedProx(mu=0.0), "FedProx with mu=0.0 does the same as fedavg"),
        (FedPer(private="none"), "FedPer with private='none' does the same as fedavg"),
    ],
)
def test_a_hyperparameter_without_effect_is_said_aloud(make_task, caplog, algorithm, said):
    with caplog.at_level(logging.WARNING, "atoll"):
        federate(make_task(), algorithm, rounds=1, evaluation="none")
    assert said in caplog.text
    caplog.clear()
    federate(make_task(), Ditto(lam=0.1), rounds=1, evaluation="none")
    assert "does the same as" not in caplog.text


@dataclass(frozen=True, kw_only=True)
class Everything(Algorithm):
    """Uses each hook once, with numbers that show who called what."""

    sums_suffice: ClassVar[bool] = False
    sends: ClassVar = {"value": "statistic"}

    def start(self, task):
        return {"rounds": 0, "w": task.network.initial, "seen": Params.of(ids=0.0)}

    def broadcast(self, server):
        return server["seen"]

    def unicast(self, server, ids):
        return Stack.of(number=torch.from_numpy(ids).float() * 10)

    def local(self, seen, cohort):
        value = cohort.map(lambda mine, all_: Params.of(v=mine["number"] + all_["ids"]), cohort.received, seen)
        return Update(send={"value": value}, keep=value)

    def aggregate(self, server, replies):
        ids = torch.as_tensor(float(replies.clients.sum()))
        assert sorted(replies.stack("value")["v"].tolist()) == sorted(
            10.0 * replies.clients + server["seen"]["ids"].item()
        )
        return {**server, "rounds": server["rounds"] + 1, "seen": Params.of(ids=server["seen"]["ids"] + ids)}

    def finish(self, server, cohort):
        return cohort.map(lambda kept: Params.of(v=kept["v"] + 1000), cohort.recall(default=Params.of(v=-1.0)))

    def personalize(self, server, cohort):
        return server["w"]


@pytest.mark.parametrize("strategy", ["whole", "loop", "chunk:3"])
@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_every_hook_is_called_with_what_it_should_get(make_task, tmp_path, strategy, memory):
    engine = LocalEngine(strategy=strategy)
    report = federate(make_task(), Everything(), rounds=3, engine=engine, memory=memory, folder=tmp_path / "run")
    assert report.server["rounds"] == 3
    assert report.server["seen"]["ids"].item() == 3 * (0 + 1 + 2 + 3)
    kept = report.population.memory.recall(np.arange(4), Stack.of(v=torch.zeros(4)), before=3)
    assert kept["v"].tolist() == [10.0 * k + 12 + 1000 for k in range(4)]  # received 10 k, heard 12, then finished


def test_a_method_without_local_work_says_so(make_task):
    with pytest.raises(NotImplementedError, match=r"Algorithm must define local\(\)"):
        federate(make_task(), Algorithm(), rounds=1)


# -- evaluation ----------------------------------------------------------------------------------------------------


def test_evaluation_covers_all_clients_on_a_schedule(make_task):
    task = make_task(sizes=(12, 9, 20), shares=(0.6, 0.2, 0.2))
    report = federate(task, FedAvg(), rounds=5, cohort=1, eval_every=2)
    assert [line["round"] for line in report.evaluations] == [2, 4, 5]
    assert len(report.scores()) == 3
    assert "shared" not in report.evaluations[0]["evaluation"]
    assert federate(task, FedAvg(), rounds=2, evaluation="none").evaluations == []


def test_on_round_sees_every_line(make_task):
    seen = []
    report = federate(make_task(), FedAvg(), rounds=3, on_round=seen.append)
    assert seen == report.history


def test_scores_are_those_of_the_model_on_the_clients_own_samples(make_task):
    task = make_task(sizes=(12, 9, 20), shares=(0.6, 0.2, 0.2))
    report = federate(task, FedAvg(), rounds=2)
    from torch.func import functional_call

    from atoll.models import MLP

    module, test = MLP((4,), 3, hidden=(6,)), task.splits["test"]
    for client, score in enumerate(report.scores()):
        mine = test.order[test.offsets[client] : test.offsets[client + 1]]
        outputs = functional_call(module, dict(report.server), (task.x[mine],))
        assert score == pytest.approx((outputs.argmax(1) == task.y[mine]).double().mean().item())


# -- cost ----------------------------------------------------------------------------------------------------------


class Traced(LocalEngine):
    """Runs every step as a traced program, however small the work is."""

    def _calibrate(self, job):
        return Plan(mode="traced")

    def _calls(self, job, plan):
        return FORCED


UNEVEN = (5, 1, 12, 7, 3, 9, 2, 17)  # eight, five, three and one of them are busy: programs for five have rows to spare
STEPS = np.array([2, 1, 3, 2, 1, 3, 1, 5])  # of these clients, in batches of 4


@pytest.mark.parametrize("make_engine", [LocalEngine, Traced, lambda: LocalEngine(strategy="loop")])
@pytest.mark.parametrize(
    ("algorithm", "epochs"),
    [
        (FedAvg(epochs=2), 2), (FedProx(), 1), (Local(), 1), (FedPer(), 1), (Ditto(), 2),
        (Ditto(epochs=1, personal_epochs=3), 4), (FedAvgFT(tune_epochs=3), 1),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_counted_one_per_batch_of_a_client(make_task, algorithm, epochs, make_engine):
    engine = make_engine()
    report = federate(make_task(sizes=UNEVEN), algorithm, rounds=3, engine=engine)
    assert [line["gradients"] for line in report.history] == [epochs * STEPS.sum()] * 3
    assert engine.programs._made or not isinstance(engine, Traced)


@pytest.mark.parametrize("make_engine", [LocalEngine, Traced])
def test_clients_that_drop_out_take_no_gradients(make_task, make_engine):
    def lost(round, clients):
        return (clients + round) % 3 == 0

    task = make_task(sizes=UNEVEN)
    report = federate(task, FedAvg(), rounds=3, engine=make_engine(), faults=lost, evaluation="none")
    assert [line["gradients"] for line in report.history] == [
        STEPS[~lost(round, np.arange(8))].sum() for round in range(3)
    ]


@dataclass(frozen=True, kw_only=True)
class Polished(FedAvg):
    """Trains once more at the end, in vain."""

    def finish(self, server, cohort):
        return sgd(cohort, start=server, epochs=2, stream="finish")


def test_the_last_local_step_is_counted_with_the_last_round(make_task):
    report = federate(make_task(), Polished(), rounds=2, evaluation="none")
    assert [line["gradients"] for line in report.history] == [8, 8 + 16]  # clients of 5, 1, 12 and 7 samples


def test_the_most_memory_that_was_held_is_written_down(make_task):
    report = federate(make_task(), FedAvg(), rounds=2, evaluation="none")
    used = [line["memory"] for line in report.history]
    assert 2**20 < used[0] <= used[1] < 2**50


# -- what a run leaves in its folder -------------------------------------------------------------------------------


@pytest.fixture
def uneven(make_task):
    return make_task(sizes=(12, 9, 20, 1), shares=(0.6, 0.15, 0.25))


def test_every_test_sample_is_in_the_folder_after_the_last_round_only(uneven, tmp_path):
    seen = []
    report = federate(
        uneven, Ditto(), rounds=3, folder=tmp_path / "run",
        on_round=lambda _: seen.append(Run.open(tmp_path / "run").outcomes()),
    )  # fmt: skip
    assert seen[:2] == [None, None]
    np.testing.assert_array_equal(seen[2]["test"], report.outcomes["test"])
    sizes = uneven.splits["test"].sizes(np.arange(4))
    assert len(report.outcomes["test"]) == sizes.sum()
    for score, mine in zip(report.scores(), np.split(report.outcomes["test"], np.cumsum(sizes)[:-1]), strict=True):
        assert (score == pytest.approx(mine.mean())) if len(mine) else np.isnan(score)


def test_every_test_sample_is_the_same_after_an_interruption(uneven, tmp_path):
    def stopped(line):
        if line["round"] == 2:
            raise KeyboardInterrupt

    whole = federate(uneven, Ditto(), rounds=4)
    with pytest.raises(KeyboardInterrupt):
        federate(uneven, Ditto(), rounds=4, folder=tmp_path, on_round=stopped)
    resumed = federate(uneven, Ditto(), rounds=4, folder=tmp_path, resume=True)
    np.testing.assert_array_equal(resumed.outcomes["test"], whole.outcomes["test"])
    assert [line["gradients"] for line in resumed.history] == [line["gradients"] for line in whole.history]
    again = federate(uneven, Ditto(), rounds=4, folder=tmp_path, resume=True)  # nothing is left to do
    np.testing.assert_array_equal(again.outcomes["test"], whole.outcomes["test"])


def test_what_the_clients_have_is_in_the_folder_from_the_beginning(uneven, tmp_path):
    seen = []
    federate(
        uneven, FedAvg(), rounds=1, folder=tmp_path / "run",
        on_round=lambda _: seen.append(Run.open(tmp_path / "run").statistics),
    )  # fmt: skip
    assert seen[0].samples.tolist() == uneven.statistics.samples.tolist()
    assert seen[0].counts.tolist() == uneven.statistics.counts.tolist()
    assert seen[0].names == uneven.names


def test_without_an_evaluation_of_all_clients_there_are_no_single_samples(uneven, tmp_path):
    report = federate(uneven, FedAvg(), rounds=1, evaluation="none", folder=tmp_path)
    assert report.outcomes is None
    assert not (tmp_path / "outcomes.npz").exists()


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        (Ditto(lam=21.0), "Ditto: lr * lam must be at most 2"),
        (FedProx(mu=21.0), "FedProx: lr * mu must be at most 2"),
        (FedDyn(alpha=21.0), "FedDyn: lr * alpha must be at most 2"),
        (PFedMe(lam=21.0), "PFedMe: lr * lam must be at most 2"),
        (PFedMe(lam=10.0, eta=0.3), "PFedMe: eta * lam must be at most 2"),
        (PFedMeSurvey(lam=21.0), "PFedMeSurvey: lr * lam must be at most 2"),
    ],
    ids=repr,
)
def test_a_pull_that_overshoots_is_said_aloud(algorithm, named, caplog):
    warn_of_overshooting(algorithm, 0.1)
    assert [record.message.startswith(named) for record in caplog.records] == [True]


@pytest.mark.parametrize("algorithm", [Ditto(lam=20.0), FedProx(), FedDyn(), PFedMe(), FedAvg()], ids=repr)
def test_a_pull_that_does_not_is_not(algorithm, caplog):
    warn_of_overshooting(algorithm, 0.1)
    assert not caplog.records


def test_a_run_says_that_a_pull_overshoots(make_task, caplog):
    federate(make_task(), FedProx(mu=21.0, epochs=0), rounds=1, evaluation="none")
    assert any("lr * mu must be at most 2" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda task: federate(task, "ditto", roundz=3), "Unknown argument of federate 'roundz'. Did you mean: rounds"),
        (lambda task: federate(task, "ditto", foldr="here"), "Did you mean: folder?"),
        (lambda task: federate(task, "ditto", rounds="3"), "`rounds` must be a whole number. Got '3' (str)."),
        (lambda task: federate(task, "ditto", seed=None), "`seed` must be a whole number. Got None."),
        (lambda task: federate(task, Ditto), "Got the class Ditto.\nhint: write Ditto()"),
        (lambda task: federate(task, 3), "A method must be an algorithm or the name of one. Got 3 (int)."),
        (lambda task: federate(task, "ditto", engine="loop"), "hint: LocalEngine(strategy='loop')"),
        (lambda task: federate(Recipe(), "ditto"), "Got a Recipe.\nhint: build it first"),
        (lambda task: federate("digits", "ditto"), "`task` must be a Task. Got 'digits' (str)."),
        (lambda task: Ditto(lamb=1.0), "Unknown argument of Ditto 'lamb'. Did you mean: lam?"),
        (lambda task: Training(learning_rate=1.0), "Unknown argument of Training 'learning_rate'."),
        (lambda task: Recipe("digits", client=3), "Did you mean: clients"),
        (lambda task: Task.own({}, traget="y"), "Unknown argument of Task.own 'traget'. Did you mean: target"),
        (lambda task: Settings(round=3), "Did you mean: rounds?"),
    ],
)
def test_a_wrong_argument_is_answered_in_our_words(make_task, call, said):
    with pytest.raises(AtollError) as raised:
        call(make_task())
    assert said in str(raised.value)


def test_a_divergence_speaks_of_scale_where_scale_is_the_reason():
    draw = generator(0, "scale")
    incomes = draw.normal(size=40) * 1e6
    clients = {name: {"income": incomes.tolist(), "y": (incomes * 3).tolist()} for name in "ab"}
    with pytest.raises(DivergedError) as error:
        federate(Task.own(clients, standardise="none", model="mlp:8"), FedAvg(), rounds=5)
    assert "scale is the likely reason: samples reach" in str(error.value)
    assert "(`income`) and targets reach" in str(error.value)
    usual = Task.own({name: {"v": [0.1, 0.2] * 20, "y": [0, 1] * 20} for name in "ab"})
    assert usual.explain_scale() == ""
