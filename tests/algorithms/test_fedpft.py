"""FedPFT: what a client says of its features, and the head that is trained on what is drawn."""

from collections.abc import Callable

import pytest
import torch
from samples import own

from atoll import Batch, Cohort, Task
from atoll.algorithms.fedpft import FedPFT
from atoll.kernel.network import Variant
from atoll.runtime.engines.local import LocalEngine
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import play

CLASSES, SIZE = 3, 6


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def test_a_client_sends_the_mean_of_each_small_class(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    sent = FedPFT(components=4).local(None, make_cohort(task)).send["mixtures"]
    for k in range(task.clients):
        x, y = own(task, k)
        z = Batch(x, y, None, None, task.network, Variant(train=False)).features(task.network.initial)
        assert sent["count"][k].tolist() == torch.bincount(y, minlength=CLASSES).tolist()
        for label in set(y.tolist()):
            assert sent["weight"][k, label].tolist() == [1, 0, 0, 0]
            mean = z[y == label].mean(0)
            torch.testing.assert_close(sent["mean"][k, label, 0].double(), mean, rtol=1e-3, atol=1e-4)  # half precision


def test_many_samples_of_a_class_get_several_components(
    make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]
) -> None:
    task = make_task(sizes=(90, 12), dtype=torch.float64)
    sent = FedPFT(components=4).local(None, make_cohort(task)).send["mixtures"]
    assert (sent["weight"][0] > 0).sum(1).tolist() == [min(4, int(n) // 10) for n in sent["count"][0]]
    torch.testing.assert_close(sent["weight"].float().sum(2), (sent["count"] > 0).float(), rtol=0, atol=1e-2)


def test_other_draws_start_elsewhere(make_task: Callable[..., Task], make_cohort: Callable[..., Cohort]) -> None:
    task = make_task(sizes=(120,), dtype=torch.float64)
    once, again, other = (
        FedPFT(components=3, iterations=1).local(None, make_cohort(task, seed=seed)).send["mixtures"]["mean"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_only_mixtures_travel(task: Task) -> None:
    ledger = play(task, FedPFT(components=2)).ledger
    up = ledger.bytes("up") / task.clients
    numbers = CLASSES * 2 * (2 * SIZE + 1)
    assert numbers * 2 + CLASSES * 4 <= up < numbers * 2 + CLASSES * 4 + 400
    assert ledger.bytes("down") == 0
    assert set(ledger.by_kind()) == {("up", "statistic")}


def test_the_head_does_not_depend_on_the_scale_of_features(task: Task) -> None:
    engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False)
    bench = Workbench(Population(task, RamMemory(task.clients), 0), engine, round=0)
    x = torch.cat([task.x, torch.zeros(len(task.x), 1)], 1)  # and one feature that never changes
    algorithm = FedPFT(server_epochs=5, server_batch=8)
    weight, bias = algorithm.answering.train_head(x, task.y, bench)
    scaled, moved = algorithm.answering.train_head(100 * x + 7, task.y, bench)
    torch.testing.assert_close((100 * x + 7) @ scaled.T + moved, x @ weight.T + bias, rtol=0, atol=1e-9)
    assert float((x @ weight.T + bias).std()) > 0.1
    assert weight[:, -1].abs().max() == 0


def test_without_passes_the_head_is_0(task: Task) -> None:
    model = play(task, FedPFT(server_epochs=0)).server.answer
    assert not model["head.weight"].any()
    assert not model["head.bias"].any()


def test_random_features(task: Task) -> None:
    report = play(task, FedPFT(width=9, server_epochs=2))
    assert report.server.answer["weight"].shape == (CLASSES, 9)
