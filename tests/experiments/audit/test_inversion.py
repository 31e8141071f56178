"""Samples and labels that messages give away, against closed forms; and what protects them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Report, Task, federate
from atoll.data import datasets, partition
from atoll.experiments.audit import audit
from atoll.experiments.audit.inversion import follow_steps, invert_first_layer
from atoll.experiments.audit.labels import infer_label, infer_shares
from atoll.experiments.audit.messages import Message, choose_probes, play_message
from atoll.experiments.audit.page import draw_pair
from atoll.experiments.audit.subject import Subject
from atoll.kernel.errors import PrivacyError
from atoll.kernel.network import Network
from atoll.kernel.params import Params
from atoll.kernel.randomness import default_generator, generator
from atoll.kernel.task import Training


def play_by_hand(x: torch.Tensor, y: torch.Tensor, *, steps: int, head: float = 1.0) -> Message:
    """Plain steps on a small network in float64; `head` scales what its last layer begins with."""
    with default_generator(3):
        module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    network = Network(module)
    start = Params(
        {name: leaf * (head if name.startswith("2.") else 1.0) for name, leaf in network.initial.items()},
        network.layout,
    )
    training = Training(lr=0.3)
    delta = follow_steps(network, start, x, y, training, steps).map(lambda leaf: leaf.detach())
    return Message(0, np.arange(len(x)), start, {"delta": delta}, network, training, steps, noisy=False)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.from_numpy(generator(0, "inversion test").standard_normal((10, 6)))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_first_layer_holds_a_single_sample_exactly(x: torch.Tensor, steps: int) -> None:
    found = invert_first_layer(play_by_hand(x[:1], torch.tensor([2]), steps=steps))
    assert found is not None
    assert torch.allclose(found, x[0], atol=1e-6)


def test_the_first_layer_says_nothing_for_several_samples(x: torch.Tensor) -> None:
    assert invert_first_layer(play_by_hand(x[:2], torch.tensor([2, 1]), steps=1)) is None


@pytest.mark.parametrize("label", range(4))
def test_the_label_of_a_single_sample(x: torch.Tensor, label: int) -> None:
    assert infer_label(play_by_hand(x[:1], torch.tensor([label]), steps=1)) == label


def test_label_counts_are_exact_where_outputs_are_uniform(x: torch.Tensor) -> None:
    y = torch.tensor([0] * 5 + [2] * 4 + [3])
    message = play_by_hand(x, y, steps=1, head=0.0)
    shares = infer_shares(message, lambda w: torch.full((4,), 0.25, dtype=torch.float64))
    assert shares is not None
    assert 10 * shares == pytest.approx([5, 0, 4, 1], abs=1e-6)


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.build(datasets.load("digits"), partition.parse("iid"), clients=3, model="mlp:32")


def run(task: Task, method: str, **settings: object) -> Report:
    return federate(task, method, rounds=1, evaluation="none", progress=False, **settings)


def test_a_message_is_what_the_run_sends(task: Task) -> None:
    subject = Subject.open(run(task, "fedavg"), trust=False)
    client, rows = choose_probes(subject)[0]
    message = play_message(subject, client, rows)
    where = torch.from_numpy(rows)
    made = follow_steps(message.network, message.start, task.x[where], task.y[where], task.training, 1)
    assert message.delta is not None
    for name, leaf in made.items():
        assert torch.allclose(leaf.detach(), message.delta[name], atol=1e-6)


def test_pictures_are_rebuilt_from_updates_and_not_under_privacy(task: Task, tmp_path) -> None:
    plain = audit(run(task, "fedavg"), attacks=["inversion", "labels"])
    single = [one for one in plain.pictures if one.attack == "first layer"]
    assert len(single) == 3
    assert min(one.psnr for one in single) > 60
    sought = [one for one in plain.pictures if one.attack == "cosine"]
    assert {one.samples for one in sought} == {1, 4}
    assert all(one.succeeds for one in sought)
    assert all(one.label for one in plain.pictures)
    assert plain.labels is not None
    assert draw_pair(single[0]).startswith(b"\x89PNG")
    assert plain.save(tmp_path)["page"].read_text().count("<img") == len(plain.pictures)
    private = audit(run(task, "fedavg", dp="client:noise=1,clip=1"), attacks=["inversion"])
    assert not any(one.succeeds for one in private.pictures)


def test_a_model_of_another_network_is_inverted_in_that_network(task: Task) -> None:
    """catches: a message read with the clients' own network."""
    found = audit(run(task, "fml:meme=mlp:16,8,beta=1"), attacks=["inversion", "labels"])
    single = [one for one in found.pictures if one.attack == "first layer"]
    assert min(one.psnr for one in single) > 60
    assert all(one.label for one in found.pictures)


def test_a_class_with_one_sample_uploads_its_feature(task: Task) -> None:
    found = audit(run(task, "oneshot-proto"), attacks=["inversion", "labels"])
    assert {one.attack for one in found.pictures} == {"features"}
    assert sum(one.succeeds for one in found.pictures) >= len(found.pictures) - 1
    assert found.labels is not None
    assert found.labels.distance == pytest.approx(0, abs=1e-6)  # counts are sent
    assert any("sends class means" in note for note in found.notes)


def test_what_protects_and_what_cannot_be_tried(task: Task) -> None:
    secure = run(task, "fedavg", secure="sums")
    with pytest.raises(PrivacyError, match="nobody has single replies"):
        audit(secure, attacks=["inversion"])
    found = audit(secure, references=0)  # what else was asked for is done
    assert found.membership
    assert any("nobody has single replies" in note for note in found.notes)
    hidden = audit(run(task, "fedper"), attacks=["labels"])
    assert hidden.labels is None
    assert any("fedper sends neither a head nor label counts" in note for note in hidden.notes)
    told = audit(run(task, "fedproto"), attacks=["labels"])
    assert told.labels is not None
    assert told.labels.distance == pytest.approx(0, abs=1e-6)
    nothing = audit(run(task, "local"), attacks=["inversion"])
    assert not nothing.pictures
    assert any("was not tried" in note for note in nothing.notes)


def test_momentum_and_decay_are_followed(x: torch.Tensor) -> None:
    message = play_by_hand(x[:2], torch.tensor([0, 1]), steps=2)
    rule = replace(message.training, momentum=0.9, weight_decay=0.01)
    moved = follow_steps(message.network, message.start, x[:2], torch.tensor([0, 1]), rule, 2)
    w = message.start.trained
    velocity = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
    leaves = {name: leaf.clone() for name, leaf in w.items()}
    for _ in range(2):
        held = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        loss = nn.functional.cross_entropy(
            (x[:2] @ held["0.weight"].T + held["0.bias"]).relu() @ held["2.weight"].T + held["2.bias"],
            torch.tensor([0, 1]),
        )
        for (name, leaf), g in zip(held.items(), torch.autograd.grad(loss, [*held.values()]), strict=True):
            velocity[name] = 0.9 * velocity[name] + g + 0.01 * leaf.detach()
            leaves[name] = leaf.detach() - 0.3 * velocity[name]
    for name, leaf in leaves.items():
        assert torch.allclose(moved[name], leaf - w[name], atol=1e-12)
