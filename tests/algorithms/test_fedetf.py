"""FedETF, by hand: what clients minimise, and how their models answer together."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import answers, own
from torch import Tensor

from atoll import Batch, Params, Task
from atoll.algorithms.fedetf import FedETF
from atoll.algorithms.trainings.etf import Given, frame_gradient, in_frame
from atoll.kernel.network import Variant
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.oneshot import average_models

CLASSES = 3


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def frame(scale: float = 16.0) -> Tensor:
    return FedETF(scale=scale).training.directions(torch.zeros(1, dtype=torch.float64), CLASSES)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_the_gradient_by_hand(task: Task, balanced: bool, mask: Tensor | None) -> None:
    x, y = task.x[:5], torch.tensor([0, 1, 2, 0, 2])
    counts = torch.tensor([4.0, 0.0, 7.0], dtype=torch.float64)
    given = Given(frame(), counts if balanced else None)
    batch = Batch(x, y, mask, None, task.network, Variant())
    g, _, loss = frame_gradient(task.network.initial, batch, given)
    module = task.network._original.requires_grad_(True)
    u = module(x)
    z = 16 * (u / u.norm(dim=1, keepdim=True)) @ (frame() / 16).T
    z = z + (counts + 1).log() if balanced else z
    each = torch.ones(5, dtype=torch.float64) if mask is None else mask
    fit = (F.cross_entropy(z, y, reduction="none") * each).sum() / each.sum()
    torch.testing.assert_close(loss, fit.detach(), rtol=0, atol=1e-12)
    for mine, theirs in zip(g.values(), torch.autograd.grad(fit, list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_client_counts_its_own_classes(task: Task) -> None:
    # One client, one step of all its samples: the counts in its loss are those of its own labels.
    models = play(task, FedETF(epochs=1, scale=16.0)).server.answer.models
    x, y = own(task, 1)
    assert len(y) == 1
    counts = F.one_hot(y[0], CLASSES).to(torch.float64)
    w = task.network.initial
    g, _, _ = frame_gradient(w, Batch(x, y, None, None, task.network, Variant()), Given(frame(), counts))
    for name, leaf in g.items():
        torch.testing.assert_close(models[name][1], w[name] - 0.1 * leaf, rtol=0, atol=1e-12)


def test_models_answer_together_or_averaged(task: Task) -> None:
    report = play(task, FedETF(epochs=2, scale=16.0, weighting="samples"))
    models, x = report.server.answer.models, task.x
    share = torch.tensor([5, 1, 12, 7], dtype=torch.float64) / 25
    z = [16 * F.normalize(answers(task, models.client(k), x), dim=1) @ (frame() / 16).T for k in range(4)]
    expected = sum(p * one for p, one in zip(share, z, strict=True))
    torch.testing.assert_close(answers(task, report.algorithm.shared(report.server), x), expected, rtol=0, atol=1e-12)
    other = play(task, FedETF(epochs=2, scale=16.0, answer="average"))
    one = average_models(models, share)
    found = other.algorithm.shared(other.server)
    batch = Batch(x, x[:, :0], None, None, task.network, Variant(train=False))
    torch.testing.assert_close(
        answers(task, found, x), in_frame(one, Params.of(directions=frame()), batch), rtol=0, atol=1e-12
    )


def test_the_frame_is_the_same_in_every_run_and_is_not_sent(task: Task) -> None:
    found = [personal_models(play(task, FedETF(epochs=0), seed=seed))[0]["beside.directions"] for seed in (0, 1)]
    assert torch.equal(*found)
    report = play(task, FedETF(epochs=0))
    assert {one.field for one in report.ledger.messages()} == {"broadcast", "model", "labels"}
