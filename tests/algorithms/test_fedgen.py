"""FedGen, by hand: what the generator is taught, what it reminds clients of, and what travels."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll import LocalEngine, Task, Training
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.fedgen import FedGen, Given, any_of, collapse, reminded_gradient
from atoll.kernel.batch import Batch
from atoll.kernel.errors import HyperparameterError, ModelError, TaskError
from atoll.kernel.network import NO_NETWORK, Variant
from atoll.kernel.params import Params, Stack, stack
from atoll.kernel.randomness import Keys, default_generator, generator
from atoll.models import MLP, CharTransformer
from atoll.models.generator import conditional_perceptron, generate
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import personal_models, play, quadratics

CLASSES = 3


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def bench_of(task: Task, seed: int = 3) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed), LocalEngine(dtype=torch.float64), round=1)


def module_of(values: Params) -> nn.Module:
    rows, columns = values["hidden.weight"].shape
    module = nn.Sequential(nn.Linear(columns, rows), nn.ReLU(), nn.Linear(rows, len(values["out.bias"]))).double()
    module.load_state_dict(dict(zip(module.state_dict(), values.values(), strict=True)))
    return module


def heads_of(task: Task, *scales: float) -> Stack:
    return stack([scale * task.network.initial.part("head") for scale in scales])


# -- the server ----------------------------------------------------------------------------------------------------


def test_steps_on_the_generator_by_hand(task: Task) -> None:
    # catches: the released code, where weights [sample, 1] times losses [sample] weigh all samples by the mean share
    # (as read); FL-bench's FedGen, whose teacher is the server's head.
    method = FedGen(server_steps=3, server_batch=8, noise=4, hidden=6, server_lr=0.01)
    bench, heads = bench_of(task), heads_of(task, 1.0, -2.0)
    counts = torch.tensor([[4.0, 1.0, 0.0], [4.0, 3.0, 0.0]], dtype=torch.float64)
    found = method.teach(None, heads, counts, bench)
    start = conditional_perceptron(4, CLASSES, 6, 6, draw=bench.generator("first generator"), like=counts)
    module = module_of(start)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01, weight_decay=method.weight_decay)
    draw = bench.generator("features")
    y = torch.from_numpy(draw.choice([0, 1], 24))  # nobody has class 2
    noise = torch.from_numpy(draw.normal(size=(24, 4)))
    order = order_of(bench, noise, y)
    shares = torch.tensor([[1 / 2, 1 / 4], [1 / 2, 3 / 4]], dtype=torch.float64)
    for some in order.split(8):
        z = module(torch.cat([noise[some], F.one_hot(y[some], CLASSES)], 1))
        loss = 0.0
        for i, label in enumerate(y[some]):
            for k in range(2):
                head = heads.client(k)
                logits = z[i] @ head["head.weight"].T + head["head.bias"]
                loss = loss + shares[k, label] * F.cross_entropy(logits, label) / 8
        pairs = [(i, j) for i in range(8) for j in range(8)]
        e = noise[some]
        apart = [((e[i] - e[j]) ** 2).mean() * (z[i] - z[j]).abs().mean() for i, j in pairs]
        optimiser.zero_grad()
        (loss + torch.exp(-torch.stack(apart).mean())).backward()
        optimiser.step()
    for mine, theirs in zip(found.values(), module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-9)


def order_of(bench: Workbench, noise: Tensor, y: Tensor) -> Tensor:
    """In which order the server's steps see its draws."""
    places = torch.arange(len(noise), dtype=torch.float64)[:, None]
    cohort = bench.cohort(places, y, batch_size=8, network=NO_NETWORK)

    def keep(seen: Params, batch: Batch, given: None) -> Params:
        later = torch.cat([seen["order"], batch.x[:, 0]])[8:]
        return Params.of(order=later)

    start = Params.of(order=torch.zeros(len(noise)))
    return cohort.scan(keep, start, train=False)["order"][0].long()


def test_the_teachers_are_the_clients_heads_each_for_the_classes_it_has(task: Task) -> None:
    # The heads are opposed: their mean, the server's head, knows nothing.
    counts = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]], dtype=torch.float64)
    heads = heads_of(task, 8.0, -8.0)
    method = FedGen(server_steps=200, server_lr=0.01)
    generator = method.teach(None, heads, counts, bench_of(task))
    noise = torch.from_numpy(bench_of(task).generator("else").normal(size=(50, method.noise)))
    for k in range(2):
        y = torch.full((50,), k)
        z = generate(generator, noise, y)
        head = heads.client(k)
        logits = z @ head["head.weight"].T + head["head.bias"]
        assert (logits.argmax(1) == k).double().mean() > 0.95


def test_the_generator_is_taught_on_from_round_to_round(task: Task) -> None:
    counts, heads = torch.ones(2, CLASSES, dtype=torch.float64), heads_of(task, 1.0, 2.0)
    method = FedGen(server_steps=2)
    once = method.teach(None, heads, counts, bench_of(task))
    again = method.teach(once, heads, counts, bench_of(task))
    assert 0 < (again - once).norm() < 0.1 * once.norm()


def test_different_noise_must_make_different_features() -> None:
    noise = torch.tensor([[0.0], [2.0]])
    assert collapse(noise, torch.ones(2, 5)) == 1
    # |e_i - e_j|^2 = 4 and |z_i - z_j| = 3 for two of four pairs.
    assert collapse(noise, torch.tensor([[0.0], [3.0]])) == pytest.approx(torch.exp(torch.tensor(-6.0)))


# -- the clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)])
def test_the_gradient_of_a_client_by_hand(task: Task, mask: Tensor | None) -> None:
    x, y = task.x[:5], task.y[:5]
    keys = Keys(torch.tensor(1), torch.tensor(2))
    batch = Batch(x, y, mask, keys, task.network, Variant())
    w, values = task.network.initial, conditional_perceptron(4, CLASSES, 6, 6, draw=generator(0, "test"), like=x)
    known = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    given = Given(values, known, *torch.tensor([0.7, 0.3], dtype=torch.float64))
    g, after, loss = reminded_gradient(w, batch, given)

    module = task.network._original.requires_grad_(True)
    drawn = any_of(known, batch.uniform("labels", 5))
    noise = batch.normal("noise", 2, 5, 4)
    make = module_of(values)
    features, same = (
        make(torch.cat([e, F.one_hot(label, CLASSES)], 1)).detach() for e, label in zip(noise, (drawn, y), strict=True)
    )
    wanted = module.head(same).softmax(1).detach()  # type: ignore[operator]
    outputs = module(x)
    each = torch.ones(5, dtype=torch.float64) if mask is None else mask
    own = (F.cross_entropy(outputs, y, reduction="none") * each).sum() / each.sum()
    apart = (F.kl_div(outputs.log_softmax(1), wanted, reduction="none").sum(1) * each).sum() / each.sum()
    recalled = F.cross_entropy(module.head(features), drawn)  # type: ignore[operator]
    expected = torch.autograd.grad(own + 0.7 * recalled + 0.3 * apart, list(module.parameters()))
    for mine, theirs in zip(g.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(loss, own.detach())
    assert set(after) == set(w)


def test_any_of_the_known_classes_is_drawn_equally_often() -> None:
    known = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    drawn = any_of(known, torch.arange(300) / 300)
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 100, 0, 100, 100, 0]
    assert any_of(known, torch.tensor([1 - 2**-24])).item() == 4


def test_the_first_round_is_fedavg(task: Task) -> None:
    mine, theirs = (play(task, one) for one in (FedGen(), FedAvg()))
    assert all(torch.equal(mine.server.w[name], theirs.server[name]) for name in theirs.server)
    assert mine.server.generator is not None


def test_reminders_fade(task: Task) -> None:
    faded, strong, plain = (play(task, one, rounds=3).server for one in (FedGen(decay=1e-9), FedGen(), FedAvg()))
    for name, leaf in plain.items():
        torch.testing.assert_close(faded.w[name], leaf, rtol=0, atol=1e-6)
    assert (strong.w - plain).norm() > 0.01


def test_reminders_help_clients_with_a_class_each() -> None:
    y = torch.arange(80) // 40
    centers = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    with default_generator(0):
        x = centers[y] + 0.3 * torch.randn(80, 2, dtype=torch.float64)
        model = MLP((2,), 2, hidden=(8,)).double()
    data = {"0": (x[:40], y[:40]), "1": (x[40:], y[40:])}
    task = Task.of_clients(data, model, training=Training(lr=0.3), shares=(1.0, 0.0, 0.0))
    reminded = play(task, FedGen(epochs=10, beta=0.0), rounds=3).server.w
    plain = play(task, FedAvg(epochs=10), rounds=3).server
    losses = [float(F.cross_entropy(bench_of(task).answers(w, x), y)) for w in (reminded, plain)]
    assert losses[0] < 0.5 * losses[1]


# -- what travels, absent and new clients ------------------------------------------------------------------------------


def test_label_counts_go_up_and_the_generator_down(task: Task) -> None:
    mine, theirs = (play(task, one, rounds=2).ledger for one in (FedGen(noise=4, hidden=6), FedAvg()))
    fields = {(entry.direction, entry.field, entry.kind) for entry in mine.entries}
    assert ("up", "labels", "labels") in fields
    extra = [mine.bytes_in_round(n)["down"] - theirs.bytes_in_round(n)["down"] for n in range(2)]
    numbers = (4 + CLASSES + 1) * 6 + (6 + 1) * 6 + CLASSES
    assert extra[0] < 4 * 500  # a name
    assert numbers * 8 <= extra[1] / task.clients < numbers * 8 + 1500


def test_who_does_not_reply_teaches_nothing(task: Task) -> None:
    report = play(task, FedGen(), faults=lambda round, clients: clients == 2)
    counted = torch.zeros(CLASSES)
    for k in (0, 1, 3):
        train = task.splits["train"]
        own = train.order[train.offsets[k] : train.offsets[k + 1]]
        counted += torch.bincount(task.y[own], minlength=CLASSES)
    assert report.server.labels["known"].tolist() == (counted > 0).double().tolist()


def test_a_private_body_stays_and_a_new_client_has_the_initial_one(task: Task) -> None:
    report = play(task, FedGen(private="body"), rounds=2, faults=lambda round, clients: clients == 1)
    assert set(report.server.w) == {"head.weight", "head.bias"}
    models = personal_models(report)
    name = next(one for one in task.network.initial if one.startswith("body") and one.endswith("weight"))
    assert torch.equal(models[1][name], task.network.initial[name])
    assert not torch.equal(models[0][name], models[2][name])
    assert torch.equal(models[0]["head.bias"], models[1]["head.bias"])
    assert report.algorithm.shared(report.server) is None


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", ["head", "all", "last:1"])
def test_a_private_head_is_refused(task: Task, private: str) -> None:
    with pytest.raises(HyperparameterError, match="must leave the head shared"):
        play(task, FedGen(private=private))


def test_tasks_without_a_class_per_sample_are_refused() -> None:
    with pytest.raises(TaskError, match="one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), FedGen())


def test_features_must_be_rows() -> None:
    tokens = torch.randint(4, (6, 5))
    with pytest.raises(TaskError, match="one class each"):
        play(Task.of_clients({"0": (tokens, tokens)}, CharTransformer((5,), 4), classes=4), FedGen())

    class Wide(nn.Module):
        head_modules = ("head",)

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

        def features(self, x: Tensor) -> Tensor:
            return x.reshape(-1, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.head(self.features(x))
            return outputs

    data = {"0": (torch.zeros(3, 4), torch.arange(3))}
    with pytest.raises(ModelError, match=r"Got features of shape \(1, 2, 2\)"):
        play(Task.of_clients(data, Wide()), FedGen())
