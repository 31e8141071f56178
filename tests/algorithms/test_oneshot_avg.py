"""One-shot FedAvg: the average by hand, its statistics of BatchNorm, and what it needs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from samples import with_public
from torch import nn

from atoll import Params, Task
from atoll.algorithms.local import Local
from atoll.algorithms.oneshot_avg import OneShotAvg
from atoll.kernel.errors import TaskError
from atoll.models import BodyAndHead
from atoll.testing.conformance import personal_models, play


def with_batchnorm() -> nn.Module:
    return BodyAndHead(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()), nn.Linear(5, 3))


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


@pytest.fixture
def normed(make_task: Callable[..., Task]) -> Task:
    return with_public(make_task(with_batchnorm, dtype=torch.float64))


def made(task: Task, **options: str) -> Params:
    model: Params = play(task, OneShotAvg(epochs=2, **options)).server.answer  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize(
    ("weighting", "share"), [("samples", [5, 1, 12, 7]), ("uniform", [1] * 4), ("sqrt", [5**0.5, 1, 12**0.5, 7**0.5])]
)
def test_the_average_by_hand(task: Task, weighting: str, share: list[float]) -> None:
    alone, found = personal_models(play(task, Local(epochs=2))), made(task, weighting=weighting)
    for name, leaf in found.items():
        expected = sum(part * model[name] for part, model in zip(share, alone, strict=True)) / sum(share)
        torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-14)


def test_variances_are_those_of_all_samples_or_plain_means(normed: Task) -> None:
    alone = personal_models(play(normed, Local(epochs=2)))
    p = torch.tensor([5, 1, 12, 7], dtype=torch.float64)[:, None] / 25
    means, variances = (torch.stack([one[f"body.1.running_{what}"] for one in alone]) for what in ("mean", "var"))
    center = (p * means).sum(0)
    pooled, plain = made(normed), made(normed, batchnorm="mean")
    together = (p * (variances + means**2)).sum(0) - center**2
    torch.testing.assert_close(pooled["body.1.running_var"], together, rtol=0, atol=1e-14)
    torch.testing.assert_close(plain["body.1.running_var"], (p * variances).sum(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(pooled["body.1.running_mean"], center, rtol=0, atol=1e-14)
    assert int(pooled["body.1.num_batches_tracked"]) == max(int(one["body.1.num_batches_tracked"]) for one in alone)


def test_statistics_are_found_on_public_samples(normed: Task) -> None:
    # One batch of all public samples, again and again: the statistics end at theirs, but for 0.9^25 of the first ones.
    assert normed.public is not None
    x, y = normed.public
    normed = replace(normed, training=replace(normed.training, batch_size=len(x)))
    averaged, found = made(normed), made(normed, batchnorm="public")
    entering = x @ found["body.0.weight"].T + found["body.0.bias"]
    left = 0.9**25
    for what, there in (("mean", entering.mean(0)), ("var", entering.var(0))):
        name = f"body.1.running_{what}"
        torch.testing.assert_close(found[name], left * averaged[name] + (1 - left) * there, rtol=0, atol=1e-12)
    assert all(torch.equal(found[name], averaged[name]) for name in found.trained)
    other = made(replace(normed, public=(x, (y + 1) % 3)), batchnorm="public")
    assert all(torch.equal(found[name], other[name]) for name in found)  # labels are not read


def test_public_samples_are_asked_for_before_training(task: Task) -> None:
    with pytest.raises(TaskError, match="average with these options needs public data"):
        OneShotAvg(batchnorm="public").start(task.public_facts())


def test_everybody_deploys_the_average(task: Task) -> None:
    report = play(task, OneShotAvg(epochs=1), faults=lambda round, clients: clients == 1)
    assert all(torch.equal(one["head.bias"], report.server.answer["head.bias"]) for one in personal_models(report))
