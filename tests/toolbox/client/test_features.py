"""Features beside answers, class by class, and their distances."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll import Batch, Cohort, Task
from atoll.kernel.network import Variant
from atoll.kernel.randomness import Keys
from atoll.models import BodyAndHead
from atoll.toolbox.client.features import class_sums, features_and_outputs, outputs_of, squared_distances


def odd() -> nn.Module:
    """BatchNorm and dropout on both sides of the boundary."""

    def side(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.Dropout(0.4))

    return BodyAndHead(side(4, 6), side(6, 3))


@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)])
def test_one_pass_gives_what_a_whole_pass_gives(make_task: Callable[..., Task], mask: torch.Tensor | None) -> None:
    task = make_task(odd, dtype=torch.float64)
    keys = Keys(torch.tensor(1), torch.tensor(2))
    batch = Batch(task.x[:5], task.y[:5], mask, keys, task.network, Variant())
    w = task.network.initial
    features, outputs, after = features_and_outputs(batch, w)
    expected, buffers = batch.forward(w)
    assert torch.equal(features, batch.features(w))
    assert torch.equal(outputs, expected)
    assert all(torch.equal(after[name], buffers[name]) for name in w)
    assert any(not torch.equal(after[name], w[name]) for name in w.part("head").buffers)
    assert torch.equal(outputs_of(batch, w, features)[0], expected)


def test_sums_of_features_by_class(make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]) -> None:
    task = make_task(sizes=(9, 2, 6), dtype=torch.float64)  # batches of 4: padding must not count
    cohort = make_cohort(task)
    found = class_sums(cohort, task.network.initial, 6)
    train = task.splits["train"]
    for k in range(3):
        own = train.order[train.offsets[k] : train.offsets[k + 1]]
        batch = Batch(task.x[own], task.y[own], None, None, task.network, Variant(train=False))
        features = batch.features(task.network.initial)
        for label in range(3):
            there = task.y[own] == label
            torch.testing.assert_close(found["sum"][k, label], features[there].sum(0), rtol=0, atol=1e-12)
            assert found["count"][k, label] == there.sum()


def test_squared_distances() -> None:
    a, b = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0, 4.0], [1.0, 2.0], [0.0, 0.0]])
    assert squared_distances(a, b).tolist() == [[25, 5, 0], [8, 0, 5]]
