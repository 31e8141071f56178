"""FedProto, by hand: what draws the features, what the server makes of prototypes, and who answers how."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import own
from torch import Tensor

from atoll import Batch, Cohort, Params, Predictor, Task
from atoll.algorithms.fedproto import FAR, FedProto, Goal, State, aligned_gradient, nearest
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.testing.conformance import personal_models, play, quadratics

CLASSES, SIZE = 3, 6


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def features_of(task: Task, w: Params, x: Tensor) -> Tensor:
    return Batch(x, torch.zeros(len(x)).long(), None, None, task.network, Variant(train=False)).features(w)


def prototypes(known: tuple[float, ...] = (1.0, 0.0, 1.0)) -> Params:
    mean = torch.arange(CLASSES * SIZE, dtype=torch.float64).reshape(CLASSES, SIZE) / 7
    return Params.of(mean=mean, known=torch.tensor(known, dtype=torch.float64))


@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_the_gradient_by_hand(task: Task, mask: Tensor | None) -> None:
    # catches: a pull that carries no gradient (PFLlib's FedAMP and FedMTL), and one for classes without a prototype.
    x, y = task.x[:5], torch.tensor([0, 1, 2, 0, 2])
    batch = Batch(x, y, mask, None, task.network, Variant())
    g, after, loss = aligned_gradient(task.network.initial, batch, Goal(prototypes(), 0.7))
    module = task.network._original.requires_grad_(True)
    z, outputs = module.features(x), module(x)  # type: ignore[operator]
    each = torch.ones(5, dtype=torch.float64) if mask is None else mask
    fit = (F.cross_entropy(outputs, y, reduction="none") * each).sum() / each.sum()
    pull = sum(each[i] * F.mse_loss(z[i], prototypes()["mean"][y[i]]) for i in range(5) if y[i] != 1) / each.sum()
    expected = torch.autograd.grad(fit + 0.7 * pull, list(module.parameters()))
    for mine, theirs in zip(g.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(loss, fit.detach())
    assert set(after) == set(task.network.initial)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_server_has_the_mean_of_each_class(task: Task, weighting: str) -> None:
    # catches: the released code under the paper's name: every client's mean counts the same (as read).
    report = play(task, FedProto(weighting=weighting, answer="head"))
    models, found = personal_models(report), report.server.prototypes
    for label in range(CLASSES):
        there = []
        for k, v in enumerate(models):
            x, y = own(task, k)
            if (y == label).any():
                there.append(features_of(task, v, x[y == label]))
        rows = torch.cat(there) if weighting == "samples" else torch.stack([one.mean(0) for one in there])
        torch.testing.assert_close(found["mean"][label], rows.mean(0), rtol=0, atol=1e-12)
        assert len({len(one) for one in there}) > 1  # so that the two weightings differ
    assert found["known"].tolist() == [1, 1, 1]


def test_a_class_that_nobody_has_this_time_keeps_its_prototype(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64)
    train, y = task.splits["train"], task.y.clone()
    for k in range(task.clients):
        y[train.order[train.offsets[k] : train.offsets[k + 1]]] = int(k == 2)
    task = Task.of_clients(
        {str(k): (own(task, k)[0], y[train.order[train.offsets[k] : train.offsets[k + 1]]]) for k in range(4)},
        task.network._original, classes=CLASSES, training=task.training, shares=(1.0, 0.0, 0.0),
    )  # fmt: skip
    absent = [play(task, FedProto(), rounds=n, faults=lambda r, clients: (r > 0) & (clients == 2)) for n in (1, 2)]
    before, after = (one.server.prototypes for one in absent)
    assert after["known"].tolist() == [1, 1, 0]
    assert torch.equal(before["mean"][1], after["mean"][1])
    assert not torch.equal(before["mean"][0], after["mean"][0])


def test_the_nearest_prototype_is_the_answer(task: Task) -> None:
    w, x = task.network.initial, task.x[:7]
    batch = Batch(x, torch.zeros(7).long(), None, None, task.network, Variant(train=False))
    z, mean = features_of(task, w, x), prototypes()["mean"]
    logits = nearest(w, Params.of(mean=mean, possible=torch.ones(CLASSES)), batch)
    expected = torch.stack([-(z - mean[label]).square().mean(1) for label in range(CLASSES)], 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    some = nearest(w, Params.of(mean=mean, possible=torch.tensor([1.0, 0.0, 1.0])), batch)
    torch.testing.assert_close(some[:, [0, 2]], expected[:, [0, 2]], rtol=0, atol=1e-12)
    torch.testing.assert_close(some[:, 1], expected.amin(1) - FAR, rtol=0, atol=1e-12)
    none = nearest(w, Params.of(mean=mean, possible=torch.zeros(CLASSES)), batch)
    assert torch.equal(none, batch.outputs(w))


def test_clients_choose_among_their_own_classes_or_all(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    server = State(prototypes())
    every, mine = (FedProto(answer=answer).personalize(server, make_cohort(task)) for answer in ("all", "own"))
    assert isinstance(every, Predictor)
    assert isinstance(mine, Predictor)
    assert every.beside["possible"].tolist() == [[1, 0, 1]] * 4
    for k in range(4):
        present = torch.bincount(own(task, k)[1], minlength=CLASSES) > 0
        assert mine.beside["possible"][k].tolist() == (present & torch.tensor([True, False, True])).double().tolist()


def test_only_prototypes_travel(task: Task) -> None:
    ledger = play(task, FedProto(), rounds=2).ledger
    up, down = (ledger.bytes(way) / (2 * task.clients) for way in ("up", "down"))
    numbers = CLASSES * (SIZE + 1)
    assert numbers * 8 <= up < numbers * 8 + 300
    assert numbers * 8 <= down < numbers * 8 + 400
    assert set(ledger.by_kind()) == {("up", "statistic"), ("down", "state")}


def test_an_absent_client_keeps_its_model_and_a_new_one_trains_its_own(
    task: Task, make_cohort: Callable[..., Cohort]
) -> None:
    report = play(task, FedProto(answer="head"), rounds=2, faults=lambda r, clients: (r == 1) & (clients == 0))
    once = play(task, FedProto(answer="head"))
    kept, before = personal_models(report)[0], personal_models(once)[0]
    assert all(torch.equal(kept[name], before[name]) for name in before)
    new = FedProto(answer="head").welcome(report.server, make_cohort(task, clients=[1]))
    assert not isinstance(new, Predictor)
    assert not torch.equal(new["head.bias"][0], task.network.initial["head.bias"])


def test_tasks_without_a_class_per_sample_are_refused() -> None:
    with pytest.raises(TaskError, match="FedProto needs samples of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), FedProto())
