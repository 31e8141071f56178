"""FedRoD, by hand: two heads, two losses, one body."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import own

from atoll import Batch, Cohort, Params, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedrod import FEWEST, FedRoD, both_heads
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.testing.conformance import personal_models, play, quadratics

CLASSES = 3


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64, batch_size=12)  # every client takes one step an epoch


def head_of(model: Params) -> Params:
    return Params({name.removeprefix("beside."): leaf for name, leaf in model.items() if name.startswith("beside.")})


def test_one_round_by_hand(task: Task) -> None:
    # catches: a personal loss whose gradient reaches the body or the generic head.
    report = play(task, FedRoD(gamma=0.8))
    personal, total = personal_models(report), 0
    mean = task.network.initial * 0.0
    for k in range(task.clients):
        x, y = own(task, k)
        module = task.network._original.requires_grad_(True)
        counts = torch.bincount(y, minlength=CLASSES).double().clamp(min=FEWEST)
        z = module.features(x)  # type: ignore[operator]
        generic = z @ module.head.weight.T + module.head.bias  # type: ignore[operator,union-attr]
        loss = F.cross_entropy(generic + 0.8 * counts.log(), y)
        g = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        head = {name: leaf.clone().requires_grad_(True) for name, leaf in task.network.initial.part("head").items()}
        both = generic.detach() + z.detach() @ head["head.weight"].T + head["head.bias"]
        g_head = torch.autograd.grad(F.cross_entropy(both, y), list(head.values()))
        for (name, leaf), step in zip(head.items(), g_head, strict=True):
            expected = leaf.detach() - task.training.lr * step
            torch.testing.assert_close(head_of(personal[k])[name], expected, rtol=0, atol=1e-12)
        moved = Params(dict(zip(task.network.initial, g, strict=True)), task.network.layout) * -task.training.lr
        mean, total = mean + moved * len(y), total + len(y)
    for name, leaf in (task.network.initial + mean / total).items():
        torch.testing.assert_close(report.server[name], leaf, rtol=0, atol=1e-12)


def test_without_balance_the_generic_model_is_fedavgs(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64)
    mine, theirs = (play(task, one, rounds=3).server for one in (FedRoD(gamma=0.0, epochs=2), FedAvg(epochs=2)))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_momentum_and_clipping_treat_the_two_heads_apart(make_task: Callable[..., Task]) -> None:
    task = make_task(dtype=torch.float64, momentum=0.9, clip=0.05, weight_decay=0.01)
    mine, theirs = (play(task, one, rounds=2).server for one in (FedRoD(gamma=0.0), FedAvg()))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_client_answers_with_both_heads(task: Task) -> None:
    w = task.network.initial
    head = 2.0 * w.part("head")
    batch = Batch(task.x[:4], task.y[:4], None, None, task.network, Variant(train=False))
    torch.testing.assert_close(both_heads(w, head, batch), 3 * batch.outputs(w), rtol=0, atol=1e-12)


def test_who_never_took_part_has_the_generic_model(task: Task, make_cohort: Callable[..., Cohort]) -> None:
    report = play(task, FedRoD(), faults=lambda r, clients: clients == 1)
    model = personal_models(report)[1]
    assert not any(leaf.any() for leaf in head_of(model).values())
    batch = Batch(task.x[:4], task.y[:4], None, None, task.network, Variant(train=False))
    answer = both_heads(report.server, head_of(model), batch)
    torch.testing.assert_close(answer, batch.outputs(report.server), rtol=0, atol=0)


def test_a_new_client_fits_a_head_and_leaves_the_generic_model_alone(
    task: Task, make_cohort: Callable[..., Cohort]
) -> None:
    w = play(task, FedRoD(), rounds=2).server
    new = FedRoD(epochs=1).welcome(w, make_cohort(task, clients=[2]))
    assert new.model is w
    x, y = own(task, 2)
    batch = Batch(x, y, None, None, task.network, Variant())
    head = {name: leaf.clone().requires_grad_(True) for name, leaf in task.network.initial.part("head").items()}
    z = batch.features(w)
    both = batch.outputs(w) + z @ head["head.weight"].T + head["head.bias"]
    for (name, leaf), g in zip(
        head.items(), torch.autograd.grad(F.cross_entropy(both, y), [*head.values()]), strict=True
    ):
        torch.testing.assert_close(new.beside[name][0], leaf.detach() - task.training.lr * g, rtol=0, atol=1e-12)


def test_the_personal_head_never_leaves(task: Task) -> None:
    mine, theirs = (play(task, one, rounds=2).ledger for one in (FedRoD(), FedAvg()))
    assert mine.bytes("up") == theirs.bytes("up")
    assert mine.bytes("down") == theirs.bytes("down")


def test_tasks_without_a_class_per_sample_are_refused() -> None:
    with pytest.raises(TaskError, match="FedRoD needs samples of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), FedRoD())
