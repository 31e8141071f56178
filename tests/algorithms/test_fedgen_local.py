"""FedGen-local: what is drawn from the mixture, what clients make of it, and what travels."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from atoll import LocalEngine, Task, Training, federate
from atoll.algorithms.fedgen_local import FedGenLocal, augmented_gradient
from atoll.algorithms.local import Local
from atoll.kernel.algorithm import Arrival, Limits, Replies
from atoll.kernel.batch import Batch
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError
from atoll.kernel.network import Variant
from atoll.kernel.params import Params, Stack, stack
from atoll.kernel.randomness import Keys
from atoll.models.vae import decoder_of
from atoll.runtime.engines.plan import Plan
from atoll.runtime.engines.scan import Scanner
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import Check, checks, personal_models, play, quadratics
from atoll.testing.conformance.tasks import build_task
from atoll.toolbox.client import sgd

CHECKS = [  # that depend on what clients do with what they are sent; the rest is the same as without it
    "strategies-agree", "clients-are-isolated", "only-what-is-declared-leaves", "late-replies-are-read",
    "odd-clients-are-served", "batchnorm-and-dropout-work",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Classifier(FedGenLocal):
    use: Literal["augment", "classifier"] = "classifier"

    limits: ClassVar[Limits] = {}


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def bench_of(task: Task) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=1)


@pytest.mark.parametrize("check", [one for one in checks() if one.name in CHECKS], ids=lambda one: one.name)
def test_the_classifier_conforms_too(check: Check) -> None:
    check.run(Classifier)


# -- the mixture -----------------------------------------------------------------------------------------------------


def constant(method: FedGenLocal, bench: Workbench, value: float) -> Params:
    """What a decoder sends that makes `value` of whatever it is given, without spread."""
    start = decoder_of(method.first_maker(bench.task))
    flat = Params(
        {name: torch.full_like(leaf, value if name == "decoder.out.bias" else 0.0) for name, leaf in start.items()}
    )
    return (flat | Params.of(**{"decoder.log_sigma": torch.tensor(-100.0, dtype=torch.float64)})) - start


def replied(method: FedGenLocal, bench: Workbench, counts: list[list[float]], clients: list[int]) -> Replies:
    """Clients whose generators make their number plus 1."""
    fields = {
        "decoder": stack([constant(method, bench, client + 1.0) for client in clients]),
        "labels": Stack.of(counts=torch.tensor(counts, dtype=torch.float64)),
    }
    arrival = Arrival(np.array(clients), fields, torch.ones(len(clients), dtype=torch.float64))
    return Replies([arrival], keep=True, workbench=bench)


@pytest.mark.closed_form("fedgen-local")
def test_clients_and_classes_are_drawn_as_often_as_they_are_in_the_data(task: Task) -> None:
    method, bench = FedGenLocal(samples=4000), bench_of(task)
    counts = [[3.0, 0.0, 1.0], [0.0, 4.0, 0.0]]
    made = method.draw_samples(replied(method, bench, counts, clients=[0, 1]))
    assert made["x"].shape == (4000, 4)
    makers = made["x"].mean(1).round().long() - 1
    assert (made["x"] - (makers + 1.0)[:, None]).abs().max() < 0.1  # the least spread
    drawn = torch.zeros(2, 3, dtype=torch.float64)
    drawn.index_put_((makers, made["y"]), torch.ones(4000, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(drawn / 4000, torch.tensor(counts, dtype=torch.float64) / 8, rtol=0, atol=0.03)
    assert drawn[0, 1] == drawn[1, 0] == drawn[1, 2] == 0


def test_the_order_of_replies_does_not_matter(task: Task) -> None:
    method, bench = FedGenLocal(samples=50), bench_of(task)
    counts = [[3.0, 0.0, 1.0], [0.0, 4.0, 0.0]]
    one = method.draw_samples(replied(method, bench, counts, clients=[0, 3]))
    other = method.draw_samples(replied(method, bench, counts[::-1], clients=[3, 0]))
    assert torch.equal(one["x"], other["x"])
    assert torch.equal(one["y"], other["y"])


@pytest.mark.closed_form("fedgen-local")
def test_an_averaged_generator_by_hand(task: Task) -> None:
    # Generators that always make 1 and 4 become one that always makes their mean, by samples.
    method, bench = FedGenLocal(samples=5, mix="average"), bench_of(task)
    replies = replied(method, bench, [[1.0, 0.0, 0.0], [0.0, 3.0, 0.0]], clients=[0, 3])
    decoder = method.average(replies)
    made = method.draw_samples(replies, decoder)
    assert decoder["decoder.out.bias"].tolist() == pytest.approx([2.5] * 4)
    torch.testing.assert_close(made["x"], torch.full((5, 4), 2.5, dtype=torch.float64), rtol=0, atol=0.1)


def test_clients_begin_at_the_averaged_generator(task: Task) -> None:
    """catches: an average that is made and never used."""
    report = play(task, FedGenLocal(mix="average"), rounds=2)
    stopped = play(task, FedGenLocal(mix="average", generator_epochs=0), rounds=2)
    assert report.server.decoder is not None
    first = decoder_of(FedGenLocal().first_maker(stopped.population.facts))
    assert all(torch.equal(stopped.server.decoder[name], leaf) for name, leaf in first.items())
    again = play(task, FedGenLocal(mix="average"), rounds=1)
    kept = again.population.memory.save(round=9)["kept"].maker
    received = again.server.decoder
    assert not torch.equal(kept["decoder.out.bias"][0], received["decoder.out.bias"])
    still = FedGenLocal(mix="average", generator_epochs=0)  # begins at what it receives, and trains no further
    cohort = cohort_of(task, 0)
    sent = still.local(still.broadcast(again.server), cohort).send["decoder"].client(0)
    assert all(torch.allclose(first[name] + sent[name], leaf) for name, leaf in received.items())


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("by", ["vae", "gan"])
def test_a_generator_that_diverges_is_named_and_the_others_go_on(
    by: Literal["vae", "gan"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = build_task()
    train, x = whole.splits["train"], whole.x.clone()
    x[train.order[train.offsets[2] : train.offsets[3]]] = 1e308
    task = replace(whole, x=x)
    method = FedGenLocal(by=by, use="classifier")
    with pytest.raises(KeyboardInterrupt):
        federate(task, method, rounds=3, folder=tmp_path, progress=False, stop=set_event())
    assert "client 2 is lost" in caplog.text
    report = federate(task, method, rounds=3, folder=tmp_path, resume=True, progress=False)
    assert [line["lost"] for line in report.history] == [{"not finite": 1}] * 3
    assert all(leaf.isfinite().all() for leaf in report.server.w.values())
    kept = report.population.memory.save(round=9)["kept"].maker
    assert all(leaf.isfinite().all() for leaf in kept.values())


def set_event() -> threading.Event:
    stop = threading.Event()
    stop.set()
    return stop


def cohort_of(task: Task, client: int) -> Cohort:
    population = Population(task, RamMemory(task.clients), seed=0)
    scanner = Scanner(population, Plan("loop"), LocalEngine(dtype=torch.float64).programs)
    return Cohort(population.facts, np.array([client]), 1, scanner)


@pytest.mark.purpose("fedgen-local")
@pytest.mark.parametrize("by", ["vae", "gan"])
def test_generators_learn_their_clients_samples(by: Literal["vae", "gan"]) -> None:
    # Classes lie at different places for the two clients; what is drawn lies there, too.
    places = torch.tensor([[[4.0, 0.0], [0.0, 4.0]], [[-4.0, 0.0], [0.0, -4.0]]], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    data = {str(k): (places[k][y] + 0.3 * torch.randn(60, 2, generator=draw, dtype=torch.float64), y) for k in range(2)}
    model = torch.nn.Linear(2, 2).double()
    task = Task.of_clients(data, model, training=Training(batch_size=20), shares=(1.0, 0.0, 0.0))
    report = play(task, FedGenLocal(by=by, generator_epochs=100, generator_lr=0.02, hidden=16, latent=2))
    made = report.server.made
    centers = places.transpose(0, 1)[made["y"]]  # of the sample's class, at either client
    nearest = (made["x"][:, None] - centers).norm(dim=2).min(1)
    assert nearest.values.mean() < 1
    assert 0.3 < nearest.indices.double().mean() < 0.7  # both clients' samples are there


# -- what it is used for -----------------------------------------------------------------------------------------------


@pytest.mark.limit("fedgen-local")
def test_the_first_round_has_nothing_to_augment_with(task: Task) -> None:
    mine, theirs = (personal_models(play(task, one)) for one in (FedGenLocal(), Local()))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in b)


@pytest.mark.closed_form("fedgen-local")
def test_the_gradient_with_generated_samples_by_hand(task: Task) -> None:
    x, y, mask = task.x[:5], task.y[:5], torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    batch = Batch(x, y, mask, Keys(torch.tensor(1), torch.tensor(2)), task.network, Variant())
    made = Params.of(x=task.x[5:12], y=task.y[5:12])
    g, _, loss = augmented_gradient(task.network.initial, batch, made, share=0.3)
    place = (batch.uniform("places", 5) * 7).long()
    module = task.network._original
    own = (F.cross_entropy(module(x), y, reduction="none") * mask).sum() / 4
    other = F.cross_entropy(module(made["x"][place]), made["y"][place])
    expected = torch.autograd.grad(0.7 * own + 0.3 * other, list(module.parameters()))
    for mine, theirs in zip(g.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(loss, own.detach())


def test_the_classifier_is_trained_on_what_was_drawn(task: Task) -> None:
    method, bench = Classifier(server_epochs=3, samples=20), bench_of(task)
    replies = replied(method, bench, [[3.0, 0.0, 1.0], [0.0, 4.0, 0.0]], clients=[0, 1])
    w = method.aggregate(method.start(task.public_facts()), replies).w
    made = method.draw_samples(replies)
    alone = sgd(bench.cohort(made["x"], made["y"]), start=task.network.initial, epochs=3).client(0)
    assert all(torch.equal(w[name], alone[name]) for name in w)
    assert (w - task.network.initial).norm() > 0


# -- what travels, absent and new clients ------------------------------------------------------------------------------


def test_only_generators_and_label_counts_go_up_and_samples_down(task: Task) -> None:
    augment = play(task, FedGenLocal(samples=30), rounds=2).ledger
    assert {entry.field for entry in augment.entries if entry.direction == "up"} == {"decoder", "labels"}
    down = {entry.round: entry.bytes for entry in augment.entries if entry.direction == "down"}
    assert set(down) == {1}
    assert 30 * (4 + 1) * 8 <= down[1] < 30 * (4 + 1) * 8 + 500
    classifier = play(task, Classifier(), rounds=2).ledger
    assert {entry.field for entry in classifier.entries} == {"decoder", "labels"}


def test_who_never_took_part_has_the_initial_model_until_it_is_welcomed(
    task: Task, make_cohort: Callable[..., Cohort]
) -> None:
    method = FedGenLocal()
    report = play(task, method, rounds=3, faults=lambda round, clients: clients == 1)
    initial = task.network.initial
    assert all(torch.equal(personal_models(report)[1][name], initial[name]) for name in initial)
    cohort = make_cohort(task, clients=[1], round=3)
    welcomed = method.welcome(report.server, cohort)
    assert isinstance(welcomed, Stack)
    alone = Local().welcome(None, cohort)
    assert (welcomed.client(0) - initial).norm() > 0
    assert (welcomed - alone).norm() > 0  # with generated samples


def test_everybody_deploys_the_classifier(task: Task) -> None:
    report = play(task, Classifier(), faults=lambda round, clients: clients == 1)
    assert all(torch.equal(model["head.bias"], report.server.w["head.bias"]) for model in personal_models(report))
    shared = report.algorithm.shared(report.server)
    assert shared is not None


def test_a_client_that_comes_again_improves_its_generator_from_where_it_was(task: Task) -> None:
    once, twice = (play(task, FedGenLocal(generator_epochs=n), rounds=r) for n, r in ((20, 1), (10, 2)))
    kept = [report.population.memory.save(round=9)["kept"].maker for report in (once, twice)]
    start = FedGenLocal().first_maker(once.population.facts)
    moved = [(one - start).norm().mean() for one in kept]
    assert moved[1] > 0.7 * moved[0]  # as far as in one go


# -- bad input -------------------------------------------------------------------------------------------------------


def test_tasks_that_cannot_be_generated_are_refused(task: Task) -> None:
    with pytest.raises(TaskError, match="of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), FedGenLocal())
    embedded = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Flatten(), torch.nn.Linear(6, 2))
    words = Task.of_clients({"0": (torch.zeros(4, 3, dtype=torch.int64), torch.arange(4) % 2)}, embedded)
    with pytest.raises(TaskError, match="samples of numbers"):
        play(replace(words), FedGenLocal())
