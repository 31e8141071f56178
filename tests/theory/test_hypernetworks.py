"""pFedHN: the server takes gradient steps on the clients' losses; its fixed points; the embedding of a new client."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from theory.tools import CLIENTS, EYE, SIZE, deployed, optima_and_curvatures
from torch import Tensor

from atoll import Task
from atoll.algorithms.pfedhn import PFedHN
from atoll.kernel.params import Params
from atoll.models.hypernetwork import Spectral
from atoll.testing.conformance import play, quadratics

LR, SERVER_LR = 0.3, 0.05
PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "clip": None, "server_lr": SERVER_LR, "hidden": 5, "embedding": 2}


def task(lr: float = LR) -> tuple[Task, Tensor, Tensor]:
    c, H = optima_and_curvatures(0)
    return quadratics(c, H, lr=lr, start=torch.ones(SIZE, dtype=torch.float64)), c, H


def h(phi: dict[str, Tensor], e: Tensor, spectral: Spectral) -> Tensor:
    """The model of a client, written down again."""

    def scaled(name: str, chosen: bool) -> Tensor:
        return phi[name] / torch.linalg.matrix_norm(phi[name], ord=2) if chosen else phi[name]

    f, layers = e, sum(name.startswith("hidden") for name in phi) // 2
    for i in range(layers):
        f = F.linear(f.relu() if i else f, scaled(f"hidden.{i}.weight", spectral != "none"), phi[f"hidden.{i}.bias"])
    return F.linear(f, scaled("head.w.weight", spectral == "all")) + phi["head.w.bias"]


def descended(phi: Params, clients: list[int], c: Tensor, H: Tensor, spectral: Spectral) -> dict[str, Tensor]:
    """The hypernetwork and all e after one gradient step on LR times the mean loss of these clients, by autograd."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in phi.items()}
    losses = []
    for k in clients:
        apart = h(leaves, leaves["embeddings"][k], spectral) - c[k]
        losses.append(0.5 * apart @ H[k] @ apart)
    g = torch.autograd.grad(LR * torch.stack(losses).mean(), list(leaves.values()))
    return {name: leaf.detach() - SERVER_LR * d for (name, leaf), d in zip(leaves.items(), g, strict=True)}


# catches: a server that forgets a leaf or the embedding, takes the wrong sign, or divides by the number of leaves.
@pytest.mark.closed_form("pfedhn")
@pytest.mark.parametrize("spectral", ["none", "hidden", "all"])
@pytest.mark.parametrize("layers", [0, 2])
def test_a_round_of_single_steps_is_a_gradient_step(spectral: Spectral, layers: int) -> None:
    problem, c, H = task()
    method = PFedHN(**PLAIN, spectral=spectral, layers=layers)  # type: ignore[arg-type]
    expected = descended(method.start(problem.public_facts()).phi, list(range(CLIENTS)), c, H, spectral)
    after = play(problem, method).server.phi
    for name, leaf in expected.items():
        torch.testing.assert_close(after[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.limit("pfedhn")
def test_one_client_a_round_is_the_published_method() -> None:
    """Then both forms of the server step are gradient steps on one client's loss after another."""
    problem, c, H = task()
    reports = [
        play(problem, PFedHN(**PLAIN, server_batch=form), 3, cohort=1)  # type: ignore[arg-type]
        for form in ("all", "sequential")
    ]
    for name, leaf in reports[0].server.phi.items():
        assert torch.equal(leaf, reports[1].server.phi[name])
    asked = [message.client for message in reports[0].ledger.messages() if message.direction == "up"]
    phi = PFedHN(**PLAIN).start(problem.public_facts()).phi  # type: ignore[arg-type]
    for k in asked:
        phi = Params(descended(phi, [k], c, H, "none"))
    for name, leaf in phi.items():
        torch.testing.assert_close(reports[0].server.phi[name], leaf, rtol=0, atol=1e-12)


@pytest.mark.purpose("pfedhn")
def test_clients_that_want_different_models_get_them() -> None:
    """A hypernetwork with enough embeddings reaches the optimum of every client, as Local does."""
    problem, c, _ = task()
    method = PFedHN(server_lr=0.1, weight_decay=0.0, hidden=20, layers=1, embedding=CLIENTS)
    torch.testing.assert_close(deployed(play(problem, method, 300)), c, rtol=0, atol=1e-6)


@pytest.mark.closed_form("pfedhn")
def test_a_new_client_reaches_what_is_nearest_among_all_that_can_be_generated() -> None:
    """h(e) = U e with orthonormal U: the best model for a new client with optimum c is U U^T c."""
    problem, _, _ = task(lr=0.5)
    method = PFedHN(hidden=2, layers=0, embedding=2, fit_epochs=60)
    report = play(problem, method)
    phi = report.server.phi
    U, _ = torch.linalg.qr(torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    zeros = phi.map(torch.zeros_like)
    planted = zeros | Params({"hidden.0.weight": torch.eye(2, dtype=torch.float64), "head.w.weight": U})
    report = replace(report, live=replace(report.live, server=replace(report.server, phi=planted)))
    c = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    x = torch.cat([c, EYE.flatten()])[None]
    torch.testing.assert_close(report.welcome(x, torch.zeros(1))["w"], U @ U.T @ c, rtol=0, atol=1e-9)
