"""Canary samples: an honest mechanism is not refuted, a broken one is."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll import Report, Task, federate
from atoll.data import datasets, partition
from atoll.experiments.audit import audit
from atoll.experiments.audit.sample_canaries import Canaries
from atoll.experiments.audit.subject import Subject
from atoll.kernel.errors import PrivacyError
from atoll.toolbox.client.private import Private


@pytest.fixture(scope="module")
def task() -> Task:
    built = Task.build(datasets.load("digits"), partition.parse("iid"), clients=3, model="mlp:16")
    return built.with_training(lr=0.1, batch_size=2000)  # a step reads all samples: the promise is at its tightest


def run(task: Task, method: str, **more: object) -> Report:
    return federate(task, method, rounds=2, evaluation="none", progress=False, **more)


def test_an_honest_promise_about_samples_holds(task: Task) -> None:
    found = audit(run(task, "fedavg+dpsgd:noise=2"), attacks=[], canaries=90)
    assert found.promise is not None
    assert found.holds
    assert found.promise.unit == "sample"
    assert 0 <= found.promise.lower < found.promise.promised
    assert found.sentences[0].startswith("With 90 canary samples, ")


def test_a_private_method_that_leaves_out_its_noise_is_found(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Private.gradient
    monkeypatch.setattr(Private, "gradient", lambda self, *rest: honest(replace(self, noise=0.0), *rest))
    found = audit(run(task, "fedavg+dpsgd:noise=8"), attacks=[], canaries=90)
    assert found.promise is not None
    assert found.promise.right >= 0.95 * found.promise.guesses
    assert not found.holds
    assert "does not hold" in found.sentences[0]


def test_personal_models_are_audited_by_what_is_sent(task: Task) -> None:
    assert audit(run(task, "ditto+dpsgd:noise=2"), attacks=[], canaries=30).holds


def test_canaries_that_are_in_are_among_their_owners_samples(task: Task) -> None:
    subject = Subject.open(run(task, "fedavg+dpsgd:noise=2"), trust=False)
    canaries = Canaries.draw(subject, 30)
    joined = canaries.join(task)
    assert 5 < canaries.within.sum() < 25
    for client in range(task.clients):
        before, after = (one.splits["train"].of(np.array([client])).order for one in (task, joined))
        added = set(after.tolist()) - set(before.tolist())
        assert added == set((np.flatnonzero(canaries.within & (canaries.owner == client)) + len(task.x)).tolist())
        assert torch.equal(joined.x[len(task.x) :], canaries.x)


def test_what_canary_samples_cannot_check(task: Task) -> None:
    private = run(task, "fedavg+dpsgd:noise=2")
    with pytest.raises(PrivacyError, match="at least 10"):
        audit(private, attacks=[], canaries=3)
    with pytest.raises(PrivacyError, match="This run makes none"):
        audit(run(task, "fedavg"), attacks=[], canaries=20)
    with pytest.raises(PrivacyError, match="nobody has single replies"):
        audit(run(task, "fedavg+dpsgd:noise=2", secure="sums"), attacks=[], canaries=20)
    with pytest.raises(PrivacyError, match="changes of one shared model"):
        audit(run(task, "scaffold+dpsgd:noise=2"), attacks=[], canaries=20)
