"""Client-level privacy: what one client can change, the noise, what is divided by, and what is refused."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from atoll import LocalEngine, federate
from atoll.algorithms import AFL, IFCA, Ditto, FedAMP, FedAvg, Fedora, FedPer, FedProto, Scaffold
from atoll.federation.settings import Settings
from atoll.kernel.errors import AtollError, HyperparameterError, PrivacyError
from atoll.kernel.params import Params, Stack
from atoll.protect.client_level import ClientPrivacy, NoisySum
from atoll.protect.stages import Clip, Place, Sent, joint_norms
from atoll.protect.words import parse_privacy

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
SIZES = (5, 9, 12, 7, 3)


class Normed(nn.Sequential):
    """A network with BatchNorm, whose statistics are sent as well."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *((method, None) for method in (FedAvg(), Ditto(), FedPer(), Scaffold(), FedProto(), AFL())),
        *((method, Normed) for method in (FedAvg(), Ditto(), Scaffold())),
    ],
)
def test_no_client_moves_the_sums_by_more_than_the_clip(make_task, method, model):
    """Whatever a method sends, in all fields together; with BatchNorm's statistics."""
    seen = []

    class Watch(Clip):
        def apply(self, sent, place):
            cut = super().apply(sent, place)
            seen.extend(joint_norms(cut.fields).tolist())
            return cut

    task = make_task(model, sizes=(8, 9, 12, 7, 6))
    rounds = 1 if method.one_shot else 2
    federate(task, method, rounds=rounds, evaluation="none", engine=ENGINE, stages=[Watch(0.01)])
    assert len(seen) >= 5
    assert max(seen) <= 0.01 * (1 + 1e-12)


def test_means_divide_by_what_is_public_and_count_everybody_the_same(make_task):
    """With next to no noise, 5 clients asked of 5: the mean of clipped deltas, whoever has how many samples."""
    task = make_task(sizes=SIZES, dtype=torch.float64)
    private = federate(task, FedAvg(), rounds=1, evaluation="none", engine=ENGINE, dp="client:noise=1e-12,clip=1e6")
    plain = federate(task, FedAvg(weighting="uniform"), rounds=1, evaluation="none", engine=ENGINE)
    assert (private.server - plain.server).norm() < 1e-5
    lost = federate(
        task, FedAvg(), rounds=1, evaluation="none", engine=ENGINE, dp="client:noise=1e-12,clip=1e6",
        faults=lambda _, clients: clients < 2,
    ).server  # fmt: skip
    three = federate(
        task, FedAvg(weighting="uniform"), rounds=1, evaluation="none", engine=ENGINE,
        faults=lambda _, clients: clients < 2,
    ).server  # fmt: skip
    initial = task.network.initial
    assert ((lost - initial) - (three - initial) * (3 / 5)).norm() < 1e-5  # 3 of 5 replied; the sum is over 5


def test_nobody_says_how_many_samples_it_has(make_task):
    report = federate(make_task(), FedAvg(), rounds=1, evaluation="none", dp="client:noise=1")
    assert {entry.field for entry in report.ledger.entries if entry.direction == "up"} == {"delta"}


def test_noise_has_the_size_it_says_and_is_drawn_for_every_round():
    rule = NoisySum(std=3.0, expected=4.0, seed=0)
    sums = {"delta": Params.of(w=torch.zeros(200_000), n=torch.tensor(7))}
    (first, total), (again, _) = (rule.in_round(2).close(sums, torch.ones(())) for _ in range(2))
    other, _ = rule.in_round(3).close(sums, torch.ones(()))
    drawn = first["delta"]["w"]
    assert drawn.std().item() == pytest.approx(3.0, rel=4 / (2 * 200_000) ** 0.5)
    assert abs(drawn.mean().item()) < 4 * 3 / 200_000**0.5
    assert abs(torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1].item()) < 4 / 200_000**0.5
    assert torch.equal(drawn, again["delta"]["w"])
    assert not torch.equal(drawn, other["delta"]["w"])
    assert first["delta"]["n"] == 0  # whole numbers are not told
    assert total == 4


def test_rounds_of_noise_add_up_as_they_must(make_task):
    """Clients whose messages are cut to nothing: what is left is a random walk of the noise over q N."""
    task = make_task(sizes=SIZES)
    more = {"rounds": 20, "evaluation": "none", "dp": "client:noise=1000,clip=1e-6"}
    runs = [federate(task, FedAvg(), seed=seed, **more).server - task.network.initial for seed in range(12)]
    moves = torch.cat([leaf.flatten() for run in runs for leaf in run.values()])
    assert moves.std().item() == pytest.approx(20**0.5 * 1e-3 / 5, rel=0.12)


def test_a_round_in_which_nobody_was_asked_releases_noise(make_task, caplog):
    task = make_task(sizes=SIZES)
    settings = {"rounds": 6, "evaluation": "none", "cohort": "poisson:0.05", "dp": "client:noise=1"}
    asked = [len(Settings(rounds=6, cohort="poisson:0.05").choose(5, round)) for round in range(6)]
    assert 0 in asked
    report = federate(task, FedAvg(), **settings)
    assert "the server's state stays as it is" not in caplog.text
    assert (report.server - task.network.initial).norm() > 0
    silent = [line for line, count in zip(report.history, asked, strict=True) if count == 0]
    assert all(line.bytes["up"] == 0 for line in silent)


def test_clients_join_by_chance_and_independently():
    settings = Settings(rounds=1, cohort="poisson:0.3")
    sizes = [len(settings.choose(1000, round)) for round in range(200)]
    assert np.mean(sizes) == pytest.approx(300, abs=4 * (210 / 200) ** 0.5)
    assert np.var(sizes) == pytest.approx(210, rel=0.45)


def test_the_same_bits_however_clients_are_grouped_and_after_a_stop(make_task, tmp_path):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    more = {"rounds": 4, "evaluation": "none", "dp": "client:noise=1,clip=0.1", "cohort": "poisson:0.7"}
    whole = federate(task, Ditto(), engine=ENGINE, **more).server
    single = LocalEngine(device="cpu", strategy="loop", dtype=torch.float64)
    assert (whole - federate(task, Ditto(), engine=single, **more).server).norm() == 0
    stop = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        federate(
            task, Ditto(), engine=ENGINE, folder=tmp_path / "run", stop=stop, on_round=lambda _: stop.set(), **more
        )
    resumed = federate(task, Ditto(), engine=ENGINE, folder=tmp_path / "run", resume=True, **more)
    assert (whole - resumed.server).norm() == 0
    assert "epsilon" in resumed.privacy[0]


def test_epsilon_finds_the_noise_and_the_report_says_it(make_task):
    report = federate(make_task(sizes=SIZES), Ditto(), rounds=3, evaluation="none", dp="client:epsilon=2,delta=1e-3")
    (sentence,) = report.privacy
    assert "epsilon 2.00" in sentence or "epsilon 1.99" in sentence
    assert "not covered" in sentence
    assert federate(make_task(), FedAvg(), rounds=1, evaluation="none").privacy == []


def test_statistics_of_batchnorm_are_cut_with_the_rest():
    delta = Stack.of(w=torch.tensor([[3.0]]), mean=torch.tensor([[400.0]]))
    cut = Clip(1.0).apply(Sent({"delta": delta}, None), Place(0, np.arange(1))).fields
    assert joint_norms(cut).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        (FedAMP(), {}, "reads single replies"),
        (Fedora(), {}, "single replies"),
        (IFCA(), {}, "before their first round|sends as cluster"),
        (FedAvg(), {"cohort": 3}, "fixed size"),
        (FedAvg(), {"late": 0.2}, "Late replies"),
        (FedAvg(), {"participation": "random:0.5"}, "schedules"),
        (FedAvg(), {"aggregate": "median"}, "added up"),
        (FedAvg(), {"compress": "sign"}, "packed"),
        (FedAvg(), {"dp": "client:noise=1,delta=0.5"}, "below 1 over the number of clients"),
        (FedAvg(), {"cohort": "poisson:2"}, "poisson:Q"),
    ],
)
def test_promises_that_would_be_lies_are_refused_before_the_first_round(make_task, method, settings, text):
    more = {"dp": "client:noise=1", **settings}
    with pytest.raises(AtollError, match=text):
        federate(make_task(sizes=SIZES), method, rounds=12, evaluation="none", **more)


@pytest.mark.parametrize(
    "words", ["client:epsilon=1,noise=1", "client:", "client:noise=-1", "client:noise=x", "client:noise=1,delta=2",
              "client:noise=1,clip=0", "client:noise"],
)  # fmt: skip
def test_words_that_promise_nothing_are_refused(words):
    with pytest.raises(HyperparameterError):
        parse_privacy(words)


def test_a_planted_field_without_protection_is_found(make_task):
    """A method that sends the number of a choice beside its delta is refused until its user says that it is public."""

    class Telling(FedAvg):
        sends = {"delta": "model", "favourite": "choice"}  # noqa: RUF012

        def local(self, broadcast, cohort):
            update = super().local(broadcast, cohort)
            from dataclasses import replace

            told = Stack.of(favourite=torch.zeros(len(cohort), dtype=torch.int64))
            return replace(update, send={**update.send, "favourite": told})

    with pytest.raises(PrivacyError, match="sends as favourite"):
        federate(make_task(), Telling(), rounds=1, evaluation="none", dp="client:noise=1")
    federate(make_task(), Telling(), rounds=1, evaluation="none", dp="client:noise=1,public=favourite")


def test_the_default_delta_is_small():
    assert ClientPrivacy(noise=1.0).delta == 1e-5
