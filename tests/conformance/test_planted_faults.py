"""Methods with a fault planted in them: each must fail the check that is there for it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import torch
from conformance.test_cheats import CAUGHT
from conformance.test_unseen_faults import CAUGHT as LATE_OR_MANY

from atoll.algorithms import list_methods
from atoll.algorithms.ifca import IFCA
from atoll.compose import create
from atoll.compose.hybrids import InClusters
from atoll.kernel.algorithm import (
    Algorithm,
    Limits,
    NonNegative,
    Range,
    Replies,
    Update,
    WithEverybody,
)
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, Tree, spread
from atoll.kernel.randomness import Keys
from atoll.testing.conformance import Check, ConformanceError, check, checks, everything
from atoll.testing.conformance.methods import shorten
from atoll.toolbox.client import sgd


def names_of_failed(method: Algorithm | type[Algorithm]) -> set[str]:
    return {result.name for result in check(method) if not result.passed}


def the_check(name: str) -> Check:
    return next(one for one in checks() if one.name == name)


@dataclass(frozen=True, kw_only=True)
class Sound(Algorithm):
    """What the faulty methods below are without their fault."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class Leak(Sound):
    """Every client's delta contains the mean over the cohort, as batch statistics across clients would."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        delta = update.send["delta"]
        return Update(send={"delta": delta + delta.map(lambda leaf: leaf.mean(0))}, weight=update.weight)


@dataclass(frozen=True, kw_only=True)
class Overwrites(Sound):
    """Writes into the model it received, after it has trained from it."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        w["head.bias"].add_(0.01)
        return update


@dataclass(frozen=True, kw_only=True)
class OverwritesInAStep(Algorithm):
    """Writes into its carry, which is the received model itself where a client is alone."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        def step(w: Params, batch: Batch, lr: torch.Tensor) -> Params:
            g, after, _ = batch.gradient(w)
            w["head.bias"].add_(0.01)
            return after.moved(g, -lr)

        return Update(send={"delta": cohort.scan(step, w, given=cohort.lr) - w}, weight=cohort.samples)


def scaled_sgd(w: Params, cohort: Cohort, scale: torch.Tensor) -> Stack:
    """A step whose size depends on a tensor with one row per client, which it captures."""

    def step(w: Params, batch: Batch, lr: torch.Tensor) -> Params:
        g, w, _ = batch.gradient(w)
        return w.moved(g, -lr / scale.mean())

    return cohort.scan(step, w, given=cohort.lr)


@dataclass(frozen=True, kw_only=True)
class Captures(Algorithm):
    """The step closes over the samples of all clients."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        w_k = scaled_sgd(w, cohort, cohort.samples)
        return Update(send={"delta": w_k - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class CapturesAStack(Algorithm):
    """The step closes over a Stack, each client's starting point."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        v = cohort.recall(default=w)

        def step(w: Params, batch: Batch, lr: torch.Tensor) -> Params:
            g, w, _ = batch.gradient(w)
            return w.moved(g, -lr).moved(v.trained, -0.01)

        w_k = cohort.scan(step, w, given=cohort.lr)
        return Update(send={"delta": w_k - w}, weight=cohort.samples, keep=w_k)


SCHEDULE = deque([1.0])  # into which no fingerprint of a step looks


@dataclass(frozen=True, kw_only=True)
class ReadsAGlobal(Algorithm):
    """The step reads a number that changes from round to round behind its back: a traced one keeps the first."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        SCHEDULE[0] = 0.5**cohort.round

        def step(w: Params, batch: Batch, lr: torch.Tensor) -> Params:
            g, w, _ = batch.gradient(w)
            return w.moved(g, -lr * SCHEDULE[0])

        return Update(send={"delta": cohort.scan(step, w, given=cohort.lr) - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class SendsWhatItKeeps(Algorithm):
    """The personal model stays on the client, and goes to the server all the same."""

    sends: ClassVar[Mapping[str, str]] = {"model": "model"}

    def local(self, w: Params, cohort: Cohort) -> Update:
        v = sgd(cohort, start=cohort.recall(default=w), epochs=1)
        return Update(send={"model": v}, weight=cohort.samples, keep=v)

    def aggregate(self, w: Params, replies: Replies) -> Params:
        return replies.mean("model")


@dataclass(frozen=True, kw_only=True)
class SendsASample(Sound):
    """The first sample of each client travels along."""

    sends: ClassVar[Mapping[str, str]] = {"delta": "model", "example": "statistic"}

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        task = cohort._host._population.task
        split = task.splits["train"]
        first = task.x[split.order[split.offsets[cohort.clients]]]
        return Update(send={**update.send, "example": Stack.of(x=first)}, weight=update.weight)


@dataclass(frozen=True, kw_only=True)
class DeclaresNothing(Sound):
    """Sends a field that it does not declare."""

    sends: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, kw_only=True)
class TrainsOnTest(Algorithm):
    """Asks for the test split."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        def step(w: Params, batch: Batch, lr: torch.Tensor) -> Params:
            g, w, _ = batch.gradient(w)
            return w.moved(g, -lr)

        w_k = cohort.scan(step, w, given=cohort.lr, split="test")
        return Update(send={"delta": w_k - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class PeeksAtTestLabels(Sound):
    """Weighs clients by their test labels, which it reads behind the cohort's back."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        task = cohort._host._population.task
        test = task.splits["test"]
        labels = [task.y[test.order[test.offsets[k] : test.offsets[k + 1]]].sum() for k in cohort.clients]
        return Update(send=update.send, weight=cohort.samples + torch.stack(labels))


@dataclass(frozen=True, kw_only=True)
class DrawsGlobally(Sound):
    """Adds noise from torch's own generator."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        noisy = update.send["delta"].map(lambda leaf: leaf + 0.01 * torch.randn_like(leaf))
        return Update(send={"delta": noisy}, weight=update.weight)


@dataclass(frozen=True, kw_only=True)
class Remembers(Sound):
    """Counts its rounds in the class, where no checkpoint finds them."""

    calls: ClassVar[list[int]] = []

    def aggregate(self, w: Params, replies: Replies) -> Params:
        self.calls.append(1)
        return w + replies.mean("delta") * (1 + 0.01 * len(self.calls))


@dataclass(frozen=True, kw_only=True)
class CountsPositions(Sound):
    """The first client of the cohort counts most, whoever it is."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return Update(send=update.send, weight=1 / (1 + torch.arange(len(cohort), dtype=torch.float64)))


@dataclass(frozen=True, kw_only=True)
class IgnoresTheSeed(Algorithm):
    """Shuffles by itself, always in the same way."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        def step(w: Params, batch: Batch, lr: torch.Tensor) -> Params:
            g, w, _ = batch.gradient(w)
            return w.moved(g, -lr)

        w_k = cohort.scan(step, w, given=cohort.lr, shuffle=False)
        return Update(send={"delta": w_k - w}, weight=cohort.samples)


@dataclass(frozen=True, kw_only=True)
class PullsTooHard(Sound):
    """Claims to be FedAvg with mu = 0, which it is not."""

    mu: NonNegative = 0.1
    limits: ClassVar[Mapping[str, Mapping[str, float]]] = {"fedavg": {"mu": 0.0}}

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        return Update(send={"delta": update.send["delta"] * (0.9 - self.mu)}, weight=update.weight)


@dataclass(frozen=True, kw_only=True)
class BeginsLate(Sound):
    """Claims to be Local: so it is for who comes in the first round, later ones begin with what others trained."""

    limits: ClassVar[Limits] = {"local": {}}

    def local(self, w: Params, cohort: Cohort) -> Update:
        update, v = super().local(w, cohort), sgd(cohort, start=cohort.recall(default=w), epochs=1)
        return Update(send=update.send, weight=update.weight, keep=v)

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        return cohort.recall(default=w)


@dataclass(frozen=True, kw_only=True)
class BeginsLateAndSaysSo(BeginsLate):
    """The same, with the condition under which it is true."""

    limits: ClassVar[Limits] = {"local": WithEverybody()}


@dataclass(frozen=True, kw_only=True)
class ChecksNothing(Sound):
    """Has a range and forgets to check it."""

    mu: Annotated[float, Range(low=0)] = 0.1

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class NeedsTwoSamples(Sound):
    """Divides by the sample count less one, as a variance does."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        scaled = update.send["delta"] / (cohort.samples - 1)
        return Update(send={"delta": scaled}, weight=update.weight)


@dataclass(frozen=True, kw_only=True)
class UploadsTwice(Sound):
    """Says that it is one-shot, and uploads before its only round as well."""

    one_shot: ClassVar[bool] = True

    def prepare(self, w: Params, cohort: Cohort) -> Update:
        return self.local(w, cohort)

    def absorb(self, w: Params, replies: Replies) -> Params:
        return self.aggregate(w, replies)


@dataclass(frozen=True, kw_only=True)
class TunesOnTest(Sound):
    """Trains fairly, then makes the personal model from test data."""

    def personalize(self, w: Params, cohort: Cohort) -> Stack:
        def step(w: Params, batch: Batch, lr: torch.Tensor) -> Params:
            g, w, _ = batch.gradient(w)
            return w.moved(g, -lr)

        return cohort.scan(step, w, given=cohort.lr, split="test")


@dataclass(frozen=True, kw_only=True)
class ExpectsEverybody(Algorithm):
    """Takes for granted that each client was there in the first round."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        first = cohort.recall(default=w if cohort.round == 0 else w * float("nan"))
        w_k = sgd(cohort, start=w, epochs=1)
        return Update(send={"delta": w_k - first}, weight=cohort.samples, keep=first)


@dataclass(frozen=True, kw_only=True)
class AveragesCounters(Sound):
    """Makes floating point numbers of BatchNorm's counter."""

    def aggregate(self, w: Params, replies: Replies) -> Params:
        return w + replies.mean("delta").map(torch.Tensor.double)


@dataclass(frozen=True, kw_only=True)
class SendsCode(Sound):
    """Broadcasts a function, which no message can hold."""

    def broadcast(self, server: Params) -> Tree:
        return {"w": server, "loss": torch.nn.functional.cross_entropy}

    def local(self, received: Tree, cohort: Cohort) -> Update:
        return super().local(received["w"], cohort)


@dataclass(frozen=True, kw_only=True)
class KnowsClientsByNumber(Sound):
    """Looks a new client up in a table of those that took part."""

    def welcome(self, w: Params, cohort: Cohort) -> Stack:
        return spread(w, 6).rows(cohort.ids)


@dataclass(frozen=True, kw_only=True)
class WelcomesWithAPart(Sound):
    """Gives new clients the head, and no body."""

    def welcome(self, w: Params, cohort: Cohort) -> Params:
        return w.part("head")


FAULTS = {
    Leak: {"clients-are-isolated", "strategies-agree"},
    Overwrites: {"inputs-are-unchanged"},
    OverwritesInAStep: {"inputs-are-unchanged"},
    Captures: {"clients-are-isolated", "strategies-agree"},
    CapturesAStack: {"clients-are-isolated", "strategies-agree"},
    ReadsAGlobal: {"strategies-agree"},
    SendsWhatItKeeps: {"only-what-is-declared-leaves"},
    SendsASample: {"only-what-is-declared-leaves"},
    DeclaresNothing: {"only-what-is-declared-leaves"},
    TrainsOnTest: {"test-data-are-never-read"},
    PeeksAtTestLabels: {"test-data-are-never-read"},
    TunesOnTest: {"test-data-are-never-read"},
    ExpectsEverybody: {"clients-may-drop-out", "absent-clients-keep-their-memory"},
    AveragesCounters: {"batchnorm-and-dropout-work"},
    SendsCode: {"payload-survives-serialisation"},
    DrawsGlobally: {"same-seed-same-bits", "stop-and-resume"},
    Remembers: {"same-seed-same-bits", "stop-and-resume"},
    CountsPositions: {"order-of-clients-does-not-matter"},
    IgnoresTheSeed: {"same-seed-same-bits"},
    PullsTooHard: {"declared-limits-hold"},
    BeginsLate: {"declared-limits-hold"},
    ChecksNothing: {"bad-hyperparameters-are-refused"},
    NeedsTwoSamples: {"odd-clients-are-served"},
    UploadsTwice: {"one-shot-methods-upload-once"},
    KnowsClientsByNumber: {"newcomers-are-welcome"},
    WelcomesWithAPart: {"newcomers-are-welcome"},
}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, id=f"{method.__name__}-{name}")
        for method, names in FAULTS.items()
        for name in sorted(names)
    ],
)
def test_fault_is_found(method: type[Algorithm], name: str) -> None:
    with pytest.raises(ConformanceError):
        the_check(name).run(method)


def test_a_limit_may_be_declared_for_everybody_only() -> None:
    the_check("declared-limits-hold").run(BeginsLateAndSaysSo)


def test_the_method_without_a_fault_passes() -> None:
    assert names_of_failed(Sound) == set()


def test_a_method_with_random_numbers_of_its_own_passes_if_they_are_keyed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Keyed(Sound):
        def local(self, w: Params, cohort: Cohort) -> Update:
            update = super().local(w, cohort)
            keys = Keys.of(cohort.ids, cohort.task.seed, "noise", cohort.round)
            scale = 1 + keys.bits(torch.zeros_like(cohort.ids)).double() / 2**33
            return Update(send={"delta": update.send["delta"] * scale}, weight=update.weight)

    assert names_of_failed(Keyed) == set()


@pytest.mark.parametrize(
    ("method", "name", "said"),
    [
        (
            Leak,
            "clients-are-isolated",
            "must do the same on a device, .* as in a cohort of 9",
        ),
        (Overwrites, "inputs-are-unchanged", "`local` of Overwrites must leave its inputs as they are.*head.bias"),
        (Captures, "clients-are-isolated", "hint: pass what differs between clients in `carry` or `given`"),
        (ReadsAGlobal, "strategies-agree", "`whole` and `traced` must give the same numbers"),
        (CapturesAStack, "clients-are-isolated", "captures the Stack `v`"),
        (TrainsOnTest, "test-data-are-never-read", "Got split='test'"),
        (SendsWhatItKeeps, "only-what-is-declared-leaves", "What is kept must not leave"),
        (DrawsGlobally, "same-seed-same-bits", "draw from `atoll.kernel.randomness` only"),
        (
            KnowsClientsByNumber,
            "newcomers-are-welcome",
            r"Clients must be able to work together. 10 failed: IndexError",
        ),
        (WelcomesWithAPart, "newcomers-are-welcome", "must get a whole model"),
        (BeginsLate, "declared-limits-hold", "must equal local, .* with 2 clients a round.*WithEverybody"),
    ],
)
def test_message_says_what_is_wrong(method: type[Algorithm], name: str, said: str) -> None:
    with pytest.raises(ConformanceError, match=f"(?s){said}"):
        the_check(name).run(method)


def test_a_method_in_a_file_of_its_own_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        """
from dataclasses import dataclass

from atoll import Algorithm, Update
from atoll.toolbox.client import sgd


@dataclass(frozen=True, kw_only=True)
class Mine(Algorithm):
    limits = {"fedavg": {}}

    def local(self, w, cohort):
        return Update(send={"delta": sgd(cohort, start=w, epochs=1) - w}, weight=cohort.samples)
"""
    )
    assert names_of_failed(create(str(file))) == set()


def test_results_are_handed_out_as_they_come() -> None:
    seen = []
    results = check(Leak, on_result=seen.append)
    assert seen == results
    assert [result.name for result in results] == [one.name for one in checks()]
    assert all(result.message for result in results if not result.passed)


# Its server tells clients something that no message carries: in one process nobody notices.
WHISPERS = """
from dataclasses import dataclass
from atoll import Algorithm, Update
from atoll.toolbox.client import sgd

ROUNDS = []

@dataclass(frozen=True, kw_only=True)
class Whispers(Algorithm):
    def start(self, task):
        ROUNDS.clear()
        return super().start(task)

    def aggregate(self, w, replies):
        ROUNDS.append(1)
        return super().aggregate(w, replies)

    def local(self, w, cohort):
        return Update(send={"delta": sgd(cohort, start=w, epochs=1 + len(ROUNDS)) - w}, weight=cohort.samples)
"""


def test_what_no_message_carries_is_not_known_at_sites(tmp_path: Path) -> None:
    (tmp_path / "whispers.py").write_text(WHISPERS)
    with pytest.raises(ConformanceError, match="Clients at sites must give the same numbers as on one machine"):
        the_check("sites-agree").run(create(str(tmp_path / "whispers.py")))


def test_every_check_finds_some_fault() -> None:
    found = {"sites-agree"}.union(*FAULTS.values(), CAUGHT.values(), LATE_OR_MANY.values())
    assert found == {one.name for one in checks()}


@dataclass(frozen=True, kw_only=True)
class LeaksIfAsked(Leak):
    """The fault is there with one value of a hyperparameter only."""

    share: NonNegative = 0.0
    limits: ClassVar[Mapping[str, Mapping[str, object]]] = {"fedavg": {}}

    def local(self, w: Params, cohort: Cohort) -> Update:
        return super().local(w, cohort) if self.share else Sound.local(self, w, cohort)


def test_a_method_inside_clusters_can_be_checked_with_other_hyperparameters() -> None:
    asked = create("ditto@ifca:cluster_rounds=2,lam=0.5")
    assert shorten(asked) == asked
    assert shorten(create("ditto@ifca:lam=0.5")) == create("ditto@ifca:cluster_rounds=1,lam=0.5")


def test_what_lasts_is_played_short_unless_it_is_asked_for() -> None:
    """Clusters are fixed after one round instead of ten, so a fault inside them is found."""
    leaking = InClusters(inner=Leak(), finder=IFCA())
    with pytest.raises(ConformanceError, match=r"as in a cohort of \d \(round 1\)"):
        the_check("clients-are-isolated").run(leaking)
    with pytest.raises(ConformanceError, match=r"as in a cohort of \d \(round 2\)"):
        the_check("clients-are-isolated").run(replace(leaking, cluster_rounds=2))


def test_everything_is_all_methods_and_some_that_are_put_together() -> None:
    names = set(everything())
    assert names > set(list_methods())
    assert sum("@" in name for name in names) >= 5
    assert any("+" in name for name in names)
    assert sum("/" in name for name in names) >= 5


def test_a_method_can_be_checked_with_other_hyperparameters() -> None:
    assert not names_of_failed(LeaksIfAsked)
    asked = LeaksIfAsked(share=0.5)
    assert names_of_failed(asked) >= {"clients-are-isolated"}
    limits = the_check("declared-limits-hold")
    assert not limits.run(LeaksIfAsked())
    assert limits.run(asked) == "this method declares no limits"  # they were declared for the defaults
