"""FedPHP: by hand on two clients (c = 1, 3, steps 0.5, weights 1 and 3), and by autograd on one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import Report, Task
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedphp import FedPHP
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.objectives.discrepancy import mean_discrepancy


def deployed(report: Report) -> list[float]:
    return [model["w"].item() for model in personal_models(report)]


def test_the_inherited_model_is_a_moving_average_with_growing_memory(two_clients: Task) -> None:
    # w_k = 0.5, 1.5, then from w = 1.25: 1.125, 2.125, then from w = 1.875: 1.4375, 2.4375. mu_k = 0, 0.45, 0.9.
    # catches: PFLlib, which deploys w_k and has mu grow with the round of the server.
    h = torch.tensor([0.5, 1.5])
    assert deployed(play(two_clients, FedPHP(lam=0.0, ramp=2))) == pytest.approx(h.tolist())
    h = 0.45 * h + 0.55 * torch.tensor([1.125, 2.125])
    assert deployed(play(two_clients, FedPHP(lam=0.0, ramp=2), rounds=2)) == pytest.approx(h.tolist())
    h = 0.9 * h + 0.1 * torch.tensor([1.4375, 2.4375])
    assert deployed(play(two_clients, FedPHP(lam=0.0, ramp=2), rounds=3)) == pytest.approx(h.tolist())


def test_memory_grows_with_the_visits_of_a_client_not_with_rounds(two_clients: Task) -> None:
    late = FedPHP(lam=0.0, ramp=2)
    report = play(two_clients, late, rounds=3, faults=lambda round, clients: (clients == 1) & (round < 2))
    # The second client comes in round 3 for the first time: h is what it trained, from w = 0.75.
    assert deployed(report)[1] == pytest.approx((0.75 + 3) / 2)


def test_the_memory_stops_growing_at_mu(two_clients: Task) -> None:
    # With ramp = 1 all visits but the first have mu; with mu = 0 the last model is all there is.
    assert deployed(play(two_clients, FedPHP(lam=0.0, mu=0.0, ramp=1), rounds=3)) == pytest.approx([1.4375, 2.4375])
    assert deployed(play(two_clients, FedPHP(lam=0.0, mu=1.0, ramp=1), rounds=3)) == pytest.approx([0.5, 1.5])


def test_without_lessons_the_shared_model_is_that_of_fedavg(two_clients: Task) -> None:
    php, plain = (play(two_clients, one, rounds=3) for one in (FedPHP(lam=0.0), FedAvg()))
    assert torch.equal(php.server["w"], plain.server["w"])
    assert php.ledger.entries == plain.ledger.entries


def test_absent_and_new_clients(two_clients: Task, make_cohort) -> None:
    report = play(two_clients, FedPHP(lam=0.0), rounds=3, faults=lambda round, clients: (clients == 1) & (round > 0))
    assert deployed(report)[1] == pytest.approx(1.5)
    welcomed = FedPHP().welcome(report.server, make_cohort(two_clients))
    assert welcomed["w"].flatten().tolist() == pytest.approx([report.server["w"].item()] * 2)


def one_client(make_task, model=None) -> Task:
    return make_task(model, sizes=(6,), dtype=torch.float64, batch_size=6)


@pytest.mark.parametrize("way", ["kd", "mmd"])
def test_a_step_by_autograd(make_task, way: str) -> None:
    # One client, one full batch per round, mu = 0.3: two rounds, because in the first the teacher is w itself.
    task, lam, mu = one_client(make_task), 0.4, 0.3
    x, y = (part[task.splits["train"].order] for part in (task.x, task.y))

    def forward(w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        z = F.relu(F.linear(x, w["body.1.weight"], w["body.1.bias"]))
        return z, F.linear(z, w["head.weight"], w["head.bias"])

    w = {name: leaf.clone() for name, leaf in task.network.initial.items()}
    h = w
    for visit in range(3):
        at = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
        (z, outputs), (teaching, answers) = forward(at), forward(h)
        if way == "kd":  # the cross-entropy with softened answers has the gradient of the divergence
            apart = -((answers / 4).softmax(1) * outputs.log_softmax(1)).sum(1).mean()
        else:
            apart = mean_discrepancy(z, teaching)
        loss = (1 - lam) * F.cross_entropy(outputs, y) + lam * apart
        gradients = torch.autograd.grad(loss, list(at.values()))
        w = {name: leaf - 0.1 * g for (name, leaf), g in zip(w.items(), gradients, strict=True)}
        share = mu if visit else 0.0
        h = {name: share * h[name] + (1 - share) * leaf for name, leaf in w.items()}
    report = play(task, FedPHP(way=way, lam=lam, mu=mu, ramp=1), rounds=3)  # type: ignore[arg-type]
    for name, leaf in personal_models(report)[0].items():
        torch.testing.assert_close(leaf, h[name], rtol=0, atol=1e-12)
        torch.testing.assert_close(report.server[name], w[name], rtol=0, atol=1e-12)


def test_the_teacher_is_asked_as_it_would_be_deployed(make_task) -> None:
    # With lam = 1 and a teacher that is w itself, only dropout sets the student apart. Without it nothing moves.
    def dropping(p: float) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 3))

    moved = []
    for p in (0.0, 0.9):
        task = one_client(make_task, lambda p=p: dropping(p))
        report = play(task, FedPHP(lam=1.0, temperature=1.0))
        moved.append((report.server - task.network.initial).norm().item())
    assert moved[0] < 1e-12
    assert moved[1] > 1e-3


@pytest.mark.parametrize("way", ["kd", "mmd"])
def test_padding_teaches_nothing(make_task, way: str) -> None:
    # A batch of 5 samples, and the same in a batch that has room for 8.
    algorithm = FedPHP(way=way, lam=0.5)  # type: ignore[arg-type]
    tight, roomy = (
        play(make_task(sizes=(5,), dtype=torch.float64, batch_size=room), algorithm, rounds=2).server for room in (5, 8)
    )
    torch.testing.assert_close(dict(tight), dict(roomy), rtol=0, atol=1e-12)
