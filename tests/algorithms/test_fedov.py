"""FedOV, by hand: what clients minimise, how outliers are moved, what is sent, and how clients vote."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from samples import Shaken, answers
from torch import Tensor, nn

from atoll import Batch, Cohort, Task, federate
from atoll.algorithms.fedov import FedOV
from atoll.algorithms.trainings.openset import OpenSet, open_gradient
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.kernel.randomness import Keys
from atoll.models import BodyAndHead, Linear
from atoll.runtime.engines.local import LocalEngine
from atoll.testing.conformance import play
from atoll.toolbox.objectives.openset import BIAS, WEIGHT, disguise, with_unknown
from atoll.toolbox.objectives.outliers import destroy

CLASSES, HIDDEN = 3, 6
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def batch_of(task: Task, mask: Tensor | None = None) -> Batch:
    keys = Keys(torch.tensor(3), torch.tensor(4))
    return Batch(task.x[:5], torch.tensor([0, 1, 2, 0, 2]), mask, keys, task.network, Variant())


def opened(task: Task) -> tuple[Tensor, Tensor]:
    """Some values of the unknown's weight and bias."""
    return torch.linspace(-1, 1, HIDDEN, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)


@pytest.mark.parametrize("how", [OpenSet(), OpenSet(destroyed=0.5, adversarial=2.0, placeholder=0.0, attack_steps=1)])
@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_the_gradient_by_hand(task: Task, how: OpenSet, mask: Tensor | None) -> None:
    batch, (a, b) = batch_of(task, mask), opened(task)
    w = with_unknown(task.network.initial, HIDDEN)
    w = w | type(w)({WEIGHT: a, BIAS: b}, w.layout)
    g, _, loss = open_gradient(w, batch, how=how, classes=CLASSES)
    module = task.network._original.requires_grad_(True)
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()

    def outputs(x: Tensor) -> Tensor:
        z = module.features(x)
        return torch.cat([module.head(z), (z @ a + b)[:, None]], 1)

    unknown, each = torch.full((5,), CLASSES), torch.ones(5, dtype=torch.float64) if mask is None else mask
    x = destroy(batch)
    moved = x.clone()
    for _ in range(how.attack_steps):
        moved = moved.detach().requires_grad_()
        (slope,) = torch.autograd.grad((F.cross_entropy(outputs(moved), unknown, reduction="none") * each).sum(), moved)
        moved = moved.detach() + how.attack_size * slope.sign()
    known = outputs(batch.x)
    second = known.masked_fill(F.one_hot(batch.y, CLASSES + 1).bool(), -1e9)
    fit = F.cross_entropy(known, batch.y, reduction="none")
    total = (
        fit
        + how.destroyed * F.cross_entropy(outputs(x), unknown, reduction="none")
        + how.adversarial * F.cross_entropy(outputs(moved), unknown, reduction="none")
        + how.placeholder * F.cross_entropy(second, unknown, reduction="none")
    )
    torch.testing.assert_close(loss, (fit * each).sum().detach() / each.sum(), **EXACT)
    names = [*(name for name, _ in module.named_parameters()), WEIGHT, BIAS]
    wanted = torch.autograd.grad((total * each).sum() / each.sum(), [*module.parameters(), a, b])
    for name, one in zip(names, wanted, strict=True):
        torch.testing.assert_close(g[name], one, **EXACT)


def test_outliers_are_moved_along_the_sign_of_the_gradient(make_task: Callable[..., Task]) -> None:
    # Of a linear model the gradient is known: sum_c p_c w_c + p_u a - a.
    task = make_task(lambda: Linear((4,), CLASSES), dtype=torch.float64)
    a = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    w = with_unknown(task.network.initial, 4)
    w = w | type(w)({WEIGHT: a, BIAS: torch.tensor(0.0, dtype=torch.float64)}, w.layout)
    batch = replace(batch_of(task), y=torch.full((5,), CLASSES))
    rows = torch.cat([task.network.initial["head.weight"], a[None]])
    z = torch.cat([answers(task, task.network.initial, batch.x), (batch.x @ a)[:, None]], 1)
    slope = z.softmax(1) @ rows - a
    found = disguise(batch, w, 1, 0.1).x
    torch.testing.assert_close(found, batch.x + 0.1 * slope.sign(), **EXACT)
    closer = torch.cat([answers(task, task.network.initial, found), (found @ a)[:, None]], 1)
    assert (closer.softmax(1)[:, -1] < z.softmax(1)[:, -1]).all()


def test_votes_by_hand(task: Task) -> None:
    report = play(task, FedOV(epochs=2))
    answer, x = report.server.answer, task.x
    votes = torch.zeros(len(x), CLASSES, dtype=torch.float64)
    module = task.network._original
    for k in range(4):
        w = answer.models.client(k)
        z = torch.func.functional_call(module.body, {n.removeprefix("body."): w[n] for n in w if "body" in n}, (x,))
        outputs = z @ w["head.weight"].T + w["head.bias"]
        unknown = z @ answer.unknown["weight"][k] + answer.unknown["bias"][k]
        votes += torch.cat([outputs, unknown[:, None]], 1).softmax(1)[:, :CLASSES]
    found = answers(task, report.algorithm.shared(report.server), x)
    torch.testing.assert_close(found.softmax(1), votes / votes.sum(1, keepdim=True), **EXACT)


def test_models_and_their_unknown_are_sent_and_nothing_else(task: Task) -> None:
    report = play(task, FedOV(epochs=1))
    assert {one.field for one in report.ledger.messages()} == {"broadcast", "model", "unknown"}
    assert set(report.server.answer.models) == set(task.network.initial)
    assert report.server.answer.unknown["weight"].shape == (4, HIDDEN)


def test_the_unknown_begins_at_zero_and_learns_from_every_term(task: Task) -> None:
    begun = play(task, FedOV(epochs=0)).server.answer.unknown
    assert not any(leaf.any() for leaf in begun.values())
    found = [
        play(task, FedOV(epochs=1, **{one: 0.0 for one in ("destroyed", "adversarial", "placeholder") if one != kept}))
        for kept in ("", "destroyed", "adversarial", "placeholder")
    ]
    values = [report.server.answer.unknown["bias"] for report in found]
    assert all(not torch.equal(one, other) for k, one in enumerate(values) for other in values[:k])
    assert (values[0] < values[1]).all()  # without outliers nothing is unknown


def small_cnn() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, HIDDEN))
    return BodyAndHead(body, nn.Linear(HIDDEN, CLASSES))


def test_clients_with_images_train_alike_alone_and_together(make_task: Callable[..., Task]) -> None:
    task = make_task(small_cnn, shape=(1, 8, 8), dtype=torch.float64)
    models = []
    for plan in ("loop", "whole"):
        engine = LocalEngine(device="cpu", dtype=torch.float64, compile=False, strategy=plan)
        report = federate(task, FedOV(epochs=2), rounds=1, engine=engine, evaluation="none")
        models.append({**report.server.answer.models, **report.server.answer.unknown})
    for name, leaf in models[0].items():
        torch.testing.assert_close(models[1][name], leaf, rtol=0, atol=1e-10)


def test_outliers_are_made_from_samples_as_they_are_whatever_view_is_learned(task: Task) -> None:
    batch = replace(batch_of(task), augment=Shaken())
    seen = batch.view(0)
    assert not torch.equal(seen.x, batch.x)
    assert torch.equal(destroy(seen), destroy(batch))
    w = with_unknown(task.network.initial, HIDDEN)
    plain, viewed, raw = (
        open_gradient(w, one, how=OpenSet(augmented=augmented), classes=CLASSES)[2]
        for one, augmented in ((batch, True), (seen, True), (seen, False))
    )
    assert torch.equal(plain, raw)
    assert not torch.equal(plain, viewed)


def test_words_cannot_be_destroyed(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    words = replace(make_cohort(task).task, sample=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TaskError, match=r"openset destroys samples of numbers\."):
        OpenSet().start(words)
