"""What distillation and generation must come to where the answer is known: FedDF, FedGen, and local generators."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor, nn

from atoll import LocalEngine, Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddf import FedDF
from atoll.algorithms.fedgen import FedGen
from atoll.algorithms.fedmd import FedMD
from atoll.algorithms.local import Local
from atoll.kernel.params import Params, stack
from atoll.kernel.randomness import default_generator
from atoll.models import MLP, Linear
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import personal_models, play
from atoll.toolbox.server.distillation import divergence

Target = Literal["avg_logits", "avg_probs", "per_teacher"]
CLASSES, FEATURES = 3, 4
ROUNDING = {"rtol": 0.0, "atol": 1e-12}
# Adam leaves a minimum that it begins at: it divides a gradient of rounding error by 1e-8, so that a step of size lr
# acts like one of lr / 1e-8. With this lr it stays; a gradient that is wrong still moves parameters by 1e-7 in a round.
STABLE = 1e-8
every_target = pytest.mark.parametrize("target", get_args(Target))


def small(shape: tuple[int, ...], classes: int) -> nn.Module:
    return MLP(shape, classes, hidden=(8,))


def drawn(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    with default_generator(seed):
        return torch.randn(samples, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (samples,))


def federation(sizes: list[int], model: Callable[..., nn.Module] = small, *, same: bool = False) -> Task:
    """Clients with normal samples, the same for all or not, that take one full-batch step per epoch; a public set."""
    rows = {str(k): drawn(size, seed=0 if same else k) for k, size in enumerate(sizes)}
    with default_generator(0):
        module = model((FEATURES,), CLASSES).double()
    training = Training(lr=0.5, batch_size=max(sizes))
    task = Task.of_clients(rows, module, classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))
    return replace(task, public=drawn(10, seed=99))


def bench_of(task: Task) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=0)


def assert_same(left: Params, right: Params) -> None:
    for name, leaf in left.items():
        torch.testing.assert_close(leaf, right[name], **ROUNDING)


# -- FedDF: teachers that agree ------------------------------------------------------------------------------------


@pytest.mark.limit("feddf")
@every_target
def test_identical_teachers_are_kept(target: Target) -> None:
    # catches: a student that starts elsewhere than at the average, or a divergence whose minimum is not agreement.
    task = federation([6, 6, 6], same=True)
    distilled = play(task, FedDF(target=target, server_lr=STABLE), rounds=3).server
    assert_same(distilled, play(task, FedAvg(), rounds=3).server)


@pytest.mark.limit("feddf")
def test_at_the_published_step_size_their_answers_are_kept() -> None:
    task = federation([6, 6, 6], same=True)
    bench = bench_of(task)
    distilled, averaged = (
        bench.answers(play(task, one, rounds=3).server, bench.public[0]) for one in (FedDF(), FedAvg())
    )
    assert float(divergence(distilled, averaged.softmax(1)).max()) < 1e-3


@pytest.mark.limit("feddf")
@every_target
def test_a_single_client_is_its_own_student(target: Target) -> None:
    task = federation([7])
    distilled = play(task, FedDF(target=target, server_lr=STABLE), rounds=3).server
    assert_same(distilled, play(task, FedAvg(), rounds=3).server)


@pytest.mark.closed_form("feddf")
def test_a_student_of_one_teacher_has_nothing_to_learn() -> None:
    # KL and its gradient at the start are 0.
    task = federation([7])
    bench = bench_of(task)
    w, (x, _) = task.network.initial, bench.public
    wanted = FedDF().targets(bench.answers(stack([w]), x))
    assert float(divergence(bench.answers(w, x), wanted).abs().max()) < 1e-15
    assert float(gradient(w, x, wanted, task).norm()) < 1e-15


def gradient(w: Params, x: Tensor, wanted: Tensor, task: Task) -> Params:
    """Of the mean divergence, by plain autograd."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    outputs = torch.func.functional_call(task.network._original, leaves, (x,))
    found = torch.autograd.grad(divergence(outputs, wanted).mean(), list(leaves.values()))
    return Params(dict(zip(leaves, found, strict=True)))


# -- FedDF: linear models ------------------------------------------------------------------------------------------


@pytest.mark.limit("feddf")
def test_mean_logits_of_linear_models_are_those_of_the_averaged_model() -> None:
    # So that with equal weights there is nothing to distil, however different the clients are.
    task = federation([4, 9, 6], Linear)
    distilled = play(task, FedDF(weighting="uniform", server_lr=STABLE), rounds=3).server
    assert_same(distilled, play(task, FedAvg(weighting="uniform"), rounds=3).server)


@pytest.mark.limit("feddf")
@pytest.mark.parametrize(
    ("model", "weighting", "target"),
    [(Linear, "uniform", "avg_probs"), (Linear, "samples", "avg_logits"), (small, "uniform", "avg_logits")],
)
def test_other_targets_weights_and_networks_leave_something_to_distil(
    model: Callable[..., nn.Module], weighting: Literal["samples", "uniform"], target: Target
) -> None:
    # Mean probabilities, an average weighted by samples, and networks: even so small a step shows it.
    task = federation([4, 9, 6], model)
    distilled = play(task, FedDF(weighting=weighting, target=target, server_lr=STABLE), rounds=3).server
    assert (distilled - play(task, FedAvg(weighting=weighting), rounds=3).server).norm() > 1e-8


@pytest.mark.closed_form("feddf")
def test_the_sum_over_teachers_is_their_number_times_the_mean_probability() -> None:
    # sum_k KL(p_k || q) = K KL(mean p || q) + sum_k KL(p_k || mean p): the gradients differ by the factor K.
    task = federation([4, 9, 6])
    bench = bench_of(task)
    w, (x, _) = task.network.initial, bench.public
    logits = bench.answers(stack([2.0 * w, -1.0 * w, 0.5 * w]), x)
    each = [gradient(w, x, one.softmax(1), task) for one in logits]
    summed, mean = (gradient(w, x, FedDF(target=one).targets(logits), task) for one in ("per_teacher", "avg_probs"))
    assert_same(summed, each[0] + each[1] + each[2])
    assert_same(summed, 3.0 * mean)


# -- FedDF: what a student with enough room learns -------------------------------------------------------------------


class Bias(nn.Module):
    """Logits that are parameters: it can answer anything, but the same for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b + 0 * x[:, :CLASSES]


@pytest.mark.closed_form("feddf")
@every_target
def test_the_student_learns_the_arithmetic_or_the_geometric_mean(target: Target) -> None:
    # Mean logits are the normalised geometric mean of the probabilities; the other two targets the arithmetic one.
    rows = {str(k): (drawn(n, k)[0], torch.full((n,), k)) for k, n in enumerate((2, 5, 3))}
    training = Training(lr=3.0, batch_size=5)
    task = Task.of_clients(rows, Bias(), classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))
    task = replace(task, public=drawn(2, seed=9))
    teachers = (3.0 * (torch.eye(CLASSES, dtype=torch.float64) - 1 / 3)).softmax(1)  # after one step from equal ones
    geometric = teachers.log().mean(0).softmax(0)
    means = {"avg_logits": geometric, "avg_probs": teachers.mean(0), "per_teacher": teachers.mean(0)}
    server = play(task, FedDF(target=target, server_epochs=600, server_lr=0.05)).server
    torch.testing.assert_close(server["b"].softmax(0), means[target], rtol=0, atol=1e-4)


# -- FedGen ----------------------------------------------------------------------------------------------------------


@pytest.mark.limit("fedgen")
@pytest.mark.parametrize("cohort", [None, 2])
def test_without_reminders_fedgen_is_fedavg(cohort: int | None) -> None:
    task = federation([4, 9, 6])
    mine = play(task, FedGen(alpha=0.0, beta=0.0, epochs=2), rounds=4, cohort=cohort).server.w
    theirs = play(task, FedAvg(epochs=2), rounds=4, cohort=cohort).server
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.closed_form("fedgen")
def test_a_head_that_comes_twice_teaches_as_one() -> None:
    # s_k(y) are shares: two clients with one head and the same samples count as one with twice as many.
    task = federation([4, 9, 6])
    head, counts = task.network.initial.part("head"), torch.tensor([[3.0, 1.0, 2.0]], dtype=torch.float64)
    other, theirs = -1.0 * head, torch.tensor([[1.0, 4.0, 1.0]], dtype=torch.float64)
    twice = FedGen().teach(None, stack([head, head, other]), torch.cat([counts, counts, theirs]), bench_of(task))
    once = FedGen().teach(None, stack([head, other]), torch.cat([2 * counts, theirs]), bench_of(task))
    for name, leaf in once.items():
        torch.testing.assert_close(twice[name], leaf, rtol=0, atol=1e-9)


@pytest.mark.closed_form("fedgen")
def test_a_head_without_samples_teaches_nothing() -> None:
    task = federation([4, 9, 6])
    head, counts = task.network.initial.part("head"), torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    one, other = (
        FedGen().teach(None, stack([head, scale * head]), counts.double(), bench_of(task)) for scale in (1.0, -7.0)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.closed_form("fedgen")
def test_the_generator_is_taught_by_the_heads_of_the_clients() -> None:
    # In the first round clients train as if alone. catches: FL-bench's FedGen, whose teacher is the server's head.
    task = federation([4, 9, 6])
    heads = stack([model.part("head") for model in personal_models(play(task, Local()))])
    counts = torch.stack(
        [torch.bincount(drawn(size, seed=k)[1], minlength=CLASSES) for k, size in enumerate((4, 9, 6))]
    )
    expected = FedGen().teach(None, heads, counts.double(), bench_of(task))
    assert_same(play(task, FedGen()).server.generator, expected)


@pytest.mark.limit("fedmd")
def test_identical_clients_digest_nothing() -> None:
    # catches: a target that is not what clients answer after their own steps, or a digest that moves at agreement.
    task = federation([6, 6, 6], same=True)
    together = personal_models(play(task, FedMD(digest_epochs=3), rounds=3))
    alone = personal_models(play(task, Local(), rounds=3))
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other)


@pytest.mark.closed_form("fedmd")
def test_a_consensus_of_linear_models_is_the_averaged_model() -> None:
    # Mean logits of linear models are those of their mean, so the server could have made it of models that never came.
    task = federation([4, 9, 6], Linear)
    report = play(task, FedMD(samples=10))
    models = personal_models(report)
    mean = stack(models).map(lambda leaf: leaf.mean(0, keepdim=True)).client(0)
    expected = bench_of(task).answers(mean, report.server.x.value).softmax(1)
    torch.testing.assert_close(report.server.wanted.value, expected, **ROUNDING)
