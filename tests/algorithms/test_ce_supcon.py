"""CE + SupCon: the gradient by hand, on samples as they are and on two views of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Batch, Task
from atoll.algorithms.ce_supcon import CESupCon
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.trainings.supcon import contrast_gradient
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.kernel.randomness import Keys
from atoll.models import BodyAndHead
from atoll.testing.conformance import play, quadratics


class Shift:
    """A view moves all samples by a number of its own."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Any shape will do."""

    def __call__(self, x: Tensor, keys: Keys) -> Tensor:
        moved = keys.bits(torch.zeros(1, dtype=torch.int64, device=x.device)).to(x.dtype) / 2**32
        return x + moved.reshape(-1, *[1] * (x.ndim - 1))


def supcon(z: Tensor, y: Tensor, real: Tensor, temperature: float) -> Tensor:
    """The mean over all real views, anchor by anchor and pair by pair."""
    z, total = F.normalize(z, dim=1), torch.zeros((), dtype=z.dtype)
    for i in np.flatnonzero(real):
        others = [a for a in np.flatnonzero(real) if a != i]
        log_all = torch.logsumexp(torch.stack([z[i] @ z[a] / temperature for a in others]), 0)
        same = [a for a in others if y[a] == y[i]]
        total = total - sum((z[i] @ z[p] / temperature - log_all for p in same), torch.zeros(())) / len(same)
    return total / real.sum()


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_the_gradient_by_hand(task: Task, mask: Tensor | None) -> None:
    x, y = task.x[:5], torch.tensor([0, 1, 2, 0, 2])
    keys = Keys(torch.tensor(3), torch.tensor(4))
    raw = Batch(x, y, mask, keys, task.network, Variant(), augment=Shift())
    g, _, loss = contrast_gradient(task.network.initial, raw.view(0), lam=0.7, temperature=0.5)
    seen = [raw.view(number).x for number in (0, 1)]
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], x)
    module = task.network._original.requires_grad_(True)
    real = torch.ones(5, dtype=torch.float64) if mask is None else mask
    fit = (F.cross_entropy(module(x), y, reduction="none") * real).sum() / real.sum()
    z = module.features(torch.cat(seen))  # type: ignore[operator]
    total = fit + 0.7 * supcon(z, y.repeat(2), real.repeat(2), 0.5)
    torch.testing.assert_close(loss, fit.detach(), rtol=0, atol=1e-12)
    for mine, theirs in zip(g.values(), torch.autograd.grad(total, list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_statistics_of_batchnorm_are_those_of_samples_as_they_are(make_task: Callable[..., Task]) -> None:
    def normed() -> nn.Module:
        return BodyAndHead(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5)), nn.Linear(5, 3))

    task = make_task(normed, sizes=(8,), batch_size=8, dtype=torch.float64)
    models = play(replace(task, augment=Shift()), CESupCon(epochs=1)).server.answer.models
    torch.testing.assert_close(models["body.0.running_mean"][0], 0.1 * task.x.mean(0), rtol=0, atol=1e-12)


def test_the_contrast_counts(task: Task) -> None:
    plain, mine = (play(task, one).server.answer.models for one in (Ensemble(epochs=1), CESupCon(epochs=1)))
    assert not torch.equal(plain["body.1.weight"][2], mine["body.1.weight"][2])


def test_a_task_without_classes_is_refused() -> None:
    with pytest.raises(TaskError, match="supcon needs samples of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), CESupCon())
