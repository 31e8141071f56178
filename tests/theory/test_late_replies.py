"""Replies that are late are read with what their clients had been sent."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from theory.tools import ALIKE, balance, kept, optima_and_curvatures
from torch import Tensor

from atoll.algorithms.feddf import FedDF
from atoll.algorithms.feddyn import FedDyn
from atoll.algorithms.fedfomo import FedFomo
from atoll.algorithms.fedgen import FedGen, State
from atoll.algorithms.fedpac import FedPAC
from atoll.algorithms.scaffold import Scaffold
from atoll.federation.report import Report
from atoll.kernel.algorithm import Algorithm, Arrival, Replies, Update
from atoll.kernel.cohort import Cohort
from atoll.kernel.params import Params, Stack, stack
from atoll.runtime.workbench import Workbench
from atoll.testing.conformance import play, quadratics
from atoll.testing.conformance.tasks import build_task

LATE: dict[str, Any] = {"late": 0.5, "delay": 3}
ROUNDS = 280


def played(method: Algorithm) -> Report:
    """Half of all replies are up to three rounds late; at the end nobody is asked any more, so all of them arrive."""
    optima, curvatures = optima_and_curvatures(seed=5)
    task = quadratics(optima, curvatures, lr=0.1)
    return play(task, method, ROUNDS, faults=lambda round, who: np.full(len(who), round >= ROUNDS - 3), **LATE)


def optimum() -> Tensor:
    optima, curvatures = optima_and_curvatures(seed=5)
    return balance(curvatures, optima, ALIKE)


@pytest.mark.closed_form("scaffold")
def test_scaffolds_c_stays_the_mean_of_all_control_variates() -> None:
    report = played(Scaffold(epochs=3))
    torch.testing.assert_close(report.server.c["w"], kept(report)["w"].mean(0), atol=1e-10, rtol=0)
    torch.testing.assert_close(report.server.w["w"], optimum(), atol=1e-6, rtol=0)


@pytest.mark.closed_form("feddyn")
def test_feddyns_h_stays_the_mean_of_all_gradients() -> None:
    report = played(FedDyn(alpha=1.0, epochs=3))
    torch.testing.assert_close(report.server.h["w"], kept(report)["w"].mean(0), atol=1e-10, rtol=0)
    torch.testing.assert_close(report.server.w["w"], optimum(), atol=1e-6, rtol=0)


@pytest.mark.closed_form("fedfomo")
def test_a_reply_to_fedfomo_is_credited_to_the_models_that_it_is_about() -> None:
    task = quadratics(torch.tensor([[1.0], [2.0], [-4.0], [3.0]], dtype=torch.float64))
    method, report = FedFomo(models=2), play(task, FedFomo())
    chosen, seen = torch.tensor([[1, 2]] * 4), torch.ones(4, dtype=torch.bool)
    server = replace(method.start(task.public_facts()), chosen=chosen, seen=seen)
    fields = {
        "delta": Stack.of(w=torch.zeros(1, 1, dtype=torch.float64)),
        "omega": Stack.of(omega=torch.tensor([[0.5, -0.25]], dtype=torch.float64)),
        "others": Stack.of(others=torch.tensor([[3, 1]])),  # by now the server would send those of 1 and 2
    }
    arrival = Arrival(np.array([0]), fields, torch.ones(1), late=2)
    replies = Replies([arrival], keep=True, workbench=Workbench(report.population, report.engine, 0))
    after = method.aggregate(server, replies)
    assert after.affinity[0].tolist() == [0, -0.25, 0, 0.5]
    assert after.mixing[0].tolist() == [0, 0, 0, 1]


@pytest.mark.purpose("fedfomo")
@pytest.mark.parametrize("models", [1, 2, 5])
def test_fedfomo_reads_replies_to_fewer_models_than_it_sends_now(models: int) -> None:
    report = play(build_task(), FedFomo(models=models), 8, cohort=4, **LATE)
    assert torch.isfinite(report.server.affinity).all()
    assert not report.server.affinity.diagonal().any()


# -- models that a server puts together again from what it sent and what came back ------------------------------------

TRAINED: dict[int, Params] = {}  # by client: what it trained last, whether or not it has arrived


def write_down(cohort: Cohort, models: Stack) -> None:
    TRAINED.update({int(client): models.client(k) for k, client in enumerate(cohort.clients)})


@dataclass(frozen=True, kw_only=True)
class RememberingFedDF(FedDF):
    """Compares what its teachers answer with what the models answer that clients trained."""

    def local(self, w: Params, cohort: Cohort) -> Update:
        update = super().local(w, cohort)
        write_down(cohort, w + update.send["delta"])
        return update

    def aggregate(self, w: Params, replies: Replies) -> Params:
        x, _ = self.divide(replies.workbench)
        trained = stack([TRAINED[int(client)] for client in sorted(replies.clients)])
        ANSWERS.append(replies.workbench.answers(trained, x))
        return super().aggregate(w, replies)

    def targets(self, logits: Tensor) -> Tensor:
        torch.testing.assert_close(logits, ANSWERS[-1], atol=1e-10, rtol=0)
        return super().targets(logits)


ANSWERS: list[Tensor] = []


@pytest.mark.closed_form("feddf")
def test_teachers_of_feddf_are_the_models_that_clients_trained() -> None:
    play(build_task(), RememberingFedDF(server_epochs=2), 6, **LATE)
    assert len(ANSWERS) >= 5


@dataclass(frozen=True, kw_only=True)
class RememberingFedGen(FedGen):
    """Compares the heads that teach its generator with those that clients trained."""

    def local(self, server: State, cohort: Cohort) -> Update:
        update = super().local(server, cohort)
        write_down(cohort, (server.w + update.send["delta"]).part("head"))
        return update

    def aggregate(self, server: State, replies: Replies) -> State:
        HEADS[:] = [stack([TRAINED[int(client)] for client in replies.clients])]
        return super().aggregate(server, replies)

    def teach(self, generator: Params | None, heads: Stack, counts: Tensor, bench: Workbench) -> Params:
        for name, leaf in HEADS[0].items():
            torch.testing.assert_close(heads[name], leaf, atol=1e-10, rtol=0)
        return super().teach(generator, heads, counts, bench)


HEADS: list[Stack] = []


@pytest.mark.closed_form("fedgen")
def test_the_generator_of_fedgen_learns_from_the_heads_that_clients_trained() -> None:
    play(build_task(), RememberingFedGen(server_steps=2), 6, **LATE)
    assert HEADS


@pytest.mark.closed_form("fedpac")
def test_fedpac_mixes_the_heads_that_clients_trained() -> None:
    """With heads of their own, a client's head is the one that it trained, whenever that arrives."""
    seen: list[tuple[Stack, Stack]] = []

    @dataclass(frozen=True, kw_only=True)
    class Remembering(FedPAC):
        def local(self, server: Any, cohort: Cohort) -> Update:
            update = super().local(server, cohort)
            write_down(cohort, update.send["head"])
            return update

        def aggregate(self, server: Any, replies: Replies) -> Any:
            after = super().aggregate(server, replies)
            rows = torch.from_numpy(replies.clients)
            seen.append((after.heads.rows(rows), stack([TRAINED[int(client)] for client in replies.clients])))
            return after

    play(build_task(), Remembering(heads="own"), 6, **LATE)
    assert len(seen) >= 5
    assert all(torch.equal(mine[name], leaf) for mine, trained in seen for name, leaf in trained.items())
