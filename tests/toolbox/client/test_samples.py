"""All samples of each client at once."""

import torch

from atoll import Batch, Task
from atoll.kernel.network import Variant
from atoll.testing.conformance import quadratics
from atoll.toolbox.client.samples import rows_of


def test_every_client_has_its_samples_and_one_hot_labels(make_task, make_cohort) -> None:
    task = make_task(sizes=(5, 1, 12), shape=(2, 3))
    found = rows_of(make_cohort(task, clients=[2, 1]))
    assert [x.shape for x, _ in found] == [(12, 6), (1, 6)]
    train = task.splits["train"]
    mine = train.order[train.offsets[2] : train.offsets[3]]
    assert torch.equal(found[0][0], task.x[mine].flatten(1))
    assert torch.equal(found[0][1].argmax(1), task.y[mine])
    assert found[0][1].sum(1).tolist() == [1] * 12


def test_numbers_that_are_predicted_stay_numbers(make_cohort) -> None:
    task = quadratics(torch.tensor([[1.0], [3.0]], dtype=torch.float64), samples=[1, 3])
    assert [tuple(y.shape) for _, y in rows_of(make_cohort(task))] == [(1, 1), (3, 1)]


def test_encoded_samples_are_what_enters_the_head(make_task, make_cohort) -> None:
    task: Task = make_task(sizes=(5, 2))
    x, _ = rows_of(make_cohort(task), encoded=True)[0]
    w, mine = task.network.initial, task.splits["train"].order[:5]
    batch = Batch(task.x[mine], task.y[mine], None, None, task.network, Variant(train=False))
    torch.testing.assert_close(torch.nn.functional.linear(x, w["head.weight"], w["head.bias"]), batch.outputs(w))


def test_clients_without_labels_are_not_asked_for_them(make_task, make_cohort) -> None:
    unlabelled = make_cohort(make_task()).without("labels")
    assert [tuple(y.shape) for _, y in rows_of(unlabelled)] == [(5, 0), (1, 0), (12, 0), (7, 0)]


def test_chunks_find_the_same(make_task, make_cohort) -> None:
    task = make_task()
    whole = rows_of(make_cohort(task))
    alone = [rows_of(make_cohort(task, clients=[k]))[0] for k in range(4)]
    for (x, y), (x_alone, y_alone) in zip(whole, alone, strict=True):
        assert torch.equal(x, x_alone)
        assert torch.equal(y, y_alone)
