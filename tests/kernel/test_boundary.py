"""What a method may read is decided where clients run: an answer sees samples, never targets, and no other splits."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from atoll.algorithms.fedavg import FedAvg
from atoll.compose import create
from atoll.federation.loop import federate
from atoll.kernel.algorithm import Predictor
from atoll.kernel.batch import HIDDEN, Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import CohortError, LabelsNeeded
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params
from atoll.runtime.engines.local import LocalEngine
from atoll.toolbox.client.paired import lead

SHARES = (0.5, 0.25, 0.25)


def tell_the_target(model: Params, beside: Params, batch: Batch) -> Tensor:
    """Answer with the label, on which every score is 100 %."""
    return (batch.y[:, None] == torch.arange(3)).to(batch.network.dtype)


class Peeks(FedAvg):
    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        return Predictor(cohort.stacked(w), Params({}), tell_the_target)


class PeeksForAll(FedAvg):
    def shared(self, server: Params) -> Predictor:
        return Predictor(server, Params({}), tell_the_target)


@pytest.fixture
def task(make_task):
    return make_task(sizes=(12, 9, 14), shares=SHARES)


@pytest.mark.parametrize("strategy", ["whole eager", "loop eager", "whole traced"])
@pytest.mark.parametrize("method", [Peeks(), PeeksForAll()])
def test_an_answer_has_no_targets(task, method, strategy) -> None:
    with pytest.raises(LabelsNeeded, match="Targets must not be read here"):
        federate(task, method, rounds=1, engine=LocalEngine(device="cpu", strategy=strategy))


def test_an_answer_has_none_on_the_servers_test_set(task) -> None:
    central = replace(task, central=(task.x[:5], task.y[:5]))
    with pytest.raises(LabelsNeeded):
        federate(central, PeeksForAll(), rounds=1, evaluation="central")


def test_an_answer_has_none_where_a_client_chooses_by_validation(make_cohort, task) -> None:
    cohort = make_cohort(task)
    peeking = Predictor(cohort.stacked(cohort.initial), Params({}), tell_the_target)
    with pytest.raises(LabelsNeeded):
        lead(cohort, peeking, cohort.initial, "score")


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y[0], lambda y: y == 1, lambda y: y + 1, lambda y: 1 - y, lambda y: y.shape, len, bool, list,
        lambda y: torch.zeros(3)[y], lambda y: nn.functional.cross_entropy(torch.zeros(3, 3), y), torch.is_tensor,
        lambda y: y.to(torch.float64),
    ],
)  # fmt: skip
def test_hidden_targets_cannot_be_used(use) -> None:
    if use is torch.is_tensor:
        assert not use(HIDDEN)
        return
    with pytest.raises(LabelsNeeded, match="Whoever answers a sample has the sample alone"):
        use(HIDDEN)


def test_a_batch_without_targets_is_cut_and_joined_as_others_are() -> None:
    x = torch.arange(8.0)[:, None]
    batch = Batch(x, torch.zeros(8), None, None, Network(nn.Identity()), Variant()).unlabelled
    assert batch.rows(torch.tensor([2, 2, 5])).x[:, 0].tolist() == [2, 2, 5]
    assert [len(part.x) for part in batch.split(2)] == [4, 4]
    assert len(batch.views(2).x) == 16
    assert batch.rows(torch.tensor([0])).y is HIDDEN
    assert batch.split(2)[1].y is HIDDEN
    assert batch.views(2).y is HIDDEN


def add_targets(carry: Params, batch: Batch, given: None) -> Params:
    return Params.of(sum=carry["sum"] + batch.total(batch.y.to(carry["sum"].dtype)))


def count_samples(carry: Params, batch: Batch, given: None) -> Params:
    return Params.of(sum=carry["sum"] + batch.count)


def test_a_step_that_says_it_reads_no_targets_gets_none(make_cohort, task) -> None:
    cohort = make_cohort(task)
    assert cohort.scan(count_samples, Params.of(sum=0.0), labels=False)["sum"].tolist() == cohort.samples.tolist()
    with pytest.raises(LabelsNeeded):
        cohort.scan(add_targets, Params.of(sum=0.0), labels=False)


def test_what_may_be_read_is_no_field_of_a_cohort(make_cohort, task) -> None:
    cohort = make_cohort(task)
    assert cohort.splits == {"train", "val"}
    assert cohort.labelled
    for name, value in (("splits", {"test"}), ("labelled", True)):
        with pytest.raises(TypeError, match=name):
            replace(cohort, **{name: value})
    with pytest.raises(CohortError, match="Only train, val may be read here. Got split='test'"):
        cohort.scan(add_targets, Params.of(sum=0.0), split="test")
    with pytest.raises(CohortError, match="Got split='test'"):
        cohort.has_samples("test")


def test_less_may_be_read_and_never_more(make_cohort, task) -> None:
    cohort = make_cohort(task, splits={"train", "val", "test"})
    cohort.scan(add_targets, Params.of(sum=0.0), split="test")
    learner = cohort.without("test", "labels")
    assert learner.splits == {"train", "val"}
    with pytest.raises(CohortError, match="Only train, val may be read here"):
        learner.scan(count_samples, Params.of(sum=0.0), split="test", labels=False)
    with pytest.raises(LabelsNeeded, match="These clients have samples without them"):
        learner.scan(add_targets, Params.of(sum=0.0))
    assert learner.without("val").splits == {"train"}


@dataclass(frozen=True, kw_only=True)
class SeesTheBatch(FedAvg):
    """Centres its answers over the batch."""

    @property
    def transductive(self) -> bool:
        return True

    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        return Predictor(cohort.stacked(w), Params({}), centred)


def centred(model: Params, beside: Params, batch: Batch) -> Tensor:
    outputs = batch.outputs(model)
    return outputs - outputs.mean(0)


def chance(task, engine) -> float:
    """All answers are 0 to a sample alone: the first class."""
    found = []
    for client in range(task.clients):
        split = task.splits["test"]
        y = task.y[split.order[split.offsets[client] : split.offsets[client + 1]]]
        found.append(float((y == 0).double().mean()))
    return sum(found) / len(found)


@pytest.mark.parametrize("strategy", ["whole eager", "loop eager", "whole traced"])
def test_a_transductive_method_is_scored_one_sample_at_a_time_as_well(task, strategy) -> None:
    engine = LocalEngine(device="cpu", dtype=torch.float64, strategy=strategy)
    report = federate(task, SeesTheBatch(), rounds=2, engine=engine)
    assert report.inductive == pytest.approx(chance(task, engine))
    assert report.figures("inductive").macro == report.inductive
    assert report.figures("test").macro != report.inductive
    assert report.transductive


def test_one_that_is_not_has_no_such_score(task) -> None:
    report = federate(task, FedAvg(), rounds=1)
    assert report.inductive is None
    assert not report.transductive
    with pytest.raises(Exception, match="Scores of one test sample at a time are those of the test split"):
        report.figures("inductive")


def test_a_batchnorm_without_statistics_makes_every_method_transductive(make_task) -> None:
    class Layers(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4, track_running_stats=False), nn.Flatten(),
                             nn.Linear(12, 3))  # fmt: skip

    task = make_task(Layers, sizes=(12, 9, 14), shape=(1, 4), shares=SHARES)
    report = federate(task, FedAvg(), rounds=1)
    assert report.transductive
    assert report.inductive is not None


def test_where_one_sample_has_no_variance_it_is_said(make_task) -> None:
    class Flat(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    report = federate(make_task(Flat, sizes=(12, 9, 14), shares=SHARES), SeesTheBatch(), rounds=1)
    assert report.inductive is None
    with pytest.raises(Exception, match="several numbers of a sample in every BatchNorm"):
        report.scores("inductive")


def test_fafis_released_profile_says_that_it_is_transductive() -> None:
    names = ("fafi", "fafi:batch_statistics=true", "fafi/features+refined:profile=faithful", "fedavg", "ditto+gate")
    assert [create(name).transductive for name in names] == [False, True, True, False, False]
    assert create("fafi:profile=faithful").transductive
    assert not create("fafi:profile=faithful,batch_statistics=false").transductive


def test_the_servers_test_set_is_answered_one_at_a_time_as_well(task) -> None:
    class SharesTheBatch(SeesTheBatch):
        def shared(self, server: Params) -> Predictor:
            return Predictor(server, Params({}), centred)

    central = replace(task, central=(task.x[:7], task.y[:7]))
    report = federate(central, SharesTheBatch(), rounds=1, evaluation="central")
    assert report.central_inductive == pytest.approx(float((task.y[:7] == 0).double().mean()))
    assert report.central is not None
    assert report.transductive
    every = federate(central, SharesTheBatch(), rounds=2, eval_every=1, evaluation="central").history
    assert [line.evaluation.central.inductive is None for line in every if line.evaluation] == [False, False]
    assert federate(central, FedAvg(), rounds=1, evaluation="central").central_inductive is None
