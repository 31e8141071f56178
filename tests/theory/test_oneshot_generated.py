"""What one-shot methods that make up samples must come to where the answer is known.

DENSE, Co-Boosting, IntactOFL and FedCVAE.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll import Algorithm, LocalEngine, Task, Training
from atoll.algorithms.answers import coboosting, dense, intactofl
from atoll.algorithms.answers.intactofl import Gate
from atoll.algorithms.coboosting import CoBoosting
from atoll.algorithms.dense import Dense
from atoll.algorithms.ensemble import Ensemble
from atoll.algorithms.fedcvae import FedCVAE
from atoll.algorithms.intactofl import IntactOFL
from atoll.kernel.batch import Batch
from atoll.kernel.network import Network, Variant
from atoll.kernel.params import Params, stack
from atoll.kernel.predictor import Predictor
from atoll.kernel.randomness import Keys, default_generator
from atoll.models import MLP, Linear
from atoll.models.vae import decoder_of
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import play
from atoll.toolbox.server.distillation import disagreement
from atoll.toolbox.server.synthesis import Pool, Teachers, teaching_cost

CLASSES, FEATURES = 3, 4
SMALL: dict[str, Any] = {"server_epochs": 3, "generator_steps": 3, "server_batch": 8, "noise": 4, "width": 4}
every_gate = pytest.mark.parametrize("gate", get_args(Gate))


def drawn(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    with default_generator(seed):
        return torch.randn(samples, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (samples,))


def federation(sizes: list[int], model: Callable[..., nn.Module] = MLP, **options: Any) -> Task:
    """Clients with normal samples; a public set."""
    with default_generator(0):
        module = model((FEATURES,), CLASSES, **options).double()
    data = {str(k): drawn(size, seed=k) for k, size in enumerate(sizes)}
    training = Training(lr=0.2, batch_size=4)
    task = Task.of_clients(data, module, classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))
    return replace(task, public=drawn(11, seed=99))


@pytest.fixture
def task() -> Task:
    return federation([9, 7, 5], hidden=(6,))


def bench_of(task: Task) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=0)


def batch_of(task: Task, network: Network | None = None) -> Batch:
    x, y = drawn(10, seed=5)
    keys = Keys(torch.tensor(1), torch.tensor(2))
    return Batch(x, y, None, keys, network or task.network, Variant(train=False))


def scaled(task: Task, *factors: float) -> Params:
    """Models that are multiples of the initial one, as `given`."""
    several = stack([task.network.initial * factor for factor in factors])
    return Params(several, several.layout)


def stranger() -> Params:
    """A model that began elsewhere."""
    with default_generator(8):
        return Network(MLP((FEATURES,), CLASSES, hidden=(6,)).double()).initial


def linear(task: Task, weight: Tensor) -> Params:
    """A linear model without a bias."""
    names = list(task.network.initial)
    bias = torch.zeros(len(weight), dtype=torch.float64)
    return Params(dict(zip(names, (weight, bias), strict=True)), task.network.layout)


def votes(*each: float) -> Tensor:
    return torch.tensor(each, dtype=torch.float64)


def answers_of(algorithm: Algorithm, server: Any, batch: Batch) -> Tensor:
    shared = algorithm.shared(server)
    assert isinstance(shared, Predictor)
    return shared.answer(shared.model, shared.beside, batch)  # type: ignore[arg-type]


# -- DENSE -------------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("dense")
def test_a_student_that_is_the_ensemble_has_no_loss_and_no_direction(task: Task) -> None:
    w, batch = task.network.initial, batch_of(task)
    given = Teachers(scaled(task, 1.0, 1.0), votes(0.5, 0.5), w)

    def objective(trained: Params) -> tuple[Tensor, Tensor]:
        loss, _ = dense.lesson(w | trained, batch, given, temperature=4.0)
        return loss, loss

    g, loss = batch.differentiate(objective, w.trained)
    assert abs(loss) < 1e-14
    assert g.norm() < 1e-14
    other, _ = dense.lesson(w * 2.0, batch, given, temperature=4.0)
    assert other > 1e-4


@pytest.mark.closed_form("dense")
def test_what_samples_cost_by_hand(task: Task) -> None:
    batch = batch_of(task)
    given = Teachers(scaled(task, 1.0, 3.0), votes(0.5, 0.5), stranger())
    first, third = (batch.outputs(task.network.initial * factor) for factor in (1.0, 3.0))
    student = batch.outputs(stranger())
    wanted = (first + third) / 2
    label = torch.nn.functional.cross_entropy(wanted, batch.y)
    p, q = (wanted / 3).softmax(1), (student / 3).softmax(1)
    apart = 9 * (p * (p.log() - q.log())).sum(1) * (wanted.argmax(1) != student.argmax(1))
    assert (apart == 0).any()
    assert (apart > 0).any()  # both cases occur
    found = teaching_cost(batch, given, statistics=1.0, adversarial=0.7)
    torch.testing.assert_close(found, label - 0.7 * apart.mean(), rtol=0, atol=1e-12)


@pytest.mark.limit("dense")
def test_without_epochs_the_student_stays_as_it_began(task: Task) -> None:
    student = play(task, Dense(server_epochs=0)).server.answer
    assert all(torch.equal(student[name], leaf) for name, leaf in task.network.initial.items())


@pytest.mark.limit("dense")
def test_the_last_student_is_deployed_whatever_it_is_worth(task: Task) -> None:
    """Nothing is chosen on data: with test samples of any value the student is the same, and it is the last one."""
    method, bench = Dense(**SMALL), bench_of(task)
    seen: list[Params] = []

    class Watched(dense.Student):
        def pass_over(self, *inputs: Any) -> Any:
            state = super().pass_over(*inputs)
            seen.append(state.w.client(0))
            return state

    models = stack([task.network.initial * factor for factor in (0.5, 2.0)])
    end = Watched(**SMALL).learn(bench, task.network.initial, models)
    assert len(seen) == 3
    assert all(torch.equal(end[name], seen[-1][name]) for name in end)
    assert any((seen[-1][name] != seen[-2][name]).any() for name in end)
    again = method.answering.learn(bench, task.network.initial, models)
    assert all(torch.equal(end[name], again[name]) for name in end)


@pytest.mark.purpose("dense")
def test_a_student_learns_what_clients_know_together_without_a_sample() -> None:
    """One client tells two classes apart by the first number, the other knows the third class by the second one."""
    task, bench = (made := federation([4, 4], Linear)), bench_of(made)
    first, second = torch.zeros(2, CLASSES, FEATURES, dtype=torch.float64)
    first[0, 0], first[1, 0], second[2, 1] = 8.0, -8.0, 8.0
    models = stack([linear(task, weight) for weight in (first, second)])
    method = Dense(server_epochs=20, generator_steps=5, server_batch=32, noise=8, width=16, server_lr=0.1)
    student = method.answering.learn(bench, linear(task, torch.zeros_like(first)), models)
    x, _ = drawn(200, seed=7)
    wanted = bench.answers(models, x).mean(0).argmax(1)
    assert (bench.answers(student, x).argmax(1) == wanted).double().mean() > 0.9
    alone = bench.answers(models, x).argmax(2)
    assert max((one == wanted).double().mean() for one in alone) < 0.75


# -- Co-Boosting -------------------------------------------------------------------------------------------------------


@pytest.mark.closed_form("coboosting")
def test_votes_go_by_the_sign_and_stay_between_0_and_1() -> None:
    """One model is right and the other wrong: the votes end at 1 and 0, in steps of one size."""
    task = federation([4], Linear)
    right = torch.zeros(CLASSES, FEATURES, dtype=torch.float64)
    right[0, 0] = 1.0
    models = stack([linear(task, right), linear(task, -right)])
    x = torch.ones(6, FEATURES, dtype=torch.float64)
    batch = Batch(x, torch.zeros(6, dtype=torch.int64), None, None, task.network, Variant(train=False))
    given = coboosting.Revision(Params(models, models.layout), torch.tensor(0.2, dtype=torch.float64))
    now = Params.of(votes=votes(0.5, 0.5))
    path = [now["votes"]]
    for _ in range(4):
        now = coboosting.revise(now, batch, given)
        path.append(now["votes"])
    expected = [[0.5, 0.5], [0.7, 0.3], [0.9, 0.1], [1.0, 0.0]]
    torch.testing.assert_close(torch.stack(path[:4]), torch.tensor(expected, dtype=torch.float64))
    # At (1, 0) the first vote has no slope left: only the sum is divided by it.
    assert ((path[4] >= 0) & (path[4] <= 1)).all()
    torch.testing.assert_close(path[4], path[3])


@pytest.mark.closed_form("coboosting")
def test_hard_samples_count_more_by_hand(task: Task) -> None:
    batch = batch_of(task)
    given = Teachers(scaled(task, 1.0, 3.0), votes(0.2, 0.6), stranger())
    wanted = 0.25 * batch.outputs(task.network.initial) + 0.75 * batch.outputs(task.network.initial * 3.0)
    sure = wanted.softmax(1).gather(1, batch.y[:, None])[:, 0]
    label = ((1 - sure) * -sure.log()).mean()
    apart = disagreement(batch.outputs(stranger()), wanted, 3.0).mean()
    found = coboosting.cost(batch, given, statistics=1.0, adversarial=0.7)
    torch.testing.assert_close(found, label - 0.7 * apart, rtol=0, atol=1e-12)


@pytest.mark.limit("coboosting")
def test_without_steps_and_moves_the_student_learns_as_in_dense(task: Task) -> None:
    w, batch = task.network.initial, batch_of(task)
    given = Teachers(scaled(task, 0.5, 2.0), votes(0.5, 0.5), w)
    mine, _ = coboosting.lesson(w, batch, given, temperature=4.0, diversity=0.0)
    theirs, _ = dense.lesson(w, batch, given, temperature=4.0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)
    moved, _ = coboosting.lesson(w, batch, given, temperature=4.0, diversity=0.1)
    assert moved != mine
    pool = Pool(bench_of(task), 1, 10)
    pool.add(batch.x, batch.y)
    for lr, same in ((0.0, True), (0.1, False)):
        after = CoBoosting(vote_lr=lr).answering.votes(pool, given, epoch=1)
        assert torch.equal(after, given.votes) == same


# -- IntactOFL ---------------------------------------------------------------------------------------------------------


@every_gate
@pytest.mark.limit("intactofl")
def test_a_gate_without_epochs_is_the_plain_ensemble(task: Task, gate: Gate) -> None:
    batch = batch_of(task)
    gated, plain = (play(task, one) for one in (IntactOFL(server_epochs=0, gate=gate), Ensemble()))
    mine = answers_of(gated.algorithm, gated.server, batch)
    theirs = answers_of(plain.algorithm, plain.server, batch)
    torch.testing.assert_close(mine.log_softmax(1), theirs.log_softmax(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("data", ["generated", "public"])
@pytest.mark.limit("intactofl")
def test_the_gate_of_one_client_is_that_client(data: Literal["generated", "public"]) -> None:
    task = federation([9], hidden=(6,))
    method, batch = IntactOFL(data=data, **SMALL), batch_of(task)
    server = play(task, method).server
    alone = batch.outputs(server.answer.models.client(0))
    torch.testing.assert_close(answers_of(method, server, batch), alone, rtol=0, atol=1e-12)


@pytest.mark.limit("intactofl")
def test_a_gate_between_identical_experts_changes_nothing(task: Task) -> None:
    logits = torch.randn(1, 6, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(
        4, -1, -1
    )
    gate = Params.of(weight=torch.randn(4, FEATURES, dtype=torch.float64), bias=torch.ones(4, dtype=torch.float64))
    use = intactofl.open_gate(gate, drawn(6, seed=1)[0], "softmax")
    torch.testing.assert_close(intactofl.gate_logits(logits, use), logits[0])
    torch.testing.assert_close(use.mean(1), torch.ones(6, dtype=torch.float64))
    assert use.std() > 0.1


@every_gate
@pytest.mark.closed_form("intactofl")
def test_what_a_gate_costs_by_hand_and_padding_does_not_count(task: Task, gate: Gate) -> None:
    batch = batch_of(task)
    mask = torch.tensor([1.0] * 7 + [0.0] * 3, dtype=torch.float64)
    with default_generator(3):
        values = Params.of(
            weight=torch.randn(2, FEATURES, dtype=torch.float64), bias=torch.randn(2, dtype=torch.float64)
        )
    given = Teachers(scaled(task, 1.0, 3.0), votes(0.5, 0.5), values)
    found, _ = intactofl.lesson(
        values, replace(batch, mask=mask), given, rule=gate, temperature=4.0, balance=0.3, diversity=0.0
    )
    x, y = batch.x[:7], batch.y[:7]
    each = torch.stack([replace(batch, x=x).outputs(task.network.initial * factor) for factor in (1.0, 3.0)])
    said = x @ values["weight"].T + values["bias"]
    g = 2 * said.softmax(1) if gate == "softmax" else said
    mixed = (g[:, 0, None] * each[0] + g[:, 1, None] * each[1]) / 2
    expected = torch.nn.functional.cross_entropy(mixed, y) + 0.3 * g.std(correction=0)
    expected = expected + disagreement(mixed, each.mean(0), 4.0).mean()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.purpose("intactofl")
def test_a_gate_listens_to_whom_a_sample_belongs() -> None:
    """Two clients with opposite labels, on either side of the plane: only a gate can serve both."""
    data = {}
    for k, side in enumerate((3.0, -3.0)):
        x, _ = drawn(60, seed=k)
        x[:, 0] += side
        y = (x[:, 1] * side > 0).long()
        data[str(k)] = (x, y)
    with default_generator(0):
        module = Linear((FEATURES,), 2).double()
    training = Training(lr=0.5, batch_size=20)
    task = Task.of_clients(data, module, classes=2, training=training, shares=(1.0, 0.0, 0.0))
    x, y = (torch.cat([data[k][part] for k in ("0", "1")]) for part in (0, 1))
    task = replace(task, public=(x, y))
    scores = {}
    for method in (Ensemble(), IntactOFL(data="public", server_epochs=90, server_batch=20, server_lr=0.1)):
        report = play(task, method)
        said = answers_of(method, report.server, Batch(x, y, None, None, task.network, Variant(train=False)))
        scores[type(method)] = float((said.argmax(1) == y).double().mean())
    assert scores[IntactOFL] > 0.9
    assert scores[Ensemble] < 0.75


# -- FedCVAE -----------------------------------------------------------------------------------------------------------


def constant(method: FedCVAE, bench: Workbench, value: float) -> Params:
    """A decoder that makes `value` of whatever it is given."""
    start = decoder_of(method.training.first(bench.task))
    return Params(
        {name: torch.full_like(leaf, value if name == "decoder.out.bias" else 0.0) for name, leaf in start.items()}
    )


@pytest.mark.closed_form("fedcvae")
def test_decoders_and_classes_are_drawn_as_often_as_they_are_in_the_data(task: Task) -> None:
    method, bench = FedCVAE(samples=4000), bench_of(task)
    decoders = stack([constant(method, bench, value) for value in (1.0, 2.0)])
    counts = torch.tensor([[3.0, 0.0, 1.0], [0.0, 4.0, 0.0]], dtype=torch.float64)
    made = method.answering.make_samples(bench, decoders, counts)
    found = torch.zeros(2, 3, dtype=torch.float64)
    found.index_put_((made["x"][:, 0].long() - 1, made["y"]), torch.ones(4000, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(found / 4000, counts / 8, rtol=0, atol=0.03)
    assert found[counts == 0].sum() == 0


@pytest.mark.closed_form("fedcvae")
def test_the_prior_is_a_normal_distribution_that_is_cut_off(task: Task) -> None:
    reach, center = 1.5, 4.0
    e = FedCVAE(samples=20000, latent=2, reach=reach, center=center).answering.draw_prior(
        bench_of(task), np.random.default_rng(0)
    )
    assert e.shape == (20000, 2)
    assert (e - center).abs().max() <= reach
    normal = torch.distributions.Normal(torch.tensor(0.0).double(), torch.tensor(1.0).double())
    inside = 2 * normal.cdf(torch.tensor(reach)) - 1
    variance = 1 - 2 * reach * normal.log_prob(torch.tensor(reach).double()).exp() / inside
    torch.testing.assert_close(e.mean(0), torch.full((2,), center, dtype=torch.float64), rtol=0, atol=0.02)
    torch.testing.assert_close(e.var(0), variance.expand(2), rtol=0.03, atol=0)


@pytest.mark.limit("fedcvae")
def test_one_decoder_that_learned_from_identical_ones_makes_the_same(task: Task) -> None:
    method, bench = FedCVAE(variant="kd", samples=200, decoder_epochs=60, lr=0.01), bench_of(task)
    decoders = stack([constant(method, bench, 2.0)] * 2)
    counts = torch.tensor([[3.0, 0.0, 1.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    one = method.answering.distil(
        bench, decoder_of(method.training.first(bench.task)), method.answering.make_samples(bench, decoders, counts)
    )
    made = method.answering.make_samples_by_one(bench, one, counts.sum(0))
    assert (made["x"] - 2).abs().mean() < 0.1
    assert set(made["y"].tolist()) == {0, 2}  # nobody has class 1


@pytest.mark.purpose("fedcvae")
@pytest.mark.parametrize("variant", ["ens", "kd"])
def test_a_classifier_of_all_classes_from_clients_of_one_class_each(variant: Literal["ens", "kd"]) -> None:
    """Where each client has a single class, a model of its own knows one answer only."""
    places = torch.tensor([[3.0, 0.0], [-2.0, 3.0], [-2.0, -3.0]], dtype=torch.float64)
    data = {}
    for k in range(CLASSES):
        noise = torch.randn(40, 2, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        data[str(k)] = (places[k] + 0.4 * noise, torch.full((40,), k))
    with default_generator(0):
        module = Linear((2,), CLASSES).double()
    training = Training(lr=0.1, batch_size=20)
    task = Task.of_clients(data, module, classes=CLASSES, training=training, shares=(1.0, 0.0, 0.0))
    method = FedCVAE(
        variant=variant, epochs=60, lr=0.01, hidden=8, latent=2, samples=300, server_epochs=20, decoder_epochs=20
    )
    report = play(task, method)
    x, y = task.x, task.y
    right = (bench_of(task).answers(report.server.answer, x).argmax(1) == y).double().mean()
    assert right > 0.95
