"""FedMD, by hand: what travels, what is averaged, and where learning from each other ends."""

from dataclasses import replace

import pytest
import torch
from samples import biased

from atoll import Recipe, Task
from atoll.algorithms.fedmd import FedMD
from atoll.kernel.batch import Batch
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.kernel.params import Params
from atoll.kernel.randomness import Keys
from atoll.testing.conformance import personal_models, play
from atoll.testing.conformance.tasks import build_task
from atoll.toolbox.client.answers import Lessons, imitating_gradient


def test_the_first_round_by_hand() -> None:
    task = biased((1, 0), (3, 1))
    server = play(task, FedMD()).server
    assert server.wanted.value.tolist() == [pytest.approx([0.5, 0.5])] * 4  # logits (2, -2) and (-2, 2), alike
    half = torch.tensor([-1.0, 1.0], dtype=torch.float64).softmax(0).tolist()  # weighted by 1 and 3
    by_samples = play(task, FedMD(weighting="samples")).server
    assert by_samples.wanted.value.tolist() == [pytest.approx(half)] * 4
    p = torch.tensor([2.0, -2.0], dtype=torch.float64).softmax(0)
    probs = play(task, FedMD(weighting="samples", send="probs")).server
    assert probs.wanted.value[0].tolist() == pytest.approx((0.25 * p + 0.75 * p.flip(0)).tolist())


def test_the_gradient_of_the_digest_by_hand() -> None:
    task = build_task()
    w, x = task.network.initial, task.x[:4]
    batch = Batch(x, task.y[:4], None, None, task.network, Variant(train=False))
    batch = replace(batch, keys=Keys.of(torch.tensor(0), 0, "test"))
    q = torch.full((1, 3), 1 / 3, dtype=torch.float64)  # one public sample: every draw is this one
    g, _, _ = imitating_gradient(w, batch, Lessons(Params.of(x=x[:1]), Params.of(wanted=q)))
    p = batch.outputs(w).softmax(1)[0]
    torch.testing.assert_close(g["head.bias"], p - q[0], rtol=0, atol=1e-12)


def test_clients_that_only_learn_from_each_other_agree() -> None:
    """Two models (2, -2) and (-2, 2) after the first round meet at their mean, where nothing is left to learn."""
    task = biased((1, 0), (1, 1))
    first = [model["b"] for model in personal_models(play(task, FedMD()))]
    assert first[0].tolist() == pytest.approx([2.0, -2.0])
    many = replace(task, training=replace(task.training, lr=1.0))
    apart = [
        float((one["b"] - other["b"]).abs().sum())
        for one, other in (personal_models(play(many, FedMD(digest_epochs=n), 2)) for n in (0, 1, 20))
    ]
    assert apart[0] > apart[1] > apart[2]


def test_equal_clients_teach_each_other_nothing() -> None:
    """catches: a digest whose target is not what was answered."""
    alike = biased((2, 0), (2, 0), lr=0.5)
    one, other = personal_models(play(alike, FedMD(digest_epochs=5), 3))
    alone, _ = personal_models(play(alike, FedMD(digest_epochs=0), 3))
    assert one["b"].tolist() == pytest.approx(other["b"].tolist())
    assert one["b"].tolist() == pytest.approx(alone["b"].tolist())


def test_the_student_answers_as_all_do() -> None:
    """It is taught by logits alone, and ends where FedDF's student does."""
    task = biased((1, 0), (3, 1))
    report = play(task, FedMD(weighting="samples", server_epochs=400, server_lr=0.05))
    w = report.server.w["b"]
    assert float(w[1] - w[0]) == pytest.approx(2.0, abs=1e-2)  # the mean of logits is (-1, 1)


def test_no_model_travels() -> None:
    task = build_task()
    report = play(task, FedMD(samples=7, server_epochs=1), 2)
    up = [entry for entry in report.ledger.messages() if entry.direction == "up"]
    assert {entry.kind for entry in up} <= {"answers", "statistic"}
    assert report.server.x.value.shape[0] == min(7, len(task.public[0]))
    assert all(name not in ("head.weight", "head.bias") for name in (*report.server.x, *report.server.wanted))


def test_answers_are_those_of_all_architectures() -> None:
    task = Recipe(clients=4, model="mlp:8/mlp:12", public=0.1).build()
    report = play(task, FedMD(samples=20), 2)
    one, other = (state.wanted.value for state in report.server.states)
    assert torch.equal(one, other)


def test_a_task_without_classes_is_refused(two_clients: Task) -> None:
    public = (two_clients.x[:1], two_clients.y[:1])
    with pytest.raises(TaskError, match="classes"):
        play(replace(two_clients, public=public), FedMD())
