"""MTFL with FedAvg-Adam: Adam itself for one client, its moments averaged for several, those of patches kept."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll import Task
from atoll.algorithms.mtfl_adam import MTFLAdam
from atoll.models import BodyAndHead
from atoll.testing.conformance import personal_models, play

PATCH = {"body.1.weight", "body.1.bias"}


def network() -> BodyAndHead:
    return BodyAndHead(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()), nn.Linear(5, 3))


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    made = make_task(network, sizes=(8, 8, 12), dtype=torch.float64)
    return replace(made, training=replace(made.training, batch_size=16))


def test_one_client_trains_by_adam_whatever_the_rounds(make_task: Callable[..., Task]) -> None:
    """catches: moments that begin anew in every round, or a count of steps that does."""
    task = make_task(network, sizes=(8,), dtype=torch.float64)
    task = replace(task, training=replace(task.training, batch_size=16))
    rows = task.splits["train"].order
    x, y = task.x[rows], task.y[rows]
    module = network().double()
    module.load_state_dict(dict(task.network.initial))
    optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(6):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    report = play(task, MTFLAdam(adam_lr=0.02, private="none", epochs=2), rounds=3)
    for name, leaf in module.named_parameters():
        torch.testing.assert_close(report.server.w[name], leaf.detach(), rtol=0, atol=1e-7)
    assert float(report.server.steps.value) == 6


def test_the_first_step_has_the_same_size_everywhere(task: Task) -> None:
    """Adam's first step is lr times the sign of the gradient; the mean over clients cannot be longer."""
    moved = play(task, MTFLAdam(adam_lr=0.01)).server.w.trained - task.network.initial.trained.without(PATCH)
    assert max(float(leaf.abs().max()) for leaf in moved.values()) <= 0.01 + 1e-9


def test_moments_are_averaged_by_hand(task: Task) -> None:
    report = play(task, MTFLAdam())
    weights = torch.tensor([8.0, 8.0, 12.0], dtype=torch.float64) / 28
    means = []
    for k in range(3):
        alone = play(task, MTFLAdam(), faults=lambda _, clients, k=k: clients != k)
        means.append(alone.server.mean["head.bias"])
    torch.testing.assert_close(report.server.mean["head.bias"], weights @ torch.stack(means), rtol=0, atol=1e-12)


def test_patches_and_their_moments_never_leave(task: Task) -> None:
    report = play(task, MTFLAdam(), rounds=2)
    for part in (report.server.w, report.server.mean, report.server.square):
        assert not PATCH & set(part)
    one, other, _ = personal_models(report)
    assert not torch.equal(one["body.1.bias"], other["body.1.bias"])
    assert torch.equal(one["head.bias"], other["head.bias"])
