"""Faults that show late, in many clients or in answers, and those of `unseen`: which check finds each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from conformance import unseen
from conformance.test_cheats import HidesASampleInTheDelta, Honest, Sending, mixed_up, run
from conformance.unseen import labels_of
from torch import Tensor

from atoll.compose import create
from atoll.kernel.algorithm import Algorithm, Predictor, Replies, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.record import record
from atoll.kernel.task import Facts
from atoll.testing.conformance import ConformanceError, check
from atoll.toolbox.client import sgd


def tell_the_label(model: Params, beside: Params, batch: Batch) -> Tensor:
    return (batch.y[:, None] == torch.arange(3)).double()


@dataclass(frozen=True, kw_only=True)
class AnswersWithLabels(Honest):
    """Answers with the labels that it is asked for."""

    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        return Predictor(w, Params({}), tell_the_label)


@dataclass(frozen=True, kw_only=True)
class TrainsOnTestAmongMany(Honest):
    """Opens the test split, but only in cohorts of more than six clients."""

    def personalize(self, w: Params, cohort: Cohort) -> Params | Stack:
        if len(cohort) <= 6:
            return w
        opened = replace(cohort, splits=frozenset({"test"}))
        return opened.scan(unseen.descend, cohort.stacked(w), split="test")


def centred(model: Params, beside: Params, batch: Batch) -> Tensor:
    outputs = batch.outputs(model)
    return outputs - batch.total(outputs.T).mean() / batch.count


@dataclass(frozen=True, kw_only=True)
class UsesTheTestBatch(Honest):
    """Centres its answers by those of the whole batch."""

    def personalize(self, w: Params, cohort: Cohort) -> Predictor:
        return Predictor(w, Params({}), centred)


@dataclass(frozen=True, kw_only=True)
class SaysThatItUsesTheTestBatch(UsesTheTestBatch):
    """The same, and says so."""

    @property
    def transductive(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class SendsASampleInRound8(Sending):
    """A scaled sample, once."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        if cohort.round == 8:
            return update
        return replace(update, send={**update.send, "example": Stack.of(x=torch.zeros(len(cohort), 12).double())})

    def made_of(self, first: Tensor) -> Tensor:
        return 0.37 * first + 0.1


@dataclass(frozen=True, kw_only=True)
class SendsASampleInFarRounds(SendsASampleInRound8):
    """The same after a thousand rounds."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        return super().local(w, cohort if cohort.round < 1000 else replace(cohort, round=8))


@dataclass(frozen=True, kw_only=True)
class ReadsValidationFromRound5(Honest):
    """Trains on validation samples as well, but not at first."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        w_k = sgd(cohort, start=w, epochs=1)
        if cohort.round >= 5:
            w_k = cohort.scan(unseen.descend, w_k, split="val")
        return Update(send={"delta": w_k - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class ReadsValidationInFarRounds(Honest):
    """The same after a hundred rounds."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        w_k = sgd(cohort, start=w, epochs=1)
        if cohort.round >= 100:
            w_k = cohort.scan(unseen.descend, w_k, split="val")
        return Update(send={"delta": w_k - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class CallsCountsAModel(Honest):
    """Label counts by another name."""

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "extra": "model"}

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return replace(update, send={**update.send, "extra": Stack.of(x=0.1 * labels_of(cohort) + 3)})


@dataclass(frozen=True, kw_only=True)
class SaysThatItSendsCounts(CallsCountsAModel):
    """The same counts, in a field that says so."""

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "extra": "labels"}


@dataclass(frozen=True, kw_only=True)
class LogsCounts(Honest):
    """Label counts in the log."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        cohort.observe(sharpness=labels_of(cohort)[:, 1] / cohort.samples)
        return super().local(w, cohort)


@dataclass(frozen=True, kw_only=True)
class WeighsByCounts(Honest):
    """Label counts in the last digits of the weight."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        digits = labels_of(cohort) @ torch.tensor([1e-3, 1e-5, 0.0], dtype=torch.float64)
        return replace(super().local(w, cohort), weight=cohort.samples + digits)


@dataclass(frozen=True, kw_only=True)
class MixesManyClients(Honest):
    """Clients see each other in cohorts of more than six."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return mixed_up(update) if len(cohort) > 6 else update


@record
class Teachers:
    """The shared model, and what every client trained."""

    w: Params
    models: Stack | None = None


@dataclass(frozen=True, kw_only=True)
class RebuildsLateModels(Honest):
    """Keeps the models that clients trained, the late ones from a model that they never had."""

    sums_suffice: ClassVar[bool] = False

    def start(self, task: Facts) -> Tree:
        return Teachers(w=task.network.initial)

    def broadcast(self, server: Teachers) -> Params:
        return server.w

    def aggregate(self, server: Teachers, replies: Replies) -> Tree:
        return Teachers(w=server.w + replies.mean("delta"), models=self.models(server.w, replies))

    def models(self, w: Params, replies: Replies) -> Stack:
        models: Stack = w + replies.stack("delta")
        return models.rows(torch.from_numpy(replies.clients.argsort()))

    def personalize(self, server: Teachers, cohort: Cohort) -> Params:
        return server.w


@dataclass(frozen=True, kw_only=True)
class KeepsLateModels(RebuildsLateModels):
    """The same as it should be."""

    def models(self, w: Params, replies: Replies) -> Stack:
        return replies.models(lambda broadcast, _: broadcast).rows(torch.from_numpy(replies.clients.argsort()))


CAUGHT: dict[type[Algorithm], str] = {
    AnswersWithLabels: "answers-need-no-labels",
    TrainsOnTestAmongMany: "test-data-are-never-read",
    UsesTheTestBatch: "answers-stand-alone",
    SendsASampleInRound8: "only-what-is-declared-leaves",
    SendsASampleInFarRounds: "only-what-is-declared-leaves",
    ReadsValidationFromRound5: "validation-data-are-read-where-declared",
    ReadsValidationInFarRounds: "validation-data-are-read-where-declared",
    CallsCountsAModel: "only-what-is-declared-leaves",
    LogsCounts: "only-what-is-declared-leaves",
    WeighsByCounts: "only-what-is-declared-leaves",
    MixesManyClients: "clients-are-isolated",
    RebuildsLateModels: "late-replies-are-read",
    unseen.Forgetful: "stop-and-resume",
    unseen.SwappedMemories: "clients-are-isolated",
    unseen.CountsTest: "test-data-are-never-read",
    unseen.GlobalDraws: "same-seed-same-bits",
    unseen.ValidationWeights: "validation-data-are-read-where-declared",
    unseen.WelcomesWithTest: "newcomers-are-welcome",
    unseen.ChangesInPlace: "inputs-are-unchanged",
    unseen.AnswersByPlace: "answers-stand-alone",
    unseen.TableByPlace: "order-of-clients-does-not-matter",
    unseen.LapsingLimit: "declared-limits-hold",
    unseen.KeepsThenSends: "only-what-is-declared-leaves",
    unseen.CountsInDelta: "only-what-is-declared-leaves",
    unseen.SampleInSigns: "only-what-is-declared-leaves",
    unseen.PreparesLabels: "only-what-is-declared-leaves",
}
SAID = {
    AnswersWithLabels: "Targets must not be read here",
    TrainsOnTestAmongMany: "unexpected keyword argument 'splits'",
    UsesTheTestBatch: "The answer to a sample must be the same whether it is asked for alone or with others",
    SendsASampleInRound8: "Client 2 sends one, or a part of one, in example/x",
    CallsCountsAModel: "The label counts of clients follow from extra/x in what is sent",
    LogsCounts: "The label shares of clients follow from log sharpness in the log",
    WeighsByCounts: "The label counts of clients follow from weight in what is sent",
    unseen.CountsInDelta: r"The label counts of clients follow from delta/body.0.weight in what is sent \(round 5000\)",
    unseen.SampleInSigns: "The signs of some numbers that clients send are those of a sample's numbers, from place 0",
    MixesManyClients: r"as in a cohort of 9 \(round 0\)",
    RebuildsLateModels: r"adds 'delta' of client \d, \d round\(s\) late, to the newest model",
}


@pytest.mark.parametrize(("method", "name"), CAUGHT.items(), ids=lambda one: getattr(one, "__name__", None))
def test_it_is_caught(method: type[Algorithm], name: str) -> None:
    with pytest.raises(ConformanceError, match=SAID.get(method)):
        run(name, method)


@pytest.mark.parametrize("method", [KeepsLateModels, SaysThatItSendsCounts, SaysThatItUsesTheTestBatch])
def test_what_is_said_or_done_well_passes(method: type[Algorithm]) -> None:
    assert [result.message for result in check(method) if not result.passed] == []


def test_a_transductive_method_says_so_and_its_remark_is_shown() -> None:
    said = "it says that answers depend on the other samples of a batch"
    assert run("answers-stand-alone", SaysThatItUsesTheTestBatch) == said


def test_fafi_as_released_would_be_found_if_it_did_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    released = create("fafi:profile=faithful")
    check_alone = "answers-stand-alone"
    assert run(check_alone, released)
    monkeypatch.setattr(type(released.answering), "transductive", property(lambda _: False))
    with pytest.raises(ConformanceError, match="The answer to a sample must be the same"):
        run(check_alone, released)


def test_a_sample_in_every_delta_is_found_though_it_is_not_exact() -> None:
    with pytest.raises(ConformanceError, match="Samples must not leave"):
        run("only-what-is-declared-leaves", HidesASampleInTheDelta)
