"""FML, by hand: equal models teach each other nothing, and what unequal ones teach is p - q."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Recipe, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fml import FML, taught_gradient
from atoll.algorithms.local import Local
from atoll.compose import create
from atoll.kernel.batch import Batch
from atoll.kernel.errors import AtollError, ModelError, TaskError
from atoll.kernel.network import Variant
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.tasks import SIZES, build_task
from atoll.testing.conformance.trees import find_difference


def in_one_step(lr: float = 0.1, sizes: tuple[int, ...] = SIZES) -> Task:
    task = build_task(sizes=sizes)
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
    g, _, _ = taught_gradient(w, batch, 0.3, lambda: batch.outputs(v))
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


def with_meme(task: Task, meme: str) -> Task:
    """The task of clients that have the small network themselves, with the values that w begins with."""
    return replace(task, network=FML(meme=meme).network(task.public_facts()))


@pytest.mark.limit("fml", "fedavg")
@pytest.mark.parametrize("meme", ["linear", "mlp:5"])
def test_a_small_shared_model_that_learns_from_data_alone_is_fedavgs(meme: str) -> None:
    task = build_task()
    report = play(task, FML(meme=meme, beta=1.0), 3)
    alone = play(with_meme(task, meme), FedAvg(), 3)
    assert dict(report.server).keys() == dict(alone.server).keys() != dict(task.network.initial).keys()
    assert all(torch.equal(report.server[name], leaf) for name, leaf in alone.server.items())


@pytest.mark.limit("fml", "local")
def test_a_personal_model_that_learns_from_data_alone_is_locals_whatever_the_shared_one_is() -> None:
    task = build_task()
    mine, alone = (personal_models(play(task, one, 3)) for one in (FML(meme="linear", alpha=1.0), Local()))
    assert find_difference(mine, alone) is None


@pytest.mark.purpose("fml")
def test_the_two_networks_teach_each_other() -> None:
    """catches: a teacher asked with the leaves or the network of its student."""
    task = in_one_step(sizes=(13,))
    meme = with_meme(task, "linear").network

    def distance(rounds: int, alpha: float, beta: float) -> float:
        report = play(task, FML(meme="linear", alpha=alpha, beta=beta, epochs=20), rounds)
        small = Batch(task.x, task.y, None, None, meme, Variant(train=False)).outputs(report.server)
        own = Batch(task.x, task.y, None, None, task.network, Variant(train=False)).outputs(personal_models(report)[0])
        return float((small.softmax(1) - own.softmax(1)).abs().mean())

    for alpha, beta in ((0.0, 1.0), (1.0, 0.0)):
        assert distance(40, alpha, beta) < 0.5 * distance(1, alpha, beta)


def test_the_small_model_alone_travels() -> None:
    report = play(build_task(), FML(meme="linear"), 2)
    numbers = sum(leaf.numel() for leaf in report.server.values())
    sent = [entry for entry in report.ledger.messages() if entry.kind == "model"]
    assert {entry.direction for entry in sent} == {"up", "down"}
    assert all(8 * numbers < entry.bytes < 8 * numbers + 300 for entry in sent)  # and names
    assert report.algorithm.shared(report.server) is None


def test_clients_of_all_architectures_average_one_small_model() -> None:
    task = Recipe(clients=4, model="mlp:8/mlp:12").build()
    report = play(task, FML(meme="mlp:5", beta=1.0), 2)
    one, other = report.server.states
    alone = play(replace(with_meme(task, "mlp:5"), networks=(), architecture=None), FedAvg(), 2).server
    assert find_difference([one], [other]) is None
    assert all(torch.allclose(one[name], leaf, rtol=0, atol=1e-6) for name, leaf in alone.items())
    assert [len(model["head.weight"][0]) for model in personal_models(report)] == [8, 12, 8, 12]
    apart = play(task, FML(beta=1.0), 2).server.states
    assert [len(model["head.weight"][0]) for model in apart] == [8, 12]


def test_a_small_model_with_dropout_has_the_same_bits_however_clients_are_run() -> None:
    """catches: a network that a step asks and that its thread has no copy of, or that draws without keys."""
    task = Recipe(clients=40, model="mlp:8").build().of(np.arange(4))
    whole = play(task, FML(meme="simple-cnn"), 2, strategy="whole").server
    for strategy in ("loop", "threads", "chunk:2"):
        other = play(task, FML(meme="simple-cnn"), 2, strategy=strategy).server
        assert all(torch.allclose(other[name], leaf, atol=1e-6) for name, leaf in whole.items()), strategy
    still = play(task, FML(meme="simple-cnn", beta=1.0, epochs=0), 1).server
    assert not torch.equal(still["head.weight"], whole["head.weight"])


def test_a_new_client_learns_beside_the_small_model() -> None:
    task = build_task()
    report = play(task, FML(meme="linear"), 2)
    model = report.welcome(task.x[:8], task.y[:8])
    assert dict(model).keys() == dict(task.network.initial).keys()
    assert not torch.equal(model["head.weight"], task.network.initial["head.weight"])


def test_the_small_model_works_inside_clusters() -> None:
    report = play(build_task(), create("fml@ifca:meme=linear,clusters=2,cluster_rounds=2"), 4)
    assert all("body.0.weight" in model for model in personal_models(report))


@pytest.mark.parametrize(("meme", "words"), [("cnn", "images of shape"), ("mpl", "Unknown model 'mpl'")])
def test_a_small_model_that_cannot_be_is_refused(meme: str, words: str) -> None:
    with pytest.raises(AtollError, match=words):
        play(build_task(), FML(meme=meme))


def test_a_small_model_without_an_answer_for_every_pixel_is_refused() -> None:
    images, labels = torch.rand(4, 1, 3, 3, dtype=torch.float64), torch.zeros(4, 3, 3, dtype=torch.int64)
    task = Task.of_clients({"0": (images, labels)}, nn.Conv2d(1, 2, 1, dtype=torch.float64), classes=2)
    with pytest.raises(
        ModelError,
        match=r"meme=mlp:8 does not fit this task\. MLP must answer for targets of shape \(3, 3\)\. Got .* \(1, 2\)",
    ):
        play(task, FML(meme="mlp:8"))


def test_widths_of_the_small_model_may_be_written_as_elsewhere() -> None:
    method = create("fml:meme=mlp:16,8,alpha=0.3")
    assert method == FML(meme="mlp:16,8", alpha=0.3)
    report = play(build_task(), method)
    assert [len(report.server[f"body.{number}.bias"]) for number in (1, 3)] == [16, 8]
