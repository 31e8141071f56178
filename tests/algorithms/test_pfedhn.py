"""pFedHN, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Recipe, Task, Training, federate
from atoll.algorithms.fedavg import FedAvg
from atoll.algorithms.pfedhn import PFedHN
from atoll.kernel.algorithm import Arrival, Replies
from atoll.kernel.errors import EngineError, LabelsNeeded
from atoll.kernel.params import Params, Stack
from atoll.models import BodyAndHead
from atoll.testing.conformance import personal_models, play

PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "clip": None, "hidden": 1, "layers": 0, "embedding": 1}
A, a, H, c, E = "hidden.0.weight", "hidden.0.bias", "head.w.weight", "head.w.bias", "embeddings"


def numbers(phi: Params) -> dict[str, float]:
    """A, a, H, c and the two embeddings of the smallest hypernetwork: theta_k = H (A e_k + a) + c."""
    return {A: phi[A].item(), a: phi[a].item(), H: phi[H].item(), c: phi[c].item(), "e0": phi[E][0].item(),
            "e1": phi[E][1].item()}  # fmt: skip


def stepped(phi: dict[str, float], k: int, delta: float, lr: float) -> dict[str, float]:
    """After a step that follows the change of client k's model."""
    f, e = phi[A] * phi[f"e{k}"] + phi[a], f"e{k}"
    moves = {H: f, c: 1.0, A: phi[H] * phi[e], a: phi[H], e: phi[H] * phi[A]}
    return {name: value + lr * delta * moves.get(name, 0.0) for name, value in phi.items()}


def test_one_round_by_hand(two_clients: Task) -> None:
    # delta_k = 0.5 (c_k - theta_k) after one step of size 0.5; one step of the server along the mean.
    method = PFedHN(**PLAIN, server_lr=0.1)
    before = numbers(method.start(two_clients.public_facts()).phi)
    after = numbers(play(two_clients, method).server.phi)
    deltas = [
        0.5 * (want - (before[H] * (before[A] * before[f"e{k}"] + before[a]))) for k, want in ((0, 1.0), (1, 3.0))
    ]
    both = [stepped(before, k, delta, 0.1 / 2) for k, delta in enumerate(deltas)]
    for name, value in before.items():
        assert after[name] == pytest.approx(both[0][name] + both[1][name] - value, abs=1e-12)


def test_one_client_after_another(two_clients: Task) -> None:
    # The second step is taken where the first one ended, in the order of the clients' numbers.
    method = PFedHN(**PLAIN, server_lr=0.1, server_batch="sequential")
    phi = numbers(method.start(two_clients.public_facts()).phi)
    deltas = [0.5 * (want - (phi[H] * (phi[A] * phi[f"e{k}"] + phi[a]))) for k, want in ((0, 1.0), (1, 3.0))]
    for k, delta in enumerate(deltas):
        phi = stepped(phi, k, delta, 0.1)
    assert numbers(play(two_clients, method).server.phi) == pytest.approx(phi, abs=1e-12)


def test_models_are_what_the_new_hypernetwork_makes(two_clients: Task) -> None:
    report = play(two_clients, PFedHN(**PLAIN, server_lr=0.1), 2)
    phi = numbers(report.server.phi)
    for k, model in enumerate(personal_models(report)):
        assert model["w"].item() == pytest.approx(phi[H] * (phi[A] * phi[f"e{k}"] + phi[a]) + phi[c])


def test_momentum_decay_and_clipping(two_clients: Task) -> None:
    method = PFedHN(**PLAIN | {"momentum": 0.5, "weight_decay": 0.1, "clip": 0.01}, server_lr=0.2)
    start = method.start(two_clients.public_facts())
    first = play(two_clients, method).server
    g = first.velocity - start.phi * 0.1  # decay is added to the clipped gradient
    assert g.norm().item() == pytest.approx(0.01)
    second = play(two_clients, method, 2).server
    g = second.velocity - first.velocity * 0.5 - first.phi * 0.1
    assert g.norm().item() == pytest.approx(0.01)
    for name, leaf in second.phi.items():
        torch.testing.assert_close(leaf, first.phi[name] - 0.2 * second.velocity[name])


def test_a_late_reply_counts_less(two_clients: Task) -> None:
    method = PFedHN(**PLAIN, server_lr=0.1)
    server = method.start(two_clients.public_facts())
    delta = Stack.of(w=torch.ones(1, 1, dtype=torch.float64))
    moved = []
    for weight in (1.0, 0.5):
        arrival = Arrival(np.array([1]), {"delta": delta}, torch.tensor([weight]))
        moved.append(method.aggregate(server, Replies([arrival], keep=True)).phi - server.phi)
    for name, leaf in moved[0].items():
        torch.testing.assert_close(moved[1][name], leaf / 2)


def test_a_model_goes_each_way(two_clients: Task) -> None:
    mine, plain = ([*play(two_clients, one).ledger.messages()] for one in (PFedHN(), FedAvg()))
    sent = [message for message in mine if message.direction == "up"]
    assert {message.field for message in sent} == {"delta"}
    assert {one.bytes for one in sent} == {one.bytes for one in plain if one.field == "delta"}
    assert {message.field for message in mine if message.direction == "down"} == {"unicast"}


def test_the_embedding_of_an_absent_client_is_its_own(two_clients: Task) -> None:
    method = PFedHN(**PLAIN)
    start, report = (
        method.start(two_clients.public_facts()),
        play(two_clients, method, 2, faults=lambda _, clients: clients == 1),
    )
    assert torch.equal(report.server.phi[E][1], start.phi[E][1])
    assert not torch.equal(report.server.phi[E][0], start.phi[E][0])


def test_a_head_of_ones_own(body_and_head: Task) -> None:
    report = play(body_and_head, PFedHN(private="head"), 3)
    assert {name for name in report.server.phi if name.startswith("head.")} == {
        "head.body.value.weight",
        "head.body.value.bias",
    }
    heads = [model["head.value"].item() for model in personal_models(report)]
    assert heads[0] != heads[1]
    fields = {message.field: message.bytes for message in report.ledger.messages() if message.direction == "up"}
    whole = play(body_and_head, PFedHN())
    assert fields["delta"] < {m.field: m.bytes for m in whole.ledger.messages() if m.direction == "up"}["delta"]


def with_batchnorm() -> Task:
    data = {str(k): (torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) + 10 * k,
                     torch.tensor([0, 1] * 3)) for k in range(3)}  # fmt: skip
    model = BodyAndHead(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2)).double()
    return Task.of_clients(data, model, classes=2, training=Training(lr=0.05, batch_size=3), shares=(1.0, 0.0, 0.0))


def test_statistics_of_norm_layers_are_not_generated_and_stay() -> None:
    # catches: batch statistics never aggregated (4.1, 15); here they are the client's own, and its scales begin at 1.
    report = play(with_batchnorm(), PFedHN(hidden=4), 4)
    assert not any("running" in name for name in report.server.phi)
    means = torch.stack([model["body.1.running_mean"] for model in personal_models(report)])
    assert not torch.equal(means[0], means[1])
    start = PFedHN(hidden=4).start(with_batchnorm().public_facts()).phi
    assert torch.equal(start["head.body.1.weight.bias"], torch.ones(3, dtype=torch.float64))


def test_a_hypernetwork_that_does_not_fit_is_refused(two_clients: Task) -> None:
    with pytest.raises(EngineError, match=r"hypernetwork of [\d,]+ numbers.* bytes\. There are"):
        PFedHN(hidden=10**7).start(two_clients.public_facts())


# -- new clients -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def welcomed() -> dict[str, Any]:
    task = Recipe(samples=900, clients=8, partition="dirichlet:0.3", unseen=0.25, training=Training(lr=0.1)).build()
    runs = {name: federate(task, PFedHN(server_lr=0.1, hidden=20, private=name), rounds=6) for name in ("none", "head")}
    return {name: run.evaluations[-1]["evaluation"]["newcomers"] for name, run in runs.items()}


def test_new_clients_fit_an_embedding_or_have_the_mean_of_all(welcomed: dict[str, Any]) -> None:
    found = welcomed["none"]
    assert found["unlabelled"]["way"] == "welcome"
    assert found["unlabelled"]["macro"] > 0.2
    assert found["labelled"]["0"]["macro"] > 0.2
    assert found["labelled"]["0"]["clients"] != found["unlabelled"]["clients"]


def test_a_head_of_ones_own_needs_labels(welcomed: dict[str, Any]) -> None:
    found = welcomed["head"]
    assert found["unlabelled"] == {"way": "none"}
    assert found["labelled"]["0"]["macro"] > 0.2


def test_without_labels_norm_layers_still_meet_the_samples() -> None:
    report = play(with_batchnorm(), PFedHN(hidden=4), 2)
    x = report.task.x[-4:] + 100
    model = report.welcome(x)
    assert model["body.1.running_mean"].abs().max() > 5
    with pytest.raises(LabelsNeeded):
        replace(report, algorithm=PFedHN(hidden=4, private="head")).welcome(x)
