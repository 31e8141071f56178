"""FedCVAE: what travels, what the classifier sees, and what is refused. Its draws: theory/test_oneshot_generated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from atoll import LocalEngine, Task
from atoll.algorithms.fedcvae import FedCVAE
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, stack
from atoll.models.vae import decoded, decoder_of
from atoll.runtime.memory import RamMemory
from atoll.runtime.population import Population
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import Check, checks, personal_models, play, quadratics

CHECKS = ("order-of-clients-does-not-matter", "clients-may-drop-out", "batchnorm-and-dropout-work")


@dataclass(frozen=True, kw_only=True)
class Distilled(FedCVAE):
    variant: Literal["ens", "kd"] = "kd"


@pytest.fixture
def task(make_task: Callable[..., Task]) -> Task:
    return make_task(dtype=torch.float64)


def bench_of(task: Task) -> Workbench:
    return Workbench(Population(task, RamMemory(task.clients), seed=0), LocalEngine(dtype=torch.float64), round=0)


@pytest.mark.parametrize("check", [one for one in checks() if one.name in CHECKS], ids=lambda one: one.name)
def test_one_decoder_for_all_conforms_too(check: Check) -> None:
    check.run(Distilled)


def test_decoders_and_label_counts_go_up_and_nothing_down(task: Task) -> None:
    entries = play(task, FedCVAE()).ledger.entries
    assert {(entry.direction, entry.field) for entry in entries} == {("up", "decoder"), ("up", "labels")}


def test_everybody_deploys_the_classifier(task: Task) -> None:
    report = play(task, FedCVAE())
    assert set(report.server) == {"model"}
    assert all(
        torch.equal(model["head.bias"], report.server["model"]["head.bias"]) for model in personal_models(report)
    )
    assert (report.server["model"] - task.network.initial).norm() > 0


def test_samples_are_what_the_decoder_of_their_client_makes(task: Task) -> None:
    method, bench = FedCVAE(samples=40), bench_of(task)
    start = decoder_of(method.training.first(bench.task))
    decoders = stack([start, start * 2.0])
    counts = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    made = method.answering.made(bench, decoders, counts)
    first, second = made["y"] == 0, made["y"] > 0
    for mine, decoder in ((first, start), (second, start * 2.0)):
        assert mine.any()
        torch.testing.assert_close(made["x"][mine], decoded(decoder, made["y"][mine], made["e"][mine]))


def test_a_secret_center_shifts_what_is_drawn_and_what_is_trained(task: Task) -> None:
    far = FedCVAE(center=5.0)
    e = far.answering.made(
        bench_of(task), stack([decoder_of(far.training.first(bench_of(task).task))]), torch.ones(1, 3)
    )["e"]
    assert (e - 5).abs().max() <= far.reach
    moved, usual = (play(task, one).server["model"] for one in (far, FedCVAE()))
    assert (moved - usual).norm() > 0


def test_the_classifier_takes_steps_of_adam(task: Task) -> None:
    """Its first step moves every value that has a gradient by the step size."""
    method, bench = FedCVAE(server_epochs=1, server_batch=50, lr=0.01), bench_of(task)
    made = Params.of(x=task.x, y=task.y)
    after = method.answering.classifier(bench, task.network.initial, made)
    moved = (after - task.network.initial)["head.bias"].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-3, atol=0)


def test_one_decoder_for_all_is_trained_on_what_all_made(task: Task) -> None:
    bench = bench_of(task)
    start = decoder_of(Distilled().training.first(bench.task))
    decoders = stack([start * 3.0])
    errors = []
    for epochs in (0, 40):
        method = Distilled(samples=100, decoder_epochs=epochs, lr=0.01)
        made = method.answering.made(bench, decoders, torch.ones(1, 3))
        errors.append(
            (decoded(method.answering.distilled(bench, start, made), made["y"], made["e"]) - made["x"]).square().mean()
        )
    assert errors[1] < 0.2 * errors[0]


def test_tasks_that_cannot_be_generated_are_refused() -> None:
    with pytest.raises(TaskError, match="of one class each"):
        play(quadratics(torch.ones(2, 1, dtype=torch.float64)), FedCVAE())
    embedded = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Flatten(), torch.nn.Linear(6, 2))
    words = Task.of_clients({"0": (torch.zeros(4, 3, dtype=torch.int64), torch.arange(4) % 2)}, embedded)
    with pytest.raises(TaskError, match="samples of numbers"):
        play(words, FedCVAE())
