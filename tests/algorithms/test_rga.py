"""RGA, by hand: moments, standardised features, prototypes, and what an answer does not depend on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from samples import answers, own, with_public
from torch import Tensor

from atoll import Batch, Params, Task
from atoll.algorithms.answers.rga import LEAST, standardise
from atoll.algorithms.fedetf import FedETF
from atoll.algorithms.local import Local
from atoll.algorithms.rga import RGA
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.testing.conformance import personal_models, play

CLASSES = 3
Prototypes = Literal["frame", "means"]
Moments = Literal["training", "public"]


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(dtype=torch.float64))


def features_of(task: Task, w: Params, x: Tensor, prototypes: Prototypes) -> Tensor:
    if prototypes == "frame":
        return answers(task, w, x)
    return Batch(x, x[:, :0], None, None, task.network, Variant(train=False)).features(w)


def models_of(task: Task, prototypes: Prototypes) -> list[Params]:
    if prototypes == "means":
        return personal_models(play(task, Local(epochs=3)))
    models = play(task, FedETF(epochs=3)).server.answer.models
    return [models.client(k) for k in range(task.clients)]


@pytest.mark.parametrize("prototypes", ["frame", "means"])
@pytest.mark.parametrize("moments", ["training", "public"])
def test_answers_by_hand(task: Task, prototypes: Prototypes, moments: Moments) -> None:
    report = play(task, RGA(epochs=3, prototypes=prototypes, moments=moments))
    found = answers(task, report.algorithm.shared(report.server), task.x)
    assert task.public is not None
    fused, means = torch.zeros(()), torch.zeros(CLASSES, 6, dtype=torch.float64)
    for k, w in enumerate(models_of(task, prototypes)):
        x, y = own(task, k)
        there = features_of(task, w, x if moments == "training" else task.public[0], prototypes)
        m, s = there.mean(0), there.std(0, correction=0)
        if not s.any():  # one sample of its own: nothing can be standardised by it
            continue
        s = s.clamp(min=LEAST * s.mean())
        fused = fused + len(y) ** 0.5 * (features_of(task, w, task.x, prototypes) - m) / s
        for label in range(CLASSES) if prototypes == "means" else ():
            if (y == label).any():
                mean = features_of(task, w, x[y == label], prototypes).mean(0)
                means[label] += len(y) ** 0.5 * (mean - m) / s
    frame = FedETF().training.directions(task.x, CLASSES)
    expected = F.cosine_similarity(fused[:, None], frame if prototypes == "frame" else means, dim=2)
    torch.testing.assert_close(found, 16 * expected, rtol=0, atol=1e-9)


def test_what_does_not_vary_is_left_out() -> None:
    features = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    mean, deviation = torch.zeros(2, 2), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    found = standardise(features, mean, deviation)
    assert found[1].tolist() == [[0.0, 0.0]]
    torch.testing.assert_close(found[0], torch.tensor([[0.5, 2 / (LEAST * 1.0)]]))


def test_a_class_that_nobody_has_is_never_the_answer(task: Task) -> None:
    task = replace(task, y=task.y % 2)
    report = play(task, RGA(epochs=1, prototypes="means"))
    found = answers(task, report.algorithm.shared(report.server), task.x)
    assert (found[:, 2] < found[:, :2].amin(1) - 10).all()


def test_an_answer_does_not_depend_on_the_other_samples(task: Task) -> None:
    # catches: statistics of the test batch, with which a single sample becomes 0.
    report = play(task, RGA(epochs=1))
    shared = report.algorithm.shared(report.server)
    together, alone = answers(task, shared, task.x[:5]), [answers(task, shared, task.x[k : k + 1]) for k in range(5)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


def test_only_what_is_needed_is_sent(task: Task) -> None:
    for prototypes, fields in (("frame", {"mean", "deviation"}), ("means", {"mean", "deviation", "classes"})):
        report = play(task, RGA(epochs=1, prototypes=prototypes))  # type: ignore[arg-type]
        assert set(report.server.answer.features) == fields


def test_public_samples_are_asked_for_before_training(task: Task) -> None:
    with pytest.raises(TaskError, match="rga with these options needs public data"):
        RGA(moments="public").start(replace(task, public=None).public_facts())
