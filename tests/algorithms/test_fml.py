"""FML, by hand: equal models teach each other nothing, and what unequal ones teach is p - q."""

from dataclasses import replace

import pytest
import torch

from atoll import Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fml import FML, taught_gradient
from atoll.kernel.batch import Batch
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.tasks import build_task
from atoll.testing.conformance.trees import find_difference


def in_one_step(lr: float = 0.1) -> Task:
    task = build_task()
    return replace(task, training=replace(task.training, batch_size=64, lr=lr))


def test_in_the_first_step_models_are_equal_and_teach_nothing() -> None:
    found = play(in_one_step(), FML(alpha=0.25, beta=0.5)).server
    half = play(in_one_step(lr=0.05), FedAvg()).server
    assert all(torch.allclose(found[name], leaf, rtol=0, atol=1e-14) for name, leaf in half.items())


def test_the_gradient_by_hand() -> None:
    task = build_task()
    network, x, y = task.network, task.x[:4], task.y[:4]
    w = network.initial
    v = w.map(lambda leaf: leaf.roll(1, 0))
    batch = Batch(x, y, None, None, network, Variant(train=False))
    p, q = (batch.outputs(one).softmax(1) for one in (w, v))
    g, _, _ = taught_gradient(w, batch, v, 0.3)
    truth = torch.nn.functional.one_hot(y, 3)
    expected = (0.3 * (p - truth) + 0.7 * (p - q)).mean(0)
    torch.testing.assert_close(g["head.bias"], expected, rtol=0, atol=1e-12)


def test_models_that_learn_from_each_other_alone_stay_where_they_are() -> None:
    report = play(build_task(), FML(alpha=0.0, beta=0.0), rounds=3)
    start = build_task().network.initial
    assert all(torch.allclose(report.server[name], leaf, rtol=0, atol=1e-12) for name, leaf in start.items())


def test_a_student_alone_leaves_the_shared_model_as_fedavg_has_it() -> None:
    """catches: a personal model whose gradient reaches its teacher."""
    assert (
        find_difference([play(build_task(), FML(beta=1.0), 3).server], [play(build_task(), FedAvg(), 3).server]) is None
    )


def test_a_personal_model_without_data_follows_the_shared_one() -> None:
    def distance(rounds: int) -> float:
        report = play(in_one_step(), FML(alpha=0.0, beta=1.0, epochs=20), rounds)
        x = build_task().x
        batch = Batch(x, build_task().y, None, None, build_task().network, Variant(train=False))
        wanted = batch.outputs(report.server).softmax(1)
        return float((batch.outputs(personal_models(report)[0]).softmax(1) - wanted).abs().mean())

    assert distance(1) > 0
    assert distance(40) < 0.1


def test_a_task_without_classes_is_refused(two_clients: Task) -> None:
    with pytest.raises(TaskError, match="classes"):
        play(two_clients, FML())
