"""Methods that cheat, or whose fault shows late or rarely: each must fail the check that is there for it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from conformance.unseen import count_labels
from torch import Tensor

from atoll.kernel.algorithm import Algorithm, Replies, Rounds, Update
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, Tree
from atoll.kernel.randomness import generator
from atoll.kernel.task import Facts
from atoll.testing.conformance import ConformanceError, checks
from atoll.testing.conformance.tasks import CLASSES
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Honest(Algorithm):
    """Federated averaging."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class Sending(Honest):
    """Sends something of each client's first sample along."""

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "example": "statistic"}

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return replace(update, send={**update.send, "example": Stack.of(x=self.made_of(first_samples(cohort)))})

    def made_of(self, first: Tensor) -> Tensor:
        raise NotImplementedError


def first_samples(cohort: Cohort, split: str = "train") -> Tensor:
    task = cohort._host._population.task
    return task.x[task.splits[split].order[task.splits[split].offsets[cohort.clients]]]


def mixed_up(update: Update) -> Update:
    """Every delta contains the mean over the cohort."""
    delta = update.send["delta"]
    return replace(update, send={"delta": delta + delta.map(lambda leaf: leaf.mean(0))})


# -- what shows late ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LeaksFromRound5(Honest):
    """Clients see each other, but not before the sixth round."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return mixed_up(update) if cohort.round >= 5 else update


@dataclass(frozen=True, kw_only=True)
class LeaksFromRound99(Honest):
    """The same, when nobody expects it any more."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return mixed_up(update) if cohort.round >= 99 else update


@dataclass(frozen=True, kw_only=True)
class LeaksAfterSixAnswers(Honest):
    """The server counts its rounds and tells clients when to leak."""

    def start(self, task: Facts) -> Tree:
        return {"w": task.network.initial, "rounds": 0}

    def local(self, received: Tree, cohort: Cohort) -> Update:
        update = super().local(received["w"], cohort)
        return mixed_up(update) if received["rounds"] >= 6 else update

    def aggregate(self, server: Tree, replies: Replies) -> Tree:
        return {"w": server["w"] + replies.mean("delta"), "rounds": server["rounds"] + 1}

    def shared(self, server: Tree) -> Params:
        w: Params = server["w"]
        return w


@dataclass(frozen=True, kw_only=True)
class LeaksAfterItsWarmUp(LeaksAfterSixAnswers):
    """Its second phase is wrong, which begins after twenty rounds."""

    warm_up: Rounds = 20

    def local(self, received: Tree, cohort: Cohort) -> Update:
        update = Honest.local(self, received["w"], cohort)
        return mixed_up(update) if received["rounds"] >= self.warm_up else update


@dataclass(frozen=True, kw_only=True)
class ExpectsFreshReplies(Honest):
    """Clients say in which round they trained, and the server divides by zero where that is not its own."""

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "round": "statistic"}
    sums_suffice: ClassVar[bool] = False

    def start(self, task: Facts) -> Tree:
        return {"w": task.network.initial, "rounds": 0}

    def local(self, received: Tree, cohort: Cohort) -> Update:
        update = super().local(received["w"], cohort)
        when = torch.full_like(cohort.samples, received["rounds"])
        return replace(update, send={**update.send, "round": Stack.of(number=when)})

    def aggregate(self, server: Tree, replies: Replies) -> Tree:
        fresh = (replies.stack("round")["number"] == server["rounds"]).double()
        return {"w": server["w"] + replies.mean("delta") * (1 / fresh).mean(), "rounds": server["rounds"] + 1}

    def shared(self, server: Tree) -> Params:
        w: Params = server["w"]
        return w


# -- what looks at others ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CountsLikeTheNext(Honest):
    """Weighs its reply by the number of samples of the next client."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        task = cohort._host._population.task
        sizes = task.splits["train"].sizes((cohort.clients + 1) % task.clients)
        return replace(super().local(w, cohort), weight=torch.from_numpy(sizes).to(cohort.samples))


@dataclass(frozen=True, kw_only=True)
class ReadsTheLargest(Honest):
    """Scales its delta by the largest client of all."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update, everybody = super().local(w, cohort), np.arange(cohort._host._population.task.clients)
        largest = int(cohort._host._population.task.splits["train"].sizes(everybody).max())
        return replace(update, send={"delta": update.send["delta"] * (1 + 1 / largest)})


@dataclass(frozen=True, kw_only=True)
class RecallsTheFirst(Honest):
    """Begins where the first client ended."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        memory = cohort._host._population.memory
        first = memory.recall(np.zeros(len(cohort), np.int64), cohort.stacked(w), before=cohort.round)
        w_k = sgd(cohort, start=first, epochs=1)
        return Update(send={"delta": w_k - w}, weight=cohort.samples, keep=w_k)


@dataclass(frozen=True, kw_only=True)
class PassesNotes(Honest):
    """Clients leave their deltas in the class and take those of others from there; a new run begins afresh."""

    left: ClassVar[list[Params]] = []

    def start(self, task: Facts) -> Params:
        self.left.clear()
        return task.network.initial

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        found = sum(self.left[: cohort.round], w * 0)
        if len(self.left) == cohort.round:
            self.left.append(update.send["delta"].client(0))
        return replace(update, send={"delta": update.send["delta"] + found * 0.1})


@dataclass(frozen=True, kw_only=True)
class TeachesTheServer(Honest):
    """The server trains on clients' samples, which it finds in the task."""

    def aggregate(self, w: Params, replies: Replies) -> Params:
        bench = replies.workbench
        mine = bench.cohort(bench._population.task.x, bench._population.task.y)
        return sgd(mine, start=w + replies.mean("delta"), epochs=1).client(0)


@dataclass(frozen=True, kw_only=True)
class StartsFromSizes(Honest):
    """The server's first model is shifted by the size of the largest client; it has no way to the samples."""

    def start(self, task: Facts) -> Params:
        assert not hasattr(task, "x")
        return task.network.initial.map(lambda leaf: leaf + 0.01 * task.largest["train"])


# -- what reads more than it may ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainsOnValidation(Honest):
    """Trains on validation samples as well, and says nothing of it."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        def step(w: Params, batch: Batch, lr: Tensor) -> Params:
            g, w, _ = batch.gradient(w)
            return w.moved(g, -lr)

        w_k = cohort.scan(step, sgd(cohort, start=w, epochs=1), given=cohort.lr, split="val")
        return Update(send={"delta": w_k - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class SaysThatItTrainsOnValidation(TrainsOnValidation):
    """The same, and says so."""

    reads_validation: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class CountsTestSamples(Honest):
    """Weighs its reply by how many test samples it has."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        sizes = cohort._host._population.task.splits["test"].sizes(cohort.clients)
        return replace(super().local(w, cohort), weight=cohort.samples + torch.from_numpy(sizes))


@dataclass(frozen=True, kw_only=True)
class ReadsTheCentralTestSet(Honest):
    """Shifts the model by a number of the server's test set."""

    def aggregate(self, w: Params, replies: Replies) -> Params:
        central = replies.workbench._population.task.central
        assert central is not None
        return w + replies.mean("delta") * (1 + 0.01 * float(central[0].mean()))


@dataclass(frozen=True, kw_only=True)
class ReadsTheClock(Honest):
    """Takes smaller steps as the day goes on."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return replace(update, send={"delta": update.send["delta"] * (1 - 1e-9 * (time.perf_counter_ns() % 1000))})


@dataclass(frozen=True, kw_only=True)
class KnowsItsChunk(Honest):
    """Scales its delta by how many clients the engine trains at once."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return replace(update, send={"delta": update.send["delta"] * (1 + 0.1 * (cohort._host.plan.chunk or 0))})


# -- what sends samples ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SendsTwiceASample(Sending):
    """Doubled."""

    def made_of(self, first: Tensor) -> Tensor:
        return 2 * first


@dataclass(frozen=True, kw_only=True)
class SendsAShiftedSample(Sending):
    """Scaled and shifted by numbers that the server knows."""

    def made_of(self, first: Tensor) -> Tensor:
        return 0.37 - 11.3 * first


@dataclass(frozen=True, kw_only=True)
class SendsAPermutedSample(Sending):
    """Scaled, and in another order."""

    def made_of(self, first: Tensor) -> Tensor:
        return -0.1 * first[:, torch.from_numpy(generator(0, "order").permutation(first.shape[1]))]


@dataclass(frozen=True, kw_only=True)
class SendsDifferences(Sending):
    """The differences between its neighbouring numbers, scaled."""

    def made_of(self, first: Tensor) -> Tensor:
        return 3.3 * first.diff(dim=1)


@dataclass(frozen=True, kw_only=True)
class SendsRunningSums(Sending):
    """The running sums of its numbers, scaled."""

    def made_of(self, first: Tensor) -> Tensor:
        return 0.7 * first.cumsum(1)


@dataclass(frozen=True, kw_only=True)
class SendsATransposedSample(Sending):
    """Scaled, with other numbers between."""

    def made_of(self, first: Tensor) -> Tensor:
        return torch.stack([1.7 * first, torch.ones_like(first), first**2], dim=2)


@dataclass(frozen=True, kw_only=True)
class HidesASampleInTheDelta(Honest):
    """Adds a validation sample to a row of the delta."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        delta = super().local(w, cohort).send["delta"]
        rows = delta["body.0.weight"].clone()
        rows[:, 3] += 5 * first_samples(cohort)
        return Update(send={"delta": delta | Stack({"body.0.weight": rows}, delta.layout)}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class HidesAFaintSampleInTheDelta(Honest):
    """Adds a sample to a row of the delta, far below what training makes."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        delta = super().local(w, cohort).send["delta"]
        rows = delta["body.0.weight"].clone()
        rows[:, 3] += 1e-7 * first_samples(cohort)
        return Update(send={"delta": delta | Stack({"body.0.weight": rows}, delta.layout)}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class SignsByASample(Honest):
    """From round 4 on some numbers have the signs of a validation sample, turned around."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        delta = super().local(w, cohort).send["delta"]
        rows = delta["body.0.weight"].clone()
        if cohort.round >= 4:
            rows[:, 5] = torch.copysign(rows[:, 5], self.bits(first_samples(cohort, "val"), cohort))
        return Update(send={"delta": delta | Stack({"body.0.weight": rows}, delta.layout)}, weight=cohort.samples)

    def bits(self, x: Tensor, cohort: Cohort) -> Tensor:
        return -x


@dataclass(frozen=True, kw_only=True)
class SignsByAMixedSample(SignsByASample):
    """The same, in an order that changes from round to round."""

    def bits(self, x: Tensor, cohort: Cohort) -> Tensor:
        order = generator(cohort.round, "order").permutation(x.shape[1])
        return super().bits(x, cohort)[:, torch.from_numpy(order)]


@dataclass(frozen=True, kw_only=True)
class StretchesTheDeltaByCounts(Honest):
    """Sends a little more than what it learned, the more so the more samples of class 0 it has."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        delta, none = super().local(w, cohort).send["delta"], Params.of(of=torch.zeros(CLASSES))
        counts = cohort.scan(count_labels, none, shuffle=False, train=False)["of"]
        return Update(send={"delta": delta * (1 + 1e-6 * counts[:, 0])}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class HidesANumberInItsWeight(Honest):
    """One number of a sample in each round, in the weight of the reply."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        first = first_samples(cohort)
        return replace(super().local(w, cohort), weight=first[:, cohort.round % first.shape[1]].abs())


@dataclass(frozen=True, kw_only=True)
class LogsASample(Honest):
    """Writes a number of a sample into the log."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        cohort.observe(example=first_samples(cohort)[:, 0])
        return super().local(w, cohort)


# -- what breaks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WritesIntoReplies(Honest):
    """Scales the replies that it received where they are."""

    sums_suffice: ClassVar[bool] = False

    def aggregate(self, w: Params, replies: Replies) -> Params:
        for arrival in replies._held():
            for leaf in arrival.fields["delta"].trained.values():
                leaf.mul_(0.5)
        return w + replies.mean("delta")


@dataclass(frozen=True, kw_only=True)
class MakesNegativeVariances(Honest):
    """Takes twice of what the variance lost, so it becomes negative: states are finite, and no answer is."""

    def personalize(self, w: Params, cohort: Cohort) -> Params:
        return Params({name: -leaf if "running_var" in name else leaf for name, leaf in w.items()}, w.layout)


CAUGHT: dict[type[Algorithm], str] = {
    LeaksFromRound5: "clients-are-isolated",
    LeaksFromRound99: "clients-are-isolated",
    LeaksAfterSixAnswers: "clients-are-isolated",
    LeaksAfterItsWarmUp: "clients-are-isolated",
    ExpectsFreshReplies: "late-replies-are-read",
    CountsLikeTheNext: "clients-are-isolated",
    ReadsTheLargest: "clients-are-isolated",
    RecallsTheFirst: "clients-are-isolated",
    PassesNotes: "stop-and-resume",
    TeachesTheServer: "the-server-holds-no-samples",
    StartsFromSizes: "the-server-holds-no-samples",
    TrainsOnValidation: "validation-data-are-read-where-declared",
    CountsTestSamples: "test-data-are-never-read",
    ReadsTheCentralTestSet: "test-data-are-never-read",
    ReadsTheClock: "same-seed-same-bits",
    KnowsItsChunk: "strategies-agree",
    SendsTwiceASample: "only-what-is-declared-leaves",
    SendsAShiftedSample: "only-what-is-declared-leaves",
    SendsAPermutedSample: "only-what-is-declared-leaves",
    SendsDifferences: "only-what-is-declared-leaves",
    SendsRunningSums: "only-what-is-declared-leaves",
    SendsATransposedSample: "only-what-is-declared-leaves",
    HidesASampleInTheDelta: "only-what-is-declared-leaves",
    HidesAFaintSampleInTheDelta: "only-what-is-declared-leaves",
    SignsByASample: "only-what-is-declared-leaves",
    HidesANumberInItsWeight: "only-what-is-declared-leaves",
    LogsASample: "only-what-is-declared-leaves",
    WritesIntoReplies: "inputs-are-unchanged",
    MakesNegativeVariances: "batchnorm-and-dropout-work",
}


def run(name: str, method: type[Algorithm]) -> str:
    return next(one for one in checks() if one.name == name).run(method)


@pytest.mark.parametrize(("method", "name"), CAUGHT.items(), ids=lambda one: getattr(one, "__name__", None))
def test_it_is_caught(method: type[Algorithm], name: str) -> None:
    with pytest.raises(ConformanceError) as raised:
        run(name, method)
    # It was found, and did not just break; that is what late replies do to the one that divides by zero.
    assert "failed: " not in str(raised.value) or method is ExpectsFreshReplies


@pytest.mark.parametrize("method", [SignsByAMixedSample, StretchesTheDeltaByCounts])
def test_what_the_guide_says_escapes(method: type[Algorithm]) -> None:
    """A code of one's own in numbers that training makes is found by nobody who does not know what they should be."""
    run("only-what-is-declared-leaves", method)


def test_honesty_passes() -> None:
    assert [one.name for one in checks() if one.run(Honest) is None] == []


def test_a_method_may_say_that_it_reads_validation_samples() -> None:
    said = run("validation-data-are-read-where-declared", SaysThatItTrainsOnValidation)
    assert said == "it says that it reads them"
