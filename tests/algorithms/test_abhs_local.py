"""ABHS without an exchange, by hand: what clients decide, what the server decides, and the averaged base."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from samples import own
from torch import nn

from atoll import Cohort, Params, Stack, Task
from atoll.algorithms.abhs_local import ABHSLocal
from atoll.kernel.algorithm import Update
from atoll.kernel.errors import TaskError
from atoll.kernel.randomness import generator
from atoll.models import BodyAndHead
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.client.blocks import blocks_of

CLASSES = 3
quick = partial(ABHSLocal, epochs=2, personal_epochs=1)


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    task = make_task(dtype=torch.float64, sizes=(20, 3, 14, 9), shares=(0.6, 0.2, 0.2))
    draw = generator(1, "public")
    x, y = torch.from_numpy(draw.normal(size=(8, 4))), torch.from_numpy(draw.integers(CLASSES, size=8))
    return replace(task, public=(x, y))


def test_clients_share_as_deep_as_their_classes_are_even(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    shares = [torch.bincount(own(task, k)[1], minlength=CLASSES) / len(own(task, k)[0]) for k in range(task.clients)]
    even = torch.stack([torch.special.entr(one).sum() for one in shares]) / math.log(CLASSES)
    for theta in (0.0, 0.5, 0.8, 0.95, 2.0):
        sent = quick(theta=theta).local(task.network.initial, make_cohort(task)).send["split"]["split"]
        good = [(1 - (1 - e) / 2 >= theta, e >= theta) for e in even.tolist()]
        assert sent.tolist() == [int(first) + int(first and second) for first, second in good]


def deciding(task: Task, splits: list[int], **options: Any) -> dict[str, Any]:
    """What the server makes of clients that want these splits."""

    @dataclass(frozen=True, kw_only=True)
    class Decided(ABHSLocal):
        def local(self, w: Params, cohort: Cohort) -> Update:
            sent = super().local(w, cohort).send
            return Update(send={**sent, "split": Stack.of(split=torch.tensor(splits)[cohort.ids])})

    return play(task, Decided(epochs=2, personal_epochs=1, **options)).server  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("splits", "theta_c", "expected"),
    [
        ([2, 2, 2, 2], 0.0, [2, 2, 2, 2]), ([2, 2, 2, 2], 1.0, [0, 0, 0, 0]), ([0, 0, 2, 2], 0.0, [0, 0, 2, 2]),
        ([0, 1, 1, 2], 0.0, [0, 1, 1, 2]),
    ],
)  # fmt: skip
def test_the_server_averages_as_deep_as_each_wants_and_all_are_alike(
    task: Task, splits: list[int], theta_c: float, expected: list[int]
) -> None:
    server = deciding(task, splits, theta_c=theta_c)
    assert server.splits.tolist() == expected
    assert bool(((server.alike > 0) & (server.alike < 1)).all())
    alone = play(task, quick(theta=2.0)).server.found.models
    n = torch.tensor([len(own(task, k)[0]) for k in range(4)], dtype=torch.float64)
    for number, leaves in enumerate(blocks_of(task.public_facts()).leaves):
        shares = torch.tensor(expected) > number
        for name in leaves:
            mean = torch.tensordot(n * shares / (n * shares).sum().clamp(min=1), alone[name], dims=1)
            for k in range(4):
                torch.testing.assert_close(server.found.models[name][k], mean if shares[k] else alone[name][k])


def test_all_averaged_is_one_model_and_no_ensemble(task: Task) -> None:
    report = play(task, quick(theta=0.0, theta_c=0.0))
    shared = report.algorithm.shared(report.server)
    assert isinstance(shared, Params)
    assert set(shared) == set(task.network.initial)
    for model in personal_models(report):  # nothing lies above the base
        assert all(torch.equal(model[name], leaf) for name, leaf in shared.items())


def normed() -> nn.Module:
    return BodyAndHead(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, CLASSES))


@pytest.mark.parametrize("probes", ["noise", "public"])
def test_statistics_of_the_averaged_base_are_those_of_samples(
    make_task: Callable[..., Task], task: Task, probes: str
) -> None:
    normal = make_task(normed, dtype=torch.float64, sizes=(20, 3, 14, 9), shares=(0.6, 0.2, 0.2))
    normal = replace(normal, public=task.public)
    server = deciding(normal, [1, 1, 1, 1], theta_c=0.0, probes=probes)
    found = server.found.models.client(3)
    mean, inside = found["body.1.running_mean"], found["body.1.running_var"]
    if probes == "public":  # found anew: in the mean over batches, those of what enters the layer
        entering = normal.public[0] @ found["body.0.weight"].T + found["body.0.bias"]
        torch.testing.assert_close(mean, entering.mean(0), rtol=0, atol=0.15)
        return
    alone = play(normal, quick(theta=2.0)).server.found.models
    n = torch.tensor([len(own(normal, k)[0]) for k in range(4)], dtype=torch.float64)[:, None]
    share, means = n / n.sum(), alone["body.1.running_mean"]
    torch.testing.assert_close(mean, (share * means).sum(0))
    second = (share * (alone["body.1.running_var"] + means.square())).sum(0)
    torch.testing.assert_close(inside, second - mean.square())


def test_public_samples_are_needed_only_where_they_are_asked_for(task: Task) -> None:
    private = replace(task, public=None)
    play(private, quick())
    for method in (quick(probes="public"), quick(student_epochs=1)):
        with pytest.raises(TaskError, match="ABHSLocal with these options needs public data"):
            play(private, method)


def test_noise_must_be_like_the_samples(task: Task) -> None:
    class Looked(BodyAndHead):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Embedding(5, 6), nn.Flatten()), nn.Linear(12, CLASSES))

    letters = {"0": (torch.arange(6).reshape(3, 2) % 5, torch.arange(3))}
    words = Task.of_clients(letters, Looked(), classes=CLASSES, shares=(1.0, 0.0, 0.0))
    with pytest.raises(TaskError, match="must be numbers") as caught:
        ABHSLocal().start(words.public_facts())
    assert "probes=public" in str(caught.value)


def test_a_student_learns_from_all(task: Task) -> None:
    report = play(task, quick(student_epochs=3, personal="none"))
    shared = report.algorithm.shared(report.server)
    assert isinstance(shared, Params)
    assert not torch.equal(shared["head.weight"], task.network.initial["head.weight"])
