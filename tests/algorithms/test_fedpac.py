"""FedPAC: what clients say of their data, the weights that follow, and a round by autograd."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atoll import Report, Stack, Task
from atoll.algorithms.fedpac import FedPAC, centroids, class_moments
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, spread
from atoll.kernel.replies import Arrival, Replies
from atoll.models import MLP
from atoll.runtime.serialise import to_bytes
from atoll.testing.conformance import personal_models, play, quadratics


def small(make_task, **more) -> Task:
    return make_task(lambda: MLP((4,), 3, hidden=(5,)), dtype=torch.float64, **more)


def features(task: Task, w: Params, client: int) -> tuple[Tensor, Tensor]:
    """What enters the head for the training samples of a client, and their labels."""
    split = task.splits["train"]
    mine = split.order[split.offsets[client] : split.offsets[client + 1]]
    return F.relu(F.linear(task.x[mine], w["body.1.weight"], w["body.1.bias"])), task.y[mine]


def weights(mean: Tensor, variance: Tensor) -> Tensor:
    return FedPAC()._weights(Stack.of(mean=mean, variance=variance))


def test_moments_are_the_mean_and_variance_of_features_by_class(make_task, make_cohort) -> None:
    task = small(make_task)
    w = task.network.initial
    found = class_moments(make_cohort(task), w, torch.zeros(3, 5).double())
    for client in range(4):
        z, y = features(task, w, client)
        by_class = z[:, None] * F.one_hot(y, 3)[:, :, None]  # each sample in the row of its class
        torch.testing.assert_close(found["mean"][client], by_class.mean(0))
        variance = (by_class - by_class.mean(0)).square().sum((1, 2)).mean() / len(z)
        torch.testing.assert_close(found["variance"][client], variance)
    assert found["variance"][1] == pytest.approx(0)  # of a single sample


def test_clients_alike_are_weighed_by_inverse_variance() -> None:
    variance = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)
    found = weights(torch.ones(3, 2, 2).double(), variance)
    torch.testing.assert_close(found, torch.tensor([[4.0, 2, 1]] * 3).double() / 7, rtol=0, atol=1e-6)


def test_two_clients_weigh_bias_against_variance() -> None:
    # a of the other: a^2 V_1 + (1 - a)^2 V_0 + a^2 D, least at a = V_0 / (V_0 + V_1 + D).
    mean = torch.tensor([[[0.0]], [[0.3]]], dtype=torch.float64)
    found = weights(mean, torch.tensor([0.2, 0.1], dtype=torch.float64))
    assert found[0, 1].item() == pytest.approx(0.2 / (0.3 + 0.09), abs=1e-6)
    assert found[1, 0].item() == pytest.approx(0.1 / (0.3 + 0.09), abs=1e-6)


def test_the_objective_is_that_of_the_paper() -> None:
    # a^T (diag V + D) a with D_jl = <m_i - m_j, m_i - m_l>: the found weights are least on a grid of all weights.
    with torch.random.fork_rng():
        mean = torch.arange(12.0).reshape(3, 2, 2).double().sin()
    variance = torch.tensor([0.5, 0.3, 0.8], dtype=torch.float64)
    steps = 200
    i, j = torch.meshgrid(torch.arange(steps + 1), torch.arange(steps + 1), indexing="ij")
    i, j = i[i + j <= steps], j[i + j <= steps]
    grid = torch.stack([i, j, steps - i - j], 1).double() / steps
    for client, row in enumerate(weights(mean, variance)):
        apart = (mean[client] - mean).flatten(1)
        form = torch.diag(variance) + apart @ apart.T
        assert row @ form @ row <= (grid @ form * grid).sum(1).min() + 1e-9


def test_small_weights_are_left_out_and_rows_sum_to_one() -> None:
    variance = torch.tensor([1e-4, 1.0, 1e-3], dtype=torch.float64)
    found = weights(torch.zeros(3, 1, 1).double(), variance)
    assert (found[:, 1] == 0).all()  # 1e-4 of the whole
    torch.testing.assert_close(found.sum(1), torch.ones(3).double())


def test_two_rounds_by_autograd(make_task) -> None:
    # One client, one full batch: head first, then the body under the new head, drawn to the centroids of round 1.
    task, lam = small(make_task, sizes=(6,), batch_size=6), 0.7
    w = dict(task.network.initial)
    known: Tensor | None = None
    for _ in range(2):
        for part in ("head", "body"):
            at = {name: leaf.clone().requires_grad_(name.startswith(part)) for name, leaf in w.items()}
            z, y = features(task, Params(at), 0)
            loss = F.cross_entropy(F.linear(z, at["head.weight"], at["head.bias"]), y)
            if part == "body" and known is not None:
                loss = loss + lam * F.mse_loss(z, known[y])
            names = [name for name in w if name.startswith(part)]
            gradients = torch.autograd.grad(loss, [at[name] for name in names])
            w = w | {name: w[name] - 0.1 * g for name, g in zip(names, gradients, strict=True)}
        z, y = features(task, Params(w), 0)
        known = torch.stack([z[y == one].mean(0) if (y == one).any() else z.new_zeros(5) for one in range(3)])
    report = play(task, FedPAC(lam=lam, epochs=1), rounds=2)
    model = personal_models(report)[0]
    for name, leaf in w.items():
        torch.testing.assert_close(model[name], leaf, rtol=0, atol=1e-12)
    torch.testing.assert_close(report.server.prototypes["mean"], known)


def test_the_head_can_have_a_step_size_of_its_own(make_task) -> None:
    task = small(make_task)
    slow, usual = (play(task, FedPAC(head_lr=lr, epochs=0), rounds=1) for lr in (0.05, None))
    moved = [one.server.heads["head.bias"][0] - task.network.initial["head.bias"] for one in (slow, usual)]
    assert moved[0].norm() < 0.7 * moved[1].norm()
    same = play(task, FedPAC(head_lr=0.1, epochs=0), rounds=1)
    assert torch.equal(same.server.heads["head.bias"], usual.server.heads["head.bias"])


def test_the_step_size_of_the_head_decays_as_that_of_the_body(make_task) -> None:
    task = small(make_task)
    decaying = replace(task, training=replace(task.training, lr_decay=0.25))
    own, tasks = (play(decaying, FedPAC(head_lr=lr), rounds=3).server for lr in (task.training.lr, None))
    assert all(torch.equal(own.heads[name], tasks.heads[name]) for name in own.heads)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_centroids_are_means_over_all_samples(make_task, weighting) -> None:
    task = small(make_task)
    found = play(task, FedPAC(epochs=0, head_epochs=0, weighting=weighting)).server.prototypes["mean"]
    parts = [features(task, task.network.initial, client) for client in range(4)]
    z, y = torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])
    torch.testing.assert_close(found, torch.stack([z[y == one].mean(0) for one in range(3)]))


def test_late_features_count_less_in_centroids(make_task) -> None:
    # As in every mean, three rounds late is half of the weight: (6 + 2 / 2) / (2 + 1 / 2).
    task, method = small(make_task), FedPAC()
    server = method.start(task.public_facts())

    def message(client: int, total: float, count: float, late: int) -> Arrival:
        one = lambda value: torch.full((1, 3), value, dtype=torch.float64)  # noqa: E731
        moments = Stack.of(mean=one(0.0)[..., None].expand(1, 3, 5), variance=torch.ones(1).double())
        classes = Stack.of(sum=one(total)[..., None].expand(1, 3, 5), count=one(count))
        model = spread(task.network.initial, 1)
        fields = {"delta": model.only(server.w) * 0, "head": model.only(server.heads)}
        fields |= {"moments": moments, "classes": classes}
        return Arrival(np.array([client]), fields, torch.ones(1).double(), late)

    after = method.aggregate(server, Replies([message(0, 6.0, 2.0, 0), message(1, 2.0, 1.0, 3)], keep=True))
    torch.testing.assert_close(after.prototypes["mean"], torch.full((3, 5), 7 / 2.5).double())


def test_a_class_that_nobody_had_keeps_its_centroid() -> None:
    before = Params.of(mean=torch.tensor([[1.0], [2.0], [0.0]]), known=torch.tensor([1.0, 1.0, 0.0]))
    sums = Params.of(sum=torch.tensor([[3.5], [0.0], [0.0]]), count=torch.tensor([1.5, 0, 0]))
    after = centroids(before, sums)
    assert after["mean"].flatten().tolist() == pytest.approx([7 / 3, 2, 0])
    assert after["known"].tolist() == [1, 1, 0]


def heads(report: Report) -> Tensor:
    return report.server.heads["head.weight"]


def test_heads_are_mixed_among_those_who_replied(make_task) -> None:
    task = small(make_task)
    report = play(task, FedPAC(), rounds=2, faults=lambda round, clients: (clients == 2) & (round == 1))
    matrix = report.algorithm.mixing(report.server)
    torch.testing.assert_close(matrix.sum(1), torch.ones(4).double())
    assert matrix[[0, 1, 3], 2].tolist() == [0, 0, 0]
    before = play(task, FedPAC(), rounds=1)
    assert torch.equal(matrix[2], before.algorithm.mixing(before.server)[2])
    assert torch.equal(heads(report)[2], heads(before)[2])
    never = play(task, FedPAC(), rounds=2, faults=lambda round, clients: clients == 2)
    assert never.algorithm.mixing(never.server)[2].tolist() == [0, 0, 1, 0]
    assert torch.equal(heads(never)[2], task.network.initial["head.weight"])


def test_deployed_is_the_newest_body_under_the_own_mixture(make_task) -> None:
    report = play(small(make_task), FedPAC(), rounds=2)
    for client, model in enumerate(personal_models(report)):
        assert torch.equal(model["body.1.weight"], report.server.w["body.1.weight"])
        assert torch.equal(model["head.weight"], heads(report)[client])
    assert report.algorithm.shared(report.server) is None


def test_a_new_client_fits_the_mean_head(make_task, make_cohort) -> None:
    task = small(make_task)
    report = play(task, FedPAC(), rounds=2)
    model = FedPAC(head_epochs=0).welcome(report.server, make_cohort(task))
    torch.testing.assert_close(model["head.weight"][0], heads(report).mean(0))
    fitted = FedPAC().welcome(report.server, make_cohort(task))
    assert not torch.equal(fitted["head.weight"], model["head.weight"])
    assert torch.equal(fitted["body.1.weight"], model["body.1.weight"])


@pytest.mark.parametrize("new", [True, False])
def test_who_never_trained_gets_the_mean_head_of_those_heard_of(make_task, make_cohort, new: bool) -> None:
    # catches: a mean with the initial heads of clients that never trained in it.
    task = small(make_task)
    report = play(task, FedPAC(), rounds=2, faults=lambda round, clients: (clients == 2) | (clients == 1))
    algorithm, cohort = FedPAC(head_epochs=0), make_cohort(task, clients=[2])
    model = algorithm.welcome(report.server, cohort) if new else algorithm.personalize(report.server, cohort)
    torch.testing.assert_close(model["head.weight"][0], heads(report)[[0, 3]].mean(0))
    assert torch.equal(model["body.1.weight"][0], report.server.w["body.1.weight"])


def test_nobody_was_heard_of_at_first(make_task, make_cohort) -> None:
    task = small(make_task)
    model = FedPAC(head_epochs=0).welcome(FedPAC().start(task.public_facts()), make_cohort(task))
    torch.testing.assert_close(model["head.weight"][0], task.network.initial["head.weight"])


def test_what_travels(make_task) -> None:
    task = small(make_task)
    report = play(task, FedPAC(), rounds=1)
    initial = task.network.initial
    prototypes = Params.of(mean=torch.zeros(3, 5).double(), known=torch.zeros(3).double())
    found = {(one.direction, one.field): one.bytes for one in report.ledger.entries}
    assert found["down", "broadcast"] == len(to_bytes({"w": initial.without_part("head"), "prototypes": prototypes}))
    assert found["down", "unicast"] == len(to_bytes(initial.part("head")))
    assert found["up", "delta"] == len(to_bytes(initial.without_part("head")))
    assert found["up", "head"] == len(to_bytes(initial.part("head")))
    assert {field for direction, field in found if direction == "up"} == {
        "delta",
        "head",
        "moments",
        "classes",
        "weight",
    }


def test_a_task_without_classes_is_refused() -> None:
    with pytest.raises(TaskError, match="FedPAC needs samples of one class each"):
        play(quadratics(torch.ones(2, 1).double()), FedPAC())
