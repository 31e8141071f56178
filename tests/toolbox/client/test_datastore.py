"""A client's samples as a memory."""

from collections.abc import Callable

import pytest
import torch

from atoll import Batch, Cohort, Params, Task
from atoll.kernel.network import Variant
from atoll.toolbox.client import passes
from atoll.toolbox.client.datastore import datastore, say_neighbours

SIZES = (9, 1, 6)


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(sizes=SIZES, dtype=torch.float64)


def own(task: Task, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    train = task.splits["train"]
    rows = train.order[train.offsets[client] : train.offsets[client + 1]]
    batch = Batch(task.x[rows], task.y[rows], None, None, task.network, Variant(train=False))
    return batch.features(task.network.initial), task.y[rows]


@pytest.mark.parametrize("capacity", [None, 4, 100])
def test_clients_store_their_own_samples_and_nothing_else(
    task: Task, make_cohort: Callable[..., Cohort], monkeypatch: pytest.MonkeyPatch, capacity: int | None
) -> None:
    monkeypatch.setattr(passes, "AT_ONCE", 4)  # so that there are several batches, the last one padded
    store = datastore(make_cohort(task), task.network.initial, 6, capacity)
    assert store["taken"].shape == (3, min(capacity or 9, 9))
    for k, size in enumerate(SIZES):
        features, labels = own(task, k)
        stored = min(size, capacity or size)
        assert store["taken"][k].tolist() == [place < stored for place in range(store["taken"].shape[1])]
        found = store["features"][k, :stored]
        # Every stored sample is one of the client's, with its label, and none is there twice.
        same = (found[:, None] - features).abs().amax(2) < 1e-12
        assert same.sum(1).tolist() == [1] * stored
        assert same.sum(0).max() == 1
        assert store["labels"][k, :stored].tolist() == labels[same.double().argmax(1)].tolist()
        assert not store["features"][k, stored:].any()
        assert not store["labels"][k, stored:].any()


def test_a_full_store_is_a_random_choice(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    stores = [datastore(make_cohort(task, seed=seed), task.network.initial, 6, 4)["features"][0] for seed in (0, 1)]
    assert not torch.equal(*stores)


def test_neighbours_by_hand() -> None:
    # Squared distances 1, 4, 9 and a place that is not taken; size 2 and scale 0.5 make the kernel exp(-distance^2).
    store = Params.of(
        features=torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 0.0]], dtype=torch.float64),
        labels=torch.tensor([2, 0, 2, 1]),
        taken=torch.tensor([True, True, True, False]),
    )
    here, e = torch.zeros(1, 2, dtype=torch.float64), torch.exp(torch.tensor([-1.0, -4.0, -9.0], dtype=torch.float64))
    two = say_neighbours(store, here, count=2, scale=0.5, classes=3)
    torch.testing.assert_close(two, torch.stack([e[1], 0 * e[0], e[0]])[None] / (e[0] + e[1]))
    many = say_neighbours(store, here, count=99, scale=0.5, classes=3)
    torch.testing.assert_close(many, torch.stack([e[1], 0 * e[0], e[0] + e[2]])[None] / e.sum())


def test_far_neighbours_still_have_a_say() -> None:
    # catches: dividing exp(-distance) by its sum without taking the largest out first: 0 / 0.
    store = Params.of(
        features=torch.tensor([[1e3], [1.1e3]]), labels=torch.tensor([1, 0]), taken=torch.tensor([True, True])
    )
    said = say_neighbours(store, torch.zeros(1, 1), count=2, scale=1.0, classes=2)
    assert said.tolist() == [[0.0, 1.0]]


def test_an_empty_store_knows_nothing() -> None:
    store = Params.of(features=torch.zeros(2, 3), labels=torch.zeros(2).long(), taken=torch.zeros(2, dtype=torch.bool))
    assert say_neighbours(store, torch.ones(1, 3), count=2, scale=1.0, classes=4).tolist() == [[0.25] * 4]
