"""Clients with different architectures: what travels, what is kept, what is refused, and that a run can be resumed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from typer.testing import CliRunner

from atoll import Recipe, Task, Training, federate
from atoll.algorithms.ditto import Ditto
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.feddf import FedDF
from atoll.algorithms.fedora import Fedora
from atoll.algorithms.kt_pfl import KTpFL
from atoll.algorithms.local import Local
from atoll.cli import app
from atoll.compose import create
from atoll.federation.config import describe
from atoll.federation.labels import label
from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.errors import TaskError
from atoll.kernel.params import Params, Stack
from atoll.kernel.randomness import default_generator, generator
from atoll.models import MLP, BodyAndHead, Linear
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import personal_models, play

SIZES = (9, 4, 6, 11, 5)  # samples; clients 0, 2 and 4 have the first architecture
METHODS = [Local(), FedAvg(), FedDF(server_epochs=1), KTpFL(samples=5)]


def normalised() -> nn.Module:
    return BodyAndHead(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()), nn.Linear(5, 3))


def mixed(*models: Callable[[], nn.Module], shares: tuple[float, float, float] = (0.6, 0.0, 0.4)) -> Task:
    """Five clients with normal samples, who have these models in turn, and some public samples."""
    draw = generator(0, "test data")
    rows = {
        f"client {k}": (torch.from_numpy(draw.normal(size=(size, 4))), torch.from_numpy(draw.integers(3, size=size)))
        for k, size in enumerate(SIZES)
    }
    built = []
    for model in models or (lambda: MLP((4,), 3, hidden=(6,)), normalised):
        with default_generator(0):
            built.append(model().double())
    training = Training(lr=0.1, batch_size=4)
    task = Task.of_clients(rows, built, classes=3, training=training, shares=shares)
    x = torch.from_numpy(draw.normal(size=(7, 4)))
    return replace(task, public=(x, torch.zeros(7, dtype=torch.int64)))


def scores(report: Report) -> list[list[float]]:
    return [line["evaluation"]["personal"]["test"]["clients"] for line in report.history if "evaluation" in line]


# -- who has what ------------------------------------------------------------------------------------------------------


def test_clients_deploy_models_of_their_own_architecture() -> None:
    task = mixed()
    for algorithm in METHODS:
        models = personal_models(play(task, algorithm, rounds=2))
        for client, model in enumerate(models):
            own = task.networks[client % 2].initial
            assert [(name, leaf.shape) for name, leaf in model.items()] == [(name, own[name].shape) for name in own]
            assert any(not torch.equal(leaf, own[name]) for name, leaf in model.items())


@pytest.mark.parametrize(
    ("algorithm", "strategy"), list(zip(METHODS, ["loop", "threads", "chunk:2", "chunk:2"], strict=True))
)
def test_bits_do_not_depend_on_how_clients_are_run(algorithm: Algorithm, strategy: str) -> None:
    task = mixed()
    whole, other = (personal_models(play(task, algorithm, 2, strategy=one, cohort=4)) for one in ("whole", strategy))
    for mine, theirs in zip(whole, other, strict=True):
        assert all(torch.equal(leaf, theirs[name]) for name, leaf in mine.items())


def test_a_client_is_sent_and_sends_its_own_model_only() -> None:
    small, large = (MLP((4,), 3, hidden=(width,)) for width in (6, 60))
    task = mixed(lambda: small, lambda: large)
    alone = [play(mixed(lambda model=model: model), FedAvg()) for model in (small, large)]  # type: ignore[misc]
    ledger = play(task, FedAvg()).ledger
    for message in ledger.messages():
        field = {"unicast": "broadcast"}.get(message.field, message.field)
        assert message in [one._replace(field=message.field) for one in alone[message.client % 2].ledger.messages()
                           if one.field == field]  # fmt: skip
    assert len(list(ledger.messages())) == 3 * len(SIZES)
    assert ledger.bytes("down") == sum(one.ledger.bytes("down") * n // 5 for one, n in zip(alone, (3, 2), strict=True))


def test_every_architecture_has_a_server_that_may_work_before_anybody_is_asked() -> None:
    class Doubled(FedAvg):
        def equip(self, w: Params, workbench: Workbench) -> Params:
            assert workbench.network.layout == w.layout
            return w * 2.0

    task = mixed()
    models = play(task, Doubled(epochs=0)).server.states
    for model, one in zip(models, task.by_architecture, strict=True):
        assert all(torch.equal(model[name], 2 * leaf) for name, leaf in one.network.initial.trained.items())


def test_local_keeps_models_of_different_shapes() -> None:
    # Each client does what it would do if all had its architecture.
    models = (lambda: MLP((4,), 3, hidden=(6,)), normalised)
    together = scores(play(mixed(*models), Local(), 3, evaluation="all", eval_every=1))
    for number, model in enumerate(models):
        alone = scores(play(mixed(model), Local(), 3, evaluation="all", eval_every=1))
        for mine, theirs in zip(together, alone, strict=True):
            assert mine[number::2] == theirs[number::2]


def test_its_name_and_its_configuration_stay() -> None:
    report = play(mixed(), FedDF(server_epochs=2))
    assert label(report.algorithm) == "feddf:server_epochs=2"
    config = describe(report.task, report.algorithm, report.settings)
    assert config["algorithm"]["name"] == "feddf"
    assert config["model"]["parameters"] == [4 * 6 + 6 + 6 * 3 + 3, 4 * 5 + 5 + 2 * 5 + 5 * 3 + 3]


def test_a_piece_works_inside_architectures() -> None:
    task = mixed()
    plain, neutral, pulled = (
        personal_models(play(task, create(name), 2)) for name in ("fedavg", "fedavg+prox:mu=0", "fedavg+prox:mu=5")
    )
    for client in range(task.clients):
        name = "head.weight"
        assert torch.equal(plain[client][name], neutral[client][name])
        assert not torch.equal(plain[client][name], pulled[client][name])


def test_new_clients_get_the_model_of_their_architecture() -> None:
    task = mixed().hold_out(0.4)
    assert task.unseen is not None
    report = play(task, FedAvg(), 1, evaluation="all")
    found = report.history[-1]["evaluation"]["newcomers"]["labelled"]["0"]["clients"]
    assert len(found) == task.unseen.clients == 2
    # One who comes later has the first architecture.
    welcomed = report.welcome(torch.zeros(2, 4))
    assert torch.equal(welcomed["head.weight"], report.server.states[0]["head.weight"])


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "memory"), [(Local(), "ram"), (Local(), "disk"), (FedAvg(), "ram"), (FedDF(server_epochs=1), "ram")]
)
def test_a_resumed_run_is_the_same(algorithm: Local | FedAvg | FedDF, memory: str, tmp_path: Path) -> None:
    settings = {"rounds": 4, "eval_every": 1, "evaluation": "all", "memory": memory, "cohort": 4, "drop": 0.2}

    def stopped(line: dict[str, int]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(mixed(), algorithm, folder=tmp_path / "run", on_round=stopped, **settings)
    resumed = play(mixed(), algorithm, folder=tmp_path / "run", resume=True, **settings)
    whole = play(mixed(), algorithm, folder=tmp_path / "whole", **settings)
    assert scores(resumed) == scores(whole)
    assert resumed.ledger.entries == whole.ledger.entries
    for mine, theirs in zip(personal_models(resumed), personal_models(whole), strict=True):
        assert mine.layout == theirs.layout
        assert all(torch.equal(leaf, theirs[name]) for name, leaf in mine.items())


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_method_that_needs_one_architecture_is_refused() -> None:
    with pytest.raises(TaskError) as error:
        play(mixed(), Ditto())
    assert str(error.value) == (
        "Ditto needs clients that all have one architecture. own has 2.\n"
        "hint: choose a single `model`, or a method that takes several: fedavg, feddf, fedmd, fml, kt-pfl, local."
    )
    with pytest.raises(TaskError, match="FedAvg@ifca needs clients that all have one architecture"):
        play(mixed(), create("fedavg@ifca"), rounds=11)


def test_a_method_with_an_exchange_before_training_is_refused() -> None:
    class Mixed(Fedora):
        mixes_architectures: ClassVar[bool] = True

    with pytest.raises(TaskError, match=r"must not define `prepare`\. .* does"):
        play(mixed(), Mixed())


def test_what_each_client_is_sent_by_itself_reaches_it() -> None:
    """catches: a cohort of one architecture that gets the rows of another, or of the first clients."""

    class Greeted(FedAvg):
        mixes_architectures: ClassVar[bool] = True

        def unicast(self, server: Params, ids: NDArray[np.int64]) -> Stack:
            return Stack.of(number=torch.from_numpy(ids))

        def local(self, w: Params, cohort: Cohort) -> Update:
            assert torch.equal(cohort.received["number"], cohort.ids)
            return super().local(w, cohort)

        def fuse(self, servers: Sequence[Params], replies: Replies) -> list[Params]:
            greeted = replies.map(lambda one: one._replace(fields={**one.fields, "met": one.unicast}))
            assert sorted(greeted.stack("met")["number"].tolist()) == sorted(replies.clients.tolist())
            return [*servers]

        sums_suffice: ClassVar[bool] = False

    for strategy in ("whole", "loop", "chunk:2"):
        play(mixed(), Greeted(), 2, strategy=strategy)


def test_public_samples_are_asked_for() -> None:
    with pytest.raises(TaskError, match="FedDF needs public data"):
        play(replace(mixed(), public=None), FedDF())


def test_late_replies_are_aggregated_with_those_in_time() -> None:
    """catches: an architecture that is aggregated twice in a round, for late replies and for the others."""
    fused: list[list[int]] = []

    class Noted(FedAvg):
        def fuse(self, servers, replies):  # type: ignore[no-untyped-def]
            fused.append([number for number, _ in replies.by_architecture()])
            return [*servers]

    federate(mixed(), Noted(), rounds=30, late=0.4, delay=2, evaluation="none")
    assert any(len(numbers) == 2 for numbers in fused)
    assert all(len(set(numbers)) == len(numbers) for numbers in fused)


def test_the_first_architecture_may_be_lost_for_a_round() -> None:
    task = mixed(lambda: Linear((4,), 3), lambda: MLP((4,), 3, hidden=(6,)))
    report = play(task, FedAvg(), faults=lambda round, clients: np.asarray(clients) % 2 == 0)
    first, second = report.server.states
    assert all(torch.equal(leaf, first[name]) for name, leaf in task.networks[0].initial.items())
    assert not torch.equal(second["head.weight"], task.networks[1].initial["head.weight"])


# -- the whole path ----------------------------------------------------------------------------------------------------


def test_compare_on_the_command_line(tmp_path: Path) -> None:
    given = "compare feddf:server_epochs=2 local --model mlp:32/mlp:64 --public 0.1 --clients 4 --rounds 2 --seeds 1"
    result = CliRunner().invoke(app, [*given.split(), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    for name in ("feddf:server_epochs=2", "local", "fedavg"):
        assert name in result.output
    assert (tmp_path / "runs" / "report.html").exists()


def test_a_recipe_deals_models_in_turn() -> None:
    task = Recipe("digits", clients=5, model="mlp:32/linear/mlp:16,8").build()
    assert task.architecture is not None
    assert task.architecture.tolist() == [0, 1, 2, 0, 1]
    assert [network.parameters for network in task.networks] == [
        65 * 32 + 33 * 10, 65 * 10, 65 * 16 + 17 * 8 + 9 * 10
    ]  # fmt: skip
    assert task.network is task.networks[0]
    assert Recipe("digits", clients=5, model="mlp:32").build().architecture is None
