"""Private statistics: what one sample moves, their noise and account, one-shot methods under it, and planted faults."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.samples import Work

from atoll import LocalEngine, create, federate
from atoll.algorithms import AFL, Ensemble, FedCGS, FedProto, OneShotMargins, OneShotProto
from atoll.algorithms.answers.afl import Ridge
from atoll.algorithms.trainings.frozen import Frozen
from atoll.data.batches import Split
from atoll.kernel.algorithm import Update
from atoll.kernel.errors import AtollError, PrivacyError
from atoll.kernel.job import Done, Job
from atoll.kernel.params import Stack, flatten
from atoll.protect.account import gaussian_epsilon
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.toolbox.client import private
from atoll.toolbox.client.change import Change
from atoll.toolbox.client.private import Private
from atoll.toolbox.pairs import Pair
from atoll.toolbox.server.frozen import Phi, moments

ENGINE = LocalEngine(device="cpu", strategy="whole", dtype=torch.float64)
SIZES = (8, 9, 12, 7, 6)
ONE_SHOT = [AFL(), FedCGS(), OneShotMargins(epochs=1), Ensemble(epochs=1), OneShotProto(epochs=1)]


def uploads(task, method, monkeypatch, clip=0.7):
    """What every client releases under the initial model, before noise: name of the field, powers, value."""
    seen = {}  # the engine may try the work first

    def spy(cohort, where, value, powers, rule):
        seen[where] = (where, dict(powers), value)
        return value

    monkeypatch.setattr(private, "disturb", spy)

    def work(cohort):
        cohort = replace(cohort, changes=(Change(private=Private(clip, 1.0)),))
        frozen = isinstance(method.training, Frozen)
        w = Phi(cohort.initial) if frozen else cohort.stacked(cohort.initial)
        return method.answering.upload(method.training, w, cohort)

    here = ENGINE.place(task)
    job = Job(Work(work), method, method.start(Population(here, RamMemory(task.clients), 0).facts), np.arange(1), 0)
    (done,) = ENGINE.run(job, Population(here, RamMemory(task.clients), 0))
    assert isinstance(done, Done), done
    return seen.values()


def without_first(task):
    """The same task in which client 0 lacks its first training sample."""
    train = task.splits["train"]
    offsets = train.offsets.copy()
    offsets[1:] -= 1
    return replace(task, splits={**task.splits, "train": Split(train.order[1:], offsets)})


def moved_furthest(task, method, monkeypatch, clip=0.7):
    """How far a sample moves each released leaf, over what is declared: at most 1."""
    one, other = (uploads(which, method, monkeypatch, clip) for which in (task, without_first(task)))
    return {
        (where, leaf): float((value[leaf] - after[leaf]).norm()) / clip ** powers[leaf]
        for (where, powers, value), (_, _, after) in zip(one, other, strict=True)
        for leaf in value
    }


@pytest.mark.parametrize("method", ONE_SHOT, ids=lambda one: type(one).__name__)
def test_no_sample_moves_a_statistic_by_more_than_is_declared(make_task, method, monkeypatch):
    """Whatever a method releases; the samples are large, so all features are cut."""
    task = make_task(sizes=SIZES, dtype=torch.float64)
    task = replace(task, x=task.x * 100)
    found = moved_furthest(task, method, monkeypatch)
    assert found
    assert max(found.values()) <= 1 + 1e-9
    assert min(found.values()) > 0  # the sample is in every one of them


def test_a_sensitivity_that_is_declared_too_small_is_found(make_task, monkeypatch):
    """The planted fault: features that are not cut, with the sensitivity of features that are."""

    @dataclass(frozen=True, kw_only=True)
    class Sly(Ridge):
        called: ClassVar[str] = "sly"

        def upload(self, training, phi, cohort):
            raw = moments(replace(cohort, changes=()), phi)
            return Update(
                send={"moments": private.release(cohort, "moments", lambda _: raw, {"count": 0, "sum": 1, "square": 2})}
            )

    class Method(Pair, training=Frozen, answering=Sly):
        pass

    task = make_task(sizes=SIZES, dtype=torch.float64)
    found = moved_furthest(replace(task, x=task.x * 100), dataclass(frozen=True, kw_only=True)(Method)(), monkeypatch)
    assert max(found.values()) > 1


def test_a_release_that_is_left_out_is_found(make_task):
    """The planted fault: a method that says its statistics are released, and sends them as they are."""

    @dataclass(frozen=True, kw_only=True)
    class Bare(Ridge):
        called: ClassVar[str] = "bare"

        def upload(self, training, phi, cohort):
            return Update(send={"moments": moments(cohort, phi)})

    class Method(Pair, training=Frozen, answering=Bare):
        pass

    from atoll.compose.pieces import Dpsgd

    method = Dpsgd(inner=dataclass(frozen=True, kw_only=True)(Method)())
    with pytest.raises(PrivacyError, match="`local` of Method.dpsgd reads training samples as they are"):
        federate(make_task(sizes=SIZES), method, rounds=1, evaluation="none")


@pytest.mark.parametrize("method", ["afl", "fedcgs", "oneshot-margins", "ensemble", "oneshot-proto"])
def test_with_next_to_no_noise_and_a_wide_norm_it_is_the_method(make_task, method):
    task = make_task(sizes=(8, 8, 8, 8), dtype=torch.float64)  # whole batches: a short one counts less with noise
    more = {"rounds": 1, "engine": ENGINE}
    plain = federate(task, method, **more).server
    wide = federate(task, f"{method}+dpsgd:sample_clip=1000,noise=1e-16", **more).server
    for one, other in zip(flatten(plain)[0], flatten(wide)[0], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        ("afl", 1),
        ("fedcgs", 1),
        ("oneshot-margins:epochs=2", 4),
        ("ensemble:epochs=2", 3),
        ("oneshot-proto:epochs=2", 3),
    ],
)
def test_every_release_is_counted_beside_training(make_task, method, passes):
    name, _, values = method.partition(":")
    report = federate(make_task(sizes=SIZES), f"{name}+dpsgd:{values + ',' if values else ''}noise=3", rounds=1)
    (sentence,) = report.privacy
    assert f"({passes} passes)" in sentence
    assert f"epsilon {gaussian_epsilon(passes**0.5 / 3, 1e-5):.2f} " in sentence


def test_the_noise_has_the_size_that_is_declared(make_task):
    """Three leaves together: each has the noise of z C^p sqrt(3)."""
    task, rule = make_task(sizes=(4,) * 40), Private(clip=2.0, noise=5.0)

    def work(cohort):
        zeros = Stack.of(
            count=torch.full((len(cohort), 500), 1e4),
            sum=torch.zeros(len(cohort), 500),
            square=torch.zeros(len(cohort), 500),
        )
        changed = replace(cohort, changes=(Change(private=rule),))
        return Update(
            send={"delta": private.release(changed, "moments", lambda _: zeros, {"count": 0, "sum": 1, "square": 2})}
        )

    population = Population(ENGINE.place(task), RamMemory(40), 0)
    (done,) = ENGINE.run(Job(Work(work), create("fedavg"), None, np.arange(40), 0), population)
    for power, leaf in enumerate(("count", "sum", "square")):
        noise = done.result.send["delta"][leaf] - (1e4 if power == 0 else 0)
        assert noise.std().item() == pytest.approx(5 * 3**0.5 * 2**power, rel=0.03)
        assert abs(torch.corrcoef(noise[:2])[0, 1].item()) < 0.2
    assert (private.disturb(
        _cohort_of(task), "labels", Stack.of(counts=torch.zeros(1, 50)), {"counts": 0}, rule
    )["counts"] >= 0).all()  # fmt: skip


def _cohort_of(task):
    found = []
    job = Job(Work(lambda cohort: found.append(cohort) or Update()), create("fedavg"), None, np.arange(1), 0)
    list(ENGINE.run(job, Population(ENGINE.place(task), RamMemory(task.clients), 0)))
    return found[0]


@pytest.mark.parametrize("method", ["afl", "oneshot-margins"])
def test_numbers_do_not_depend_on_the_grouping(make_task, method):
    task = make_task(sizes=SIZES, dtype=torch.float64)
    single = LocalEngine(device="cpu", strategy="loop", dtype=torch.float64)
    one, two = (
        federate(task, f"{method}+dpsgd:noise=0.1", rounds=1, engine=engine) for engine in (ENGINE, single)
    )  # fmt: skip
    for mine, theirs in zip(flatten(one.server)[0], flatten(two.server)[0], strict=True):
        assert torch.equal(mine, theirs)


def test_clients_trained_with_noise_are_not_taken_for_those_without(make_task, tmp_path):
    task = make_task(sizes=SIZES)
    more = {"rounds": 1, "trained": tmp_path, "evaluation": "none"}
    plain = federate(task, "ensemble:epochs=1", **more).server.answer.models
    noisy = federate(task, "ensemble+dpsgd:epochs=1,noise=5", **more).server.answer.models
    assert (plain - noisy).norm().max() > 0.1


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("fedproto", "gradient of its own|sends as prototypes"),
        ("regmean", "sends as grams"),
        ("fedpft", "sends as mixtures"),
        ("fedpac", "before their first round|sends as"),
        ("ifca", "before their first round|sends as"),
        ("fedcvae", "must train by `sgd`|sends as labels"),
    ],
)
def test_what_no_mechanism_covers_is_refused(make_task, method, text):
    with pytest.raises(AtollError, match=text):
        federate(make_task(sizes=SIZES), f"{method}+dpsgd", rounds=1 if create(method).one_shot else 3)


def test_leaves_without_a_sensitivity_are_refused(make_task):
    with pytest.raises(PrivacyError, match="sensitivity of each leaf"):
        private.disturb(_cohort_of(make_task()), "x", Stack.of(a=torch.zeros(1)), {}, Private(1.0, 1.0))


def test_fedproto_declares_nothing():
    assert not FedProto().releases
